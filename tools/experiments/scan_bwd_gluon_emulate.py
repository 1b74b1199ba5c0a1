"""The same for `scan_bwd` in Gluon (see scan_gluon_emulate.py), against its formulas in PyTorch.

PYTHONPATH=src python tools/experiments/scan_bwd_gluon_emulate.py
"""

import inspect
import types
from pathlib import Path
from unittest import mock

import scan_gluon_emulate as E
import torch
from tests.upper_tiles import in_quarters, whole

import wyfold.tile.index.gluon as IG
import wyfold.tile.index.triton as I
from wyfold.runtime.chunks import chunk_grid
from wyfold.runtime.launch import Config
from wyfold.stages.records import Prepared
from wyfold.stages.scan_bwd import gluon as G
from wyfold.stages.scan_bwd.triton import token_borders

VARIANTS = (
    {"BV": 128, "PARTS": 1, "OUT": 2, "stages": 2},
    {"BV": 128, "PARTS": 1, "OUT": 1, "stages": 2},
    {"BV": 128, "PARTS": 2, "OUT": 1, "stages": 2},
    {"BV": 64, "PARTS": 1, "OUT": 1, "stages": 3},
)
PACKED = [0, 1, 65, 129, 129, 300, 517]


class mbarrier(E.mbarrier):
    @staticmethod
    def expect(b, n, pred=True):
        if bool(pred):
            E.mbarrier.expect(b, n)


BASE = E.Acc


class Acc(BASE):
    """Its addend may be a product that is not waited for yet: they finish in order."""

    def __init__(self, a, b, acc, use):
        self.before = acc
        super().__init__(a, b, torch.zeros(acc.shape), use)

    def finish(self):
        self.acc = self.before.get() if isinstance(self.before, BASE) else self.before
        super().finish()


def divisor(beta):
    return torch.where(beta.abs() < 2.0**-60, 2.0**-60, beta)


def namespace(pid):
    text = Path(G.__file__).read_text()
    text = text[text.index("@gluon.jit") :]
    text = text.replace("source.tile, source.token", "source.tile.clone(), source.token.clone()")
    ns = {
        **{name: getattr(G, name) for name in ("Tiles", "Source", "Memory", "Place")},
        "gluon": types.SimpleNamespace(jit=E.jit),
        "gl": E.make_gl(pid),
        "mbarrier": mbarrier,
        "fence_async_shared": lambda: None,
        "barrier": lambda: None,
        "clear_rows": E.clear_rows,
        "quarters": lambda squares, box, count: E.Quarters(squares.t),
        "divisor": divisor,
        "one_over": lambda x: 1 / x,
        "in_bfloat16": lambda x: (x.bfloat16(), x.bfloat16().float()),
        **{name: getattr(E, name) for name in ("tma", "tma_load", "tma_store")},
        **{name: getattr(E, name) for name in ("warpgroup_mma", "warpgroup_mma_wait")},
    }
    span = inspect.getsource(I.sequence_span.fn)
    scope = {"tl": types.SimpleNamespace(load=E.load, constexpr=int)}
    exec("from __future__ import annotations\n" + span[span.index("def ") :], scope)
    ns["sequence_span"] = scope["sequence_span"]
    for helper in (IG.clear_lower, IG.tma_load_upper):
        source = inspect.getsource(helper.fn)
        exec("from __future__ import annotations\n" + source[source.index("def ") :], ns)
    exec(compile("from __future__ import annotations\n" + text, G.__file__, "exec"), ns)
    return ns


def drawn(gate, B, T, H, HV, K, V, cu, given, device="cpu", seed=1):
    """Arguments of a call with factors at random: the launch is a map of whatever they are."""
    gen = torch.Generator(device).manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=gen, device=device)
    u = lambda *s: torch.rand(*s, generator=gen, device=device)
    channel, folded = gate == "channel", gate in ("channel", "scalarEF")
    unit = lambda *s: torch.nn.functional.normalize(r(*s), dim=-1).bfloat16()
    q, k, v, do = unit(B, T, H, K), unit(B, T, H, K), r(B, T, HV, V).bfloat16(), r(B, T, HV, V).bfloat16()
    grid = chunk_grid(B, T, 64, None if cu is None else torch.tensor(cu, device=device))
    n, N = grid.chunks * HV, B if cu is None else len(cu) - 1
    square = lambda: in_quarters((torch.eye(64, device=device) + 0.1 * r(n, 64, 64).tril(-1).mT).bfloat16())
    rows = 0.05 + 0.95 * u(n, 4, 64)  # X of a strength of zero would hide all others
    if channel:
        rows[:, :3] = 1.0
    prepared = Prepared(
        rows,
        u(n, K if channel else 1),
        unit(n, 64, K) if channel else None,
        unit(n, 64, K) if channel else None,
        unit(n, 64, K) if folded else None,
        square(),
        square(),
    )
    states = [r(N, HV, K, V) * 0.1 if x else None for x in (given, given)]
    return q, k, v, prepared, states[0], do, states[1], grid, K**-0.5


