"""Delta-rule sequence mixers for PyTorch: DeltaNet, Gated DeltaNet, Kimi Delta Attention, TTT-Linear."""

from wyfold.ops.conv import causal_conv1d
from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from wyfold.ops.doctor import doctor
from wyfold.ops.explain import explain
from wyfold.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from wyfold.ops.gates import fused_beta_sigmoid, fused_gdn_gate, fused_kda_gate
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.ops.norm import l2norm, rms_norm_gated
from wyfold.ops.solve import chunk_scaled_dot_kkt, solve_tril
from wyfold.ops.ttt_linear import (
    TTTState,
    chunk_ttt_linear,
    fused_chunk_ttt_linear,
    fused_recurrent_ttt_linear,
)
from wyfold.runtime.check import UnsupportedError, checked
from wyfold.runtime.layout import SequenceLayout

__version__ = "0.1.0"

__all__ = [
    "SequenceLayout",
    "TTTState",
    "UnsupportedError",
    "causal_conv1d",
    "checked",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "chunk_scaled_dot_kkt",
    "chunk_ttt_linear",
    "doctor",
    "explain",
    "fused_beta_sigmoid",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "fused_recurrent_ttt_linear",
    "l2norm",
    "rms_norm_gated",
    "solve_tril",
]
