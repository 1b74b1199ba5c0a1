"""`gradients` in Gluon, for every gate, on the emulator, against float64 autograd of the token loop."""

import copy
import functools
import itertools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tests.emulator.cases import cases
from tests.emulator.compare import BFLOAT16, require_close
from tests.emulator.delta import C, options
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold import reference
from wyfold.kernels.gradients import gluon
from wyfold.kernels.gradients.gluon import channel, scalar, wide
from wyfold.kernels.gradients.gluon.heads import UNROLLED
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid
from wyfold.runtime.kernel_configs import Config, LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.eager import log_gate_floor

SCALE = 128**-0.5
CALLS = [
    {"gate": "medium"},
    {"gate": "harsh", "H": 2},
    {"gate": "slow", "T": 90, "B": 2},
    {"gate": "fast", "strided": True},
    {"gate": "harsh", "norm": True},
    {"T": 200, "cu": [0, 70, 190], "norm": True},
    {"T": 300, "H": 2, "cu": [0, 70, 70, 198, 240]},
    {"T": 200, "H": 2, "norm": True, "activated": torch.bfloat16},
    {"T": 200, "cu": [0, 70, 190], "activated": torch.float32},
    {"T": 200, "cu": [0, 70, 190], "gate": "harsh", "norm": True, "erases": False},
    {"H": 2, "group": 2},
    {"T": 200, "cu": [0, 70, 190], "group": 3, "norm": True, "activated": torch.bfloat16},
    {"gate": "harsh", "group": 4, "T": 90},
]
KINDS = ["channel", "scalar", "none"]
WIDE = [
    {"gate": "harsh", "T": 200, "H": 2, "norm": True},
    {"T": 200, "cu": [0, 70, 190], "norm": True, "erases": False},
    {"gate": "slow", "T": 90, "strided": True},
    {"cu": [0, 40, 110], "T": 200, "activated": torch.float32},
    {"cu": [0, 70, 190], "T": 200, "group": 3, "norm": True, "V": 256},
    {"gate": "harsh", "T": 100, "group": 2, "V": 256},
    {"gate": "slow", "T": 100, "group": 2, "K": 128},
]
"""Calls with wide heads, which no kernel for a gate per channel serves."""
CASES = cases(CALLS, KINDS) + cases([{"K": 256, "V": 192} | call for call in WIDE], KINDS[1:])


class Tokens(NamedTuple):
    """Per-token tensors, [B, T, H, ..] or the rows of one value head; g: log gates, one or K numbers a token.

    Only q and k have key heads; all others have value heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor


@dataclass
class Call:
    """Arguments of a launch, and the expected gradients."""

    kind: str
    given: dict[str, Any]
    do: Tensor
    borders: TokenBorders
    grid: ChunkGrid
    options: DeltaOptions
    end: int
    want: dict[str, Tensor]


def test_gradients(case):
    shape, kind = case.values
    judge(Machine(*case.schedule), draw(kind, **shape))


@pytest.mark.parametrize("group, K, V, norm", [
    (3, 128, 128, True), (UNROLLED.value + 1, 128, 128, True), (2, 128, 192, False), (2, 64, 64, True),
])  # fmt: skip
def test_a_group_has_the_sums_of_its_heads(group: int, K: int, V: int, norm: bool):
    """Every gradient of a value head has the bits of equal heads; dq and dk are float32 sums in the heads' order."""
    call = draw("scalar", T=100 if group <= 3 else 60, group=group, K=K, V=V, norm=norm)
    q, k = (call.given[name].repeat_interleave(group, 2) for name in ("q", "k"))
    alone = run(Machine(), replace(call, given=call.given | {"q": q, "k": k}))
    for name, found in run(Machine(), call).items():
        expected = alone[name]
        if name in ("q", "k"):
            expected = functools.reduce(torch.add, expected.float().unflatten(2, (-1, group)).unbind(3)).bfloat16()
        assert found is None or torch.equal(found, expected), name


def judge(machine: Machine, call: Call) -> None:
    out = run(machine, call)
    name = wide.wyfold_gradients_wide_gluon.fn.__name__
    assert (name in machine.launches) == (call.do.shape[3] != 128)
    pairs = {}
    for name, want in call.want.items():
        got = out[name]
        if name not in ("A_log", "dt_bias"):
            assert not got[:, call.end :].any(), f"d{name} is not zero behind the last sequence"
            got, want = got[:, : call.end], want[:, : call.end]
        assert not got[want == 0].any(), f"d{name} is not zero where it must be"
        pairs[f"d{name}"] = got, want
    require_close(machine, BFLOAT16, **pairs)


