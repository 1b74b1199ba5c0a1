"""`prepare` in Gluon with a gate per channel, on the emulator, against its definition in float64."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_as_rounded
from tests.emulator.delta import C, filled, options
from tests.emulator.machine import Machine
from tests.upper_tiles import from_quarters
from torch import Tensor

from wyfold.kernels.low_rank_prepare.gluon import erase_gate as low_rank
from wyfold.kernels.low_rank_prepare.triton import call_arguments
from wyfold.kernels.prepare.gluon import channel
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid
from wyfold.runtime.kernel_configs import Config, LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.eager import log_gate_floor

K = 128
CALLS = [
    *({"gate": gate} for gate in ("slow", "medium", "fast", "faster", "none", "reset", "always reset")),
    {"norm": True},
    {"T": 100, "B": 2, "H": 1, "HV": 2},
    {"cu": [0, 50, 50, 120]},
    {"cu": [0, 50, 120], "norm": True, "gate": "reset"},
    {"strided": True, "T": 100},
    {"narrow": True},
    {"softplus": True},
    {"erases": False, "gate": "reset"},
    {"erase_heads": 1, "gate": "slow", "HV": 2},
    {"erase_heads": 2, "gate": "faster", "HV": 2, "T": 100},
    {"erase_heads": 1, "norm": True, "cu": [0, 50, 50, 120]},
    {"erase_heads": 0, "gate": "reset", "H": 2, "HV": 2},
]
CASES = cases(CALLS)


def truth(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    norm: bool,
    erases: bool,
    spans: list[tuple[int, int, int]],
    b: Tensor | None = None,
) -> list[Tensor]:
    """The expected tiles of all chunks, in order: total, decayed q and erasing rows, E, F^T, W^T.

    Erasing rows are k, or b k with an erase gate [B, T, heads, K].
    """
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g = g.clamp(min=log_gate_floor(torch.float32))
    shared, found = beta.shape[2] // q.shape[2], []
    for row, low, high in spans:
        for t, h in itertools.product(range(low, high, C), range(beta.shape[2])):
            tokens = row, slice(t, min(t + C, high))
            keys, queries = filled(k[*tokens, h // shared]), filled(q[*tokens, h // shared])
            gates, strength = filled(g[*tokens, h]), filled(beta[*tokens, h, None])
            rows = keys if b is None else filled(b[*tokens, h // (beta.shape[2] // b.shape[2])].double()) * keys
            found.append(chunk(queries, rows, keys, gates, strength, erases))
    return [torch.stack(x) for x in zip(*found, strict=True)]


def chunk(q: Tensor, a: Tensor, k: Tensor, g: Tensor, beta: Tensor, erases: bool) -> tuple[Tensor, ...]:
    i = torch.arange(C)
    # A difference of prefix sums would lose digits, so the gates between are summed.
    between = ((i[None, None, :] <= i[:, None, None]) & (i[None, None, :] > i[None, :, None])).double()
    D = torch.einsum("rsi,ik->rsk", between, g).exp()
    J, P = (torch.einsum("rk,sk,rsk->rs", x, k, D) for x in (a, q))
    J, P, eye = erases * J.tril(-1), P.tril(), torch.eye(C).double()
    A = torch.linalg.solve_triangular(eye + beta * J, eye, upper=False)
    W = torch.linalg.solve_triangular(eye + J * beta.mT, eye, upper=False)
    G = g.cumsum(0)
    return G[-1].exp(), q * G.exp(), a * G.exp(), A.mT @ (k * D[C - 1]), (P @ A).mT, W.mT


def reciprocal_norms(q: Tensor, k: Tensor, group: int, spans: list[tuple[int, int, int]]) -> Tensor:
    """`Prepared.norms` of all chunks."""
    found = []
    for row, low, high in spans:
        for t, h in itertools.product(range(low, high, C), range(group * q.shape[2])):
            rows = [filled(x[row, t : min(t + C, high), h // group].double()) for x in (q, k)]
            found.append(torch.stack([(x.square().sum(-1) + 1e-6).rsqrt() for x in rows]))
    return torch.stack(found)


def gates(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Log gates of a kind: decay by rate, or resets, whose log gate is -inf."""
    rates = {"none": 0.0, "slow": 1e-3, "medium": 0.1, "fast": 5.0, "faster": 40.0}
    g = -torch.rand(shape) * rates.get(kind, 1.0)
    if kind == "reset":
        g[:, ::7] = -torch.inf
        g[:, 3, :, ::2] = -1e4
    if kind == "always reset":
        g.fill_(-torch.inf)
    return g


