"""`prepare` in Gluon without a gate or with a scalar one, on the emulator, against its definition in float64."""

import itertools

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_as_rounded
from tests.emulator.delta import C, filled, options
from tests.emulator.machine import Machine
from tests.upper_tiles import from_quarters
from torch import Tensor

from wyfold.kernels.prepare.gluon import scalar
from wyfold.runtime.chunk_layout import chunk_grid
from wyfold.runtime.kernel_configs import Config

CALLS = [
    {},
    {"gate": False},
    {"norm": True},
    {"gate": False, "norm": True, "B": 2, "T": 192},
    {"T": 100, "B": 2, "H": 2, "HV": 4},
    {"cu": [0, 50, 50, 120]},
    {"cu": [0, 50, 120], "norm": True},
    {"wide": 129, "T": 100},
    {"wide": 129, "norm": True},
    {"logit": True},
    {"erases": False, "norm": True},
    {"K": 256},
    {"K": 256, "norm": True, "T": 100, "cu": [0, 30, 90]},
    {"K": 256, "norm": True, "wide": 257},
]
CASES = cases(CALLS)


def truth(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, norm: bool, erases: bool, spans: list[tuple[int, int, int]]
) -> list[Tensor]:
    """The expected tiles of all chunks, in order: total, F^T, W^T, (F diag(beta))^T."""
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    shared, eye, found = beta.shape[2] // q.shape[2], torch.eye(C).double(), []
    for row, low, high in spans:
        for t, h in itertools.product(range(low, high, C), range(beta.shape[2])):
            tokens = row, slice(t, min(t + C, high))
            keys, queries = filled(k[*tokens, h // shared]), filled(q[*tokens, h // shared])
            strength, G = filled(beta[*tokens, h, None]), filled(g[*tokens, h, None])[:, 0].cumsum(0)
            D = (G[:, None] - G[None, :]).exp().tril()
            J, P = erases * (keys @ keys.mT * D).tril(-1), (queries @ keys.mT * D).tril()
            A = torch.linalg.solve_triangular(eye + strength * J, eye, upper=False)
            W = torch.linalg.solve_triangular(eye + J * strength.mT, eye, upper=False)
            found.append((G[-1:].exp(), (P @ A).mT, W.mT, (P @ A * strength.mT).mT))
    return [torch.stack(x) for x in zip(*found, strict=True)]


def test_prepare(case):
    (call,) = case.values
    judge(Machine(*case.schedule), **call)


def judge(
    machine: Machine,
    *,
    B: int = 1,
    T: int = 128,
    H: int = 1,
    HV: int = 1,
    norm: bool = False,
    cu: list[int] | None = None,
    gate: bool = True,
    K: int = 128,
    wide: int | None = None,
    logit: bool = False,
    erases: bool = True,
) -> None:
    """wide: distance between heads, K by default; odd ones cannot be TMA strides. logit: beta before its sigmoid."""
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    if not norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q, k = (torch.nn.functional.pad(x.bfloat16(), (0, (wide or K) - K))[..., :K] for x in (q, k))
    given, g = torch.rand(B, T, HV), -torch.rand(B, T, HV) * 0.1 * gate
    given[:, ::7] *= logit  # a strength of zero, which must not be divided by
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, *span) for span in itertools.pairwise(cu)]
    want = truth(q, k, g, given.sigmoid() if logit else given, norm, erases, spans)
    for x in (q, k) if cu else ():
        x[:, spans[-1][2] :] = torch.nan
    o = torch.full((B, T, HV, K), 7.0).bfloat16()
    how = options(qk_l2norm=norm, beta_logit=logit, erases=erases)
    call = q, k, g if gate else None, given, None, None
    grid = chunk_grid(B, T, C, None if cu is None else torch.tensor(cu))
    with machine.installed(scalar.launch, Config(4, 1, {})):
        both, forward, backward = (
            scalar.prepare(*call, grid, how, o, folded=False, forward=there, backward=back)
            for there, back in ((True, True), (True, False), (False, True))
        )
    n = len(want[0])
    got = both.total.flatten()[:n, None], *(from_quarters(x[:n]) for x in (both.F, both.W, both.FB))
    require_as_rounded(machine, **dict(zip(("total", "F", "W", "FB"), zip(got, want, strict=True), strict=True)))
    alone = (both.FB, forward.FB), (both.rows, forward.rows), (both.W, forward.W)
    alone += (both.F, backward.F), (both.rows_bwd, backward.rows), (both.W, backward.W)
    for x, y in alone:
        assert torch.equal(x[:n].view(torch.uint8), y[:n].view(torch.uint8)), "one direction alone has other bits"
    assert erases or not both.rows[:n, 0].any(), "keys read the state though writes erase nothing"
    assert logit or not got[3][both.rows[:n, 3] == 0].any(), "F diag(beta) is not zero where beta is"
