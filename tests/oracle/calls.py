"""Random calls of every public operator, over what the docstrings offer."""

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from tests.oracle import loops
from tests.oracle.rounding import Perturb, bound, gate_mass, response
from torch import Tensor

import wyfold
from wyfold import serving

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Call:
    """One random call.

    Attributes:
        operator: Public name.
        leaves: Argument tensors as autograd leaves, by name.
        views: Function that turns a leaf into an argument of other strides, by name; missing: the leaf itself.
        run: Calls the operator with argument tensors; returns results by name.
        loop: Calls the token loop with float64 tensors and a slot; returns results by name, and intermediate values.
        terms: Largest number of terms in a sum of the operator.
        reduced: The same for single results, such as gradients of arguments that all tokens share.
        work: Dtype of the operator's arithmetic.
        differentiable: Whether gradients are compared.
        detached: Results without a gradient.
        padding: First padding token of a packed row: outputs and gradients are 0 from there.
        text: Description of the call.
    """

    operator: str
    leaves: dict[str, Tensor]
    views: dict[str, Callable[[Tensor], Tensor]]
    run: Callable[..., dict[str, Tensor]]
    loop: Callable[..., dict[str, Tensor]]
    terms: int
    work: torch.dtype
    differentiable: bool = True
    detached: tuple[str, ...] = ()
    padding: int | None = None
    reduced: dict[str, int] = dataclasses.field(default_factory=dict)
    text: str = ""


@dataclasses.dataclass
class Comparison:
    """One result or gradient of one call: |error| / bound in the Frobenius norm, and both."""

    call: str
    name: str
    error: float
    bound: float
    size: float

    @property
    def ratio(self) -> float:
        return self.error / self.bound if self.bound else (0.0 if self.error == 0 else float("inf"))


def compare(call: Call, probes: int = 1, device: torch.device | str = "cpu") -> list[Comparison]:
    """Compare every result and gradient of the call with the token loop's.

    Args:
        call: The call.
        probes: Disturbed runs that measure responses. If a bound is exceeded, 20 are used: a response is a root mean
            square,
            which for few elements may be small by chance in a single run.
        device: Device of the operator.
    """
    got, incoming = evaluate(call, call.run, lambda x: x.detach().to(device), None)
    got = {name: x.cpu() for name, x in got.items()}
    incoming = {name: x.cpu() for name, x in incoming.items()}
    seen: dict[str, Tensor] = {}
    clean = evaluate_loop(call, loops.exact, incoming, seen)

    def disturb(seed: int) -> dict[str, Tensor]:
        return evaluate_loop(call, Perturb(seed, call.work, gate_mass(seen)), incoming, {})

    disturbed = [disturb(seed) for seed in range(probes)]
    found = judged(call, got, clean, response(clean, disturbed))
    if max((c.ratio for c in found), default=0.0) <= 1:
        return found
    disturbed += [disturb(seed) for seed in range(probes, 20)]
    return judged(call, got, clean, response(clean, disturbed))


def judged(call: Call, got: dict[str, Tensor], clean: dict[str, Tensor], sizes: dict[str, float]) -> list[Comparison]:
    """Errors and bounds of all results."""
    found = []
    check_padding(call, got)
    for name, x in got.items():
        truth = clean[name]
        assert x.shape == truth.shape, f"{call.text}: {name} is {tuple(x.shape)}, expected {tuple(truth.shape)}"
        if not x.is_floating_point():
            assert torch.equal(x.long(), truth.long()), f"{call.text}: {name} is {x}, expected {truth}"
            continue
        allowed = bound(truth, sizes[name], call.reduced.get(name, call.terms), call.work, x.dtype)
        error = torch.linalg.vector_norm(difference(x, truth)).item()
        found.append(Comparison(call.text, name, error, allowed, torch.linalg.vector_norm(truth).item()))
    return found


def difference(x: Tensor, truth: Tensor) -> Tensor:
    """x - truth without infinite entries of x whose truth is beyond the dtype's largest number."""
    largest = torch.finfo(x.dtype).max
    overflow = (truth.abs() >= largest) & (x == truth.sign() * torch.inf)
    return torch.where(overflow, 0.0, x.double() - truth)


def check_padding(call: Call, got: dict[str, Tensor]) -> None:
    """Outputs and gradients of padding rows are exactly 0."""
    if call.padding is None:
        return
    for name, x in got.items():
        of = name[1:] if name[1:] in TOKENS else None
        if name in ("o", "y") or of:
            rows = call.views.get(of, lambda x: x)(x) if of else x
            assert not rows[:, call.padding :].any(), f"{call.text}: {name} is not 0 past the last boundary"


TOKENS = ("q", "k", "v", "g", "beta", "x", "residual", "eta", "eta_col")
"""Arguments with a row for every token."""


