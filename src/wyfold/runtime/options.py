"""Options of a call as records. `ops/` translates the public flags into them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from wyfold.runtime.chunk_layout import Cut


class DeltaOptions(NamedTuple):
    """Options of one call of the delta family.

    Every field is a scalar of the registered operators' schema, in this order.

    Attributes:
        operator: Public name, for messages.
        recurrent: Whether the call goes token by token instead of chunk by chunk.
        scale: Multiplies q.
        qk_l2norm: Whether the operator normalises the rows of q and k.
        activation: "given": g is the log gate. "softplus": -exp(A_log) softplus(g + dt_bias). "bounded":
            lower_bound * sigmoid(exp(A_log) (g + dt_bias)).
        lower_bound: Of the bounded activation, else 0.
        clamp: Lower limit of log gates, 0 for none. Raised gates have no gradient.
        beta_logit: Whether beta is passed before its sigmoid.
        beta_most: Factor of the sigmoid, 1 or 2.
        state_v_first: Whether the caller's states are [V, K].
        state_dtype: Dtype of returned states.
        final_state: Whether final states are returned.
        chunk_size: C. In the recurrent form, tokens between the states from which the backward recomputes.
        checkpoint_every: Tokens between returned intermediate states; 0 if none are returned.
        save: Whether a backward will follow.
        keep_factors: Whether E, F, A and the grams are kept for the backward instead of recomputed.
        backend: The plan's backend.
        segment_chunks, segments, segment_fewest: `Cut` of long sequences.
        unit: `gradient_unit` of the call.
        head_width: Width of the value heads that the call's are computed as, with K rounded up to a power of two; 0 for
            widths nearest to the call's.
        rule: "delta", or how a diagonal-plus-low-rank rule makes its rows and columns (`tile.columns`): "given",
            "rates", "keys", "feedback".
        erases: Whether a write of the rule "delta" first erases what its key reads. False: GLA.
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
    segment_fewest: int = 0
    unit: float = 1.0
    head_width: int = 0
    rule: str = "delta"
    erases: bool = True

    def stage(self, name: str) -> str:
        """Stage that does a step of the delta rule, or the same step of a diagonal-plus-low-rank rule."""
        return name if self.rule == "delta" or name == "segment_fold" else f"low_rank_{name}"

    @property
    def bounded_keys(self) -> bool:
        """Whether no key lets a state grow: kernels normalise keys, or writes erase nothing."""
        return self.qk_l2norm or not self.erases

    @property
    def cut(self) -> Cut:
        return Cut(self.segment_chunks, self.segments, self.segment_fewest)


def gradient_unit(scale: float, dtype: torch.dtype) -> float:
    """Unit of the gradients that pass through states in kernels: a factor of `scale`.

    float32: a power of two. The gradient of a state then keeps its bits when it leaves one call and enters the next. A
    split call therefore has the gradients of the whole. The rest of the scale multiplies do.

    bfloat16, float16: all of the scale. do then enters products unchanged; a factor would round it once more.

    1 if values multiplied or divided by the unit might leave the range of float32.
    """
    if not 2.0**-40 <= abs(scale) <= 2.0**40:
        return 1.0
    return 2.0 ** (math.frexp(scale)[1] - 1) if dtype == torch.float32 else scale


DELTA_SCHEMA = (
    "str operator, bool recurrent, float scale, bool qk_l2norm, str activation, float lower_bound, float clamp, "
    "bool beta_logit, float beta_most, bool state_v_first, ScalarType state_dtype, bool final_state, "
    "int chunk_size, int checkpoint_every, bool save, bool keep_factors, str backend, "
    "int segment_chunks, int segments, int segment_fewest, float unit, int head_width, str rule, bool erases"
)
