"""Runs the source of `prepare` in Gluon for channel gates on the CPU, at the worst moments, beside float64.

    PYTHONPATH=src:. python tools/experiments/prepare_channel_emulate.py

Copies land when they are waited for (after poison) or at once, stores when they are waited for; products read what they
read when they are waited for and complain if it changed since they were issued. Products in TF32 cut their operands.
"""

import itertools
import types
from pathlib import Path
from unittest import mock

import torch
from tests.compile import aot
from tests.upper_tiles import whole

from wyfold.runtime.options import DeltaOptions
from wyfold.stages.chunk_grid import eager as chunk_grid
from wyfold.stages.prepare.gluon import channel
from wyfold.tile.decay import triton as decay
from wyfold.tile.dot import gluon as dot
from wyfold.tile.index import gluon as index
from wyfold.tile.inverse import gluon as inverse

T = torch.as_tensor
MODE = "late"
UNDER_WAY: list = []
STORES: list = []
LAST_ANCHORS: list = []


def bits(x):
    return x.contiguous().view(torch.int16)


def cut(x):
    return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32) if x.dtype == torch.float32 else x.float()


class Bar:
    def __init__(self):
        self.late = []

    def check(self):
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase + 1, self.count
        assert self.pending >= 0


class Bars:
    def __init__(self, n):
        self.bars = [Bar() for _ in range(n)]

    def index(self, i):
        return self.bars[int(i)]

    def _keep_alive(self):
        pass


