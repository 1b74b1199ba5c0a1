"""`low_rank_prepare` of rules with two columns on the emulator, against its definition in float64."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_as_rounded, require_close
from tests.emulator.delta import options
from tests.emulator.machine import Machine
from tests.emulator.test_prepare_channel import gates
from tests.upper_tiles import from_quarters
from torch import Tensor
from torch.nn.functional import normalize, pad, softplus

from wyfold.kernels.low_rank_prepare.gluon import columns
from wyfold.kernels.low_rank_prepare.gluon import kernel as _kernel
from wyfold.kernels.low_rank_prepare.triton import call_arguments
from wyfold.reference.error import floor
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid
from wyfold.runtime.kernel_configs import Config, LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.eager import log_gate_floor

C = 32
FACTORS = ("total", "q", "rows", "E", "K", "F", "P", "A", "R")
KERNEL = _kernel.wyfold_low_rank_prepare_gluon.fn.__name__
ULP_OF_A_SUM = 2.0**-17
"""Of binary logarithms from 64 to 128, whose exponential is hardly a normal number: their relative error in it."""
CALLS = [
    *({"gate": gate} for gate in ("slow", "medium", "fast", "faster", "none", "reset")),
    {"K": 128, "HV": 1},
    {"K": 128, "HV": 2, "gate": "reset", "T": 50},
    {"T": 50, "B": 2, "H": 1, "HV": 4},
    {"cu": [0, 20, 20, 60, 61], "T": 70},
    {"cu": [0, 40], "K": 128, "gate": "faster"},
    {"strided": True, "T": 40},
    {"softplus": True, "T": 40},
    {"softplus": True, "K": 128},
]
CASES = cases(CALLS)


@dataclass
class Call:
    """Arguments of a launch, and the expected tiles."""

    tokens: tuple[Tensor, Tensor, Tensor, Tensor]
    gate: list[Any]
    grid: ChunkGrid
    options: DeltaOptions
    o: Tensor
    end: int
    want: list[Tensor]


def test_prepare(case):
    (shape,) = case.values
    judge(Machine(*case.schedule), draw(**shape))


def judge(machine: Machine, call: Call) -> None:
    o = call.o.clone()
    arguments = call_arguments(call.tokens, *call.gate, o.shape[2], call.options)
    with machine.installed(columns, Config(4, 1, {})):
        found = columns.prepare(*arguments, call.grid, call.options, LaunchKey(), o, backward=True, clear=True)
    assert machine.launches == [KERNEL]
    assert not o[:, call.end :].any(), "outputs behind the last sequence are zero"
    for name, want in zip(FACTORS, call.want, strict=True):
        got = getattr(found, name)
        got = from_quarters(got) if got.dim() == 4 else got
        if name == "total":
            require_close(machine, 1.25 * floor(want, got.dtype) + ULP_OF_A_SUM, total=(got[: len(want)], want))
        else:
            require_as_rounded(machine, **{name: (got[: len(want)], want)})


def chunk(q: Tensor, a: Tensor, b: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Expected tiles of a chunk, in the order of FACTORS; rows a read before the decay of their token."""
    i = torch.arange(C)

    def decays(early: int) -> Tensor:
        # A difference of prefix sums would lose digits, so the gates between are summed.
        between = (i[None, None, :] <= i[:, None, None] - early) & (i[None, None, :] > i[None, :, None])
        return torch.einsum("rsi,ik->rsk", between.double(), g).exp()

    behind, before, sums = decays(0), decays(1), g.cumsum(0)
    L, J = (torch.einsum("rk,sk,rsk->rs", a, x, before).tril(-1) for x in (b, k))
    Pb, Pk = (torch.einsum("rk,sk,rsk->rs", q, x, behind).tril() for x in (b, k))
    A = torch.linalg.inv(torch.eye(C).double() - L)
    b, k, R = b * behind[C - 1], k * behind[C - 1], A @ J
    rows = a * pad(sums, (0, 0, 1, -1)).exp()
    return sums[-1].exp(), q * sums.exp(), rows, A.mT @ b, R.mT @ b + k, (Pb @ A).mT, (Pb @ R + Pk).mT, A.mT, R.mT


def draw(
    *,
    B: int = 1,
    T: int = 64,
    H: int | None = None,
    HV: int = 2,
    K: int = 64,
    gate: str = "medium",
    cu: list[int] | None = None,
    strided: bool = False,
    softplus: bool = False,
) -> Call:
    """Draw a call. softplus: The gate is activated in the kernel, with parameters."""
    H = H or HV
    q, k, a = (normalize(torch.randn(B, T, H, K), dim=-1).bfloat16() for _ in range(3))
    b = (normalize(torch.randn(B, T, HV, K), dim=-1) * torch.rand(B, T, HV, 1)).bfloat16()
    g = given = gates(gate, (B, T, HV, K))
    parameters: list[Tensor | None] = [None, None]
    if softplus:
        A_log, dt_bias = torch.randn(HV), torch.randn(HV, K)
        parameters = [A_log, dt_bias]
        given = torch.randn(g.shape).bfloat16()
        g = activated(given, A_log, dt_bias)
    if strided:
        k, b = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, b))
    wide, want = g.double().clamp(min=log_gate_floor(torch.float32)), []
    spans = [(n, 0, T) for n in range(B)] if cu is None else [(0, *span) for span in itertools.pairwise(cu)]
    for n, low, high in spans:
        for t, h in itertools.product(range(low, high, C), range(HV)):
            tokens = n, slice(t, min(t + C, high))
            tiles = [x[*tokens, h // (HV // x.shape[2])].double() for x in (q, a, b, k, wide)]
            want.append(chunk(*(pad(x, (0, 0, 0, C - len(x))) for x in tiles)))
    end = spans[-1][2]
    for x in (q, k, a, b, given):
        x[:, end:] = torch.nan
    how = options(rule="given", chunk_size=C, activation="softplus" if softplus else "given")
    grid = chunk_grid(B, T, C, None if cu is None else torch.tensor(cu))
    o = torch.full((B, T, HV, K), 7.0).bfloat16()
    return Call((q, k, a, b), [given, None, *parameters], grid, how, o, end, [torch.stack(x) for x in zip(*want)])


def activated(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -A_log.exp()[:, None] * softplus(x.float() + dt_bias)