def run(machine: Machine, call: Call) -> dict[str, Tensor]:
    """Gradients by the arguments' names."""
    out = {name: None if x is None else torch.full_like(x, torch.nan) for name, x in call.given.items()}
    module: ModuleType = channel.launch if call.kind == "channel" else scalar.launch
    q, k, _, *rest = call.given.values()
    borders = copy.deepcopy(call.borders)  # of value heads in groups some are overwritten
    with machine.installed(module, Config(4, 3, {})), mock.patch.object(module, "sum_over_chunks", sum_over_chunks):
        gluon.gradients(q, k, *rest, call.do, borders, call.grid, call.options, LaunchKey(), GradientOutputs(**out))
    return out


def sum_over_chunks(terms: torch.Tensor | None, total: torch.Tensor | None) -> None:
    """What the launch of this name does, which is no Gluon kernel."""
    if terms is not None and total is not None:
        total.copy_(terms.view(len(terms), total.numel(), -1).sum((0, 2)).view_as(total))


def draw(
    kind: str,
    *,
    gate: str = "medium",
    T: int = 128,
    B: int = 1,
    H: int = 1,
    group: int = 1,
    cu: list[int] | None = None,
    strided: bool = False,
    norm: bool = False,
    activated: torch.dtype | None = None,
    erases: bool = True,
    K: int = 128,
    V: int = 128,
) -> Call:
    """A random call; group: value heads of a key head; activated: dtype of a gate whose activation is inside."""
    x, raw, parameters = drawn(kind, gate, (B, T, H, K, V), group, norm, activated)
    spans = [(0, a, b) for a, b in itertools.pairwise(cu)] if cu else [(b, 0, T) for b in range(B)]
    want = truth(x, raw, spans, norm, parameters, erases)
    grid = chunk_grid(B, T, C, torch.tensor(cu) if cu else None)
    lie = borders(x, spans, grid, norm, erases)
    for y in (x.q, x.k, x.do, *(() if raw is None else (raw,))):
        y[:, spans[-1][2] :] = torch.nan
    q = x.q
    if strided:
        q = q[..., None].expand(*q.shape, 2).flatten(-2)[..., ::2]
        raw = None if raw is None else raw.transpose(1, 2).contiguous().transpose(1, 2)
    given = {"q": q, "k": x.k, "v": x.v, "g": raw, "beta": x.beta, **parameters}
    how = options(scale=SCALE, qk_l2norm=norm, activation="softplus" if activated else "given", erases=erases)
    return Call(kind, given, x.do, lie, grid, how, spans[-1][2], want)


