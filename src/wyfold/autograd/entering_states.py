"""Where the initial states of a chunked forward in segments come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from wyfold.autograd.kernel_call import KernelCall
from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import EvenSegments


def entering_states(
    call: KernelCall, slots: Slots | None
) -> tuple[Tensor | None, Tensor | None, Callable[[], None] | None]:
    """Initial states as the summaries read them, and as the scan does; and a launch that copies them first, or None.

    If both differ, the summaries write those that the scan reads.
    """
    states = slots.entering if slots else call.t.initial_state
    if slots is None or states is None or call.segments is None:
        return states, states, None
    copied = states.new_empty(call.grid.sequences, *states.shape[1:], dtype=call.options.state_dtype)
    if isinstance(call.segments, EvenSegments) and not call.two_streams:
        return states, copied, None
    return copied, copied, partial(call.stage("state_pool").enter, states, slots, copied)