class Shared:
    def __init__(self, t, width=0):
        self.t, self.width = t, width

    dtype = property(lambda s: s.t.dtype)
    shape = property(lambda s: tuple(s.t.shape))

    def index(self, i):
        assert 0 <= int(i) < self.t.shape[0], i
        t = self.t[int(i)]
        return Pieces(t.view(-1, t.shape[0], self.width)) if 0 < self.width < t.shape[-1] else Shared(t)

    def permute(self, order):
        return Shared(self.t.permute(order))

    def slice(self, start, n, dim=0):
        assert start % n == 0, "the compiler wants tiles at multiples of their size"
        return Shared(self.t.narrow(dim, start, n))

    def load(self, layout):
        return self.t.clone()

    def store(self, x):
        assert x.shape == self.t.shape and x.dtype == self.t.dtype, (x.shape, self.t.shape, x.dtype, self.t.dtype)
        self.t.copy_(x)

    def _reinterpret(self, dtype, shape, layout):
        whole = self.t.view(-1).view(dtype)
        whole = whole[: torch.Size(shape).numel()]
        width = shape[-1] if layout is None else min(layout // whole.itemsize, shape[-1])
        if len(shape) == 2 and width < shape[1]:
            return Pieces(whole.view(-1, shape[0], width))
        return Shared(whole.view(shape), width)


class Pieces(Shared):
    """A tile whose rows are wider than the swizzle: so many columns of all rows lie together."""

    shape = property(lambda s: (s.t.shape[1], s.t.shape[0] * s.t.shape[2]))

    def slice(self, start, n, dim=0):
        assert dim == 0 and start % n == 0
        return Pieces(self.t.narrow(1, start, n))

    def load(self, layout):
        return self.t.permute(1, 0, 2).reshape(self.shape)

    def store(self, x):
        assert x.shape == self.shape and x.dtype == self.t.dtype, (x.shape, self.shape, x.dtype, self.t.dtype)
        self.t.copy_(x.view(x.shape[0], -1, self.t.shape[2]).permute(1, 0, 2))

    def permute(self, order):
        return Turned(self)


class Turned(Shared):
    """Pieces as the other operand of a product reads them."""

    def __init__(self, pieces):
        self.pieces = pieces

    def load(self, layout):
        return self.pieces.load(layout).mT


class Product:
    def __init__(self, a, b, acc, use):
        self.a, self.b, self.use, self.out = a, b, use, None
        self.acc = acc
        self.seen = [(x.load(None) if isinstance(x, Shared) else x).clone() for x in (a, b)]

    def finish(self):
        for x, seen in zip((self.a, self.b), self.seen, strict=True):
            now = x.load(None) if isinstance(x, Shared) else x
            assert torch.equal(bits(now), bits(seen)), "an operand changed while a product read it"
        before = self.acc.out if isinstance(self.acc, Product) else self.acc
        self.out = cut(self.seen[0]) @ cut(self.seen[1]) + (before if self.use else 0)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    UNDER_WAY.append(Product(a, b, acc, use_acc))
    return UNDER_WAY[-1]


def warpgroup_mma_wait(n, deps):
    while len(UNDER_WAY) > n:
        UNDER_WAY.pop(0).finish()
    assert all(x.out is not None for x in deps), "a result is used before its wait"
    return tuple(x.out for x in deps)


class mbarrier:
    MBarrierLayout = staticmethod(lambda: "bars")

    @staticmethod
    def init(b, count):
        (b.index(0) if isinstance(b, Bars) else b).__dict__.update(count=count, pending=count, tx=0, phase=0)

    @staticmethod
    def expect(b, n):
        b = b.index(0) if isinstance(b, Bars) else b
        b.tx, b.pending = b.tx + int(n), b.pending - 1
        b.check()

    @staticmethod
    def wait(b, phase):
        b = b.index(0) if isinstance(b, Bars) else b
        for land in b.late:
            land()
        b.late.clear()
        assert (b.phase & 1) != int(phase), "waits for ever"


class Box:
    def __init__(self, b):
        self.b, self.dtype, self.block_shape, self.layout = b, b.base.dtype, b.block_shape, b.layout.swizzle_byte_width
        self.block_type = types.SimpleNamespace(nbytes=torch.Size(b.block_shape).numel() * b.base.itemsize)
        self.view = b.base.as_strided(b.shape, b.strides)

    def region(self, at):
        assert all(0 <= int(a) < s for a, s in zip(at, self.b.shape, strict=True)), "a box outside of memory"
        return tuple(
            slice(int(a), min(int(a) + n, s)) for a, n, s in zip(at, self.b.block_shape, self.b.shape, strict=True)
        )


def tma_load(box, at, bar, to):
    bar = bar.index(0) if isinstance(bar, Bars) else bar
    here = box.view[box.region(at)]
    x = torch.zeros(box.b.block_shape, dtype=box.dtype)
    x[: here.shape[0], : here.shape[1]] = here
    assert to.shape == tuple(x.shape) and to.dtype == x.dtype
    to.store(torch.full_like(x, float("nan")))

    def land():
        to.store(x)
        bar.tx -= box.block_type.nbytes
        bar.check()

    bar.late.append(land) if MODE == "late" else land()


def tma_store(box, at, x):
    seen, where = x.load(None), box.region(at)

    def land():
        assert torch.equal(bits(seen), bits(x.load(None))), "a result changed while it was stored"
        box.view[where] = seen

    STORES.append(land)


def store_wait(pendings):
    while len(STORES) > pendings:
        STORES.pop(0)()


class Pointer:
    def __init__(self, t, at=None):
        self.t, self.at = t, t.storage_offset() if at is None else at
        self.dtype = types.SimpleNamespace(element_ty=t.dtype)

    def __add__(self, more):
        return Pointer(self.t, self.at + more)


def place(p, mask):
    at = T(p.at)
    flat = torch.as_strided(p.t, (p.t.untyped_storage().nbytes() // p.t.itemsize,), (1,), 0)
    here = torch.ones_like(at, dtype=torch.bool) if mask is None else T(mask).expand(at.shape)
    assert bool(((at[here] >= 0) & (at[here] < flat.numel())).all()), "outside of memory"
    return flat, at, here


def load(p, mask=None, other=0.0):
    flat, at, here = place(p, mask)
    return torch.where(here, flat[at.clamp(0, flat.numel() - 1)], T(other, dtype=flat.dtype))


def store(p, x, mask=None):
    flat, at, here = place(p, mask)
    flat[at[here]] = T(x).to(flat.dtype).expand(at.shape)[here]


def parts(x):
    high = x.to(torch.bfloat16)
    return high, (x - high.float()).to(torch.bfloat16)


def chunk_span(i_c, cu, first, sequence, length, per, packed, C):
    i_c = int(i_c)
    if packed:
        n = int(sequence.t[i_c])
        begin = int(cu.t[n]) + (i_c - int(first.t[n])) * C
        return n, 0, 0, T(begin), max(min(int(cu.t[n + 1]) - begin, C), 0)
    return 0, 0, T(i_c // per), T(i_c % per * C), min(length - i_c % per * C, C)


def activated(x, rate, bias, lower_bound, clamp, kind):
    if kind == "softplus":
        x = -rate * torch.nn.functional.softplus(x + bias)
    elif kind != "given":
        x = lower_bound * torch.sigmoid((x + bias) * rate)
    return torch.where(x < clamp, T(clamp), x)


def language(pid, programs):
    gl = types.SimpleNamespace(
        constexpr=lambda x: x, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        program_id=lambda axis: T(pid, dtype=torch.int32), num_programs=lambda axis: programs, load=load, store=store,
        arange=lambda a, b, layout=None: torch.arange(a, b),
        allocate_shared_memory=lambda dtype, shape, layout: Bars(shape[0])
        if layout == "bars"
        else Shared(torch.full(shape, float("nan"), dtype=dtype))._reinterpret(dtype, shape, layout),
        static_range=range, zeros=lambda s, d, layout: torch.zeros(s, dtype=d),
        full=lambda s, x, d, layout: torch.full(s, x, dtype=d),
        where=lambda c, a, b: torch.where(T(c), T(a), T(b)), convert_layout=lambda x, layout, assert_trivial=False: x,
        sum=lambda x, axis: x.sum(axis).to(x.dtype), exp=torch.exp, rsqrt=torch.rsqrt, fma=lambda a, b, c: a * b + c,
        min=lambda x, axis: x.amin(axis), minimum=lambda a, b: torch.minimum(T(a), T(b, dtype=torch.float32)),
        associative_scan=lambda x, axis, combine: x.cumsum(axis), permute=lambda x, order: x.permute(order),
        split=lambda x: (x[..., 0], x[..., 1]), join=lambda a, b: torch.stack((a, b), -1),
        broadcast=torch.broadcast_tensors, expand_dims=lambda x, axis: x.unsqueeze(axis), num_warps=lambda: 4,
    )  # fmt: skip
    layouts = (
        "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout",
    )  # fmt: skip
    for name in layouts:
        setattr(gl, name, lambda *a: None)
    gl.NVMMASharedLayout = lambda swizzle, *_: swizzle
    return gl


def namespace(pid, programs):
    names = {
        "gluon": types.SimpleNamespace(jit=lambda f=None, **_: f if f is not None else (lambda f: f)),
        "gl": language(pid, programs),
        "tl": types.SimpleNamespace(range=lambda *ends, **_: torch.arange(*map(int, ends), dtype=torch.int32)),
        "mbarrier": mbarrier,
        "tma": types.SimpleNamespace(store_wait=store_wait),
        "tma_load": tma_load,
        "tma_store": tma_store,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "mma_v2": lambda a, b, acc, input_precision=None: acc + cut(a) @ cut(b),
        "fence_async_shared": lambda: None,
        "barrier": lambda: None,
        "sigmoid": torch.sigmoid,
        "divisor": lambda x: torch.where(x.abs() < 2.0**-60, T(2.0**-60), x),
        "BK": channel.BK.value,
        "REACH": channel.REACH.value,
        "SHIFT": channel.SHIFT.value,
        "NEAREST": channel.NEAREST.value,
    }
    for module in (dot, inverse, index, channel):
        text = Path(module.__file__).read_text()
        text = text[text.index("@gluon.jit") :]
        for word in ("int32", "float32"):
            text = text.replace(f".to(gl.{word}, bitcast=True)", f".view(torch.{word})")
        exec(compile("from __future__ import annotations\n" + text, module.__file__, "exec"), names)
    names.update(torch=torch, parts=parts, exp2=torch.exp2, chunk_span=chunk_span, activated=activated)
    near = names["_add_near"]

    def counted(*given):
        LAST_ANCHORS.append(int(given[-2]))
        return near(*given)

    names["_add_near"] = counted
    names["range"] = lambda *ends: range(*map(int, ends))
    return names


def launched(kernel, programs, *arguments, **fixed):
    fixed = {name: x for name, x in fixed.items() if name.isupper()}
    given = [
        Box(x) if isinstance(x, index.SharedBoxes) else Pointer(x) if isinstance(x, torch.Tensor) else x
        for x in arguments
    ]
    for pid in range(programs):
        UNDER_WAY.clear()
        namespace(pid, programs)[kernel.fn.__name__](*given, **fixed)
        assert not STORES and not UNDER_WAY


def truth(q, k, g, beta, norm, spans, C=64):
    """What every tile should hold, in float64: total, decayed q and k, E, F^T, W^T."""
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    found = []
    H, HV, K = q.shape[2], beta.shape[2], q.shape[3]
    g = g.clamp(min=decay.FLOOR)
    for b, low, high in spans:
        for s, h in itertools.product(range(low, high, C), range(HV)):
            n = min(C, high - s)
            kk, qq, gg, be = (torch.zeros(C, K).double() for _ in range(4))
            kk[:n], qq[:n] = k[b, s : s + n, h * H // HV], q[b, s : s + n, h * H // HV]
            gg[:n], be[:n] = g[b, s : s + n, h], beta[b, s : s + n, h, None]
            G, be = gg.cumsum(0), be[:, :1]
            # A difference of sums would lose digits: the sum of what lies between.
            o = torch.arange(C)
            inside = ((o[None, None, :] <= o[:, None, None]) & (o[None, None, :] > o[None, :, None])).double()
            D = torch.einsum("rsi,ik->rsk", inside, gg).exp()
            J = torch.einsum("rk,sk,rsk->rs", kk, kk, D).tril(-1)
            P = torch.einsum("rk,sk,rsk->rs", qq, kk, D).tril()
            eye = torch.eye(C).double()
            A = torch.linalg.solve_triangular(eye + be * J, eye, upper=False)
            W = torch.linalg.solve_triangular(eye + J * be.mT, eye, upper=False)
            kt = kk * D[C - 1]
            found.append((G[-1].exp(), qq * G.exp(), kk * G.exp(), A.mT @ kt, (P @ A).mT, W.mT))
    return [torch.stack(x) for x in zip(*found, strict=True)]


def case(B=1, T=128, H=1, HV=2, gate="mid", norm=False, cu=None, strided=False, narrow=False, inside="given", seed=0):
    torch.manual_seed(seed)
    q, k = (torch.randn(B, T, H, 128) for _ in range(2))
    if not norm:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q, k = q.bfloat16(), k.bfloat16()
    beta, g = torch.rand(B, T, HV), -torch.rand(B, T, HV, 128)
    g = {"slow": g * 1e-3, "mid": g * 0.1, "fast": g * 5.0, "faster": g * 40.0, "none": g * 0.0}.get(gate, g)
    if gate == "reset":
        g[:, ::7] = float("-inf")
        g[:, 3, :, ::2] = -1e4
    if gate == "all":
        g.fill_(float("-inf"))
    given, A_log, dt_bias = g, None, None
    if inside == "softplus":
        A_log, dt_bias = torch.randn(HV), torch.randn(HV, 128)
        given = torch.randn(g.shape)
        g = -A_log.exp()[:, None] * torch.nn.functional.softplus(given.to(torch.bfloat16).float() + dt_bias)
        given = given.bfloat16()
    if narrow:
        given = given.bfloat16()
        g = given.float()
    if strided:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    spans = [(b, 0, T) for b in range(B)]
    if cu is not None:
        spans = list(zip([0] * len(cu), cu, cu[1:], strict=False))
        for x in (q, k, given):
            x[:, cu[-1] :] = float("nan")
    options = DeltaOptions(
        "x", False, 1.0, norm, inside, 0.0, 0.0, False, 1.0, False, torch.float32, True, 64, 0, True, True, "triton"
    )
    o = torch.full((B, T, HV, 128), 7.0).bfloat16()
    here = mock.patch.multiple(channel, launched=launched, processors=lambda device: 1)
    with aot.pretending("sm_90", lambda *a, **b: None), here:
        grid = chunk_grid.chunk_grid(B, T, 64, None if cu is None else torch.tensor(cu))
        LAST_ANCHORS.clear()
        found = channel.prepare(q, k, given, beta, A_log, dt_bias, grid, options, o, folded=True, backward=True)
    want = truth(q, k, g, beta, norm, spans)
    n = len(want[0])
    got = (found.total, found.q, found.k, found.E, whole(found.F), whole(found.W))
    names = ("total", "q", "k", "E", "F", "W")
    errors = {}
    for name, x, y in zip(names, got, want, strict=True):
        assert x[:n].isfinite().all(), name
        size = y.norm().clamp(min=1e-30)
        errors[name] = f"{float((x[:n].double() - y).norm() / size):.1e}"
        if name != "total":
            errors[name] += f" ({float((y.bfloat16().double() - y).norm() / size):.1e})"
    return errors, max(LAST_ANCHORS)


if __name__ == "__main__":
    print("relative error (of rounding alone); anchors")
    for mode in ("late", "early"):
        MODE = mode
        for call in (
            *({"gate": gate} for gate in ("slow", "mid", "fast", "faster", "none", "reset", "all")),
            {"norm": True},
            {"T": 100, "B": 2, "H": 2, "HV": 4},
            {"cu": [0, 50, 50, 120]},
            {"cu": [0, 50, 120], "norm": True, "gate": "reset"},
            {"strided": True, "T": 100},
            {"narrow": True},
            {"inside": "softplus"},
        ):
            print(mode, call, *case(**call), flush=True)
