"""Operators of the low-rank rules and their token loops, for the tests of this folder."""

from collections.abc import Callable

import wyfold
from wyfold import reference

OPERATORS: dict[str, tuple[Callable, Callable, str]] = {
    "chunk_dplr_delta_rule": (wyfold.chunk_dplr_delta_rule, reference.dplr_delta_rule, "dplr_delta_rule"),
    "fused_recurrent_dplr_delta_rule": (
        wyfold.fused_recurrent_dplr_delta_rule,
        reference.dplr_delta_rule,
        "dplr_delta_rule",
    ),
    "chunk_iplr_delta_rule": (wyfold.chunk_iplr_delta_rule, reference.iplr_delta_rule, "iplr_delta_rule"),
    "fused_recurrent_iplr_delta_rule": (
        wyfold.fused_recurrent_iplr_delta_rule,
        reference.iplr_delta_rule,
        "iplr_delta_rule",
    ),
    "chunk_rwkv7": (wyfold.chunk_rwkv7, reference.rwkv7, "rwkv7"),
    "fused_recurrent_rwkv7": (wyfold.fused_recurrent_rwkv7, reference.rwkv7, "rwkv7"),
    "fused_mul_recurrent_rwkv7": (wyfold.fused_mul_recurrent_rwkv7, reference.mul_rwkv7, "mul_rwkv7"),
    "chunk_gdn2": (wyfold.chunk_gdn2, reference.gdn2, "gdn2"),
    "fused_recurrent_gdn2": (wyfold.fused_recurrent_gdn2, reference.gdn2, "gdn2"),
    "chunk_comba": (wyfold.chunk_comba, reference.comba, "comba"),
    "fused_recurrent_comba": (wyfold.fused_recurrent_comba, reference.comba, "comba"),
}
"""Public name -> operator, token loop, name of the rule in `reference.inputs`."""


def agree(float64_bounds, got: dict, truth: dict) -> None:
    """Require every result and gradient within the float64 bounds."""
    assert got.keys() == truth.keys()
    for name in truth:
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], truth[name])
