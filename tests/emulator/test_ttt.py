"""`ttt` forward in Gluon, on the emulator, against docs/algorithm.md, section 8, in float64."""

from itertools import pairwise
from typing import NamedTuple

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import BFLOAT16, require_close
from tests.emulator.delta import PACKED
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold.kernels.ttt import gluon
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTInputs
from wyfold.runtime.chunk_layout import chunk_grid
from wyfold.runtime.kernel_configs import Config

C, SEGMENT, D, EPS = 16, 64, 64, 1e-6
SCALE = D**-0.5
CALLS = [
    {"B": 2, "T": 100},
    {"T": 530, "cu": PACKED, "H": 2},
    {"T": 530, "cu": PACKED, "kept": False, "col": True, "residual": "q"},
    {"T": 384, "S0": False, "c0": False, "kept": False},
    {"T": 40, "S0": False, "offset": 100.0},
    {"T": 7, "c0": False, "strided": True},
    {"T": 64, "col": True, "stages": 2},
    {"T": 330, "stages": 1},
]
CASES = cases(CALLS)


class Truth(NamedTuple):
    """Outputs, final states, per-token values for the backward, and states at segment boundaries, in order."""

    o: Tensor
    S: Tensor
    c: Tensor
    N: Tensor
    X: Tensor
    rows: Tensor
    border_S: Tensor
    border_c: Tensor


def truth(x: TTTInputs, S0: Tensor | None, c0: Tensor | None, spans: list[tuple[int, int, int]]) -> Truth:
    q, k, v, w, u, eta = (y.double() for y in x[:6])
    B, T, HV, _ = v.shape
    col = torch.ones(B, T, HV, 1).double() if x.col is None else x.col.double()
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, k))
    o, N, X, rows = (torch.zeros(B, T, HV, width).double() for width in (D, D, D, 4))
    ST, cT, border_S, border_c = [], [], [], []
    for n, (b, begin, end) in enumerate(spans):
        for h in range(HV):
            S = torch.zeros(D, D).double() if S0 is None else S0[n, h].double()
            c = torch.zeros(1, D).double() if c0 is None else c0[n, h].double()
            for t in range(begin, end, C):
                if (t - begin) % SEGMENT == 0:
                    border_S.append(S.T)
                    border_c.append(c[0])
                s = (b, slice(t, min(t + C, end)), h)
                Z = k[s] @ S + c
                r = (Z.var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
                X[s] = (Z - Z.mean(-1, keepdim=True)) * r
                Y = w[h] * (w[h] * X[s] + u[h] - v[s] + k[s])
                y, xy = Y.mean(-1, keepdim=True), (X[s] * Y).mean(-1, keepdim=True)
                N[s] = r * (Y - y - X[s] * xy) * col[s]
                rows[s] = torch.cat([r, xy, y, xy], -1)
                O = SCALE * q[s] @ S + c - eta[s] * (SCALE * q[s] @ k[s].T + 1).tril() @ N[s]
                normal = (O - O.mean(-1, keepdim=True)) * (O.var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
                o[s] = (q[s] if x.residual == "q" else O) + w[h] * normal + u[h]
                step = eta[s][-1]
                S = S - step * k[s].T @ N[s]
                c = c - step * N[s].sum(0, keepdim=True)
            ST.append(S)
            cT.append(c)
    states = (torch.stack(y).unflatten(0, (len(spans), HV)) for y in (ST, cT))
    return Truth(o, *states, N, X, rows, torch.stack(border_S), torch.stack(border_c))


def test_ttt(case):
    (call,) = case.values
    judge(Machine(*case.schedule), **call)


def judge(
    machine: Machine,
    *,
    T: int,
    B: int = 1,
    H: int = 1,
    HV: int = 2,
    cu: list[int] | None = None,
    S0: bool = True,
    c0: bool = True,
    col: bool = False,
    residual: str = "o",
    kept: bool = True,
    strided: bool = False,
    offset: float = 0.0,
    stages: int = 3,
) -> None:
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, D), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(B, T, HV, D).bfloat16()
    if strided:
        q, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, v))
    w, u = 1 + 0.1 * torch.randn(HV, D), 0.1 * torch.randn(HV, D)
    eta = torch.rand(B, T, HV, 1) * 0.5
    factor = torch.randn(B, T, HV, 1).bfloat16() if col else None
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, *span) for span in pairwise(cu)]
    S = torch.randn(len(spans), HV, D, D) * 0.1 if S0 else None
    c = torch.randn(len(spans), HV, 1, D) * 0.1 + offset if c0 else None
    x = TTTInputs(q, k, v, w, u, eta, factor, residual)
    want = truth(x, S, c, spans)
    used = spans[-1][2]
    for y in (q, k, v, eta, *((factor,) if factor is not None else ())):
        y[:, used:] = torch.nan

    def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    grid = chunk_grid(B, T, SEGMENT, None if cu is None else torch.tensor(cu))
    o, ST, cT = blank(B, T, HV, D, dtype=q.dtype), blank(*want.S.shape), blank(*want.c.shape)
    left = None
    if kept:
        tiles = grid.chunks * HV
        left = SegmentBorders(
            N=blank(B, T, HV, D, dtype=q.dtype), S=blank(tiles, D, D, dtype=q.dtype), c=blank(tiles, D),
            X=blank(B, T, HV, D, dtype=q.dtype), rows=blank(B, T, HV, 4),
        )  # fmt: skip
    with machine.installed(gluon, Config(4, stages, {"READ": 152, "PREPARE": 96})):
        gluon.ttt(x, StateViews(S, c), StateViews(ST, cT), grid, C, SCALE, EPS, o, left)
    assert not o[:, used:].any(), "outputs behind the last sequence are zero"
    require_close(machine, BFLOAT16, o=(o[:, :used], want.o[:, :used]), S=(ST, want.S), c=(cT, want.c))
    if left is not None:
        firsts = [b * grid.per_sequence for b in range(B)] if cu is None else grid.first[: len(spans)].tolist()
        order = [
            (first + j) * HV + h
            for first, (_, begin, end) in zip(firsts, spans, strict=True)
            for h in range(HV)
            for j in range(-(-(end - begin) // SEGMENT))
        ]
        tokens = {name: (getattr(left, name)[:, :used], getattr(want, name)[:, :used]) for name in ("N", "X")}
        rows = {f"rows {i}": (left.rows[:, :used, :, i], want.rows[:, :used, :, i]) for i in range(4)}
        borders = {"border S": (left.S[order], want.border_S), "border c": (left.c[order], want.border_c)}
        require_close(machine, BFLOAT16, **tokens, **rows, **borders)
