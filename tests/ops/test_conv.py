"""`causal_conv1d`: the token loop and its autograd, options, bitwise guarantees, errors, registration."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import wyfold.reference.conv as reference
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.explain import explain
from wyfold.reference import shapes
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.layout import SequenceLayout

NAMES = ("x", "weight", "bias", "residual", "initial_state")
CU = (0, 5, 5, 6, 13)


def drawn(
    B: int = 1,
    T: int = 15,
    D: int = 3,
    W: int = 4,
    N: int | None = None,
    S: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Every tensor of a call; without S no state."""
    tensors = {
        "x": torch.randn(B, T, D, dtype=dtype),
        "weight": torch.randn(D, W, dtype=dtype),
        "bias": torch.randn(D, dtype=dtype),
        "residual": torch.randn(B, T, D, dtype=dtype),
    }
    if S is not None:
        tensors["initial_state"] = torch.randn(B if N is None else N, D, S, dtype=dtype)
    return tensors


def gradients(
    call: Callable, tensors: dict[str, Tensor], incoming: list[Tensor] | None = None, **options: object
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results of a call and the gradients of all its tensors under fixed incoming gradients."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    results = [result for result in call(**leaves, **options) if result is not None]
    if incoming is None:
        generator = torch.Generator().manual_seed(1)
        incoming = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    found = torch.autograd.grad(results, list(leaves.values()), incoming, allow_unused=True, materialize_grads=True)
    return [r.detach() for r in results], dict(zip(leaves, found))


def against_reference(bounds, tensors: dict[str, Tensor], **options: object) -> None:
    got, got_gradients = gradients(causal_conv1d, tensors, **options)
    truth, true_gradients = gradients(reference.causal_conv1d, tensors, **options)
    assert len(got) == len(truth)
    for name, result, expected in zip(("y", "final_state"), got, truth):
        bounds.output(name, result, expected)
    for name, expected in true_gradients.items():
        bounds.gradient(f"d{name}", got_gradients[name], expected)


# --- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", range(2, 9))
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 7, 8, 9, 20])
def test_every_width_and_length(W: int, T: int, float64_bounds):
    against_reference(float64_bounds, drawn(B=2, T=T, W=W, S=W - 1), output_final_state=True, activation="silu")


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("S", [None, 3, 7], ids=["no state", "state", "long state"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("final", [False, True], ids=["y", "y and final state"])
def test_options(cu_seqlens, S: int | None, activation: str | None, final: bool, float64_bounds):
    packed = cu_seqlens is not None
    tensors = drawn(B=1 if packed else 2, N=4 if packed else None, S=S)
    cu = torch.tensor(cu_seqlens) if packed else None
    for left_out in itertools.chain.from_iterable(itertools.combinations(("bias", "residual"), n) for n in range(3)):
        given = {name: t for name, t in tensors.items() if name not in left_out}
        against_reference(float64_bounds, given, output_final_state=final, activation=activation, cu_seqlens=cu)


@pytest.mark.parametrize("packing", shapes.PACKINGS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packings(packing: str, index: torch.dtype, float64_bounds):
    packed = shapes.PACKINGS[packing]
    cu = torch.tensor(packed.cu_seqlens, dtype=index)
    tensors = drawn(T=packed.tokens, D=2, N=cu.shape[0] - 1, S=5)
    against_reference(float64_bounds, tensors, output_final_state=True, activation="silu", cu_seqlens=cu)


@pytest.mark.parametrize("B", [0, 1])
def test_empty_batches(B: int):
    tensors = drawn(B=B, T=0, S=3)
    (y, final), found = gradients(causal_conv1d, tensors, output_final_state=True)
    assert y.shape == (B, 0, 3)
    assert torch.equal(final, tensors["initial_state"])
    assert torch.equal(found["weight"], torch.zeros(3, 4, dtype=torch.float64))


def test_gradient_of_either_result_alone(float64_bounds):
    tensors = drawn(B=2, T=2, S=6)

    def one(call: Callable, which: int, **arguments: object) -> tuple[Tensor]:
        return (call(**arguments, output_final_state=True, activation="silu")[which],)

    for which in (0, 1):
        (got,), found = gradients(partial(one, causal_conv1d, which), tensors)
        (truth,), expected = gradients(partial(one, reference.causal_conv1d, which), tensors)
        float64_bounds.output("result", got, truth)
        for name, gradient in expected.items():
            float64_bounds.gradient(f"d{name}", found[name], gradient)


@pytest.mark.parametrize("wanted", [(name,) for name in NAMES] + [("x", "bias"), ("weight", "initial_state")])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(wanted: tuple[str, ...]):
    tensors = drawn(S=3, dtype=torch.float32)
    _, every = gradients(causal_conv1d, tensors, output_final_state=True, activation="silu")
    leaves = {name: t.clone().requires_grad_(name in wanted) for name, t in tensors.items()}
    results = causal_conv1d(**leaves, output_final_state=True, activation="silu")
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(r.shape, generator=generator, dtype=torch.float64).float() for r in results]
    torch.autograd.backward(results, incoming)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted)
        assert name not in wanted or torch.equal(leaf.grad, every[name])


def test_second_order_raises():
    x, weight = torch.randn(1, 5, 2, requires_grad=True), torch.randn(2, 4)
    (dx,) = torch.autograd.grad(causal_conv1d(x, weight)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dx.sum().backward()


# --- bitwise guarantees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_equals_separate_calls(dtype: torch.dtype, activation: str | None, threads: int):
    lengths = (700, 0, 1, 2, 3, 4, 513, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    tensors = drawn(T=sum(lengths) + 9, D=37, N=len(lengths), S=5, dtype=dtype)
    (y, final), found = gradients(causal_conv1d, tensors, output_final_state=True, activation=activation, cu_seqlens=cu)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype)
    dfinal = torch.randn(final.shape, generator=generator, dtype=torch.float64).to(dtype)
    for n, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        alone = {
            "x": tensors["x"][:, start:end],
            "weight": tensors["weight"],
            "bias": tensors["bias"],
            "residual": tensors["residual"][:, start:end],
            "initial_state": tensors["initial_state"][n : n + 1],
        }
        incoming = [dy[:, start:end], dfinal[n : n + 1]]
        results, expected = gradients(causal_conv1d, alone, incoming, output_final_state=True, activation=activation)
        assert torch.equal(results[0], y[:, start:end])
        assert torch.equal(results[1][0], final[n])
        for name in ("x", "residual"):
            assert torch.equal(expected[name], found[name][:, start:end])
        assert torch.equal(expected["initial_state"][0], found["initial_state"][n])


def test_layout_is_its_boundaries():
    tensors = drawn(T=15, N=4, S=3)
    cu = torch.tensor(CU)
    by_tensor, by_layout = (
        causal_conv1d(**tensors, cu_seqlens=given, output_final_state=True) for given in (cu, SequenceLayout(cu, 15))
    )
    assert torch.equal(by_tensor[0], by_layout[0])
    assert torch.equal(by_tensor[1], by_layout[1])


def test_rows_past_the_last_boundary_are_never_read_and_return_zero():
    tensors = drawn(T=15, N=4, S=3)
    options = {"cu_seqlens": torch.tensor(CU), "activation": "silu", "output_final_state": True}
    (y, final), found = gradients(causal_conv1d, tensors, **options)
    poisoned = {name: t.clone() for name, t in tensors.items()}
    for name in ("x", "residual"):
        poisoned[name][:, CU[-1] :] = torch.nan
    dy = torch.randn_like(y)
    (y, final), found = gradients(causal_conv1d, tensors, [dy, final], **options)
    dy = dy.clone()
    dy[:, CU[-1] :] = torch.nan
    (y_poisoned, final_poisoned), found_poisoned = gradients(causal_conv1d, poisoned, [dy, final], **options)
    assert torch.equal(y_poisoned, y)
    assert torch.equal(final_poisoned, final)
    for name, gradient in found.items():
        assert torch.equal(found_poisoned[name], gradient), name
    for spare in (y, found["x"], found["residual"]):
        assert torch.equal(spare[:, CU[-1] :], torch.zeros(1, 2, 3, dtype=torch.float64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_values_stay_in_their_sequence(bad: float):
    tensors = drawn(T=13, N=4, S=3)
    options = {"cu_seqlens": torch.tensor(CU), "activation": "silu", "output_final_state": True}
    (y, final), found = gradients(causal_conv1d, tensors, **options)
    hit = {name: t.clone() for name, t in tensors.items()}
    hit["x"][:, 4] = bad  # the first sequence's last token
    hit["initial_state"][2] = bad  # the third sequence's state
    (y_hit, final_hit), found_hit = gradients(causal_conv1d, hit, **options)
    for whole, part in ((y_hit, y), (found_hit["x"], found["x"])):
        assert torch.equal(whole[:, 6:], part[:, 6:])
    assert torch.equal(y_hit[:, :4], y[:, :4])
    for whole, part in ((final_hit, final), (found_hit["initial_state"], found["initial_state"])):
        assert torch.equal(whole[[1, 3]], part[[1, 3]])


@pytest.mark.parametrize("cuts", [(1,), (3, 4), (9, 10, 11), tuple(range(1, 40))])
def test_a_call_split_anywhere_equals_one_call(cuts: tuple[int, ...]):
    tensors = drawn(B=2, T=40, D=11, dtype=torch.float32, S=3)
    x, weight, bias, residual, state = tensors.values()
    whole, last = causal_conv1d(**tensors, output_final_state=True, activation="silu")
    pieces = []
    for start, end in itertools.pairwise((0, *cuts, 40)):
        y, state = causal_conv1d(
            x[:, start:end], weight, bias, residual=residual[:, start:end], initial_state=state,
            output_final_state=True, activation="silu",
        )  # fmt: skip
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_float32_rounded_once(dtype: torch.dtype):
    """x, weight and states in 16 bits, bias in float32: every result is the float32 result, rounded."""
    tensors = drawn(T=50, D=9, S=4, dtype=dtype) | {"bias": torch.randn(9)}
    options = {"output_final_state": True, "activation": "silu"}
    (y, final), found = gradients(causal_conv1d, tensors, **options)
    incoming = [
        torch.randn(r.shape, generator=g, dtype=torch.float64).to(dtype)
        for g in [torch.Generator().manual_seed(1)]
        for r in (y, final)
    ]
    wide = {name: t.float() for name, t in tensors.items()}
    (y_wide, final_wide), found_wide = gradients(causal_conv1d, wide, [d.float() for d in incoming], **options)
    assert torch.equal(y, y_wide.to(dtype))
    assert torch.equal(final, final_wide.to(dtype))
    for name, gradient in found.items():
        assert gradient.dtype == tensors[name].dtype
        assert torch.equal(gradient, found_wide[name].to(gradient.dtype)), name


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float64])
def test_final_state_has_the_dtype_of_the_initial_one(state: torch.dtype):
    tensors = drawn(B=2, T=2, S=5, dtype=torch.float32)
    tensors["initial_state"] = tensors["initial_state"].to(state)
    _, final = causal_conv1d(**tensors, output_final_state=True)
    assert final.dtype == state
    assert torch.equal(final, torch.cat([tensors["initial_state"][:, :, 2:], tensors["x"].mT.to(state)], 2))


STRIDED = {
    "channels before time": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "slice of a projection": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "off by one element": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_is_contiguous(layout: str):
    tensors = drawn(B=2, T=9, D=4, S=3, dtype=torch.float32)
    options = {"output_final_state": True, "activation": "silu"}
    results, found = gradients(causal_conv1d, tensors, **options)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(r.shape, generator=generator, dtype=torch.float64).float() for r in results]
    strided = STRIDED[layout]
    leaves = {name: strided(t).requires_grad_() for name, t in tensors.items()}
    got = causal_conv1d(**leaves, **options)
    for result, expected in zip(got, results):
        assert torch.equal(result, expected)
    dx = torch.autograd.grad(got, list(leaves.values()), [strided(d) for d in incoming])
    for name, gradient in zip(leaves, dx):
        assert torch.equal(gradient, found[name]), name


def test_expanded_inputs():
    x, weight = torch.randn(1, 1, 3).expand(2, 6, 3), torch.randn(1, 4).expand(3, 4)
    y, _ = causal_conv1d(x, weight, residual=x)
    assert torch.equal(y, causal_conv1d(x.contiguous(), weight.contiguous(), residual=x.contiguous())[0])


def test_without_gradients_same_bits_and_inputs_untouched():
    tensors = drawn(T=9, S=5, dtype=torch.float32)
    before = {name: t.clone() for name, t in tensors.items()}
    (y, final), _ = gradients(causal_conv1d, tensors, output_final_state=True, activation="silu")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
            y_without, final_without = causal_conv1d(**leaves, output_final_state=True, activation="silu")
        assert y_without.grad_fn is None
        assert torch.equal(y_without, y)
        assert torch.equal(final_without, final)
    for name, t in tensors.items():
        assert torch.equal(t, before[name])


# --- errors ----------------------------------------------------------------------------------------------------------

GOOD = {"x": torch.randn(1, 9, 4), "weight": torch.randn(4, 3)}
CU9 = torch.tensor([0, 4, 9])
REFUSED = {
    "x no tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    "x missing": ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    "weight missing": ({"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType"),
    "x of rank 2": ({"x": torch.randn(9, 4)}, ValueError, r"x must have 3 dimensions, \[B, T, D\]"),
    "x of integers": ({"x": torch.ones(1, 9, 4, dtype=torch.int64)}, ValueError, "x must be float32"),
    "weight as Conv1d has it": ({"weight": torch.randn(4, 1, 3)}, ValueError, "weight must have 2 dimensions, "),
    "weight of other channels": ({"weight": torch.randn(5, 3)}, ValueError, r"weight must be \[D, W\]"),
    "weight transposed": ({"weight": torch.randn(3, 4)}, ValueError, r"weight must be \[D, W\]"),
    "weight too short": ({"weight": torch.randn(4, 1)}, ValueError, "W from 2 to 8"),
    "weight too long": ({"weight": torch.randn(4, 9)}, ValueError, "W from 2 to 8"),
    "weight of integers": ({"weight": torch.ones(4, 3).int()}, ValueError, "weight must be float32"),
    "bias of other channels": ({"bias": torch.randn(5)}, ValueError, r"bias must be \[D\] = \[4\], got \[5\]"),
    "bias no tensor": ({"bias": True}, TypeError, "bias must be a torch.Tensor"),
    "residual of other length": ({"residual": torch.randn(1, 8, 4)}, ValueError, "residual must be"),
    "residual on another device": ({"residual": torch.randn(1, 9, 4, device="meta")}, ValueError, "residual must have"),
    "state too short": ({"initial_state": torch.randn(1, 4, 1)}, ValueError, r"must be \[N, D, S >= W-1\]"),
    "state of other batch": ({"initial_state": torch.randn(2, 4, 2)}, ValueError, "initial_state must be"),
    "state transposed": ({"initial_state": torch.randn(1, 2, 4)}, ValueError, "initial_state must be"),
    "state of packed batch": (
        {"initial_state": torch.randn(1, 4, 2), "cu_seqlens": CU9}, ValueError, r"\[N, D, S >= W-1\] = \[2, 4, >= 2\]"
    ),
    "state of integers": ({"initial_state": torch.ones(1, 4, 2).int()}, ValueError, "initial_state must be float32"),
    "flag no flag": ({"output_final_state": 1}, TypeError, "output_final_state must be True or False, got 1"),
    "unknown activation": ({"activation": "relu"}, ValueError, "activation must be one of None, 'silu', 'swish'"),
    "activation no string": ({"activation": True}, ValueError, "activation must be one of"),
    "boundaries no tensor": ({"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    "boundaries with a batch": ({"x": torch.randn(2, 9, 4), "cu_seqlens": CU9}, ValueError, "cu_seqlens must come"),
    "boundaries of rank 2": ({"cu_seqlens": CU9[None]}, ValueError, r"cu_seqlens must be \[N\+1\]"),
    "boundaries on another device": ({"cu_seqlens": CU9.to("meta")}, ValueError, "cu_seqlens must be on cpu"),
    "layout of other length": ({"cu_seqlens": SequenceLayout(CU9, 10)}, ValueError, "layout of T = 9 tokens, got 10"),
    "unknown backend": ({"backend": "cuda"}, ValueError, "backend must be one of"),
    "absent backend": ({"backend": "triton"}, UnsupportedError, "backend='triton' cannot serve"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str):
    change, error, text = REFUSED[kind]
    with pytest.raises(error, match=f"^causal_conv1d: .*{text}"):
        causal_conv1d(**(GOOD | change))


@pytest.mark.parametrize("kind", shapes.INVALID_PACKINGS)
def test_refused_boundaries(kind: str):
    with pytest.raises(ValueError, match=r"^causal_conv1d: cu_seqlens must "):
        causal_conv1d(**GOOD, cu_seqlens=torch.tensor(shapes.INVALID_PACKINGS[kind].cu_seqlens))


@pytest.mark.parametrize("keyword", ["head_first", "dilation"])
def test_unknown_keywords(keyword: str):
    with pytest.raises(TypeError, match=keyword):
        causal_conv1d(**GOOD, **{keyword: None})


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "copies"),
    [
        (torch.empty(2, 9, 4), ()),
        (torch.empty(2, 9, 12)[..., :4], ()),
        (torch.empty(1, 4, 9).mT, ()),
        (torch.empty(2, 4, 9).mT, ("x",)),
        (torch.empty(1, 9, 4).expand(2, 9, 4), ("x",)),
    ],
)
def test_explain_reports_the_copy_that_flattening_makes(x: Tensor, copies: tuple[str, ...]):
    plan = explain(causal_conv1d, x, GOOD["weight"])
    assert plan.copies == copies
    assert (x.flatten(0, 1).data_ptr() != x.data_ptr()) == bool(copies)
    assert plan.backend == "eager"
    assert plan.forward == plan.backward == ("conv (wyfold.kernels.conv.eager)",)


# --- registration and compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
@pytest.mark.parametrize("final", [False, True])
def test_opcheck(cu_seqlens, final: bool):
    tensors = list(drawn(T=13, N=None if cu_seqlens is None else 4, S=4, dtype=torch.float32).values())
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    forward = torch.ops.wyfold.causal_conv1d_fwd.default
    torch.library.opcheck(forward, (*tensors, cu, final, True, "eager"))
    torch.library.opcheck(forward, (*tensors[:2], None, None, None, cu, final, False, "eager"))
    dfinal = tensors[4] if final else None
    for needs in ([True] * 5, [True, False, False, True, False], [False, True, True, False, True]):
        arguments = (*tensors, cu, tensors[0].mT.contiguous().mT, dfinal, needs, True, "eager")
        torch.library.opcheck(torch.ops.wyfold.causal_conv1d_bwd.default, arguments)


# Dynamo itself makes an instance of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "form",
    [pytest.param("dense", marks=pytest.mark.release), pytest.param("boundaries", marks=pytest.mark.release), "layout"],
)
def test_compiles_whole_with_its_backward(form: str):
    tensors = drawn(T=13, N=None if form == "dense" else 4, S=4, dtype=torch.float32)
    cu = None if form == "dense" else torch.tensor(CU)

    def call(cu_seqlens: Tensor | None, **tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        packed = SequenceLayout(cu_seqlens, 13) if form == "layout" else cu_seqlens
        return causal_conv1d(**tensors, cu_seqlens=packed, output_final_state=True, activation="silu")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results, found = gradients(call, tensors, cu_seqlens=cu)
    results_compiled, found_compiled = gradients(compiled, tensors, cu_seqlens=cu)
    for expected, got in zip(results, results_compiled):
        assert torch.equal(got, expected)
    for name, gradient in found.items():
        assert torch.equal(found_compiled[name], gradient), name
