"""Runs the Gluon TTT launch's own source on the CPU: a thread for each group of warps, copies that land late or early.

Everything that the launch writes is compared with float64; states and tokens behind every end are NaN.
"""

import inspect
import itertools
import sys
import time
import types
from pathlib import Path
from unittest import mock

import scan_gluon_emulate as E
import torch

from wyfold.runtime.chunks import chunk_grid
from wyfold.runtime.launch import Config
from wyfold.stages.ttt import Borders, States, Tokens
from wyfold.stages.ttt import gluon as G
from wyfold.tile.index.gluon import SharedBoxes
from wyfold.tile.state.gluon import state_offsets


def mma_v2(a, b, acc):
    assert a.dtype == b.dtype == torch.bfloat16, (a.dtype, b.dtype)
    return a.float() @ b.float() + acc


def reduce(x, axis, how):
    if how == "first":
        return x[:, 0].clone()
    return tuple(y.sum(axis) for y in x)


def bf16_parts(x):
    high = x.to(torch.bfloat16)
    return high, (x - high.float()).to(torch.bfloat16)


def namespace(pid):
    import wyfold.tile.index.triton as I

    text = Path(G.__file__).read_text()
    text = text[text.index("@gluon.jit") :]
    text = text.replace("token = at.token\n", "token = at.token.clone()\n")
    text = text.replace("j * SEGMENT", "int(j) * SEGMENT")
    gl = E.make_gl(pid)
    layout = lambda *a, **k: None
    gl.SwizzledSharedLayout = layout
    gl.full = lambda s, x, d, l: torch.full(s, x, dtype=d)
    gl.sum = lambda x, axis: x.sum(axis)
    gl.reduce = reduce
    gl.rsqrt = torch.rsqrt
    gl.join = lambda a, b: torch.stack([a, b], -1)
    gl.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    old = gl.where
    gl.where = lambda c, a, b: old(c, a, torch.as_tensor(b, dtype=torch.float32) if isinstance(b, float) else b)
    ns = {name: getattr(G, name) for name in ("Tiles", "Source", "Memory", "Place")}
    ns |= {
        "gluon": types.SimpleNamespace(jit=E.jit),
        "gl": gl,
        "mbarrier": E.mbarrier,
        "tma_load": E.tma_load,
        "mma_v2": mma_v2,
        "bf16_parts": bf16_parts,
        "add_five": "sums",
        "fence_async_shared": lambda: None,
        "barrier": lambda: None,
        "clear_rows": E.clear_rows,
    }
    for helper in (I.sequence_span, state_offsets):
        source = inspect.getsource(helper.fn)
        exec("from __future__ import annotations\n" + source[source.index("def ") :], ns)
    ns["tl"] = types.SimpleNamespace(load=E.load)
    exec(compile("from __future__ import annotations\n" + text, G.__file__, "exec"), ns)
    ns["_first"] = "first"
    ns["_from_first"] = lambda z: z - z[:, :1]
    return ns


def emulate(kernel, programs, *arguments, **fixed):
    """In place of `launched`."""
    names = list(inspect.signature(kernel.fn).parameters)
    fixed = {n: v for n, v in fixed.items() if n in names}
    for pid in range(programs):
        E.FAILED.clear()
        given = [
            E.Desc(x) if isinstance(x, SharedBoxes) else E.Ptr(x) if isinstance(x, torch.Tensor) else x
            for x in arguments
        ]
        namespace(pid)[kernel.fn.__name__](*given, **fixed)


