"""Runs the Gluon scan's own source on the CPU, threads for partitions, the worst moments for everything asynchronous.

Copies land at the last moment (after poison) or at once; products and stores read shared memory when they are waited
for and complain if it changed since they were issued; barriers count arrivals and bytes; a wait that never ends raises.
"""

import inspect
import threading
import time
import types
from pathlib import Path
from unittest import mock

import torch
from tests.upper_tiles import in_quarters

from wyfold.reference import rounded as Rd
from wyfold.runtime.chunks import chunk_grid
from wyfold.runtime.launch import Config
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.records import Prepared, Slots
from wyfold.stages.scan import gluon as G

LOCK = threading.Condition()
FAILED = []
HERE = threading.local()


class Bar:
    def __init__(self):
        self.count = None
        self.phase = 0
        self.late = []

    def init(self, count):
        self.count = self.pending = count
        self.tx = 0

    def check(self):
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            LOCK.notify_all()
        if self.pending < 0:
            FAILED.append("too many arrivals")
            raise RuntimeError("too many arrivals")


class Bars:
    def __init__(self, n):
        self.b = [Bar() for _ in range(n)]

    def _keep_alive(self):
        pass

    def index(self, i):
        return self.b[int(i)]


class Shared:
    def __init__(self, t):
        self.t = t

    dtype = property(lambda s: s.t.dtype)

    def index(self, i):
        i = int(i)
        assert 0 <= i < self.t.shape[0], i
        return Shared(self.t[i])

    def permute(self, o):
        return Shared(self.t.permute(o))

    def slice(self, a, n, dim=0):
        return Shared(self.t.narrow(dim, a, n))

    def load(self, layout):
        return self.t.clone()

    def store(self, x):
        assert x.shape == self.t.shape and x.dtype == self.t.dtype, (x.shape, self.t.shape, x.dtype)
        self.t.copy_(x)


