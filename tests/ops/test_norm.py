"""`l2norm` and `rms_norm_gated`: the reference and its autograd, bitwise guarantees, errors, registration."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wyfold.reference.norm as reference
from wyfold.ops.norm import l2norm, rms_norm_gated
from wyfold.runtime.check import UnsupportedError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS = list(itertools.product(("swish", "silu", "sigmoid"), (True, False), (True, False)))
SIZES = [(7,), (0, 24), (3, 0, 8), (1, 1), (2, 5, 3, 24), (40, 130)]


def drawn(size: tuple[int, ...], bias: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    tensors = {"x": torch.randn(size), "g": 2 * torch.randn(size), "weight": torch.randn(size[-1])}
    tensors |= {"bias": torch.randn(size[-1])} if bias else {}
    return {name: t.to(dtype) for name, t in tensors.items()}


def gradients(
    call: Callable, tensors: dict[str, Tensor], dy: Tensor | None = None, **options: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Result of a call and the gradients of all its tensors under a fixed incoming gradient."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    y = call(**leaves, **options)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y.detach(), dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))


def against_reference(bounds, ours: Callable, truth: Callable, tensors: dict[str, Tensor], **options: object) -> None:
    y, found = gradients(ours, tensors, **options)
    expected, true_gradients = gradients(truth, tensors, **options)
    bounds.output("y", y, expected)
    for name, gradient in true_gradients.items():
        bounds.gradient(f"d{name}", found[name], gradient)


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [size for size in SIZES if size[-1] > 1])
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_l2norm(size: tuple[int, ...], eps: float, float64_bounds):
    x = {"x": torch.randn(size, dtype=torch.float64)}
    against_reference(float64_bounds, l2norm, reference.l2norm, x, eps=eps)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "before", "rounded"), OPTIONS)
def test_rms_norm_gated(size, bias: bool, activation: str, before: bool, rounded: bool, float64_bounds):
    options = {"activation": activation, "norm_before_gate": before, "round_before_weight": rounded, "eps": 1e-3}
    against_reference(float64_bounds, rms_norm_gated, reference.rms_norm_gated, drawn(size, bias), **options)


@pytest.mark.parametrize("wanted", [("x",), ("g",), ("weight",), ("bias",), ("g", "weight")])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(wanted: tuple[str, ...]):
    tensors = drawn((5, 24), dtype=torch.float32)
    _, every = gradients(rms_norm_gated, tensors)
    leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}
    y = rms_norm_gated(**leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float())
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted)
        assert name not in wanted or torch.equal(leaf.grad, every[name])


def test_second_order_raises():
    x = torch.randn(3, 8, requires_grad=True)
    for call in (l2norm, lambda x: rms_norm_gated(x, torch.ones(3, 8), torch.ones(8))):
        (dx,) = torch.autograd.grad((call(x) ** 3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once differentiable"):
            dx.sum().backward()


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_dtype", [None, *FLOATS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_l2norm_dtypes(dtype: torch.dtype, output_dtype: torch.dtype | None):
    x = torch.randn(9, 40).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = l2norm(x, output_dtype=output_dtype)
    assert y.dtype == (output_dtype or dtype)
    assert torch.equal(y, l2norm(x.to(wide)).to(y.dtype))


@pytest.mark.parametrize("others", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("before", [True, False])
def test_rms_norm_gated_dtypes(dtype: torch.dtype, others: torch.dtype, before: bool):
    """x, and independently of it gate and parameters, in any float: computed in the widest, rounded once."""
    tensors = drawn((9, 40), dtype=others) | {"x": torch.randn(9, 40).to(dtype)}
    wide = torch.float64 if torch.float64 in (dtype, others) else torch.float32
    y, found = gradients(rms_norm_gated, tensors, norm_before_gate=before)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    widened = {name: t.to(wide) for name, t in tensors.items()}
    expected, expected_gradients = gradients(rms_norm_gated, widened, dy.to(wide), norm_before_gate=before)
    assert torch.equal(y, expected.to(dtype))
    for name, gradient in found.items():
        assert torch.equal(gradient, expected_gradients[name].to(tensors[name].dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_before_the_weight(dtype: torch.dtype):
    """With a gate of exactly one half, rounding first gives `weight * (rounded norm)` bit for bit, and differs."""
    x, weight = torch.randn(50, 64).to(dtype), torch.randn(64)
    zero = torch.zeros(50, 64)
    first, last = (
        rms_norm_gated(x, zero, weight, activation="sigmoid", round_before_weight=rounded) for rounded in (True, False)
    )
    normed = rms_norm_gated(x, zero, torch.full((64,), 2.0), activation="sigmoid")
    assert torch.equal(first, (normed.float() * weight * 0.5).to(dtype))
    assert not torch.equal(first, last)


# --- bitwise guarantees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 100, 128, 1024])
def test_a_row_does_not_depend_on_other_rows(width: int, threads: int):
    tensors = drawn((400, width), dtype=torch.float32)
    y, found = gradients(rms_norm_gated, tensors)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    unit = l2norm(tensors["x"])
    for rows in (slice(0, 1), slice(7, 9), slice(150, 400)):
        alone = {name: t[rows] if t.ndim == 2 else t for name, t in tensors.items()}
        y_alone, found_alone = gradients(rms_norm_gated, alone, dy[rows])
        assert torch.equal(y_alone, y[rows])
        assert torch.equal(l2norm(alone["x"]), unit[rows])
        for name in ("x", "g"):
            assert torch.equal(found_alone[name], found[name][rows])


STRIDED = {
    "transposed": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "slice of a projection": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "off by one element": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("size", [(4, 5, 24), (1, 24), (30, 1, 24)])
def test_strided_is_contiguous(layout: str, size: tuple[int, ...]):
    tensors, strided = drawn(size, dtype=torch.float32), STRIDED[layout]
    y, found = gradients(rms_norm_gated, tensors)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    leaves = {name: strided(t).requires_grad_() for name, t in tensors.items()}
    got = rms_norm_gated(**leaves)
    assert torch.equal(got, y)
    for name, gradient in zip(leaves, torch.autograd.grad(got, list(leaves.values()), strided(dy))):
        assert torch.equal(gradient, found[name]), name
    x = {"x": tensors["x"]}
    y, found = gradients(l2norm, x)
    leaf = strided(x["x"]).requires_grad_()
    got = l2norm(leaf)
    assert torch.equal(got, y)
    assert torch.equal(torch.autograd.grad(got, leaf, strided(dy))[0], found["x"])


def test_without_gradients_same_bits_and_inputs_untouched():
    tensors = drawn((5, 24), dtype=torch.float32)
    before = {name: t.clone() for name, t in tensors.items()}
    y, _ = gradients(rms_norm_gated, tensors)
    unit, _ = gradients(l2norm, {"x": tensors["x"]})
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(rms_norm_gated(**tensors), y)
            assert torch.equal(l2norm(tensors["x"]), unit)
    for name, t in tensors.items():
        assert torch.equal(t, before[name])


# --- errors ----------------------------------------------------------------------------------------------------------

X = torch.randn(2, 3, 8)
L2_REFUSED = {
    "no tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    "a number": ({"x": torch.tensor(1.0)}, ValueError, "x must be .* at least one column"),
    "no column": ({"x": torch.zeros(3, 0)}, ValueError, "x must be .* at least one column"),
    "integers": ({"x": torch.ones(3, 4).int()}, ValueError, "x must be float32"),
    "eps zero": ({"eps": 0.0}, ValueError, "eps must be above 0, got 0.0"),
    "eps nan": ({"eps": float("nan")}, ValueError, "eps must be finite"),
    "eps no number": ({"eps": "1e-6"}, TypeError, "eps must be a number, got str"),
    "output of integers": ({"output_dtype": torch.int64}, ValueError, "output_dtype must be float32"),
    "output no dtype": ({"output_dtype": float}, TypeError, "output_dtype must be a torch.dtype"),
}
GOOD = {"x": X, "g": X, "weight": torch.ones(8)}
RMS_REFUSED = {
    "x no tensor": ({"x": None}, TypeError, "x must be a torch.Tensor"),
    "x of integers": ({"x": X.int()}, ValueError, "x must be float32"),
    "g missing": ({"g": None}, TypeError, "g must be a torch.Tensor, got NoneType"),
    "g of other shape": (
        {"g": X[:1]},
        ValueError,
        r"g must be \[..., V\] = \[2, 3, 8\], the shape of x, got \[1, 3, 8\]",
    ),
    "g of integers": ({"g": X.int()}, ValueError, "g must be float32"),
    "g elsewhere": ({"g": X.to("meta")}, ValueError, "g must have the device of x"),
    "weight missing": ({"weight": None}, TypeError, "weight must be a torch.Tensor"),
    "weight of other width": ({"weight": torch.ones(4)}, ValueError, r"weight must be \[V\] = \[8\], got \[4\]"),
    "weight of rank 2": ({"weight": torch.ones(1, 8)}, ValueError, r"weight must be \[V\]"),
    "bias of other width": ({"bias": torch.ones(4)}, ValueError, r"bias must be \[V\] = \[8\], got \[4\]"),
    "bias of integers": ({"bias": torch.ones(8).int()}, ValueError, "bias must be float32"),
    "unknown activation": ({"activation": "relu"}, ValueError, "activation must be one of 'swish', 'silu', 'sigmoid'"),
    "activation None": ({"activation": None}, ValueError, "activation must be one of"),
    "eps negative": ({"eps": -1e-6}, ValueError, "eps must be above 0"),
    "flag no flag": ({"norm_before_gate": 1}, TypeError, "norm_before_gate must be True or False"),
    "another flag no flag": ({"round_before_weight": None}, TypeError, "round_before_weight must be True or False"),
    "absent backend": ({"backend": "triton"}, UnsupportedError, "backend='triton' cannot serve"),
}


@pytest.mark.parametrize("kind", L2_REFUSED)
def test_l2norm_refusals(kind: str):
    change, error, text = L2_REFUSED[kind]
    with pytest.raises(error, match=f"^l2norm: .*{text}"):
        l2norm(**({"x": X} | change))


@pytest.mark.parametrize("kind", RMS_REFUSED)
def test_rms_norm_gated_refusals(kind: str):
    change, error, text = RMS_REFUSED[kind]
    with pytest.raises(error, match=f"^rms_norm_gated: .*{text}"):
        rms_norm_gated(**(GOOD | change))


# --- registration and compilation ------------------------------------------------------------------------------------


def test_opcheck():
    tensors = list(drawn((3, 5, 24), dtype=torch.float32).values())
    x = tensors[0].transpose(0, 1)
    torch.library.opcheck(torch.ops.wyfold.l2norm_fwd.default, (x, 1e-6, torch.bfloat16, "eager"))
    torch.library.opcheck(torch.ops.wyfold.l2norm_bwd.default, (x, x, 1e-6, "eager"))
    options = ("sigmoid", 1e-6, False, True, "eager")
    torch.library.opcheck(torch.ops.wyfold.rms_norm_gated_fwd.default, (*tensors, *options))
    for needs in ([True] * 4, [False, True, False, True]):
        arguments = (*tensors, tensors[0], needs, *options)
        torch.library.opcheck(torch.ops.wyfold.rms_norm_gated_bwd.default, arguments)


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole_with_its_backward():
    tensors = drawn((3, 5, 24), dtype=torch.float32)

    def call(**tensors: Tensor) -> Tensor:
        return l2norm(rms_norm_gated(**tensors, activation="sigmoid"))

    torch._dynamo.reset()
    y, found = gradients(call, tensors)
    y_compiled, found_compiled = gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors)
    assert torch.equal(y_compiled, y)
    for name, gradient in found.items():
        assert torch.equal(found_compiled[name], gradient), name
