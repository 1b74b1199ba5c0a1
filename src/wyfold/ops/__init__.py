"""Public operators: checks, defaults, flags into records, a plan, one call.

Importing any of them imports all: each registers `torch.ops.wyfold` operators, which a program that was exported, or
that counts operations, looks up by name.
"""

from wyfold.ops import (
    conv,
    conv_serving,
    delta_rule,
    gated_delta_rule,
    gates,
    kda,
    norm,
    serving,
    solve,
    ttt_linear,
    ttt_serving,
)

__all__ = [
    "conv",
    "conv_serving",
    "delta_rule",
    "gated_delta_rule",
    "gates",
    "kda",
    "norm",
    "serving",
    "solve",
    "ttt_linear",
    "ttt_serving",
]
