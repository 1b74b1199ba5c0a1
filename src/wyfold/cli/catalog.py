"""Names that `bench`, `tune` and `verify` accept: operators, gates, shapes, flags. Imports no torch."""

from __future__ import annotations

OPS = {
    "delta_rule": "chunk_delta_rule",
    "gdn": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
    "gdp": "chunk_gated_delta_product",
    "gla": "chunk_gla",
    "dplr": "chunk_dplr_delta_rule",
    "iplr": "chunk_iplr_delta_rule",
    "rwkv7": "chunk_rwkv7",
    "gdn2": "chunk_gdn2",
    "comba": "chunk_comba",
    "ttt": "chunk_ttt_linear",
    "path": "parallel_path_attn",
    "recurrent_delta_rule": "fused_recurrent_delta_rule",
    "recurrent_gdn": "fused_recurrent_gated_delta_rule",
    "recurrent_kda": "fused_recurrent_kda",
    "recurrent_gdp": "fused_recurrent_gated_delta_product",
    "recurrent_gla": "fused_recurrent_gla",
    "recurrent_dplr": "fused_recurrent_dplr_delta_rule",
    "recurrent_iplr": "fused_recurrent_iplr_delta_rule",
    "recurrent_rwkv7": "fused_recurrent_rwkv7",
    "recurrent_gdn2": "fused_recurrent_gdn2",
    "recurrent_comba": "fused_recurrent_comba",
    "recurrent_ttt": "fused_recurrent_ttt_linear",
    "decode_delta_rule": "fused_recurrent_delta_rule",
    "decode_gdn": "fused_recurrent_gated_delta_rule",
    "decode_kda": "fused_recurrent_kda",
    "decode_gla": "fused_recurrent_gla",
    "decode_dplr": "fused_recurrent_dplr_delta_rule",
    "decode_gdn2": "fused_recurrent_gdn2",
    "solve": "solve_tril",
    "kkt": "chunk_scaled_dot_kkt",
    "conv": "causal_conv1d",
    "norm": "rms_norm_gated",
    "l2norm": "l2norm",
    "gdn_gate": "fused_gdn_gate",
    "kda_gate": "fused_kda_gate",
}
"""Name of an operator on the command line -> its public name, which is also its key in `operators.OPERATOR_SPECS`.

`decode_*` runs one token from an initial state to a final state. Wyfold's implementation is `wyfold.serving.decode`,
which updates the states in place.
"""

LAYERS = {"gdn_layer": "GatedDeltaNet", "kda_layer": "KimiDeltaAttention"}
"""Name of a layer in the rows of `bench` -> its class in `wyfold.layers`. Layers run in suites alone."""

DECAYS = ("fast", "mid", "slow")
"""Gates with given decays, from fast to slow forgetting (`bench.tensors.GATES`)."""
MODEL = "model"
"""The gate as layers pass it: a projection in the tokens' dtype. The operator activates it, and beta as well."""
BOUNDED = "bounded"
"""The same for `kda`, with the activation that is bounded by a log decay of -5 a token."""
RWKV7 = "rwkv7"
"""The decays of RWKV-7's layer, for `rwkv7` alone."""
NO_GATE = "none"

OURS = "wyfold"
"""Name of Wyfold among the implementations that `bench` runs."""

OVER_RANKS = "bench-ranks"
"""Field `kind` of a stored result of `bench` over several ranks."""
BURST = 3
"""Calls that `bench` queues in one burst on a GPU."""

DELTA_RULES = ("delta_rule", "gdn", "kda")
LOW_RANK = ("dplr", "iplr", "rwkv7", "gdn2", "comba")
LINEAR = (*DELTA_RULES, "gdp", "gla", *LOW_RANK)
"""Operators whose state is a linear function of the state before."""
TARGETED = (*LINEAR, "ttt", "path")
"""Operators whose accuracy has absolute targets."""
CHUNKED = ("solve", "kkt")
"""Operators that `--chunk` applies to."""

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
"""Names of the sizes in `bench.cases.PINNED`."""

SUITES = ("table", "groups", "widths", "prompts", "gates", "rules", "layers")
"""Names of the suites in `bench.suites.SUITES`."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "disable_recompute": DELTA_RULES,
    "batch_invariant": DELTA_RULES,
    "safe_gate": ("kda",),
}
"""Flag of `--also` -> operators that have it. With `batch_invariant` no sequence is cut into segments."""
