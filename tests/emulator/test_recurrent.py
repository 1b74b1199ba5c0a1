"""`recurrent` in Gluon, one token per sequence, on the emulator, against its formulas in float64."""

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import BFLOAT16, require_close
from tests.emulator.delta import options
from tests.emulator.machine import Machine

from wyfold.kernels.records import Slots
from wyfold.kernels.recurrent import gluon
from wyfold.runtime.chunk_layout import chunk_grid
from wyfold.runtime.kernel_configs import Config

N, H, HV, K, V, SLOTS = 4, 1, 2, 128, 128, 9
SCALE = 0.25
CONFIGS = [({"BV": 128}, 4), ({"BV": 64}, 2), ({"BV": 32}, 1)]
CALLS = [
    {"gate": "none"},
    {"gate": "scalar", "norm": True},
    {"gate": "channel"},
    {"gate": "channel", "elsewhere": True, "given": True},
]
CASES = cases(CONFIGS, CALLS)


def test_recurrent(case):
    config, call = case.values
    judge(Machine(*case.schedule), config, **call)


def judge(
    machine: Machine,
    config: tuple[dict[str, int], int],
    *,
    gate: str,
    norm: bool = False,
    elsewhere: bool = False,
    given: bool = False,
) -> None:
    """elsewhere: states are written to other slots. given: some sequences start from zeros."""
    q, k = (torch.randn(N, 1, H, K).bfloat16() for _ in range(2))
    if not norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, beta = torch.randn(N, 1, HV, V).bfloat16(), torch.rand(N, 1, HV)
    g = {"none": None, "scalar": -torch.rand(N, 1, HV), "channel": -torch.rand(N, 1, HV, K)}[gate]
    pool = torch.randn(SLOTS, HV, K, V).bfloat16()
    source, target = torch.tensor([3, -1, 8, 0]), torch.tensor([1, 2, 4, -1])
    kept = torch.tensor([True, True, False, True]) if given else None
    want, after = torch.zeros(N, 1, HV, V).double(), pool.double()
    for n, h in ((n, h) for n in range(N) for h in range(HV)):
        if source[n] < 0:
            continue
        S = pool[source[n], h].double() * (kept is None or kept[n])
        keys, query = k[n, 0, h * H // HV].double(), q[n, 0, h * H // HV].double()
        if norm:
            keys, query = (x * (x.square().sum() + 1e-6).rsqrt() for x in (keys, query))
        if g is not None:
            S = g[n, 0, h].double().exp().reshape(-1, 1) * S
        S = S + keys[:, None] * (beta[n, 0, h].double() * (v[n, 0, h].double() - keys @ S))
        want[n, 0, h] = SCALE * query @ S
        if (to := int(target[n] if elsewhere else source[n])) >= 0:
            after[to, h] = S
    o, untouched = torch.full((N, 1, HV, V), torch.nan).bfloat16(), pool.clone()
    slots = Slots(pool, pool, source[:, None], target if elsewhere else None, kept)
    blocks, warps = config
    with machine.installed(gluon, Config(warps, 1, blocks)):
        gluon.recurrent(
            q, k, v, g, beta, None, None, slots, chunk_grid(N, 1, 64, None), options(scale=SCALE, qk_l2norm=norm), o
        )
    require_close(machine, BFLOAT16, o=(o, want), states=(pool, after))
    written = [int(i) for i in (target if elsewhere else source) if i >= 0]
    others = [i for i in range(SLOTS) if i not in written]
    assert torch.equal(pool[others], untouched[others]), "a slot was written that is no sequence's"
    assert not o[1].any(), "a sequence without a live slot has an output"