def evaluate(
    call: Call,
    function: Callable[..., dict[str, Tensor]],
    cast: Callable[[Tensor], Tensor],
    incoming: dict[str, Tensor] | None,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results, gradients of leaves, and the incoming gradients that were used."""
    leaves = {name: cast(x).requires_grad_(call.differentiable) for name, x in call.leaves.items()}
    arguments = {name: call.views.get(name, lambda x: x)(x) for name, x in leaves.items()}
    results = function(**arguments, **options)
    found = {name: x.detach() for name, x in results.items()}
    if not call.differentiable:
        return found, {}
    arrows = {name: x for name, x in results.items() if name not in call.detached and x.requires_grad}
    if incoming is None:
        generator = torch.Generator().manual_seed(7)
        incoming = {
            name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x.device)
            for name, x in arrows.items()
        }
    if arrows:
        torch.autograd.backward(list(arrows.values()), [incoming[name] for name in arrows])
    for name, leaf in leaves.items():
        found[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found, incoming


def evaluate_loop(call: Call, at: Any, incoming: dict[str, Tensor], seen: dict[str, Tensor]) -> dict[str, Tensor]:
    fed = {name: x.double() for name, x in incoming.items()}
    return evaluate(call, call.loop, lambda x: x.detach().double(), fed, at=at, seen=seen)[0]


# Drawing


class Draw:
    """Random choices from one seed.

    Args:
        seed: Seed of all choices.
        backend: Backend that the call requests; None requests none.
        dtypes: Dtypes of floating tensors.
    """

    def __init__(self, seed: int, backend: str | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
        self.backend = {} if backend is None else {"backend": backend}
        self.dtypes = dtypes
        self.narrow = tuple(x for x in dtypes if x != torch.float64)
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def choose(self, *options: Any) -> Any:
        return self.choices.choice(options)

    def chance(self, probability: float) -> bool:
        return self.choices.random() < probability

    def further_dtype(self, dtype: torch.dtype) -> Callable[[], torch.dtype]:
        """Dtype of a further argument: `dtype`, or any."""
        return lambda: dtype if self.chance(0.6) else self.choose(*self.dtypes)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def length(self, longest: int = 80) -> int:
        """A length that is mostly short and near multiples of the chunk."""
        longest = longest if self.chance(0.1) else min(longest, 20)
        return min(longest, self.choose(0, 1, 1, 2, 3, 5, 16, 17, 33, 64, 65, self.choices.randint(1, longest)))

    def boundaries(self, tokens: int) -> Tensor:
        """Boundaries of packed sequences, some of them empty, sometimes with padding rows at the end."""
        count = self.choices.randint(1, 4)
        end = tokens if self.chance(0.7) else self.choices.randint(0, tokens)
        inner = sorted(self.choices.randint(0, end) for _ in range(count - 1))
        if inner and self.chance(0.4):
            inner[0] = 0
        return torch.tensor([0, *inner, end], dtype=self.choose(torch.int32, torch.int64))

    def layout(self, x: Tensor, views: dict[str, Callable[[Tensor], Tensor]], name: str) -> Tensor:
        """A leaf for an argument of these values, sometimes with strides of a non-contiguous tensor."""
        kind = self.choose("plain", "plain", "heads first", "wide", "apart")
        if kind == "heads first" and x.ndim >= 3:
            views[name] = lambda leaf: leaf.transpose(1, 2)
            return x.transpose(1, 2).contiguous()
        if kind == "wide" and x.ndim >= 1:
            width = x.shape[-1]
            views[name] = lambda leaf: leaf[..., 3 : 3 + width]
            return torch.nn.functional.pad(x, (3, 2))
        if kind == "apart" and x.ndim >= 2:
            views[name] = lambda leaf: leaf[:, ::2]
            return torch.stack([x, torch.zeros_like(x)], 2).flatten(1, 2)
        return x


def on_device_of(tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Options with their tensors on the device of `tensors`."""
    device = next(iter(tensors.values())).device

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(device)
        if isinstance(x, wyfold.SequenceLayout):
            return wyfold.SequenceLayout(x.cu_seqlens.to(device), x.tokens)
        return wyfold.TTTState(*(y.to(device) for y in x)) if isinstance(x, wyfold.TTTState) else x

    return {name: moved(x) for name, x in options.items()}


def keys(draw: Draw, *shape: int) -> Tensor:
    """Unit rows: independent, nearly parallel, or repeated."""
    x = draw.normal(*shape)
    kind = draw.choose("independent", "independent", "near", "repeated")
    if kind == "near":
        x = draw.normal(*shape[:1], 1, *shape[2:]) + 0.3 * x
    if kind == "repeated" and shape[1] > 2:
        x = x[:, torch.randint(3, (shape[1],), generator=draw.generator)]
    return torch.nn.functional.normalize(x, dim=-1)


def log_gates(draw: Draw, *shape: int) -> Tensor:
    """Log decays: weak, moderate, strong, mixed, and with full resets."""
    u = draw.uniform(*shape)
    kind = draw.choose("weak", "moderate", "moderate", "strong", "mixed", "reset", "none")
    if kind == "reset":
        return torch.where(draw.uniform(*shape) < 0.1, -torch.inf, -u)
    if kind == "mixed":
        return -(10.0 ** (4 * u - 3))
    return -u * {"weak": 0.01, "moderate": 1.0, "strong": 8.0, "none": 0.0}[kind]


def delta_call(draw: Draw, operator: str) -> Call:
    rule = operator.removeprefix("chunk_").removeprefix("fused_recurrent_")
    chunkwise = operator.startswith("chunk")
    packed = draw.chance(0.5)
    B, T, H = (1 if packed else draw.choose(1, 1, 2)), draw.length(), draw.choose(1, 2)
    HV, K, V = H * draw.choose(1, 1, 2, 3), draw.choose(8, 16, 24, 32), draw.choose(8, 16, 24, 32)
    dtype = draw.choose(*draw.dtypes)
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    leaves: dict[str, Tensor] = {}
    options: dict[str, Any] = dict(draw.backend)
    loop_options: dict[str, Any] = {}

    def argument(name: str, x: Tensor, dtype: torch.dtype, strided: bool = True) -> None:
        leaves[name] = (draw.layout(x, views, name) if strided else x).to(dtype)

    k, q = keys(draw, B, T, H, K), keys(draw, B, T, H, K)
    if draw.chance(0.5):
        options["use_qk_l2norm_in_kernel"] = True
        k, q = (x * 10 ** (3 * draw.uniform(B, T, H, 1) - 2) for x in (k, q))
    elif draw.chance(0.15):
        k = k * 1.2
    argument("q", q, dtype)
    argument("k", k, dtype)
    argument("v", draw.normal(B, T, HV, V), dtype)
    beta_kind = draw.choose("none", "plain", "plain", "negative", "logit", "logit negative")
    if beta_kind != "none":
        beta = draw.uniform(B, T, HV) * (2 if beta_kind == "negative" else 1)
        if beta_kind.startswith("logit"):
            beta = 3 * draw.normal(B, T, HV)
            options["use_beta_sigmoid_in_kernel"] = True
            if beta_kind == "logit negative":
                options["allow_neg_eigval"] = True
        argument("beta", beta, further_dtype())
    channels = (K,) if rule == "kda" else ()
    if rule != "delta_rule" and draw.chance(0.9):
        if draw.chance(0.5):
            options["use_gate_in_kernel"] = True
            argument("g", draw.choose(0.3, 1.0, 4.0) * draw.normal(B, T, HV, *channels), further_dtype())
            if draw.chance(0.7):
                argument("A_log", draw.normal(HV), further_dtype(), False)
            if draw.chance(0.7):
                argument("dt_bias", draw.normal(HV, *channels), further_dtype(), False)
            if rule == "kda" and draw.chance(0.5):
                options["lower_bound"] = -draw.choose(0.5, 2.0, 5.0)
        else:
            argument("g", log_gates(draw, B, T, HV, *channels), further_dtype())
        if rule == "kda" and draw.chance(0.3):
            options["safe_gate"] = True
            if draw.chance(0.5):
                options["lower_bound"] = -draw.choose(0.75, 3.0, 5.0)
    if draw.chance(0.3):
        options["scale"] = draw.choose(1.0, 0.37, -2.0)
    N, bounds = B, None
    if packed:
        bounds = draw.boundaries(T)
        N = len(bounds) - 1
        options["cu_seqlens"] = wyfold.SequenceLayout(bounds, T) if draw.chance(0.3) else bounds
        loop_options["cu_seqlens"] = bounds
    if draw.chance(0.3):
        options["state_v_first"] = True
    if draw.chance(0.6):
        shape = (V, K) if options.get("state_v_first") else (K, V)
        argument("initial_state", draw.normal(N, HV, *shape), draw.choose(*draw.narrow), False)
    if draw.chance(0.7):
        options["output_final_state"] = True
        if draw.chance(0.4):
            options["state_dtype"] = draw.choose(*draw.narrow)
    chunk = 64
    if chunkwise and draw.chance(0.6):
        options["chunk_size"] = chunk = draw.choose(16, 32, 64)
    if chunkwise and draw.chance(0.3):
        options["disable_recompute"] = True
    if draw.chance(0.2):
        options["batch_invariant"] = True
    every = None
    if draw.chance(0.3):
        options["return_intermediate_states"] = True
        every = 64
        if draw.chance(0.7):
            options["checkpoint_every"] = every = chunk * draw.choose(1, 2)
        loop_options["checkpoint_every"] = every
        if packed:
            layout = wyfold.SequenceLayout(bounds, T)
            loop_options["checkpoint_offsets"] = layout.checkpoint_offsets(every).tolist()
    function = getattr(wyfold, operator)
    loop_only = {"scale", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"} | {
        "state_v_first",
        "use_gate_in_kernel",
        "safe_gate",
        "lower_bound",
    }
    loop_options |= {name: x for name, x in options.items() if name in loop_only}

    def run(**tensors: Tensor) -> dict[str, Tensor]:
        returned = function(**tensors, **on_device_of(tensors, options))
        return {name: x for name, x in zip(("o", "state", "states"), returned, strict=False) if x is not None}

    def loop(**tensors: Any) -> dict[str, Tensor]:
        o, state, states = loops.delta(**tensors, **loop_options)
        found = {"o": o}
        if options.get("output_final_state"):
            found["state"] = state
        return found | ({} if states is None else {"states": states})

    reduced = dict.fromkeys(("dA_log", "ddt_bias"), max(64, B * T))
    return Call(
        operator, leaves, views, run, loop, max(K, V, 64), work_type(leaves), reduced=reduced, detached=("states",),
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options),
    )  # fmt: skip


