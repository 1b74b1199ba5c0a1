"""Runs the source of `prepare` in Gluon for no gate or a scalar one on the CPU, at the worst moments, beside float64.

    PYTHONPATH=src:. python tools/experiments/prepare_scalar_emulate.py [--against DIR]

Copies, stores and products as `prepare_channel_emulate.py` has them. --against: the `src` of another commit, whose
kernel is run beside this one's; says whether every bit of what both leave is the same.
"""

import argparse
import itertools
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from tests.compile import aot
from tests.upper_tiles import whole
from tools.experiments import prepare_channel_emulate as emulate

from wyfold.runtime.options import DeltaOptions
from wyfold.stages.chunk_grid import eager as chunk_grid
from wyfold.stages.prepare.gluon import scalar

T = torch.as_tensor
HERE = Path(scalar.__file__).parents[4]
FILES = ("tile/dot/gluon.py", "tile/inverse/gluon.py", "tile/index/gluon.py", "stages/prepare/gluon/scalar.py")
PATHS: list = []


def waited(n, deps):
    found = emulate.warpgroup_mma_wait(n, deps)
    return found if len(found) > 1 else found[0]


def namespace(pid, sources):
    names = {
        "gluon": types.SimpleNamespace(jit=lambda f=None, **_: f if f is not None else (lambda f: f)),
        "gl": emulate.language(pid, 0),
        "mbarrier": emulate.mbarrier,
        "tma": types.SimpleNamespace(store_wait=emulate.store_wait),
        "tma_load": emulate.tma_load,
        "tma_store": emulate.tma_store,
        "warpgroup_mma": emulate.warpgroup_mma,
        "warpgroup_mma_wait": waited,
        "mma_v2": lambda a, b, acc: acc + emulate.cut(a) @ emulate.cut(b),
        "fence_async_shared": lambda: None,
        "barrier": lambda: None,
        "sigmoid": torch.sigmoid,
        "divisor": lambda x: torch.where(x.abs() < 2.0**-60, T(2.0**-60), x),
        "log_gate": lambda x, *_: x,
        "NamedTuple": NamedTuple,
        "Any": object,
    }
    for file in FILES:
        text = (sources / "wyfold" / file).read_text()
        begin = min(text.index(word) for word in ("@gluon.jit", "class Numbers") if word in text)
        exec(compile("from __future__ import annotations\n" + text[begin:], file, "exec"), names)
    names.update(parts=emulate.parts, exp2=torch.exp2, chunk_span=emulate.chunk_span)
    return names


def launched(sources, kernel, programs, *arguments, **fixed):
    PATHS.append(fixed["BOXED"])
    fixed = {name: x for name, x in fixed.items() if name.isupper()}
    boxes = emulate.index.SharedBoxes
    given = [
        emulate.Box(x) if isinstance(x, boxes) else emulate.Pointer(x) if isinstance(x, torch.Tensor) else x
        for x in arguments
    ]
    for pid in range(programs):
        emulate.UNDER_WAY.clear()
        namespace(pid, sources)[kernel.fn.__name__](*given, **fixed)
        assert not emulate.STORES and not emulate.UNDER_WAY


