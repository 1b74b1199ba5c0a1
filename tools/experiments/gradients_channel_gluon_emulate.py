"""The same for `gradients` of a channel gate in Gluon (see scan_gluon_emulate.py), beside float64 autograd.

PYTHONPATH=src python tools/experiments/gradients_channel_gluon_emulate.py [words of cases]
"""

import inspect
import itertools
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import scan_gluon_emulate as E
import torch

from wyfold import reference
from wyfold.runtime.launch import Config
from wyfold.stages.gradients.gluon import channel as G
from wyfold.stages.gradients.gluon import tokens
from wyfold.stages.records import TokenBorders


class Shared(E.Shared):
    layout = None
    shape = property(lambda s: s.t.shape)
    index = lambda s, i: Shared(s.t[int(i)])
    permute = lambda s, o: Shared(s.t.permute(o))

    def _keep_alive(self):
        pass

    def _reinterpret(self, dtype, shape, layout):
        assert dtype == self.t.dtype
        return Shared(self.t.view(shape))

    def slice(self, a, n, dim=0):
        assert 0 <= a and a + n <= self.t.shape[dim]
        return Shared(self.t.narrow(dim, a, n))


class Product:
    """Reads its operands when it is waited for, and complains if they changed."""

    def __init__(self, a, b, acc, use):
        self.a, self.b, self.acc, self.use = a, b, acc, use
        self.before = [self._now(x).clone() for x in (a, b)]
        assert all(x.dtype == torch.bfloat16 for x in self.before), "operands are bfloat16"
        assert not any(x.isnan().any() for x in self.before), "an operand is not there"
        self.out = None

    _now = staticmethod(lambda x: x.t if isinstance(x, E.Shared) else x)

    def finish(self):
        for x, before in zip((self.a, self.b), self.before, strict=True):
            assert torch.equal(self._now(x), before), "operand changed while a product read it"
        acc = self.acc.out if isinstance(self.acc, Product) else self.acc
        self.out = self.before[0].float() @ self.before[1].float() + (acc if self.use else 0)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    E.queue().append(product)
    return product


def warpgroup_mma_wait(n, deps):
    queue = E.queue()
    while len(queue) > n:
        queue.pop(0).finish()
    assert all(x.out is not None for x in deps if isinstance(x, Product)), "result used before its wait"
    return tuple(x.out if isinstance(x, Product) else x for x in deps)


def sums_inside(x):
    x = x.reshape(*x.shape[:-1], -1, 8)
    until = x.flip(-1).cumsum(-1).flip(-1)
    until = torch.cat((until[..., 1:], torch.zeros_like(x[..., :1])), -1)
    return x.cumsum(-1).flatten(-2), until.flatten(-2)


def activated(x, rate, bias, lower, clamp, activation):
    u = x + bias
    g = {"given": lambda: x, "softplus": lambda: -rate * torch.nn.functional.softplus(u)}.get(
        activation, lambda: lower * torch.sigmoid(u * rate)
    )()
    return torch.where(g < clamp, float(clamp), g)


def activated_bwd(x, dg, rate, bias, lower, clamp, clamped, activation):
    if activation == "given":
        return torch.where(x < clamp, 0.0, dg) if clamped else dg, dg
    u = x + bias
    if activation == "softplus":
        g = -rate * torch.nn.functional.softplus(u)
        return dg * torch.sigmoid(u) * -rate, torch.where(dg == 0, 0.0, g * dg)
    s = torch.sigmoid(u * rate)
    dx = dg * lower * s * (1 - s) * rate
    return dx, torch.where(dx == 0, 0.0, u * dx)


def chunk_span(i_c, cu, first, sequence, T, per, packed, C):
    i_c, whole = int(i_c), torch.as_tensor
    if packed:
        n = int(sequence.t[i_c])
        s = i_c - int(first.t[n])
        t = int(cu.t[n]) + s * C
        return n, s, 0, whole(t), whole(max(min(int(cu.t[n + 1]) - t, C), 0))
    n, s = i_c // per, i_c % per
    return n, s, n, whole(s * C), whole(min(T - s * C, C))