def work_type(leaves: dict[str, Tensor], *names: str) -> torch.dtype:
    first = next(iter(leaves.values())) if not names else None
    wide = first.dtype == torch.float64 if first is not None else any(
        leaves[name].dtype == torch.float64 for name in names if name in leaves
    )  # fmt: skip
    return torch.float64 if wide else torch.float32


def describe(
    operator: str, leaves: dict[str, Tensor], views: dict[str, Callable[[Tensor], Tensor]], options: dict[str, Any]
) -> str:
    shapes = {name: tuple(views.get(name, lambda x: x)(x).shape) for name, x in leaves.items()}
    tensors = ", ".join(f"{name}={str(x.dtype)[6:]}{list(shapes[name])}" for name, x in leaves.items())
    words = ", ".join(
        f"{name}={x.cu_seqlens.tolist() if isinstance(x, wyfold.SequenceLayout) else x}" for name, x in options.items()
    )
    return f"{operator}({tensors}; {words})"


def triangle_call(draw: Draw, operator: str) -> Call:
    packed = draw.chance(0.5)
    B, T, H = (1 if packed else draw.choose(1, 2)), draw.length(100), draw.choose(1, 2)
    dtype, C = draw.choose(*draw.dtypes), draw.choose(16, 32, 64)
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    options: dict[str, Any] = dict(draw.backend)
    bounds = draw.boundaries(T) if packed else None
    if packed:
        options["cu_seqlens"] = bounds
    if draw.chance(0.4):
        options["output_dtype"] = draw.choose(*draw.dtypes)
    leaves: dict[str, Tensor] = {}
    if operator == "chunk_scaled_dot_kkt":
        HV, K = H * draw.choose(1, 2), draw.choose(8, 16, 24, 32)
        further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
        leaves["k"] = draw.layout(keys(draw, B, T, H, K) * draw.choose(1.0, 1.0, 0.1, 7.0), views, "k").to(dtype)
        leaves["beta"] = draw.layout(2 * draw.uniform(B, T, HV), views, "beta").to(further_dtype())
        kind = draw.choose("none", "heads", "channels")
        if kind != "none":
            shape = (B, T, HV) if kind == "heads" else (B, T, HV, K)
            leaves["g"] = draw.layout(log_gates(draw, *shape), views, "g").to(further_dtype())
        options["chunk_size"] = C
        terms = K + 8
        loop_of = lambda **x: loops.decayed_gram(**x, chunk_size=C, cu_seqlens=bounds)
    else:
        scale = draw.choose(0.1, 0.3, 1.0)
        leaves["A"] = draw.layout(strict_triangles(scale * draw.normal(B, T, H, C), bounds), views, "A").to(dtype)
        terms = C
        loop_of = lambda **x: loops.inverse(**x, cu_seqlens=bounds)
    function = getattr(wyfold, operator)
    work = torch.float64 if any(x.dtype == torch.float64 for x in leaves.values()) else torch.float32
    return Call(
        operator, leaves, views, lambda **x: {"o": function(**x, **on_device_of(x, options))},
        lambda at, seen, **x: {"o": loop_of(**x, at=at)},
        terms, work, differentiable=False, padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options),
    )  # fmt: skip


