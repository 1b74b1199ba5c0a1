"""Names that `bench`, `tune` and `verify` know: operators, gates, shapes, flags. Imported without torch."""

from __future__ import annotations

OPS = {
    "delta_rule": "chunk_delta_rule",
    "gdn": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "ttt": "chunk_ttt_linear",
    "recurrent_delta_rule": "fused_recurrent_delta_rule",
    "recurrent_gdn": "fused_recurrent_gated_delta_rule",
    "recurrent_kda": "fused_recurrent_kda",
    "recurrent_ttt": "fused_recurrent_ttt_linear",
    "decode_delta_rule": "fused_recurrent_delta_rule",
    "decode_gdn": "fused_recurrent_gated_delta_rule",
    "decode_kda": "fused_recurrent_kda",
    "solve": "solve_tril",
    "kkt": "chunk_scaled_dot_kkt",
    "conv": "causal_conv1d",
    "norm": "rms_norm_gated",
    "l2norm": "l2norm",
    "gdn_gate": "fused_gdn_gate",
    "kda_gate": "fused_kda_gate",
}
"""What the command line calls an operator -> its public name, also the name of its subject.

Decoding is the token form from states to states; ours is `wyfold.serving.decode`, in place.
"""

DECAYS = ("fast", "mid", "slow")
"""Gates whose decays are given, by how fast they forget (`cases.GATES`)."""
MODEL = "model"
"""The gate as a layer calls: a projection in the tokens' dtype, activated inside the operator, as beta's sigmoid is."""
NO_GATE = "none"

OURS = "wyfold"

OVER_RANKS = "bench-ranks"
"""Kind of a record of a race over ranks."""
"""Among the implementations that `bench` runs."""
BURST = 3
"""Calls of one turn of `bench` on a GPU."""

DELTA_RULES = ("delta_rule", "gdn", "kda")
CHUNKED = ("solve", "kkt")
"""Operators that `--chunk` is for."""

SHAPES = (
    "h96",
    "b4t4k",
    "t64kh8",
    "b4t16kh4",
    "mixed",
    "t32k",
    "qwen",
    "ttt",
    "short",
    "dense",
    "token64",
    "token1024",
)
"""Names of the sizes in `cases.PINNED`."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "disable_recompute": DELTA_RULES,
    "batch_invariant": DELTA_RULES,
    "safe_gate": ("kda",),
}
"""Flags that ours can be timed with as well -> the operators that have them. `batch_invariant` cuts none."""

SCORECARD_ROWS = (1, 2, 5, 6, 7, 12, 13, 14, 15, 17, 18, 19, 26, 29, 39, 40)
"""Rows of the scorecard that this version has; all of them run on the CPU (`scorecard.ROWS`)."""