def truth(x, S0, c0, cu, C, scale, eps):
    """docs/algorithm.md, section 8, in float64."""
    q, k, v, w, u, eta = (y.double() for y in x[:6])
    B, T, HV, D = v.shape
    col = torch.ones(B, T, HV, 1).double() if x.col is None else x.col.double()
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, k))
    o, N, X, rows = torch.zeros_like(v), torch.zeros_like(v), torch.zeros_like(v), torch.zeros(B, T, HV, 4).double()
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, e) for a, e in itertools.pairwise(cu)]
    ST, cT, at_S, at_c = [], [], [], []
    for n, (b, t0, t1) in enumerate(spans):
        for h in range(HV):
            S = torch.zeros(D, D).double() if S0 is None else S0[n, h].double().clone()
            c = torch.zeros(1, D).double() if c0 is None else c0[n, h].double().clone()
            for t in range(t0, t1, C):
                if (t - t0) % 64 == 0:
                    at_S.append(S.T.clone())
                    at_c.append(c[0].clone())
                s = (b, slice(t, min(t + C, t1)), h)
                Z = k[s] @ S + c
                r = (Z.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
                X[s] = (Z - Z.mean(-1, keepdim=True)) * r
                Y = w[h] * (w[h] * X[s] + u[h] - v[s] + k[s])
                y, xy = Y.mean(-1, keepdim=True), (X[s] * Y).mean(-1, keepdim=True)
                N[s] = r * (Y - y - X[s] * xy) * col[s]
                rows[s] = torch.cat([r, xy, y, xy], -1)
                O = scale * q[s] @ S + c - eta[s] * (scale * q[s] @ k[s].T + 1).tril() @ N[s]
                ln = (O - O.mean(-1, keepdim=True)) * (O.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
                o[s] = (q[s] if x.residual == "q" else O) + w[h] * ln + u[h]
                last = eta[s][-1]
                S -= last * k[s].T @ N[s]
                c -= last * N[s].sum(0, keepdim=True)
            ST.append(S)
            cT.append(c)
    shape = len(spans), HV
    order = lambda y: torch.stack(y).unflatten(0, shape)
    return o, order(ST), order(cT), N, X, rows, at_S, at_c


def case(
    B=1,
    T=200,
    H=1,
    HV=2,
    D=64,
    cu=None,
    S0=True,
    c0=True,
    col=False,
    residual="o",
    kept=True,
    mode="late",
    strided=False,
    offset=0.0,
    stages=3,
    seed=0,
):
    torch.manual_seed(seed)
    bf = torch.bfloat16
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, D), dim=-1).to(bf) for _ in range(2))
    v = torch.randn(B, T, HV, D).to(bf)
    if strided:
        q, v = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (q, v))
    w, u = 1 + 0.1 * torch.randn(HV, D), 0.1 * torch.randn(HV, D)
    eta = torch.rand(B, T, HV, 1) * 0.5
    factor = torch.randn(B, T, HV, 1).to(bf) if col else None
    N = B if cu is None else len(cu) - 1
    S = torch.randn(N, HV, D, D) * 0.1 if S0 else None
    c = torch.randn(N, HV, 1, D) * 0.1 + offset if c0 else None
    x = Tokens(q, k, v, w, u, eta, factor, residual)
    used = T if cu is None else cu[-1]
    o64, S64, c64, N64, X64, r64, atS, atc = truth(x, S, c, cu, 16, D**-0.5, 1e-6)
    for y in (q, k, v, eta, *((factor,) if col else ())):
        y[:, used:] = float("nan")
    grid = chunk_grid(B, T, 64, None if cu is None else torch.tensor(cu))
    nan = lambda *s, d=torch.float32: torch.full(s, float("nan"), dtype=d)
    o, ST, cT = nan(B, T, HV, D, d=bf), nan(N, HV, D, D), nan(N, HV, 1, D)
    tiles = grid.chunks * HV
    borders = None
    if kept:
        borders = Borders(
            nan(B, T, HV, D, d=bf), nan(tiles, D, D, d=bf), nan(tiles, D), nan(B, T, HV, D, d=bf), nan(B, T, HV, 4)
        )
    E.MODE = mode
    config = Config(4, stages, {"READ": 152, "PREPARE": 96})
    with mock.patch.object(G, "tuned", lambda *a: config), mock.patch.object(G, "launched", emulate):
        G.ttt(x, States(S, c), States(ST, cT), grid, 16, D**-0.5, 1e-6, o, borders)
    rel = lambda a, b: ((a.double() - b).norm() / b.norm()).item()
    found = {"o": rel(o[:, :used], o64[:, :used]), "S": rel(ST, S64), "c": rel(cT, c64)}
    found["spare"] = float((o[:, used:] != 0).sum())
    if kept:
        found["N"] = rel(borders.N[:, :used], N64[:, :used])
        found["X"] = rel(borders.X[:, :used], X64[:, :used])
        found["rows"] = max(rel(borders.rows[:, :used, :, i], r64[:, :used, :, i]) for i in range(4))
        bS, bc = [], []
        spans = [(b * grid.per_sequence, T) for b in range(B)]
        if cu is not None:
            spans = [(int(grid.first[n]), cu[n + 1] - cu[n]) for n in range(N)]
        for first, length in spans:
            for h in range(HV):
                for j in range(-(-length // 64)):
                    i = (first + j) * HV + h
                    bS.append(borders.S[i])
                    bc.append(borders.c[i])
        found["border S"] = rel(torch.stack(bS), torch.stack(atS)) if S0 else 0.0
        found["border c"] = rel(torch.stack(bc), torch.stack(atc)) if c0 else 0.0
    return found


if __name__ == "__main__":
    packed = [0, 1, 65, 129, 129, 300, 517]
    quick = "quick" in sys.argv
    bad = 0
    for kw in (
        {"B": 2, "T": 200},
        {"T": 530, "cu": packed, "H": 2},
        {"T": 530, "cu": packed, "kept": False, "col": True, "residual": "q"},
        {"T": 384, "S0": False, "c0": False, "kept": False},
        {"T": 40, "S0": False, "offset": 100.0},
        {"T": 7, "c0": False, "strided": True},
        {"T": 64, "col": True, "stages": 2},
        {"T": 330, "stages": 1},
    ):
        for mode in ("late",) if quick else ("late", "early"):
            t = time.time()
            found = case(mode=mode, **kw)
            ok = all(e < 1e-2 for e in found.values())
            bad += not ok
            print(
                "ok " if ok else "BAD",
                kw,
                mode,
                {n: f"{e:.1e}" for n, e in found.items()},
                f"{time.time() - t:.1f}s",
                flush=True,
            )
    print("bad", bad)
    sys.exit(bad > 0)