def strict_triangles(A: Tensor, bounds: Tensor | None) -> Tensor:
    """Zero everything except the strict lower triangle of each chunk."""
    C, T = A.shape[-1], A.shape[1]
    row = torch.zeros(T, dtype=torch.int64)
    for span in loops.documents(T, bounds):
        row[span] = torch.arange(span.stop - span.start) % C
    return A * (torch.arange(C) < row[:, None])[None, :, None]


def convolution_call(draw: Draw, operator: str) -> Call:
    packed = draw.chance(0.5)
    B, T, D, W = (
        (1 if packed else draw.choose(1, 2)),
        draw.length(40),
        draw.choose(1, 5, 8, 24),
        draw.choices.randint(2, 8),
    )
    dtype = draw.choose(*draw.dtypes)
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    options: dict[str, Any] = dict(draw.backend)
    loop_options: dict[str, Any] = {}
    leaves = {
        "x": draw.layout(draw.normal(B, T, D), views, "x").to(dtype),
        "weight": draw.normal(D, W).to(further_dtype()),
    }
    N, bounds = B, None
    if packed:
        options["cu_seqlens"] = loop_options["cu_seqlens"] = bounds = draw.boundaries(T)
        N = len(bounds) - 1
    if draw.chance(0.5):
        leaves["bias"] = draw.normal(D).to(further_dtype())
    if draw.chance(0.4):
        leaves["residual"] = draw.layout(draw.normal(B, T, D), views, "residual").to(further_dtype())
    if draw.chance(0.5):
        leaves["initial_state"] = draw.normal(N, D, W - 1 + draw.choose(0, 0, 1, 3)).to(further_dtype())
    if draw.chance(0.6):
        options["activation"] = loop_options["activation"] = draw.choose("silu", "swish")
    if draw.chance(0.7):
        options["output_final_state"] = True

    def run(**tensors: Tensor) -> dict[str, Tensor]:
        y, state = wyfold.causal_conv1d(**tensors, **on_device_of(tensors, options))
        return {"y": y} | ({} if state is None else {"state": state})

    def loop(seen: Any, **tensors: Any) -> dict[str, Tensor]:
        y, state = loops.convolution(**tensors, **loop_options)
        return {"y": y} | ({"state": state} if options.get("output_final_state") else {})

    reduced = dict.fromkeys(("dweight", "dbias"), W + B * T)
    return Call(
        operator, leaves, views, run, loop, W + 4, work_type(leaves), reduced=reduced,
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options),
    )  # fmt: skip


def elementwise_call(draw: Draw, operator: str) -> Call:
    shape = [draw.choose(0, 1, 2, 3, 7) for _ in range(draw.choose(0, 1, 2))]
    HV, K = draw.choose(1, 2, 5), draw.choose(1, 7, 8, 16, 33, 128)
    dtype = draw.choose(*draw.dtypes)
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    options: dict[str, Any] = dict(draw.backend)
    size = draw.choose(0.01, 1.0, 1.0, 30.0)
    leaves: dict[str, Tensor]
    terms = 8
    if operator == "l2norm":
        terms = K + 8
        if draw.chance(0.3):
            options["eps"] = draw.choose(1e-12, 1e-5, 1.0)
        leaves = {"x": draw.layout(size * draw.normal(*shape, K), views, "x").to(dtype)}
        eps = options.get("eps", 1e-6)
        loop = lambda at, x: loops.rows_to_unit(at(x), eps, at)
        if draw.chance(0.4):
            options["output_dtype"] = draw.choose(*draw.dtypes)
    elif operator == "rms_norm_gated":
        terms = K + 8
        leaves = {
            "x": draw.layout(size * draw.normal(*shape, K), views, "x").to(dtype),
            "g": draw.layout(draw.choose(1.0, 5.0) * draw.normal(*shape, K), views, "g").to(further_dtype()),
            "weight": draw.normal(K).to(further_dtype()),
        }
        if draw.chance(0.5):
            leaves["bias"] = draw.normal(K).to(further_dtype())
        options["activation"] = draw.choose("swish", "silu", "sigmoid")
        options["norm_before_gate"] = draw.chance(0.6)
        if draw.chance(0.3):
            options["eps"] = draw.choose(1e-5, 1e-3)
        own = {name: x for name, x in options.items() if name != "backend"}
        loop = lambda at, **x: loops.norm_and_gate(**{n: at(y) for n, y in x.items()}, **own, at=at)
    elif operator == "fused_beta_sigmoid":
        leaves = {"x": draw.layout(draw.choose(1.0, 10.0) * draw.normal(*shape, HV), views, "x").to(dtype)}
        options["scale"] = draw.choose(1.0, 2.0)
        loop = lambda at, x: loops.sigmoid_strength(x, options["scale"], at)
    else:
        channels = operator == "fused_kda_gate"
        tail = (HV, K) if channels else (HV,)
        leaves = {"g": draw.layout(draw.choose(1.0, 5.0, 30.0) * draw.normal(*shape, *tail), views, "g").to(dtype)}
        if draw.chance(0.7):
            leaves["A_log"] = (draw.choose(1.0, 1.0, 3.0) * draw.normal(HV)).to(further_dtype())
        if draw.chance(0.7):
            leaves["dt_bias"] = (draw.choose(1.0, 5.0) * draw.normal(*tail)).to(further_dtype())
        lower = -draw.choose(0.5, 2.0, 5.0, 30.0) if channels and draw.chance(0.5) else None
        if lower is not None:
            options["lower_bound"] = lower
        if draw.chance(0.4):
            options["output_dtype"] = draw.choose(*draw.dtypes)
        loop = lambda at, g, A_log=None, dt_bias=None: loops.log_gate(
            g, A_log, dt_bias, lower, channels=channels, at=at
        )
    function = getattr(wyfold, operator)
    rows = 1
    for n in shape:
        rows *= n
    reduced = dict.fromkeys(("dweight", "dbias", "dA_log", "ddt_bias"), terms + rows * K)
    work = torch.float64 if any(x.dtype == torch.float64 for x in leaves.values()) else torch.float32
    return Call(
        operator, leaves, views, lambda **x: {"y": function(**x, **on_device_of(x, options))},
        lambda at, seen, **x: {"y": loop(at, **x)}, terms, work, reduced=reduced,
        text=describe(operator, leaves, views, options),
    )  # fmt: skip


