"""Public operators. Each checks its arguments, applies defaults, makes a plan and calls the implementation.

Importing any of them imports all: each registers `torch.ops.wyfold` operators, which exported programs and FLOP
counters look up by name.
"""

from wyfold.ops import (
    comba,
    conv,
    delta_product,
    delta_rule,
    dplr,
    gated_delta_rule,
    gates,
    gdn2,
    gla,
    kda,
    norm,
    path_attention,
    rwkv7,
    serving_conv,
    serving_delta,
    serving_ttt,
    solve,
    ttt_linear,
)

__all__ = [
    "comba",
    "conv",
    "delta_product",
    "delta_rule",
    "dplr",
    "gated_delta_rule",
    "gates",
    "gdn2",
    "gla",
    "kda",
    "norm",
    "path_attention",
    "rwkv7",
    "serving_conv",
    "serving_delta",
    "serving_ttt",
    "solve",
    "ttt_linear",
]