def program(pid):
    gl = E.make_gl(pid)
    gl.allocate_shared_memory = lambda dtype, shape, layout: (
        E.Bars(shape[0]) if layout == "bars" else Shared(torch.full(shape, float("nan"), dtype=dtype))
    )
    gl.full = lambda s, v, d, layout: torch.full(s, v, dtype=d)
    gl.split = lambda x: (x[..., 0].clone(), x[..., 1].clone())
    gl.join = lambda a, b: torch.stack((a, b), -1)
    gl.sum = lambda x, axis: x.sum(axis)
    gl.fma = lambda a, b, c: a * b + c
    gl.rsqrt = torch.rsqrt
    gl.minimum = lambda a, b: torch.as_tensor(min(int(a), int(b)))
    gl.NVMMASharedLayout = gl.SwizzledSharedLayout = gl.SharedLinearLayout = lambda *a: None
    gl.where = lambda c, a, b: torch.where(c, *(torch.as_tensor(x, dtype=torch.float32) for x in (a, b)))
    names = {"gluon": types.SimpleNamespace(jit=E.jit), "gl": gl, "mbarrier": E.mbarrier, "tma": E.tma}
    names |= {"tma_load": E.tma_load, "tma_store": E.tma_store, "fence_async_shared": lambda: None}
    names |= {"barrier": lambda: None, "clear_rows": E.clear_rows, "chunk_span": chunk_span, "exp": torch.exp}
    names |= {"sigmoid": torch.sigmoid, "activated": activated, "activated_bwd": activated_bwd}
    names |= {"warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "Any": Any}
    names |= {"NamedTuple": NamedTuple}
    for module, begin in ((tokens, "class Place"), (G, "class Gate")):
        text = Path(module.__file__).read_text()
        text = text[text.index(begin) :].replace("pairs.type.layout", "None").replace("x_out, [at", "x_out, [at")
        exec(compile("from __future__ import annotations\n" + text, module.__file__, "exec"), names)
        names |= {"exp2": torch.exp2, "_sums_inside": sums_inside}
    return names


def launched(kernel, programs, *arguments, **fixed):
    names = list(inspect.signature(kernel.fn).parameters)
    fixed = {n: v for n, v in fixed.items() if n in names}
    for pid in range(programs):
        E.FAILED.clear()
        given = [
            E.Desc(x) if hasattr(x, "block_shape") else E.Ptr(x) if isinstance(x, torch.Tensor) else x
            for x in arguments
        ]
        program(pid)[kernel.fn.__name__](*given, **fixed)
        assert not E.queue() and not E.HERE.stores, "something is still under way"


C, K, V = 64, 128, 128


def chunk(q, k, g, beta):
    """G, J, P, A of one."""
    total = g.cumsum(0)
    decay = (total[:, None] - total[None]).clamp(max=0).exp()
    J, P = (torch.einsum("rc,sc,rsc->rs", x, k, decay) for x in (k, q))
    J, P = J.tril(-1), P.tril()
    return total, J, P, torch.linalg.inv(torch.eye(len(q)).double() + beta * J)


def drawn(gate, T, B, H, norm, seed=0):
    torch.manual_seed(seed)
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    q, k = (x.bfloat16() if norm else torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in (q, k))
    v, do, beta = torch.randn(B, T, H, V).bfloat16(), torch.randn(B, T, H, V).bfloat16(), torch.rand(B, T, H)
    rate = {"slow": 0.01, "mid": 0.5, "fast": 5.0, "harsh": 0.5}[gate]
    g = -torch.rand(B, T, H, K) * rate
    if gate == "harsh":
        g[:, 5] = -1e4
        g[:, 70 % T] = -float("inf")
        g[:, 9, :, ::3] = -float("inf")
        g[:, 24:40] = -20.0
        g[:, 41:48] = 0.0
    return q, k, v, g, beta, do


PARAMETERS = ("A_log", "dt_bias")


def log_gate(raw, A_log, dt_bias):
    return -A_log.exp()[:, None] * torch.nn.functional.softplus(raw + dt_bias)


def truth(q, k, v, g, beta, do, spans, norm, inside):
    given = {"q": q, "k": k, "v": v, "g": g.clamp(min=-104), "beta": beta, **(inside or {})}
    leaves = {n: x.double().requires_grad_() for n, x in given.items()}
    total = 0
    for b, s, e in spans:
        if e > s:
            tokens = {name: x[b : b + 1, s:e] for name, x in leaves.items() if name not in PARAMETERS}
            if inside:
                tokens["g"] = log_gate(tokens["g"], *(leaves[name] for name in PARAMETERS))
            y = reference.kda(*tokens.values(), scale=K**-0.5, use_qk_l2norm_in_kernel=norm)[0]
            total = total + (y * do[b : b + 1, s:e].double()).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def borders(q, k, v, g, beta, do, spans, counts, chunks):
    H, scale = q.shape[2], K**-0.5
    S_, dS_ = (torch.full((chunks * H, V, K), 7.0) for _ in range(2))
    e_, X_ = (torch.full((chunks * H, C, V), 7.0) for _ in range(2))
    first = 0
    for (b, begin, end), count in zip(spans, counts, strict=True):
        for h in range(H):
            parts = [slice(begin + C * c, min(begin + C * c + C, end)) for c in range(count)]
            whole = (q, k, v, g.clamp(min=-104), beta[..., None], do)
            rows = [[x[b, p, h].double() for x in whole] for p in parts]
            made = [chunk(x[0], x[1], x[3], x[4]) for x in rows]
            S, states = torch.zeros(K, V).double(), []
            for (_, kk, vv, _, be, _), (total, _, _, A) in zip(rows, made, strict=True):
                states.append(S)
                N = A @ (be * (vv - (kk * total.exp()) @ S))
                S = total[-1].exp()[:, None] * S + (kk * (total[-1] - total).exp()).T @ N
            dS = torch.zeros(K, V).double()
            for c in reversed(range(count)):
                (qq, kk, vv, _, be, dO), (total, J, P, A), S = rows[c], made[c], states[c]
                tile, n = (first + c) * H + h, len(qq)
                R = vv - (kk * total.exp()) @ S
                X = A.T @ (scale * P.T @ dO + (kk * (total[-1] - total).exp()) @ dS)
                S_[tile], dS_[tile], e_[tile], X_[tile] = S.T, dS.T, 0, 0
                e_[tile, :n], X_[tile, :n] = R - J @ (A @ (be * R)), X
                dS = total[-1].exp()[:, None] * dS + scale * (qq * total.exp()).T @ dO - (kk * total.exp()).T @ (be * X)
        first += count
    return TokenBorders(*(x.bfloat16() for x in (S_, dS_ / scale, e_, X_ / scale)))


def case(gate, T=128, B=1, H=1, cuts=None, strided=False, norm=False, inside=None):
    q, k, v, g, beta, do = drawn(gate, T, B, H, norm)
    raw, parameters = g, None
    if inside:
        raw = torch.randn(g.shape).to(inside)
        parameters = {"A_log": 0.3 * torch.randn(H), "dt_bias": torch.randn(H, K) - 1}
        g = log_gate(raw.double(), *(x.double() for x in parameters.values()))
    spans = [(0, a, b) for a, b in itertools.pairwise(cuts)] if cuts else [(b, 0, T) for b in range(B)]
    counts = [-(-(e - s) // C) for _, s, e in spans]
    chunks = sum(counts) + (1 if cuts else 0)
    want = truth(q, k, v, raw, beta, do, spans, norm, parameters)
    long = [x.double() for x in (q, k)]
    y_q, y_k = (x * (x.square().sum(-1, True) + 1e-6).rsqrt() if norm else x for x in long)
    lie = borders(y_q, y_k, v, g, beta, do, spans, counts, chunks)
    cu = first = sequence = None
    if cuts:
        first = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)])
        sequence = torch.tensor([i for i, c in enumerate(counts) for _ in range(c)] + [len(counts)])
        cu = torch.tensor([*cuts, T])
        for x in (q, k, do, raw):
            x[:, cuts[-1] :] = float("nan")
    if strided:
        q = q[..., None].expand(*q.shape, 2).flatten(-2)[..., ::2]
        raw = raw.transpose(1, 2).contiguous().transpose(1, 2)
    empty = lambda x, dtype: torch.full(x.shape, float("nan"), dtype=dtype)
    out = types.SimpleNamespace(q=empty(q, q.dtype), k=empty(k, k.dtype), v=empty(v, v.dtype), g=empty(raw, raw.dtype))
    out.beta, out.A_log, out.dt_bias = empty(beta, beta.dtype), None, None
    if parameters:
        out.A_log, out.dt_bias = (empty(x, x.dtype) for x in parameters.values())
    grid = types.SimpleNamespace(chunk_size=C, cu=cu, first=first, sequence=sequence, sequences=len(spans), tokens=T)
    grid.per_sequence, grid.chunks = -(-T // C), chunks
    how = types.SimpleNamespace(qk_l2norm=norm, beta_logit=False, beta_most=1.0, scale=K**-0.5)
    how.activation = "softplus" if inside else "given"
    how.clamp, how.lower_bound, how.unit = 0.0, 0.0, how.scale
    with mock.patch.object(G, "launched", launched), mock.patch.object(G, "tuned", lambda *_: Config(4, 1, {})):
        G.gradients(q, k, raw, beta, *(parameters or dict.fromkeys(PARAMETERS)).values(), do, lie, grid, how, "", out)
    end = cuts[-1] if cuts else T
    tails = [x[:, end:] for n, x in vars(out).items() if n not in PARAMETERS]
    assert not any(x.any() for x in tails), "the tail is not zero"
    found = {n: (getattr(out, n).double(), x) for n, x in want.items()}
    found = {n: pair if n in PARAMETERS else tuple(x[:, :end] for x in pair) for n, pair in found.items()}
    assert not any(bool(x[y == 0].any()) for x, y in found.values()), "not zero where it must be"
    errors = {n: float((x - y).norm() / y.norm()) for n, (x, y) in found.items()}
    print(
        E.MODE,
        gate,
        T,
        B,
        H,
        cuts or "",
        "strided" * strided,
        "norm" * norm,
        f"{inside}" * bool(inside),
        {n: f"{e:.1e}" for n, e in errors.items()},
        flush=True,
    )
    assert max(errors.values()) < 6e-3


CASES = (
    {"gate": "mid"},
    {"gate": "harsh", "H": 2},
    {"gate": "slow", "T": 90, "B": 2},
    {"gate": "fast", "strided": True},
    {"gate": "harsh", "norm": True},
    {"gate": "mid", "T": 200, "cuts": [0, 70, 190], "norm": True},
    {"gate": "mid", "T": 300, "H": 2, "cuts": [0, 70, 70, 198, 240]},
    {"gate": "mid", "T": 200, "H": 2, "norm": True, "inside": torch.bfloat16},
    {"gate": "mid", "T": 200, "cuts": [0, 70, 190], "inside": torch.float32},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for E.MODE in ("late", "early"):
        for given in CASES:
            if not sys.argv[1:] or any(word in str(given) for word in sys.argv[1:]):
                case(**given)