def ttt_leaves(draw: Draw, B: int, T: int, H: int, HV: int, K: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    options: dict[str, Any] = dict(draw.backend)
    leaves = {
        "q": draw.layout(draw.normal(B, T, H, K), views, "q").to(dtype),
        "k": draw.layout(keys(draw, B, T, H, K) * draw.choose(1.0, 1.0, 2.0), views, "k").to(dtype),
        "v": draw.layout(draw.normal(B, T, HV, K), views, "v").to(dtype),
        "w": (1 + 0.1 * draw.normal(HV, K)).to(further_dtype()),
        "b": (0.1 * draw.normal(HV, K)).to(further_dtype()),
    }
    for name in ("eta", "eta_col"):
        if name == "eta_col" and draw.chance(0.5):
            continue
        if draw.chance(0.3):
            options[name] = draw.choose(0.1, 0.01, 0.7)
        else:
            shape = (B, T, HV, 1) if draw.chance(0.5) else (B, T, HV)
            leaves[name] = draw.layout(0.3 * draw.uniform(*shape), views, name).to(further_dtype())
    if draw.chance(0.4):
        options["residual"] = draw.choose("o", "q")
    if draw.chance(0.3):
        options["scale"] = draw.choose(1.0, 0.3)
    if draw.chance(0.3):
        options["eps"] = draw.choose(1e-5, 1e-3)
    if draw.chance(0.5):
        options["chunk_size"] = draw.choose(16, 32, 64)
    return leaves, views, options


def ttt_call(draw: Draw, operator: str) -> Call:
    packed = draw.chance(0.5)
    B, T, H = (1 if packed else draw.choose(1, 2)), draw.length(50), draw.choose(1, 2)
    HV, K, dtype = H * draw.choose(1, 1, 2), draw.choose(8, 16, 24), draw.choose(*draw.dtypes)
    leaves, views, options = ttt_leaves(draw, B, T, H, HV, K, dtype)
    loop_options = {name: x for name, x in options.items() if name != "backend"}
    N, bounds = B, None
    if packed:
        bounds = draw.boundaries(T)
        N = len(bounds) - 1
        options["cu_seqlens"], loop_options["cu_seqlens"] = bounds, bounds
    chunkwise = operator == "chunk_ttt_linear"
    given: dict[str, Any] = {}
    if draw.chance(0.7):
        options["output_final_state"] = True
    if chunkwise:
        if draw.chance(0.3):
            options["state_v_first"] = loop_options["state_v_first"] = True
        if draw.chance(0.5):
            leaves["initial_state"] = (0.3 * draw.normal(N, HV, K, K)).to(draw.choose(*draw.narrow))
        if draw.chance(0.5):
            leaves["initial_state_bias"] = (0.3 * draw.normal(N, HV, 1, K)).to(draw.choose(*draw.narrow))
        if options.get("output_final_state") and draw.chance(0.4):
            options["state_dtype"] = draw.choose(*draw.narrow)
        if draw.chance(0.3):
            options["disable_recompute"] = True
    elif draw.chance(0.5):
        given["state"] = ttt_places(draw, N, HV, K, options.get("chunk_size", 16), torch.float32)
    function = getattr(wyfold, operator)

    def run(**tensors: Tensor) -> dict[str, Tensor]:
        returned = function(**tensors, **on_device_of(tensors, given | options))
        if chunkwise:
            names = zip(("o", "state", "bias"), returned, strict=True)
            return {name: x for name, x in names if x is not None}
        o, state = returned
        return {"o": o} | ({} if state is None else {f"state.{name}": x for name, x in state._asdict().items()})

    def loop(seen: Any, **tensors: Any) -> dict[str, Tensor]:
        if chunkwise:
            o, state, bias = loops.ttt(**tensors, **loop_options)
            return {"o": o} | ({"state": state, "bias": bias} if options.get("output_final_state") else {})
        state = given.get("state")
        wide = None if state is None else tuple(x.double() if x.is_floating_point() else x for x in state)
        o, final = loops.ttt_resumed(**tensors, state=wide, **loop_options)
        names = ("state", "bias", "grad", "bias_grad", "position")
        named = {f"state.{name}": x for name, x in zip(names, final, strict=True)}
        return {"o": o} | (named if options.get("output_final_state") else {})

    return Call(
        operator, leaves, views, run, loop, 64, work_type(leaves), detached=("state.position",),
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options | {"state": "given"} if given else options),
    )  # fmt: skip


def ttt_places(draw: Draw, N: int, HV: int, K: int, chunk: int, dtype: torch.dtype) -> wyfold.TTTState:
    position = torch.tensor([draw.choices.randint(0, chunk - 1) for _ in range(N)], dtype=torch.int32)
    live = (position > 0).double()[:, None, None, None]
    S, c = 0.3 * draw.normal(N, HV, K, K), 0.3 * draw.normal(N, HV, 1, K)
    G, a = live * draw.normal(N, HV, K, K), live * draw.normal(N, HV, 1, K)
    return wyfold.TTTState(*(x.to(dtype) for x in (S, c, G, a)), position)


# Serving


