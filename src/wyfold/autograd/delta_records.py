"""What a call of the delta family is made of, and the sizes of its results and gradients; nothing is computed here."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import wide


class DeltaTensors(NamedTuple):
    """Tensors of one call, as the public operators document them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None

    @property
    def packed_sequences(self) -> int | None:
        """N of a packed batch; None for a dense one, where each row is a sequence."""
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


TENSORS, DIFFERENTIABLE = len(DeltaTensors._fields), 8
INITIAL_STATE = DeltaTensors._fields.index("initial_state")
SUMMED = (INITIAL_STATE, DeltaTensors._fields.index("A_log"), DeltaTensors._fields.index("dt_bias"))


class DeltaResult(NamedTuple):
    """Output, final states and intermediate states of one call; empty where the options do not ask for them."""

    o: Tensor
    final_state: Tensor
    states: Tensor


class DeltaBackwardInputs(NamedTuple):
    """What the gradients of one call are made from.

    Attributes:
        tensors, options: The call's.
        saved: What the forward kept besides.
        do, dST: Gradients of the output and of the final states; None: zeros.
        needs: Of each differentiable tensor, whether its gradient is wanted.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    saved: list[Tensor]
    do: Tensor | None
    dST: Tensor | None
    needs: list[bool]

    def empty_grad(self, index: int) -> Tensor:
        """Unwritten memory for a gradient: in the argument's dtype, but for states and parameters, which sum, in the
        wide one. No elements if it is not wanted."""
        x = self.tensors[index]
        if x is None or not self.needs[index]:
            return self.tensors.q.new_empty(0)
        if index in SUMMED:
            return x.new_empty(x.shape, dtype=wide(self.tensors.q.dtype))
        return x.new_empty(x.shape)

    def empty_grads(self) -> list[Tensor]:
        """Of every gradient."""
        return [self.empty_grad(index) for index in range(DIFFERENTIABLE)]

    def to_input_dtypes(self, found: list[Tensor]) -> list[Tensor]:
        """Every gradient in its argument's dtype."""
        given = self.tensors[:DIFFERENTIABLE]
        return [dx if x is None or dx.dtype == x.dtype else dx.to(x.dtype) for dx, x in zip(found, given, strict=True)]


def empty_result(t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None) -> DeltaResult:
    """Unwritten results, and zeros for intermediate states, of which not every row will be written.

    Sizes come from metadata alone, so this is the operator's fake as well.

    Args:
        out: In place of an output of its own, by a caller who sees the results first: then no state is zeroed.
    """
    B, T, HV, V = t.v.shape
    K, N = t.q.shape[-1], t.packed_sequences
    state = (V, K) if options.state_v_first else (K, V)
    final = (B if N is None else N, HV, *state) if options.final_state else (0,)
    o = t.v.new_empty(B, T, HV, V) if out is None else out
    final_state = t.v.new_empty(final, dtype=options.state_dtype)
    n = options.checkpoint_every
    if not n:
        return DeltaResult(o, final_state, t.v.new_empty(0, dtype=options.state_dtype))
    rows = (B, T // n) if N is None else (T // n,)
    make = t.v.new_zeros if out is None else t.v.new_empty
    return DeltaResult(o, final_state, make((*rows, HV, *state), dtype=options.state_dtype))


def transpose_if_v_first(states: Tensor, options: DeltaOptions) -> Tensor:
    """A view of K-first states [.., K, V] in the caller's layout, and back."""
    return states.transpose(-1, -2) if options.state_v_first else states
