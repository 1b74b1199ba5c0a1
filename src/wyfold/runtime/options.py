"""What a call asks for, as types: the field's flags end in `ops/`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from wyfold.runtime.chunk_layout import Cut


class DeltaOptions(NamedTuple):
    """One call of the delta family.

    Every field is a scalar of the registered operators' schema, in this order.

    Attributes:
        operator: Public name, for messages.
        recurrent: Token by token instead of chunk by chunk.
        scale: Multiplies q.
        qk_l2norm: Rows of q and k are normalised here.
        activation: "given": g is the log gate. "softplus": -exp(A_log) softplus(g + dt_bias). "bounded":
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        lower_bound: Of the bounded activation, else 0.
        clamp: Log gates below it are raised to it, without gradient; 0: none.
        beta_logit: beta arrives before its sigmoid.
        beta_most: The sigmoid's factor, 1 or 2.
        state_v_first: States are [V, K] outside.
        state_dtype: Storage of returned states.
        final_state: Whether final states are wanted.
        chunk_size: C; for the recurrent form the distance of the states its backward starts from.
        checkpoint_every: Tokens between returned intermediate states, 0: none are wanted.
        save: Whether a backward will follow.
        keep_factors: Whether E, F, A and the grams are kept for it instead of rebuilt.
        backend: The plan's.
        segment_chunks, segments: `Cut` of long sequences.
        unit: `gradient_unit` of the call.
    """

    operator: str
    recurrent: bool
    scale: float
    qk_l2norm: bool
    activation: str
    lower_bound: float
    clamp: float
    beta_logit: bool
    beta_most: float
    state_v_first: bool
    state_dtype: torch.dtype
    final_state: bool
    chunk_size: int
    checkpoint_every: int
    save: bool
    keep_factors: bool
    backend: str
    segment_chunks: int = 0
    segments: int = 1
    unit: float = 1.0

    @property
    def cut(self) -> Cut:
        return Cut(self.segment_chunks, self.segments)


def gradient_unit(scale: float, dtype: torch.dtype) -> float:
    """What gradients are counted in on their way through the states of kernels: a part of `scale`.

    float32: a power of two. A state's gradient that leaves one call and enters the next keeps its bits, so that a split
    call has the gradients of the whole; the rest of the scale multiplies do.

    bfloat16, float16: all of the scale. do is a product's operand as it came then; a factor would round it once more.

    1 if what is times or divided by the unit might leave float32.
    """
    if not 2.0**-40 <= abs(scale) <= 2.0**40:
        return 1.0
    return 2.0 ** (math.frexp(scale)[1] - 1) if dtype == torch.float32 else scale


DELTA_SCHEMA = (
    "str operator, bool recurrent, float scale, bool qk_l2norm, str activation, float lower_bound, float clamp, "
    "bool beta_logit, float beta_most, bool state_v_first, ScalarType state_dtype, bool final_state, "
    "int chunk_size, int checkpoint_every, bool save, bool keep_factors, str backend, "
    "int segment_chunks, int segments, float unit"
)