def serving_call(draw: Draw, operator: str) -> Call:
    """prefill, decode, decode_packed and verify."""
    packed = operator in ("prefill", "verify") and draw.chance(0.5)
    columns = draw.choices.randint(1, 5)
    H, K, V, dtype = draw.choose(1, 2), draw.choose(8, 16, 24), draw.choose(8, 16, 24), draw.choose(*draw.dtypes)
    HV = H * draw.choose(1, 2)
    N = draw.choices.randint(1, 4)
    bounds = None
    if operator in ("decode", "decode_packed"):
        B, T = N, 1
        sequences = [(n, slice(0, 1)) for n in range(N)]
    elif packed:
        lengths = [draw.choices.randint(0, columns if operator == "verify" else 40) for _ in range(N)]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        B, T = 1, int(bounds[-1]) + draw.choose(0, 0, 3)
        sequences = [(0, slice(a, b)) for a, b in itertools.pairwise(bounds.tolist())]
    else:
        B, T = N, draw.choices.randint(1, columns) if operator == "verify" else draw.length(40)
        sequences = [(n, slice(0, T)) for n in range(N)]
    rule = draw.choose("delta", "gdn", "kda")
    if operator == "decode_packed":
        rule = draw.choose("gdn", "kda")
    channels = (K,) if rule == "kda" else ()
    options: dict[str, Any] = dict(draw.backend)
    loop_options: dict[str, Any] = {}
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    leaves: dict[str, Tensor] = {}
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    raw = operator == "decode_packed"
    q, k, v = keys(draw, B, T, H, K), keys(draw, B, T, H, K), draw.normal(B, T, HV, V)
    if raw or draw.chance(0.5):
        loop_options["use_qk_l2norm_in_kernel"] = True
        q, k = 3 * q, 0.5 * k
    flat_first = operator == "decode" and draw.chance(0.3)  # rows are in the token axis: [1, N, H, K]
    names = {"q": q, "k": k, "v": v}
    logits = raw or draw.chance(0.5)
    if logits:
        loop_options["use_beta_sigmoid_in_kernel"] = True
        if draw.chance(0.4):
            options["allow_neg_eigval"] = loop_options["allow_neg_eigval"] = True
        names["beta"] = 2 * draw.normal(B, T, HV)
    elif draw.chance(0.8):
        names["beta"] = draw.uniform(B, T, HV)
    if rule != "delta":
        if raw or draw.chance(0.5):
            loop_options["use_gate_in_kernel"] = True
            names["g"] = draw.choose(1.0, 4.0) * draw.normal(B, T, HV, *channels)
            if draw.chance(0.7):
                names["A_log"] = draw.normal(HV)
            if draw.chance(0.7):
                names["dt_bias"] = draw.normal(HV, *channels)
            if rule == "kda" and draw.chance(0.5):
                options["lower_bound"] = loop_options["lower_bound"] = -draw.choose(0.5, 5.0)
        else:
            names["g"] = log_gates(draw, B, T, HV, *channels)
        if rule == "kda" and not raw and draw.chance(0.3):
            loop_options["safe_gate"] = True
            options.setdefault("lower_bound", -3.0)
            loop_options["lower_bound"] = options["lower_bound"]
    if draw.chance(0.3):
        options["scale"] = loop_options["scale"] = draw.choose(1.0, -0.4)
    for name, x in names.items():
        leaves[name] = x.to(dtype if name in "qkv" else further_dtype())
    v_first = draw.chance(0.5)
    options["state_v_first"] = v_first
    loop_options["state_v_first"] = v_first
    slots = 4 * N * columns + 3
    pool_dtype = draw.choose(*draw.narrow)
    pool = draw.normal(slots, HV, *((V, K) if v_first else (K, V))).to(pool_dtype)
    order = list(range(slots))
    draw.choices.shuffle(order)
    pad = draw.choose(-1, -1, 0)
    options["pad_slot_id"] = pad
    live = lambda s: s if s > pad and 0 <= s < slots else -1
    width = columns if operator == "verify" else 1
    table = [[order.pop() for _ in range(width)] for _ in range(N)]
    for row in table:
        if draw.chance(0.2):
            row[draw.choices.randrange(width)] = draw.choose(-1, slots + 2, -7)
    shaped = (lambda x: torch.tensor(x)) if operator == "verify" else (lambda x: torch.tensor(x)[:, 0])
    indices = shaped(table).to(draw.choose(torch.int32, torch.int64))
    identity = operator != "verify" and draw.chance(0.15)
    if identity:
        table = [[n] for n in range(N)]
    else:
        options["state_indices"] = indices
    accepted = [1] * N
    if operator == "verify" and draw.chance(0.6):
        accepted = [draw.choices.randint(0, columns + 1) for _ in range(N)]
        options["num_accepted_tokens"] = torch.tensor(accepted)
    read = [live(row[min(max(a, 1), width) - 1]) for row, a in zip(table, accepted, strict=True)]
    target = table
    if draw.chance(0.3):
        target = [[order.pop() for _ in range(width)] for _ in range(N)]
        if draw.chance(0.3):
            target[0][0] = -1
        options["output_state_indices"] = shaped(target)
    write = [[live(s) for s in row] for row in target]
    fresh = [False] * N
    if draw.chance(0.4):
        fresh = [draw.chance(0.5) for _ in range(N)]
        options["has_initial_state"] = torch.tensor([not f for f in fresh])
    extra: dict[str, Any] = {}
    checkpoints: list[tuple[int, int, int]] = []  # (sequence, ordinal, slot)
    every = None
    if operator == "prefill" and draw.chance(0.4):
        every = draw.choose(32, 64)
        count = T // every
        other_pool = draw.normal(8 + N * (count + 1), *pool.shape[1:]).to(pool_dtype)
        numbers = list(range(pad + 1, len(other_pool)))
        draw.choices.shuffle(numbers)
        if packed:
            where = [numbers.pop() for _ in range(count)]
            offsets = wyfold.SequenceLayout(bounds, T).checkpoint_offsets(every).tolist()
            for n, (_, span) in enumerate(sequences):
                for i in range((span.stop - span.start) // every):
                    checkpoints.append((n, i, where[offsets[n] + i]))
            extra["checkpoint_indices"] = torch.tensor(where, dtype=torch.int64)
        else:
            where = [[numbers.pop() for _ in range(count)] for _ in range(B)]
            checkpoints = [(n, i, s) for n, row in enumerate(where) for i, s in enumerate(row)]
            extra["checkpoint_indices"] = torch.tensor(where, dtype=torch.int64).reshape(B, count)
        extra |= {"checkpoint_every": every, "checkpoint_pool": other_pool}
    if packed:
        options["cu_seqlens"] = bounds
    stored_kind = 1 if operator == "verify" else None
    flags = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "safe_gate")
    if not raw:
        options |= {name: True for name in flags if loop_options.get(name)}
    function = getattr(serving, operator)
    skipped = [r < 0 for r in read]
    touched = expected_slots(operator, sequences, read, write, skipped)

    def run(**x: Tensor) -> dict[str, Tensor]:
        own_pool = pool.clone().to(x["q"].device)
        given = on_device_of(x, options)
        more = on_device_of(x, extra)
        if more:
            more["checkpoint_pool"] = more["checkpoint_pool"].clone()
        if raw:
            mixed = torch.cat([x[n].reshape(N, -1) for n in "qkv"], -1)
            o = function(
                mixed, x["g"][:, 0], x["beta"][:, 0], x.get("A_log"), x.get("dt_bias"), own_pool,
                heads=(H, HV), dims=(K, V), **given,
            )[:, None]  # fmt: skip
        else:
            tokens = {n: x.get(n) for n in ("q", "k", "v", "g", "beta")}
            if flat_first:
                tokens = {n: None if y is None else y.transpose(0, 1).contiguous() for n, y in tokens.items()}
            rest = {n: y for n, y in x.items() if n not in tokens}
            o = function(**tokens, pool=own_pool, **rest, **given, **more)
            if flat_first:
                o = o.transpose(0, 1)
        found = {"o": o}
        rest_of_pool = [s for s in range(slots) if s not in touched]
        assert torch.equal(own_pool[rest_of_pool].cpu(), pool[rest_of_pool]), "a slot was written that no row names"
        if touched:
            found["pool"] = own_pool[sorted(touched)]
        if more:
            kept = sorted(s for n, _, s in checkpoints if not skipped[n])
            others = [s for s in range(len(more["checkpoint_pool"])) if s not in kept]
            assert torch.equal(more["checkpoint_pool"][others].cpu(), extra["checkpoint_pool"][others]), (
                "checkpoint pool"
            )
            if kept:
                found["checkpoints"] = more["checkpoint_pool"][kept]
        return found

    def loop(at: Any, seen: Any, **x: Tensor) -> dict[str, Tensor]:
        o, stored, states = loops.serve(
            x["q"], x["k"], x["v"], x.get("g"), x.get("beta"), pool.double(), sequences, read, write,
            every=stored_kind, fresh=fresh, at=at,
            **{n: x[n] for n in ("A_log", "dt_bias") if n in x}, **loop_options,
        )  # fmt: skip
        found = {"o": o}
        if touched:
            found["pool"] = torch.stack([stored[s] for s in sorted(touched)])
        kept = sorted((s, n, i) for n, i, s in checkpoints if not skipped[n])
        if kept:
            found["checkpoints"] = torch.stack([states[n][(i + 1) * every - 1] for _, n, i in kept])
        return found

    return Call(
        operator, leaves, views, run, loop, 64, work_type(leaves), differentiable=False,
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options | {"rule": rule, "pool": list(pool.shape)} | extra),
    )  # fmt: skip