def expected(q, k, v, prepared, S0, do, dST, grid, scale, cu):
    """(tiles that are written, S, dS, e, X, dS0) by the formulas, operands rounded as the launch rounds them; dS and X
    in units of the scale."""
    rows, totals, q_tiles, k_tiles, E_tiles, F, W = prepared[:7]
    F, W = whole(F), whole(W)
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    b = lambda x: x.bfloat16().float()
    n = rows.shape[0]
    S, dS = torch.zeros(2, n, V, K).unbind()
    e, X = torch.zeros(2, n, 64, V).unbind()
    spans = [(i, 0, T) for i in range(B)] if cu is None else [(0, cu[i], cu[i + 1]) for i in range(len(cu) - 1)]
    dS0 = torch.zeros(len(spans), HV, K, V)
    written = []

    def tile(x, buffer, t, rest, h):
        out = torch.zeros(64, x.shape[3])
        out[:rest] = x[buffer, t : t + rest, h].float()
        return out

    for s, (buffer, first, last) in enumerate(spans):
        chunk = s * grid.per_sequence if cu is None else int(grid.first[s])
        count = -(-(last - first) // 64)
        for h in range(HV):
            at = [(chunk + c) * HV + h for c in range(count)]
            written += at
            here = [(first + 64 * c, min(64, last - first - 64 * c)) for c in range(count)]
            keys = [
                k_tiles[i].float() if k_tiles is not None else tile(k, buffer, t, m, h // (HV // H))
                for i, (t, m) in zip(at, here)
            ]
            queries = [
                q_tiles[i].float() if q_tiles is not None else tile(q, buffer, t, m, h // (HV // H))
                for i, (t, m) in zip(at, here)
            ]
            state = torch.zeros(V, K) if S0 is None else S0[s, h].T.clone()
            for i, (t, m), key in zip(at, here, keys):
                in_k, _, out, beta = rows[i]
                S[i] = state
                R = tile(v, buffer, t, m, h).T - (b(state) @ key.T) * in_k
                error = b(R) @ W[i].float()
                if E_tiles is not None:
                    error = R - b(R) + error
                e[i] = error.T
                if E_tiles is not None:
                    state = state * totals[i] + b(R * beta) @ E_tiles[i].float()
                else:
                    state = state * totals[i] + b(error * (beta * out)) @ key
            state = torch.zeros(V, K) if dST is None else dST[s, h].T / scale
            for i, (t, m), key, query in reversed(list(zip(at, here, keys, queries))):
                in_k, in_q, out, beta = rows[i]
                dS[i] = state
                doT = tile(do, buffer, t, m, h).T
                x = doT @ F[i].float().T
                if E_tiles is not None:
                    x = x + b(state) @ E_tiles[i].float().T
                else:
                    by = divisor(beta)
                    z = (b(state) @ key.T) * (out * by)
                    x = x + (z - b(z) + b(z) @ W[i].float().T) * (1 / by)
                X[i] = x.T
                state = state * totals[i] + b(doT * in_q) @ query - b(x * (beta * in_k)) @ key
            dS0[s, h] = state.T * scale
    return written, b(S), b(dS), b(e), b(X), dS0


def case(gate, variant, mode, B=1, T=200, H=1, HV=2, K=128, V=128, cu=None, given=True):
    """How far each result of the emulated launch is from the formulas."""
    arguments = drawn(gate, B, T, H, HV, K, V, cu, given)
    q, k, v, prepared, S0, do, dST, grid, scale = arguments
    want = expected(*arguments, cu)
    if cu is not None:
        for x in (q, k, v, do):
            x[:, cu[-1] :] = float("nan")
    dS0 = torch.full((grid.sequences, HV, K, V), float("nan")) if given else None
    spec = dict(variant)
    config = Config(spec["BV"] // 16 // spec["PARTS"], spec.pop("stages"), spec)
    E.MODE, done = mode, []
    with (
        mock.patch.object(E, "namespace", namespace),
        mock.patch.object(E, "Acc", Acc),
        mock.patch.object(G, "tuned", lambda *a: config),
        mock.patch.object(G, "launched", lambda *a, **b: (done.append(1), E.emulate(*a, **b))),
    ):
        found = token_borders(q, v, grid)
        G.scan_bwd(q, k, v, prepared, S0, do, dST, grid, E.options(scale), "bf16", dS0, found)
    assert done
    written, *want = want
    pairs = [(x[written], y[written]) for x, y in zip(found, want)] + ([(dS0, want[4])] if given else [])
    return [((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs]


def main():
    bad = 0
    for variant in VARIANTS:
        for gate in ("scalar", "scalarEF", "channel"):
            for mode in ("late", "early"):
                for kw in (
                    {"B": 2},
                    {"T": 530, "cu": PACKED, "H": 2},
                    {"T": 320, "given": False},
                    {"T": 40},
                    {"T": 130, "K": 64},
                ):
                    errors = case(gate, variant, mode, **kw)
                    ok = all(x < 2e-4 for x in errors)
                    bad += not ok
                    print("ok " if ok else "BAD", variant, gate, mode, kw, [f"{x:.1e}" for x in errors], flush=True)
    print("bad", bad)


if __name__ == "__main__":
    main()