class Quarters(Shared):
    """Tiles [n, n] by quarters, as `tile.index.gluon.quarters` has them."""

    shape = property(lambda s: (4 * s.t.shape[0], s.t.shape[1] // 2, s.t.shape[2] // 2))

    def index(self, i):
        i, n = int(i), self.t.shape[1] // 2
        rows, columns = n * (i % 2), n * (i // 2 % 2)
        return Shared(self.t[i // 4, rows : rows + n, columns : columns + n])


class Acc:
    def __init__(self, a, b, acc, use):
        self.a, self.b, self.acc, self.use = a.clone(), b, (acc.get() if isinstance(acc, Acc) else acc), use
        self.snap = b.t.clone()
        self.out = None
        self.shape = self.acc.shape

    def finish(self):
        if self.out is None:
            if not torch.equal(self.snap.view(torch.int16), self.b.t.contiguous().view(torch.int16)):
                ok = HERE.tail  # pad rows of the last chunk may turn from garbage to zero meanwhile
                if not ok:
                    FAILED.append("operand changed while a product read it")
                    raise RuntimeError(FAILED[-1])
            self.out = self.a.float() @ self.b.t.float() + (self.acc if self.use else 0)

    def get(self):
        if self.out is None:
            raise RuntimeError("result used before its wait")
        return self.out


def queue():
    if not hasattr(HERE, "q"):
        HERE.q = []
        HERE.stores = []
        HERE.tail = False
    return HERE.q


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert a.dtype == b.dtype == torch.bfloat16 and a.shape[1] == b.t.shape[0]
    x = Acc(a, b, acc, use_acc)
    queue().append(x)
    return x


def warpgroup_mma_wait(n, deps):
    q = queue()
    while len(q) > n:
        q.pop(0).finish()
    out = [d.get() if isinstance(d, Acc) else d for d in deps]
    return out[0] if len(out) == 1 else tuple(out)


class mbarrier:
    MBarrierLayout = staticmethod(lambda: "bars")

    @staticmethod
    def init(b, count):
        b.init(count)

    @staticmethod
    def expect(b, n):
        with LOCK:
            b.tx += int(n)
            b.pending -= 1
            b.check()

    @staticmethod
    def arrive(b, count=1, pred=True):
        if not bool(pred):
            return
        with LOCK:
            b.pending -= count
            b.check()

    @staticmethod
    def wait(b, phase, pred=True):
        if not bool(pred):
            return
        with LOCK:
            if MODE == "late":
                for f in b.late:
                    f()
                b.late.clear()
            ok = LOCK.wait_for(
                lambda: (b.phase & 1) != int(phase) or FAILED or (b.late and MODE == "late" and _run(b, phase)),
                timeout=15,
            )
            if FAILED:
                raise RuntimeError(FAILED[0])
            if not ok:
                FAILED.append(f"hang in {threading.current_thread().name}")
                raise RuntimeError(FAILED[-1])


def _run(b, phase):
    for f in b.late:
        f()
    b.late.clear()
    return (b.phase & 1) != int(phase)


class tma:
    @staticmethod
    def store_wait(pendings):
        queue()
        while len(HERE.stores) > pendings:
            HERE.stores.pop(0)()


class Desc:
    def __init__(self, b):
        self.b = b
        self.dtype = b.base.dtype
        self.layout = "box"
        self.block_shape = b.block_shape
        n = 1
        for s in b.block_shape:
            n *= s
        self.block_type = types.SimpleNamespace(nbytes=n * b.base.itemsize)
        self.view = b.base.as_strided(b.shape, b.strides) if all(b.shape) else b.base

    def region(self, at):
        cut = []
        put = []
        for a, n, s in zip(at, self.b.block_shape, self.b.shape):
            a = int(a)
            assert -(2**31) <= a < 2**31
            lo, hi = max(a, 0), min(a + n, s)
            cut.append(slice(lo, max(hi, lo)))
            put.append(slice(lo - a, max(hi, lo) - a) if hi > lo else slice(0, 0))
        if any(c.start >= c.stop for c in cut):
            cut = [slice(0, 0)] * len(cut)
            put = cut
        return tuple(cut), tuple(put)


def inside(cut):
    """Storing a box that lies outside of memory as a whole may be an illegal instruction."""
    if any(c.start >= c.stop for c in cut):
        FAILED.append("a box outside of memory")
        raise RuntimeError(FAILED[-1])


def tma_load(d, at, bar, dst):
    cut, put = d.region(at)
    inside(cut)
    x = torch.zeros(d.b.block_shape, dtype=d.dtype)
    x[put] = d.view[cut]
    assert list(dst.t.shape) == list(d.b.block_shape), (dst.t.shape, d.b.block_shape)
    dst.t.fill_(float("nan"))

    def land():
        dst.t.copy_(x)
        bar.tx -= d.block_type.nbytes
        bar.check()

    with LOCK:
        if MODE == "late":
            bar.late.append(land)
            LOCK.notify_all()
        else:
            land()


def tma_store(d, at, src):
    cut, put = d.region(at)
    inside(cut)
    snap = src.t.clone()
    queue()

    def land():
        if not torch.equal(snap.contiguous().view(torch.int16), src.t.contiguous().view(torch.int16)):
            FAILED.append("output changed while it was stored")
            raise RuntimeError(FAILED[-1])
        d.view[cut] = src.t[put]

    if MODE == "late":
        HERE.stores.append(land)
    else:
        land()
        HERE.stores.append(lambda: None)


class Ptr:
    def __init__(self, t, off=None):
        self.t = t
        self.off = t.storage_offset() if off is None else off
        self.dtype = types.SimpleNamespace(element_ty=t.dtype)

    def __add__(self, o):
        p = Ptr(self.t, self.off + o)
        return p


def flat(t):
    return torch.as_strided(t, (t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)


def load(p, mask=None, other=0.0):
    off = torch.as_tensor(p.off)
    m = torch.ones_like(off, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(off.shape)
    f = flat(p.t)
    assert bool(((off >= 0) & (off < f.numel()))[m].all()), "load outside"
    x = f[torch.where(m, off, 0)]
    return torch.where(m, x, torch.as_tensor(other).to(x.dtype)) if mask is not None else x


def store(p, x, mask=None):
    off = torch.as_tensor(p.off)
    m = torch.ones_like(off, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(off.shape)
    f = flat(p.t)
    assert bool(((off >= 0) & (off < f.numel()))[m].all()), "store outside"
    x = torch.as_tensor(x, dtype=f.dtype) if isinstance(x, float) else x
    assert x.dtype == f.dtype
    f[off[m]] = x.expand(m.shape)[m]


class Fn:
    def __init__(self, f):
        self.f = f


def jit(f=None, **kw):
    if f is None:
        return lambda g: g
    return f


def warp_specialize(parts, warps, regs):
    errors = []

    def go(f, a):
        try:
            f(*a)
            tma.store_wait(0)
        except Exception as e:
            import traceback

            errors.append(traceback.format_exc())
            FAILED.append(repr(e))
            with LOCK:
                LOCK.notify_all()

    own = lambda x: (
        (type(x)(*map(own, x)) if hasattr(x, "_fields") else tuple(map(own, x)))
        if isinstance(x, tuple)
        else x.clone()
        if isinstance(x, torch.Tensor) and x.ndim == 0
        else x
    )
    ts = [threading.Thread(target=go, args=(p[0], own(p[1])), name=f"{p[0].__name__}{i}") for i, p in enumerate(parts)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    if errors:
        raise RuntimeError("\n".join(errors))


class GL:
    pass


def make_gl(pid):
    gl = types.SimpleNamespace(
        constexpr=int, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16
    )
    gl.program_id = lambda a: torch.tensor(pid, dtype=torch.int32)

    def alloc(dtype, shape, layout):
        if layout == "bars":
            return Bars(shape[0])
        return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 99, dtype=dtype))

    gl.allocate_shared_memory = alloc
    gl.static_range = range
    gl.static_assert = lambda true: None
    gl.zeros = lambda s, d, l: torch.zeros(s, dtype=d)
    gl.arange = lambda a, b, layout=None: torch.arange(a, b)
    gl.where = lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b))
    gl.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    gl.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    gl.fma = lambda a, b, c: torch.addcmul(c, a, b.expand_as(a))
    gl.convert_layout = lambda x, l, assert_trivial=False: x
    gl.NVMMADistributedLayout = gl.DotOperandLayout = gl.SliceLayout = gl.BlockedLayout = lambda *a: None
    gl.SwizzledSharedLayout = lambda *a: None
    gl.max = torch.amax
    gl.num_programs = lambda a: torch.tensor(PROGRAMS, dtype=torch.int32)
    gl.num_warps = lambda: 4
    gl.load = load
    gl.store = store
    gl.warp_specialize = warp_specialize
    return gl


def clear_rows(tile, rows, BT, W):
    tile.t[int(rows) :] = 0


def namespace(pid):
    import wyfold.stages.scan.gluon as G
    import wyfold.tile.decay.gluon as D
    import wyfold.tile.index.gluon as IG
    import wyfold.tile.index.triton as I
    import wyfold.tile.state.gluon as SG

    text = Path(G.__file__).read_text()
    text = text[text.index("@gluon.jit") :]
    text = text.replace("source.tile, source.token", "source.tile.clone(), source.token.clone()")
    gl = make_gl(pid)
    ns = {
        "SLOT_NUMBERS": G.SLOT_NUMBERS,
        "Tiles": G.Tiles,
        "Source": G.Source,
        "Memory": G.Memory,
        "Place": G.Place,
        "gluon": types.SimpleNamespace(jit=jit),
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": tma,
        "tma_load": tma_load,
        "tma_store": tma_store,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
        "fence_async_shared": lambda: None,
        "barrier": lambda: None,
        "clear_rows": clear_rows,
        "quarters": lambda squares, box, count: Quarters(squares.t),
    }
    tl = types.SimpleNamespace(load=load, int64=torch.int64)
    helpers = I.sequence_span, I.slot_place, IG.clear_tokens, D.chunk_decay, SG.state_offsets
    for helper in (*helpers, IG.clear_lower, IG.tma_load_upper):
        source = inspect.getsource(helper.fn)
        scope = {"tl": tl, "gl": gl, "tma_load": tma_load}
        exec("from __future__ import annotations\n" + source[source.index("def ") :], scope, ns)
    exec(compile("from __future__ import annotations\n" + text, G.__file__, "exec"), ns)
    # `_step` of a tail: products may meet rows that another part clears
    step = ns["_step"]

    def watched(*a):
        queue()
        HERE.tail = not a[-1]
        return step(*a)

    ns["_step"] = watched
    return ns


MODE = "late"
PROGRAMS = 0  # of the launch


def emulate(kernel, programs, *arguments, **fixed):
    """In place of `launched`."""
    global PROGRAMS
    from wyfold.tile.index.gluon import SharedBoxes

    PROGRAMS = programs
    names = list(inspect.signature(kernel.fn).parameters)
    fixed = {n: v for n, v in fixed.items() if n in names}
    for pid in range(programs):
        FAILED.clear()
        given = [
            Desc(x) if isinstance(x, SharedBoxes) else Ptr(x) if isinstance(x, torch.Tensor) else x for x in arguments
        ]
        namespace(pid)[kernel.fn.__name__](*given, **fixed)


def options(scale):
    return DeltaOptions(
        "x",
        False,
        scale,
        False,
        "given",
        0.0,
        0.0,
        False,
        1.0,
        False,
        torch.float32,
        True,
        64,
        0,
        False,
        False,
        "triton",
    )


def case(
    gate,
    folded,
    B=1,
    T=200,
    H=1,
    HV=2,
    K=128,
    V=128,
    cu=None,
    initial=True,
    nan=False,
    mode="late",
    fp=torch.bfloat16,
    pooled=False,
    **cfg,
):
    torch.manual_seed(1)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(B, T, HV, V).bfloat16()
    beta = torch.rand(B, T, HV)
    g = (
        None
        if gate == "none"
        else torch.nn.functional.logsigmoid(torch.randn(B, T, HV, *((K,) if gate == "channel" else ()))).clamp(min=-5)
    )
    cu_t = None if cu is None else torch.tensor(cu)
    N = B if cu is None else len(cu) - 1
    S0 = torch.randn(N, HV, K, V) * 0.1 if initial else None
    scale = K**-0.5
    ro, rS = Rd.chunked(
        q, k, v, g, beta, folded=folded, scale=scale, initial_state=S0, output_final_state=True, cu_seqlens=cu_t
    )
    grid = chunk_grid(B, T, 64, cu_t)
    ch = gate == "channel"
    n = grid.chunks * HV
    nanf = lambda *s, d=torch.bfloat16: torch.full((n, *s), float("nan"), dtype=d)
    p = {
        "rows": nanf(4, 64, d=torch.float32),
        "total": nanf(K if ch else 1, d=torch.float32),
        "q": nanf(64, K) if ch else None,
        "k": nanf(64, K) if ch else None,
        "E": nanf(64, K) if folded else None,
        "F": nanf(3, 32, 32) if folded else None,
        "W": None if folded else nanf(3, 32, 32),
        "FB": None if folded else nanf(3, 32, 32),
    }
    form = Rd.Form(torch.bfloat16, ch, folded, scale)
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, cu[i], cu[i + 1]) for i in range(N)]
    for s, (b, t0, t1) in enumerate(spans):
        first = s * grid.per_sequence if cu is None else int(grid.first[s])
        gg = torch.zeros(B, T, HV, 1) if g is None else g if ch else g[..., None]
        sh = lambda x: x.repeat_interleave(HV // x.shape[2], 2)
        tiles = [Rd._tiles(x[b : b + 1, t0:t1].float(), 64) for x in (sh(q), sh(k), gg, beta[..., None])]
        if t1 == t0:
            continue
        f = Rd.prepare(form, *tiles)
        for h in range(HV):
            for c in range(tiles[0].shape[1]):
                i = (first + c) * HV + h
                ones = torch.ones(64)
                r = f.read[h, c, :, 0] if not ch else ones
                w = f.write[h, c, :, 0] if not ch else ones
                p["rows"][i] = torch.stack([r, r, w, tiles[3][h, c, :, 0]])
                p["total"][i] = f.total[h, c].flatten()
                if ch:
                    p["q"][i], p["k"][i] = f.q[h, c], f.k[h, c]
                if folded:
                    p["E"][i], p["F"][i] = f.E[h, c], in_quarters(f.F[h, c].T)
                else:
                    p["W"][i], p["FB"][i] = in_quarters(f.W[h, c].T), in_quarters(f.FB[h, c].T)
                    p["rows"][i, 2] *= p["rows"][i, 3]
    o = torch.full_like(v, float("nan"))
    ST = torch.full((N, HV, K, V), float("nan"))
    if nan:  # garbage where nothing may be read but by boxes
        used = cu[-1]
        for x in (q, k, v):
            x[:, used:] = float("nan")
    config = Config(cfg["BV"] // 16 // cfg["PARTS"], cfg.pop("stages"), cfg)
    done = []
    global MODE
    MODE = mode
    with (
        mock.patch.object(G, "tuned", lambda *a: config),
        mock.patch.object(G, "launched", lambda *a, **b: (done.append(1), emulate(*a, **b))),
    ):
        G.scan(q, k, v, Prepared(**p), S0, grid, options(scale), "bf16", o, ST, None, None)
        if pooled:
            tokens = q, k, v, Prepared(**p)
            return done, *in_a_pool(tokens, S0, grid, options(scale), o, spans)
    used = T if cu is None else cu[-1]
    rel = lambda a, b: ((a.double() - b.double()).norm() / b.double().norm()).item()
    left = int((~o[:, used:].isnan()).sum())
    return done, rel(o[:, :used], ro[:, :used]), rel(ST, rS), (o[:, :used] != ro[:, :used]).float().mean().item(), left


def in_a_pool(tokens, S0, grid, options, o, spans):
    """Numbers that differ between a call over the slots of a pool and the call of the same states beside each other."""
    N, differing = len(spans), []
    for stored in (torch.float32, torch.bfloat16):
        for v_first in (False, True):
            for elsewhere in (False, True):
                gen = torch.Generator().manual_seed(N)
                pool = torch.randn(2 * N + 3, *S0.shape[1:], generator=gen).to(stored)
                if v_first:
                    pool = pool.mT.contiguous().mT
                order = torch.randperm(2 * N + 3, generator=gen)
                source, target = order[:N, None].clone(), order[N : 2 * N].clone()
                given = torch.rand(N, generator=gen) < 0.7
                source[0], target[-1] = (-1 if elsewhere else 99), -1
                here = torch.where(given[:, None, None, None], pool[source[:, 0].clamp(0, 2 * N + 2)].float(), 0)
                plain, left = torch.full_like(o, float("nan")), torch.full_like(S0, float("nan"))
                G.scan(*tokens, here, grid, options, "bf16", plain, left, None, None)
                expected = pool.clone()
                to = target if elsewhere else source[:, 0]
                for n in range(1, N):
                    if 0 <= to[n] < pool.shape[0]:
                        expected[to[n]] = left[n].to(stored)
                for b, t0, t1 in spans[:1]:
                    plain[b, t0:t1] = 0
                found = torch.full_like(o, float("nan"))
                slots = Slots(pool, pool, source, target if elsewhere else None, given)
                G.scan(*tokens, pool, grid, options, "bf16", found, pool, None, None, slots=slots)
                for x, y in ((found, plain), (pool, expected)):
                    differing.append(int((~((x == y) | (x.isnan() & y.isnan()))).sum()))
    return differing


if __name__ == "__main__":
    V = [
        {"BV": 128, "PARTS": 2, "OUT": 1, "stages": 3},
        {"BV": 128, "PARTS": 2, "OUT": 0, "stages": 3},
        {"BV": 128, "PARTS": 2, "OUT": 2, "stages": 2},
        {"BV": 128, "PARTS": 1, "OUT": 2, "stages": 2},
        {"BV": 64, "PARTS": 1, "OUT": 1, "stages": 3},
        {"BV": 128, "PARTS": 1, "OUT": 1, "stages": 3},
    ]
    packed = [0, 1, 65, 129, 129, 300, 517]
    bad = 0
    for cfg in V:
        for gate, folded in (("none", False), ("scalar", False), ("scalar", True), ("channel", True)):
            for mode in ("late", "early"):
                for kw in (
                    {"B": 2, "T": 200},
                    {"T": 530, "cu": packed, "nan": True, "H": 2},
                    {"T": 640, "initial": False},
                    {"T": 40},
                ):
                    t = time.time()
                    r = case(gate, folded, mode=mode, **kw, **cfg)
                    ok = r[0] and r[1] < 1e-3 and r[2] < 1e-3 and r[4] == 0
                    bad += not ok
                    print(
                        "ok " if ok else "BAD",
                        cfg,
                        gate,
                        folded,
                        mode,
                        kw,
                        [f"{x:.1e}" for x in r[1:]],
                        f"{time.time() - t:.1f}s",
                        flush=True,
                    )
    for cfg in V:
        for gate, folded in (("scalar", False), ("channel", True)):
            for kw in ({"B": 3, "T": 150}, {"T": 530, "cu": packed, "nan": True, "H": 2}):
                done, *differing = case(gate, folded, pooled=True, **kw, **cfg)
                bad += any(differing)
                print("pool", "BAD" if any(differing) else "ok ", cfg, gate, kw, len(done), differing, flush=True)
    for kw in ({"K": 64}, {"V": 64}):
        r = case("scalar", False, **kw, **(V[0] if "K" in kw else V[-2]))
        print(kw, r)
    print("bad", bad)
