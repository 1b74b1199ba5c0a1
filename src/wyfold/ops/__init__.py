"""Public operators: checks, defaults, flags into records, a plan, one call.

Importing any of them imports all: each registers `torch.ops.wyfold` operators, which a program that was exported, or
that counts operations, looks up by name.
"""

from wyfold.ops import (
    conv,
    delta_rule,
    gated_delta_rule,
    gates,
    kda,
    norm,
    serving_conv,
    serving_delta,
    serving_ttt,
    solve,
    ttt_linear,
)

__all__ = [
    "conv",
    "delta_rule",
    "gated_delta_rule",
    "gates",
    "kda",
    "norm",
    "serving_conv",
    "serving_delta",
    "serving_ttt",
    "solve",
    "ttt_linear",
]
