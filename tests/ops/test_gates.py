"""Gates and write strengths: the reference and its autograd, bitwise guarantees, errors, registration."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wyfold.reference.gates as reference
from wyfold.ops.gates import fused_beta_sigmoid, fused_gdn_gate, fused_kda_gate

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HV, K = 3, 8
CALLS = {
    "gdn": (fused_gdn_gate, reference.gdn_gate, {}),
    "kda": (fused_kda_gate, reference.kda_gate, {}),
    "kda bounded": (fused_kda_gate, reference.kda_gate, {"lower_bound": -5.0}),
    "kda bounded far": (fused_kda_gate, reference.kda_gate, {"lower_bound": -100.0}),
    "beta": (fused_beta_sigmoid, reference.beta_sigmoid, {}),
    "beta doubled": (fused_beta_sigmoid, reference.beta_sigmoid, {"scale": 2.0}),
}


def drawn(name: str, lead: tuple[int, ...] = (2, 5), size: float = 3.0, dtype: torch.dtype = torch.float64):
    """All tensor arguments of a call."""
    if name.startswith("beta"):
        return {"x": (size * torch.randn(*lead, HV)).to(dtype)}
    channels = (HV,) if name == "gdn" else (HV, K)
    tensors = {"g": size * torch.randn(*lead, *channels), "A_log": torch.randn(HV), "dt_bias": torch.randn(channels)}
    return {key: t.to(dtype) for key, t in tensors.items()}


def gradients(
    call: Callable, tensors: dict[str, Tensor], dy: Tensor | None = None, **options: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Result of a call and the gradients of all its tensors under a fixed incoming gradient."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    y = call(**leaves, **options)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y.detach(), dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))


def against_reference(bounds, name: str, tensors: dict[str, Tensor]) -> None:
    ours, truth, options = CALLS[name]
    y, found = gradients(ours, tensors, **options)
    expected, true_gradients = gradients(truth, tensors, **options)
    bounds.output("y", y, expected)
    for argument, gradient in true_gradients.items():
        bounds.gradient(f"d{argument}", found[argument], gradient)


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lead", [(), (0,), (7,), (2, 0), (2, 5), (2, 3, 4)])
@pytest.mark.parametrize("size", [1e-3, 3.0, 300.0])
def test_value_and_gradients(name: str, lead: tuple[int, ...], size: float, float64_bounds):
    against_reference(float64_bounds, name, drawn(name, lead, size))


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("beta")])
@pytest.mark.parametrize("left_out", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_omitted_parameters(name: str, left_out: tuple[str, ...], float64_bounds):
    tensors = {key: t for key, t in drawn(name).items() if key not in left_out}
    against_reference(float64_bounds, name, tensors)


@pytest.mark.parametrize("A_log", [(1, 1, HV, 1), (HV, 1), (1, HV)])
@pytest.mark.parametrize("dt_bias", [(HV, K), (HV * K,)])
def test_parameters_in_the_shapes_of_checkpoints(A_log: tuple[int, ...], dt_bias: tuple[int, ...], float64_bounds):
    tensors = drawn("kda")
    tensors |= {"A_log": tensors["A_log"].view(A_log), "dt_bias": tensors["dt_bias"].view(dt_bias)}
    against_reference(float64_bounds, "kda", tensors)


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("wanted", [("g",), ("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(name: str, wanted: tuple[str, ...]):
    ours, _, options = CALLS[name]
    tensors = drawn(name, dtype=torch.float32)
    _, every = gradients(ours, tensors)
    leaves = {key: t.clone().requires_grad_(key in wanted) for key, t in tensors.items()}
    y = ours(**leaves, **options)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float())
    for key, leaf in leaves.items():
        assert (leaf.grad is not None) == (key in wanted)
        assert key not in wanted or torch.equal(leaf.grad, every[key])


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_infinite_input_is_a_reset_without_gradient_trouble(name: str):
    """+inf gives -inf, not floored; without an incoming gradient no NaN results."""
    ours, _, _ = CALLS[name]
    tensors = drawn(name, dtype=torch.float32)
    tensors["g"][0, 2] = torch.inf
    tensors["g"][0, 3] = 1e5
    y, _ = gradients(ours, tensors)
    assert (y[0, 2] == -torch.inf).all()
    assert (y[0, 3] < -200).all()
    dy = torch.randn_like(y)
    dy[0, 2] = 0
    _, found = gradients(ours, tensors, dy)
    assert all(gradient.isfinite().all() for gradient in found.values())
    finite = {key: t.clone() for key, t in tensors.items()}
    finite["g"][0, 2] = 0
    _, expected = gradients(ours, finite, dy)
    assert torch.equal(found["A_log"], expected["A_log"])


@pytest.mark.parametrize("name", CALLS)
def test_second_order_raises(name: str):
    ours, _, options = CALLS[name]
    (x, *others) = drawn(name).values()
    x.requires_grad_()
    (dx,) = torch.autograd.grad((ours(x, *others, **options) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dx.sum().backward()


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gdn", "kda", "kda bounded"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("others", FLOATS)
@pytest.mark.parametrize("output_dtype", [None, torch.bfloat16])
def test_dtypes(name: str, dtype: torch.dtype, others: torch.dtype, output_dtype: torch.dtype | None):
    """g, and independently of it the parameters, in any float: computed in the widest, each result rounded once."""
    ours, _, options = CALLS[name]
    tensors = drawn(name, dtype=others)
    tensors["g"] = tensors["g"].to(dtype)
    wide = torch.float64 if torch.float64 in (dtype, others) else torch.float32
    y, found = gradients(ours, tensors, output_dtype=output_dtype, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    widened = {key: t.to(wide) for key, t in tensors.items()}
    expected, expected_gradients = gradients(ours, widened, dy.to(wide), **options)
    assert y.dtype == (output_dtype or wide)
    assert torch.equal(y, expected.to(y.dtype))
    for key, gradient in found.items():
        assert torch.equal(gradient, expected_gradients[key].to(tensors[key].dtype)), key


@pytest.mark.parametrize("dtype", FLOATS)
def test_beta_dtypes(dtype: torch.dtype):
    x = torch.randn(40, 3).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert fused_beta_sigmoid(x).dtype == wide
    assert torch.equal(fused_beta_sigmoid(x), fused_beta_sigmoid(x.to(wide)))


# --- bitwise guarantees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_token_does_not_depend_on_the_others(name: str, threads: int):
    ours, _, options = CALLS[name]
    tensors = drawn(name, lead=(6000,), dtype=torch.float32)
    first = next(iter(tensors))
    y, found = gradients(ours, tensors, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    for tokens in (slice(0, 1), slice(5, 8), slice(4000, 5999)):
        alone = tensors | {first: tensors[first][tokens]}
        y_alone, found_alone = gradients(ours, alone, dy[tokens], **options)
        assert torch.equal(y_alone, y[tokens])
        assert torch.equal(found_alone[first], found[first][tokens])


STRIDED = {
    "transposed": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "slice of a projection": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_is_contiguous(name: str, layout: str):
    (ours, _, options), strided = CALLS[name], STRIDED[layout]
    tensors = drawn(name, dtype=torch.float32)
    y, found = gradients(ours, tensors, **options)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    leaves = {key: strided(t).requires_grad_() for key, t in tensors.items()}
    got = ours(**leaves, **options)
    assert torch.equal(got, y)
    for key, gradient in zip(leaves, torch.autograd.grad(got, list(leaves.values()), strided(dy))):
        assert torch.equal(gradient, found[key]), key


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_same_bits_and_inputs_untouched(name: str):
    ours, _, options = CALLS[name]
    tensors = drawn(name, dtype=torch.float32)
    before = {key: t.clone() for key, t in tensors.items()}
    y, _ = gradients(ours, tensors, **options)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(ours(**tensors, **options), y)
    for key, t in tensors.items():
        assert torch.equal(t, before[key])


# --- errors ----------------------------------------------------------------------------------------------------------

GDN, KDA, LOGIT = {"g": torch.zeros(2, 5, HV)}, {"g": torch.zeros(2, 5, HV, K)}, {"x": torch.zeros(2, 5, HV)}
REFUSED = {
    "gdn, no tensor": (fused_gdn_gate, {"g": None}, TypeError, "g must be a torch.Tensor"),
    "gdn, a number": (fused_gdn_gate, {"g": torch.tensor(1.0)}, ValueError, r"g must be \[..., HV\]"),
    "gdn, integers": (fused_gdn_gate, {"g": torch.zeros(3).int()}, ValueError, "g must be float32"),
    "gdn, A_log of other heads": (fused_gdn_gate, GDN | {"A_log": torch.zeros(4)}, ValueError, "A_log must have HV"),
    "gdn, A_log a number": (fused_gdn_gate, GDN | {"A_log": 0.0}, TypeError, "A_log must be a torch.Tensor, got float"),
    "gdn, A_log elsewhere": (fused_gdn_gate, GDN | {"A_log": torch.zeros(3, device="meta")}, ValueError, "A_log must"),
    "gdn, bias of other heads": (fused_gdn_gate, GDN | {"dt_bias": torch.zeros(4)}, ValueError, r"bias must be \[HV\]"),
    "gdn, bias of integers": (fused_gdn_gate, GDN | {"dt_bias": torch.zeros(3).int()}, ValueError, "dt_bias must"),
    "gdn, output of integers": (fused_gdn_gate, GDN | {"output_dtype": torch.int8}, ValueError, "output_dtype must be"),
    "gdn, a bound": (fused_gdn_gate, GDN | {"lower_bound": -5.0}, TypeError, "lower_bound"),
    "kda, rank 1": (fused_kda_gate, {"g": torch.zeros(3)}, ValueError, r"g must be \[..., HV, K\]"),
    "kda, A_log per channel": (fused_kda_gate, KDA | {"A_log": torch.zeros(HV, K)}, ValueError, "A_log must have HV"),
    "kda, bias per head": (fused_kda_gate, KDA | {"dt_bias": torch.zeros(HV)}, ValueError, r"dt_bias must .* \[24\]"),
    "kda, bound zero": (fused_kda_gate, KDA | {"lower_bound": 0.0}, ValueError, "lower_bound must be below 0, got 0.0"),
    "kda, bound nan": (fused_kda_gate, KDA | {"lower_bound": float("nan")}, ValueError, "lower_bound must be finite"),
    "kda, bound no number": (fused_kda_gate, KDA | {"lower_bound": "-5"}, TypeError, "lower_bound must be a number"),
    "beta, no tensor": (fused_beta_sigmoid, {"x": 0.5}, TypeError, "x must be a torch.Tensor, got float"),
    "beta, integers": (fused_beta_sigmoid, {"x": torch.zeros(3).int()}, ValueError, "x must be float32"),
    "beta, scale infinite": (fused_beta_sigmoid, LOGIT | {"scale": float("inf")}, ValueError, "scale must be finite"),
    "beta, scale a tensor": (fused_beta_sigmoid, LOGIT | {"scale": torch.ones(1)}, TypeError, "scale must be a number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str):
    call, arguments, error, text = REFUSED[kind]
    with pytest.raises(error, match=rf"^{call.__name__}(: |\(\)).*{text}"):
        call(**arguments)


# --- registration and compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gdn", "kda", "kda bounded"])
def test_opcheck_of_gates(name: str):
    g, A_log, dt_bias = drawn(name, dtype=torch.float32).values()
    g = g.unsqueeze(-1) if name == "gdn" else g.transpose(0, 1)
    kind = ("bounded", -5.0) if "bounded" in name else ("softplus", 0.0)
    torch.library.opcheck(torch.ops.wyfold.gate_fwd.default, (g, A_log, dt_bias, *kind, torch.bfloat16, "eager"))
    torch.library.opcheck(torch.ops.wyfold.gate_fwd.default, (g, None, None, *kind, torch.float32, "eager"))
    for needs in ([True] * 3, [False, True, False]):
        torch.library.opcheck(torch.ops.wyfold.gate_bwd.default, (g, A_log, dt_bias, g, needs, *kind, "eager"))


def test_opcheck_of_beta():
    x = torch.randn(5, 3).t()
    torch.library.opcheck(torch.ops.wyfold.beta_sigmoid_fwd.default, (x, 2.0, "eager"))
    torch.library.opcheck(torch.ops.wyfold.beta_sigmoid_bwd.default, (x, x, 2.0, "eager"))


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.release] if n % 2 else []) for n, name in enumerate(CALLS)]
)
def test_compiles_whole_with_its_backward(name: str):
    ours, _, options = CALLS[name]
    tensors = drawn(name, dtype=torch.float32)
    torch._dynamo.reset()
    y, found = gradients(ours, tensors, **options)
    compiled = torch.compile(lambda **tensors: ours(**tensors, **options), fullgraph=True, backend="aot_eager")
    y_compiled, found_compiled = gradients(compiled, tensors)
    assert torch.equal(y_compiled, y)
    for key, gradient in found.items():
        assert torch.equal(found_compiled[key], gradient), key
