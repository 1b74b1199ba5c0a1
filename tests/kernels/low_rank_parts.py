"""Parts of packed sequences for the tests of the low-rank stages: inputs, tiles, and the token loop's results."""

from typing import Any

import torch
from torch import Tensor

from wyfold import reference
from wyfold.kernels import table
from wyfold.kernels.records import LowRankInputs
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import ChunkTable, packed_table
from wyfold.runtime.options import DeltaOptions

F64 = torch.float64
LENGTHS = [20, 0, 50, 17]
T, HV, K, V, C = sum(LENGTHS), 4, 8, 16, 16
RULES = {
    "dplr_delta_rule": "given",
    "iplr_delta_rule": "given",
    "mul_rwkv7": "rates",
    "gdn2": "keys",
    "comba": "feedback",
}
OPTIONS = DeltaOptions(
    operator="low rank", recurrent=False, scale=0.3, qk_l2norm=False, activation="given", lower_bound=0.0, clamp=0.0,
    beta_logit=False, beta_most=1.0, state_v_first=False, state_dtype=F64, final_state=True, chunk_size=C,
    checkpoint_every=0, save=True, keep_factors=False, backend="eager",
)  # fmt: skip


def drawn(rule: str, gate: str = "any") -> tuple[dict[str, Any], ChunkTable]:
    """Arguments of the token loop, and the chunk table of its sequences."""
    a = inputs.draw("random", rule, Shape(1, T, 2, HV, K, V), gate=gate, state="normal", sequences=4, dtype=F64)
    return a, packed_table(torch.tensor(LENGTHS), C)


def tiles(rule: str, a: dict[str, Any], grid: ChunkTable) -> LowRankInputs:
    """What `low_rank_prepare` loads of the arguments."""
    first, second = ("kk", "a") if rule == "mul_rwkv7" else ("p" if rule == "comba" else "a", "b")
    q, g = a.get("q", a.get("r")), next((a[name] for name in ("gk", "g") if name in a), None)
    g = a["w"] if rule == "mul_rwkv7" else g
    w = a.get("w") if rule == "gdn2" else None
    load = table.kernel_module("low_rank_prepare", "eager").load
    tokens = q, a["k"], a["v"], g, a.get("beta"), None, None
    return load(*tokens, grid, OPTIONS._replace(rule=RULES[rule]), (a.get(first), a.get(second), w))


def truth(rule: str, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and final states of the token loop."""
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    o, final = getattr(reference, rule)(**a, scale=0.3, output_final_state=True, cu_seqlens=cu)
    return o, final


def transitions(inputs: LowRankInputs, tile: int) -> list[Tensor]:
    """[K, K] transition D + b a^T of every row of a tile, with a as it reads."""
    found = []
    for r in range(inputs.q.shape[1]):
        a, b = inputs.a[tile, r], inputs.b[tile, r]
        decay = torch.ones_like(a) if inputs.g is None else inputs.g[tile, r].exp().expand_as(a)
        read = a if inputs.before else decay * a
        found.append(torch.diag(decay) + torch.outer(b, read))
    return found