def truth(q, k, g, beta, norm, spans, C=64):
    """What every tile should hold, in float64: total, F^T, W^T, (F diag(beta))^T."""
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    H, HV, K = q.shape[2], beta.shape[2], q.shape[3]
    found, eye = [], torch.eye(C).double()
    for b, low, high in spans:
        for s, h in itertools.product(range(low, high, C), range(HV)):
            n = min(C, high - s)
            kk, qq = torch.zeros(C, K).double(), torch.zeros(C, K).double()
            gg, be = torch.zeros(C).double(), torch.zeros(C, 1).double()
            kk[:n], qq[:n] = k[b, s : s + n, h * H // HV], q[b, s : s + n, h * H // HV]
            gg[:n], be[:n, 0] = g[b, s : s + n, h], beta[b, s : s + n, h]
            G = gg.cumsum(0)
            D = (G[:, None] - G[None, :]).exp().tril()
            J, P = (kk @ kk.mT * D).tril(-1), (qq @ kk.mT * D).tril()
            A = torch.linalg.solve_triangular(eye + be * J, eye, upper=False)
            W = torch.linalg.solve_triangular(eye + J * be.mT, eye, upper=False)
            found.append((G[-1].exp(), (P @ A).mT, W.mT, (P @ A * be.mT).mT))
    return [torch.stack(x) for x in zip(*found, strict=True)]


def case(sources, B=1, T=128, H=1, HV=2, norm=False, cu=None, gate=True, wide=128, logit=False, seed=0):
    torch.manual_seed(seed)
    q, k = (torch.randn(B, T, H, 128) for _ in range(2))
    if not norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q, k = (torch.nn.functional.pad(x.bfloat16(), (0, wide - 128))[..., :128] for x in (q, k))
    given, g = torch.rand(B, T, HV), -torch.rand(B, T, HV) * 0.1
    given[:, ::7] *= logit  # a strength of zero: nothing is divided by it
    beta = given.sigmoid() if logit else given
    spans = [(b, 0, T) for b in range(B)]
    if cu is not None:
        spans = list(zip([0] * len(cu), cu, cu[1:], strict=False))
        for x in (q, k):
            x[:, cu[-1] :] = float("nan")
    options = DeltaOptions(
        "x", False, 1.0, norm, "given", 0.0, 0.0, logit, 1.0, False, torch.float32, True, 64, 0, True, True, "triton"
    )
    o = torch.full((B, T, HV, 128), 7.0).bfloat16()

    def launch(*arguments, **fixed):
        launched(sources, *arguments, **fixed)

    with aot.pretending("sm_90", lambda *a, **b: None), mock.patch.object(scalar, "launched", launch):
        grid = chunk_grid.chunk_grid(B, T, 64, None if cu is None else torch.tensor(cu))
        call = q, k, g if gate else None, given, None, None, grid, options, o
        found, forth, back = (
            scalar.prepare(*call, folded=False, forward=forward, backward=backward)
            for forward, backward in ((True, True), (True, False), (False, True))
        )
    want = truth(q, k, g if gate else g * 0, beta, norm, spans)
    n, errors = len(want[0]), {}
    left = found.total, *(whole(x) for x in (found.F, found.W, found.FB))
    got = [x.reshape(-1, *y.shape[1:])[:n] for x, y in zip(left, want, strict=True)]
    both = found.FB, found.rows, found.W, found.F, found.back, found.W
    for x, y in zip(both, (forth.FB, forth.rows, forth.W, back.F, back.rows, back.W), strict=True):
        low = min(n, x.shape[0])
        assert torch.equal(x[:low].view(torch.uint8), y[:low].view(torch.uint8)), "a direction alone has other bits"
    beta = found.rows[:n, 3]
    assert logit or not left[3][:n][beta == 0].any()
    for name, x, y in zip(("total", "F", "W", "FB"), got, want, strict=True):
        assert x.isfinite().all(), name
        errors[name] = f"{float((x.double() - y).norm() / y.norm()):.1e}"
        if name != "total":
            errors[name] += f" ({float((y.bfloat16().double() - y).norm() / y.norm()):.1e})"
    return errors, [found.rows.reshape(-1, 256)[:n].clone(), *(x.clone() for x in got)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    print("relative error (of rounding alone); by boxes or by address")
    for mode in ("late", "early"):
        emulate.MODE = mode
        for call in (
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
        ):
            errors, left = case(HERE, **call)
            words = "boxes" if PATHS[-1] else "address"
            if args.against:
                before = case(args.against, **call)[1]
                same = all(
                    torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(left, before, strict=True)
                )
                words += ", the bits of before" if same else ", OTHER BITS"
            print(mode, call, errors, words, flush=True)


if __name__ == "__main__":
    main()