def expected_slots(
    operator: str, sequences: list[tuple[int, slice]], read: list[int], write: list[list[int]], skipped: list[bool]
) -> set[int]:
    """Slots of the pool that the call writes."""
    touched = set()
    for n, (_, span) in enumerate(sequences):
        if skipped[n]:
            continue
        count = span.stop - span.start if operator == "verify" else 1
        touched |= {s for s in write[n][:count] if s >= 0}
    return touched


def serving_convolution_call(draw: Draw, operator: str) -> Call:
    drafts = operator == "conv1d_update"
    packed = draw.chance(0.5)
    N, D, W, dtype = (
        draw.choices.randint(1, 4),
        draw.choose(1, 8, 24),
        draw.choices.randint(2, 8),
        draw.choose(*draw.dtypes),
    )
    further_dtype = lambda: dtype if draw.chance(0.6) else draw.choose(*draw.dtypes)
    width = W - 1 + draw.choose(0, 1, 4)
    longest = width - W + 2 if drafts else 20
    bounds = None
    options: dict[str, Any] = dict(draw.backend)
    if packed:
        lengths = [draw.choices.randint(0, longest) for _ in range(N)]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        B, T = 1, int(bounds[-1]) + draw.choose(0, 0, 3)
        sequences = [(0, slice(a, b)) for a, b in itertools.pairwise(bounds.tolist())]
        options["cu_seqlens"] = bounds
    else:
        B, T = N, draw.choices.randint(1, longest)
        sequences = [(n, slice(0, T)) for n in range(N)]
    views: dict[str, Callable[[Tensor], Tensor]] = {}
    leaves = {
        "x": draw.layout(draw.normal(B, T, D), views, "x").to(dtype),
        "weight": draw.normal(D, W).to(further_dtype()),
    }
    if draw.chance(0.5):
        leaves["bias"] = draw.normal(D).to(further_dtype())
    activation = draw.choose(None, "silu", "swish")
    slots = 2 * N + 3
    pool_dtype = draw.choose(*draw.dtypes)
    pool = draw.normal(slots, D, width).to(pool_dtype)
    if draw.chance(0.3):
        pool = pool.mT.contiguous().mT
    order = list(range(slots))
    draw.choices.shuffle(order)
    pad = draw.choose(-1, -1, 0)
    numbers = order[:N]
    if draw.chance(0.3):
        numbers[draw.choices.randrange(N)] = draw.choose(-1, slots + 2)
    options |= {"state_indices": torch.tensor(numbers), "activation": activation, "pad_slot_id": pad}
    live = [s if s > pad and 0 <= s < slots else -1 for s in numbers]
    fresh = [False] * N
    if draw.chance(0.4):
        fresh = [draw.chance(0.5) for _ in range(N)]
        options["has_initial_state"] = torch.tensor([not f for f in fresh])
    accepted = [1] * N
    if drafts and draw.chance(0.5):
        accepted = [draw.choices.randint(0, width - W + 2) for _ in range(N)]
        options["num_accepted_tokens"] = torch.tensor(accepted)
    function = getattr(serving, operator)
    columns = {
        live[n]: min(width, W - 2 + span.stop - span.start) if drafts else width
        for n, (_, span) in enumerate(sequences)
        if live[n] >= 0 and (span.stop > span.start or not drafts)
    }

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        own = pool.clone(memory_format=torch.preserve_format).to(x.device)
        y = function(x, own, weight, bias, **on_device_of({"x": x}, options))
        others = [s for s in range(slots) if s not in columns]
        assert torch.equal(own[others].cpu(), pool[others]), "a slot was written that no row names"
        return {"y": y} | {f"slot {s}": own[s, :, :n] for s, n in columns.items()}

    def loop(at: Any, seen: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        y, stored = loops.serve_convolution(
            x, pool.double(), weight, bias, sequences, live,
            drafts=drafts, accepted=accepted, fresh=fresh, activation=activation, at=at,
        )  # fmt: skip
        return {"y": y} | {f"slot {s}": stored[s][:, :n] for s, n in columns.items()}

    return Call(
        operator, leaves, views, run, loop, W + 4, work_type(leaves), differentiable=False,
        padding=int(bounds[-1]) if bounds is not None else None,
        text=describe(operator, leaves, views, options | {"pool": f"{pool_dtype}{list(pool.shape)}"}),
    )  # fmt: skip


def serving_ttt_call(draw: Draw, operator: str) -> Call:
    N, H, K, dtype = draw.choices.randint(1, 4), draw.choose(1, 2), draw.choose(8, 16, 24), draw.choose(*draw.dtypes)
    HV = H * draw.choose(1, 2)
    leaves, views, options = ttt_leaves(draw, N, 1, H, HV, K, dtype)
    loop_options = {name: x for name, x in options.items() if name != "backend"}
    slots, pad, pool_dtype = 2 * N + 3, draw.choose(-1, -1, 0), draw.choose(*draw.narrow)
    pool = ttt_places(draw, slots, HV, K, options.get("chunk_size", 16), pool_dtype)
    order = list(range(slots))
    draw.choices.shuffle(order)
    numbers = order[:N]
    if draw.chance(0.3):
        numbers[draw.choices.randrange(N)] = draw.choose(-1, slots + 2)
    live = [s if s > pad and 0 <= s < slots else -1 for s in numbers]
    options |= {"state_indices": torch.tensor(numbers), "pad_slot_id": pad}
    touched = sorted(s for s in live if s >= 0)
    names = ("state", "bias", "grad", "bias_grad", "position")

    def run(**tensors: Any) -> dict[str, Tensor]:
        own = wyfold.TTTState(*(x.clone().to(tensors["q"].device) for x in pool))
        o = serving.ttt_decode(**tensors, pool=own, **on_device_of(tensors, options))
        others = [s for s in range(slots) if s not in touched]
        assert all(torch.equal(x[others].cpu(), y[others]) for x, y in zip(own, pool, strict=True)), (
            "another slot was written"
        )
        return {"o": o} | ({f"pool.{n}": x[touched] for n, x in zip(names, own, strict=True)} if touched else {})

    def loop(seen: Any, **tensors: Any) -> dict[str, Tensor]:
        wide = tuple(x.double() if x.is_floating_point() else x for x in pool)
        own = dict(loop_options)
        at = tensors.pop("at")
        eta = tensors.pop("eta", own.pop("eta", None))
        eta_col = tensors.pop("eta_col", own.pop("eta_col", None))
        o, stored = loops.serve_ttt(**tensors, eta=eta, eta_col=eta_col, pool=wide, slots=live, at=at, **own)
        found = {"o": o}
        if touched:
            found |= {f"pool.{n}": torch.stack([stored[s][i] for s in touched]) for i, n in enumerate(names)}
        return found

    return Call(
        operator, leaves, views, run, loop, 64, work_type(leaves), differentiable=False,
        text=describe(operator, leaves, views, options | {"pool": f"{pool_dtype}{slots}"}),
    )  # fmt: skip


OPERATORS: dict[str, Callable[[Draw, str], Call]] = {
    "chunk_delta_rule": delta_call,
    "fused_recurrent_delta_rule": delta_call,
    "chunk_gated_delta_rule": delta_call,
    "fused_recurrent_gated_delta_rule": delta_call,
    "chunk_kda": delta_call,
    "fused_recurrent_kda": delta_call,
    "chunk_ttt_linear": ttt_call,
    "fused_recurrent_ttt_linear": ttt_call,
    "solve_tril": triangle_call,
    "chunk_scaled_dot_kkt": triangle_call,
    "causal_conv1d": convolution_call,
    "rms_norm_gated": elementwise_call,
    "l2norm": elementwise_call,
    "fused_gdn_gate": elementwise_call,
    "fused_kda_gate": elementwise_call,
    "fused_beta_sigmoid": elementwise_call,
    "prefill": serving_call,
    "decode": serving_call,
    "decode_packed": serving_call,
    "verify": serving_call,
    "conv1d_prefill": serving_convolution_call,
    "conv1d_update": serving_convolution_call,
    "ttt_decode": serving_ttt_call,
}


def draw_call(
    operator: str,
    seed: int,
    backend: str | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    table: dict[str, Callable[[Draw, str], Call]] = OPERATORS,
) -> Call:
    """The random call of a seed."""
    return table[operator](Draw(zlib.crc32(operator.encode()) + seed, backend, dtypes), operator)
