"""fla's names for Wyfold's operators: switching a script takes one import.

    from wyfold.integrations.fla import chunk_gated_delta_rule     # was: from fla.ops.gated_delta_rule import ...

Names, argument order, keywords and defaults are those of fla-core 0.6.0; docs/migration.md lists the differences. For
code that imports `fla` itself, `install()` makes that import find a stand-in, which also has fla's context parallelism
and helpers. fla's models are in `wyfold.integrations.fla.models`, which needs transformers.
"""

from __future__ import annotations

from wyfold.integrations.fla.acceleration import Acceleration, Report, accelerate
from wyfold.integrations.fla.attention import parallel_path_attn
from wyfold.integrations.fla.checkpoints import FlaCheckpoint, from_fla, to_fla
from wyfold.integrations.fla.gated_norms import FusedRMSNormGated, rms_norm_gated
from wyfold.integrations.fla.gla import GatedLinearAttention, chunk_gla, fused_recurrent_gla
from wyfold.integrations.fla.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
)
from wyfold.integrations.fla.linear_attention import (
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)
from wyfold.integrations.fla.low_rank import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gdn2,
    chunk_iplr_delta_rule,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_iplr_delta_rule,
)
from wyfold.integrations.fla.modules import GatedMLP, L2Norm, RMSNorm, ShortConvolution
from wyfold.integrations.fla.path_layer import PaTHAttention
from wyfold.integrations.fla.pieces import (
    causal_conv1d,
    chunk_scaled_dot_kkt_fwd,
    fused_gdn_gate,
    fused_kda_gate,
    l2norm,
    solve_tril,
)
from wyfold.integrations.fla.recurrences import (
    chunk_delta_rule,
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from wyfold.integrations.fla.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
from wyfold.integrations.fla.rwkv7_layer import RWKV7Attention
from wyfold.integrations.fla.stand_in import StandIn, install, uninstall
from wyfold.integrations.fla.ttt import chunk_ttt_linear, fused_chunk_ttt_linear

__all__ = [
    "Acceleration",
    "DeltaNet",
    "FlaCheckpoint",
    "FusedRMSNormGated",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedMLP",
    "KimiDeltaAttention",
    "L2Norm",
    "PaTHAttention",
    "RMSNorm",
    "RWKV7Attention",
    "Report",
    "ShortConvolution",
    "StandIn",
    "accelerate",
    "causal_conv1d",
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv7",
    "chunk_scaled_dot_kkt_fwd",
    "chunk_simple_gla",
    "chunk_ttt_linear",
    "from_fla",
    "fused_chunk_ttt_linear",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "install",
    "l2norm",
    "parallel_path_attn",
    "rms_norm_gated",
    "solve_tril",
    "to_fla",
    "uninstall",
]