@dataclass
class Call:
    """Arguments of a launch, and the expected tiles."""

    tokens: list[Any]
    grid: ChunkGrid
    options: DeltaOptions
    o: Tensor
    end: int
    want: list[Tensor]
    norms: Tensor | None
    b: Tensor | None = None


def test_prepare(case):
    (shape,) = case.values
    judge(Machine(*case.schedule), draw(**shape))


def judge(machine: Machine, call: Call) -> None:
    if call.options.rule == "keys":
        judge_low_rank(machine, call)
        return
    o = call.o.clone()
    with machine.installed(channel.launch, Config(4, 1, {})):
        found = channel.prepare(*call.tokens, call.grid, call.options, o, folded=True, backward=True)
    got = found.total, found.q, found.k, found.E, found.F, found.W
    assert (found.rows[: len(call.want[0]), 0] == float(call.options.erases)).all(), "the factor of the keys read"
    assert not o[:, call.end :].any(), "outputs behind the last sequence are zero"
    if call.norms is not None:
        assert found.norms is not None
        require_as_rounded(machine, norms=(found.norms[: len(call.norms)], call.norms))
    pairs = {
        name: (from_quarters(x)[: len(want)] if name in "FW" else x[: len(want)], want)
        for name, x, want in zip(("total", "q", "k", "E", "F", "W"), got, call.want, strict=True)
        if x is not None
    }
    assert call.options.erases or {"k", "W"}.isdisjoint(pairs), "nothing reads them"
    require_as_rounded(machine, **pairs)


def judge_low_rank(machine: Machine, call: Call) -> None:
    """The launch of GDN-2, whose erasing rows are -(b k)."""
    q, k, g, _, A_log, dt_bias = call.tokens
    o = call.o.clone()
    arguments = call_arguments((q, k, None, call.b), g, None, A_log, dt_bias, o.shape[2], call.options)
    config = Config(4, 1, {})
    with machine.installed(channel.launch, config), machine.installed(low_rank, config):
        found = low_rank.prepare(*arguments, call.grid, call.options, LaunchKey(), o, backward=True, clear=True)
    assert not o[:, call.end :].any(), "outputs behind the last sequence are zero"
    assert found.A is not None and found.K is None and found.P is None and found.R is None
    got = found.total, found.q, -found.rows, found.E, from_quarters(found.F), from_quarters(found.A)
    pairs = zip(("total", "q", "rows", "E", "F", "A"), got, call.want, strict=True)
    require_as_rounded(machine, **{name: (x[: len(want)], want) for name, x, want in pairs})


def draw(
    *,
    B: int = 1,
    T: int = 128,
    H: int = 1,
    HV: int = 1,
    gate: str = "medium",
    norm: bool = False,
    cu: list[int] | None = None,
    strided: bool = False,
    narrow: bool = False,
    softplus: bool = False,
    erases: bool = True,
    erase_heads: int | None = None,
) -> Call:
    """Draw a call of `prepare`, or of `low_rank_prepare` with the rule "keys".

    Args:
        narrow: The gate is bfloat16, as a projection gives it.
        softplus: It is activated in the kernel.
        erase_heads: Heads of the erase gate of the low-rank rule; 0: its gate is 1; None: the delta rule.
    """
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    if not norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q, k, beta = q.bfloat16(), k.bfloat16(), torch.rand(B, T, HV)
    g = given = gates(gate, (B, T, HV, K))
    parameters: list[Tensor | None] = [None, None]
    if narrow:
        given = g.bfloat16()
        g = given.float()
    if softplus:
        parameters = [A_log, dt_bias] = [torch.randn(HV), torch.randn(HV, K)]
        given = torch.randn(g.shape).bfloat16()
        g = -A_log.exp()[:, None] * torch.nn.functional.softplus(given.float() + dt_bias)
    if strided:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, *span) for span in itertools.pairwise(cu)]
    b = None
    if erase_heads is not None:
        beta.fill_(1.0)
        b = torch.rand(B, T, erase_heads, K).bfloat16() * 2 if erase_heads else None
    end, want = spans[-1][2], truth(q, k, g, beta, norm, erases, spans, b)
    norms = reciprocal_norms(q, k, HV // H, spans) if norm else None
    for x in (q, k, given, *([] if b is None else [b])):
        x[:, end:] = torch.nan
    how = options(qk_l2norm=norm, activation="softplus" if softplus else "given", erases=erases)
    if erase_heads is not None:
        how = how._replace(rule="keys", chunk_size=C)
    grid = chunk_grid(B, T, C, None if cu is None else torch.tensor(cu))
    o = torch.full((B, T, HV, K), 7.0).bfloat16()
    return Call([q, k, given, beta, *parameters], grid, how, o, end, want, norms, b)