def drawn(
    kind: str,
    gate: str,
    sizes: tuple[int, int, int, int, int],
    group: int,
    norm: bool,
    activated: torch.dtype | None,
) -> tuple[Tokens, Tensor | None, dict[str, Tensor | None]]:
    """Tokens, the raw gate, and the parameters of its activation. sizes: B, T, H, K, V."""
    B, T, H, K, V = sizes
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    HV = H * group
    shape = B, T, HV
    q, k = (x if norm else torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, do = torch.randn(*shape, V).bfloat16(), torch.randn(*shape, V).bfloat16()
    width = K if kind == "channel" else 1
    g = -torch.rand(*shape, width) * {"slow": 0.01, "medium": 0.5, "fast": 5.0, "harsh": 0.5}[gate] * (kind != "none")
    if gate == "harsh" and kind != "none":
        g[:, 5] = -1e4
        g[:, 70 % T] = -torch.inf
        g[:, 9, :, ::3] = -torch.inf
        g[:, 24:40] = -20.0
        g[:, 41:48] = 0.0
    raw, parameters = g, {"A_log": None, "dt_bias": None}
    if activated and kind != "none":
        raw = torch.randn(g.shape).to(activated)
        parameters = {"A_log": 0.3 * torch.randn(HV), "dt_bias": torch.randn(HV, width).squeeze(-1) - 1}
        g = log_gate(raw.double(), *(x.double() for x in parameters.values() if x is not None))
    tokens = Tokens(q.bfloat16(), k.bfloat16(), v, g, torch.rand(*shape), do)
    return tokens, None if kind == "none" else raw if kind == "channel" else raw[..., 0], parameters


def log_gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -A_log.exp()[:, None] * torch.nn.functional.softplus(raw + dt_bias.view(*A_log.shape, -1))


def unit_rows(*rows: Tensor) -> list[Tensor]:
    return [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in rows]


def truth(
    x: Tokens,
    raw: Tensor | None,
    spans: list[tuple[int, int, int]],
    norm: bool,
    parameters: dict[str, Tensor | None],
    erases: bool,
) -> dict[str, Tensor]:
    """Gradients of all arguments; those of padding tokens are zero."""
    given = {"q": x.q, "k": x.k, "v": x.v, "g": raw, "beta": x.beta, **parameters}
    leaves = {name: y.double().requires_grad_() for name, y in given.items() if y is not None}
    total = torch.zeros(()).double()
    for b, begin, end in spans:
        if end == begin:
            continue
        q, k, v, beta = (leaves[name][b : b + 1, begin:end] for name in ("q", "k", "v", "beta"))
        g = torch.zeros(*v.shape[:3], 1).double()
        if raw is not None:
            g = leaves["g"][b : b + 1, begin:end].reshape(*v.shape[:3], -1)
        if "A_log" in leaves:
            g = log_gate(g, leaves["A_log"], leaves["dt_bias"])
        g = g.clamp(min=log_gate_floor(torch.float32)).expand(*v.shape[:3], x.q.shape[3])
        if erases:
            y = reference.kda(q, k, v, g, beta, scale=SCALE, use_qk_l2norm_in_kernel=norm)[0]
        else:
            q, k = unit_rows(q, k) if norm else (q, k)
            y = reference.gla(q, k, v * beta[..., None], g, scale=SCALE)[0]
        total = total + (y * x.do[b : b + 1, begin:end].double()).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def borders(x: Tokens, spans: list[tuple[int, int, int]], grid: Any, norm: bool, erases: bool) -> TokenBorders:
    """The output of `scan_bwd`, in float64 and then rounded."""
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    wide = x._replace(
        q=x.q.double(), k=x.k.double(), v=x.v.double(), beta=x.beta.double()[..., None], do=x.do.double(),
        g=x.g.double().clamp(min=log_gate_floor(torch.float32)),
    )  # fmt: skip
    reciprocals = [(y.square().sum(-1) + 1e-6).rsqrt().float() for y in (wide.q, wide.k)]
    if norm:
        q, k = unit_rows(wide.q, wide.k)
        wide = wide._replace(q=q, k=k)
    wide = wide._replace(q=wide.q.repeat_interleave(HV // H, 2), k=wide.k.repeat_interleave(HV // H, 2))
    S_, dS_ = torch.full((2, grid.chunks * HV, V, K), 7.0)
    e_, X_ = torch.full((2, grid.chunks * HV, C, V), 7.0)
    norms = torch.full((grid.chunks * HV, 2, C), torch.nan)
    for n, (b, begin, end) in enumerate(spans):
        first = n * grid.per_sequence if grid.cu is None else int(grid.first[n])
        for h in range(HV):
            chunks = [Chunk(*(y[b, t : min(t + C, end), h] for y in wide), erases) for t in range(begin, end, C)]
            S, states = torch.zeros(K, V).double(), []
            for one in chunks:
                states.append(S)
                S = one.total.exp()[:, None] * S + one.k_out.T @ (one.A @ (one.beta * one.R(S)))
            dS = torch.zeros(K, V).double()
            for c in reversed(range(len(chunks))):
                one, S, tile = chunks[c], states[c], (first + c) * HV + h
                X = one.A.T @ (SCALE * one.P.T @ one.do + one.k_out @ dS)
                S_[tile], dS_[tile] = S.T, dS.T / SCALE
                e_[tile], X_[tile] = 0, 0
                for i, r in enumerate(reciprocals):
                    norms[tile, i] = 1e3
                    norms[tile, i, : len(X)] = r[b, begin + c * C : min(begin + c * C + C, end), h // (HV // H)]
                e_[tile, : len(X)] = one.R(S) - one.J @ (one.A @ (one.beta * one.R(S)))
                X_[tile, : len(X)] = X / SCALE
                dS = one.total.exp()[:, None] * dS + SCALE * one.q_in.T @ one.do - one.k_in.T @ (one.beta * X)
    return TokenBorders(*(y.bfloat16() for y in (S_, dS_, e_, X_)), norms if norm else None)


class Chunk:
    """One chunk of one head: decayed rows, grams, and A = (I + diag(beta) J)^-1."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, erases: bool):
        G = g.cumsum(0).expand(-1, q.shape[1])
        self.total, self.v, self.beta, self.do = G[-1], v, beta, do
        self.q_in, self.k_in, self.k_out = q * G.exp(), erases * k * G.exp(), k * (G[-1] - G).exp()
        decay = (G[:, None] - G[None]).clamp(max=0).exp()
        J, P = (torch.einsum("rc,sc,rsc->rs", x, k, decay) for x in (k, q))
        self.J, self.P = erases * J.tril(-1), P.tril()
        self.A = torch.linalg.inv(torch.eye(len(q)).double() + beta * self.J)

    def R(self, S: Tensor) -> Tensor:
        """v minus the state's prediction for the keys."""
        return self.v - self.k_in @ S
