"""PyTorch's transforms and unusual tensors ended in PyTorch's errors.

Examples are "must override the setup_context staticmethod" and "NestedTensorImpl doesn't support sizes. Please file an
issue". Now each gives correct results, or one sentence that names the operator, the argument if there is one, and what
to do.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import wyfold
from wyfold import TTTState, serving
from wyfold.cli.operators import OPERATOR_SPECS, OperatorSpec
from wyfold.reference.shapes import Shape

SHAPE = Shape(2, 5, 1, 2, 8, 8)
ARGUMENTS = [
    pytest.param(subject, name, id=f"{subject.name}-{name}")
    for subject in OPERATOR_SPECS.values()
    for name, x in subject.arguments(SHAPE, torch.float64, 0).items()
    if isinstance(x, Tensor) and x.is_floating_point()
]
DIFFERENTIABLE = [case for case in ARGUMENTS if case.values[0].backward]
DIFFERENTIABLE_OPERATORS = [pytest.param(x, id=x.name) for x in OPERATOR_SPECS.values() if x.backward]


def unary_function(subject: OperatorSpec, name: str) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Tensor]:
    """The operator as a function of one of its arguments, and that argument."""
    arguments = subject.arguments(SHAPE, torch.float64, 0)
    return lambda x: subject.ours(arguments | {name: x}), arguments[name].detach()


# --- supported -------------------------------------------------------------------------------------------------------


Gradients = tuple[Tensor, ...]


def of_all_arguments(subject: OperatorSpec) -> tuple[Tensor, list[Tensor], Callable[[Tensor], Gradients]]:
    """An operator's first result, its floating arguments, and their gradients as a function of the incoming one."""
    arguments = subject.arguments(SHAPE, torch.float64, 0)
    leaves = [x.requires_grad_() for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point()]
    y = subject.ours(arguments)[0]
    # The first result does not depend on every argument.
    return y, leaves, lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True, materialize_grads=True)


def same(found: Gradients, expected: Gradients) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("subject", DIFFERENTIABLE_OPERATORS)
def test_a_batch_of_incoming_gradients(subject: OperatorSpec):
    """Of all arguments at once, by both of PyTorch's transforms."""
    y, leaves, gradients = of_all_arguments(subject)
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    one_by_one = tuple(map(torch.stack, zip(*map(gradients, dy), strict=True)))
    batch = {"is_grads_batched": True, "retain_graph": True, "materialize_grads": True}
    assert same(torch.autograd.grad(y, leaves, dy, **batch), one_by_one)
    assert same(torch.func.vmap(gradients)(dy), one_by_one)


@pytest.mark.parametrize("subject", DIFFERENTIABLE_OPERATORS)
def test_a_batch_on_another_thread(subject: OperatorSpec):
    """Autograd's thread of a CUDA device counts no level of `is_grads_batched`, as no thread does outside of it."""
    y, _, gradients = of_all_arguments(subject)
    dy = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = gradients(torch._add_batch_dim(dy, 0, 1))
    found = tuple([torch._remove_batch_dim(dx, 1, 3, 0) for dx in batched])
    assert same(found, tuple(map(torch.stack, zip(*map(gradients, dy), strict=True))))


@pytest.mark.parametrize("subject", DIFFERENTIABLE_OPERATORS)
def test_a_batch_without_members(subject: OperatorSpec):
    y, leaves, gradients = of_all_arguments(subject)
    found = torch.vmap(gradients, in_dims=2)(y.new_empty(0, *y.shape).movedim(0, 2))
    assert same(found, tuple(x.new_empty(0, *x.shape) for x in leaves))


@pytest.mark.parametrize(("subject", "name"), DIFFERENTIABLE)
def test_a_batch_along_another_dimension(subject: OperatorSpec, name: str):
    """Of one argument, so that the operator has no gradient of the others to return."""
    run, x = unary_function(subject, name)
    x.requires_grad_()
    y = run(x)[0]
    dy = torch.randn(2, *y.shape, dtype=y.dtype)
    one_by_one = torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in dy])
    batched = torch.vmap(lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0], in_dims=2)(dy.movedim(0, 2))
    assert torch.equal(batched, one_by_one)


@pytest.mark.parametrize("name", ["l2norm", "chunk_delta_rule", "causal_conv1d", "chunk_ttt_linear"])
def test_a_vectorized_jacobian(name: str):
    subject = OPERATOR_SPECS[name]
    run, x = unary_function(subject, {"l2norm": "x", "causal_conv1d": "bias"}.get(name, "v"))
    vectorized, plain = (functional.jacobian(lambda x: run(x)[0], x, vectorize=flag) for flag in (True, False))
    assert torch.equal(vectorized, plain)


PLAIN = {
    "negated": (torch._neg_view, torch.neg),
    "imaginary part of a conjugate": (lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag, torch.neg),
    "zeros without memory": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), torch.zeros_like),
    "of a subclass": (lambda x: TwoTensor(x, x), lambda x: x),
}


@torch.no_grad()
@pytest.mark.parametrize(("subject", "name"), ARGUMENTS)
def test_tensors_without_plain_storage(subject: OperatorSpec, name: str):
    run, x = unary_function(subject, name)
    of_plain = {}  # two kinds have the same values
    for kind, (as_it_is, plain) in PLAIN.items():
        if plain not in of_plain:
            of_plain[plain] = run(plain(x))
        for y, z in zip(run(as_it_is(x)), of_plain[plain], strict=True):
            # Negated gates may grow a state past the largest number.
            found = y.a if isinstance(y, TwoTensor) else y
            assert found.shape == z.shape and bool(((found == z) | (found.isnan() & z.isnan())).all()), kind


# --- refused in one sentence -----------------------------------------------------------------------------------------


def refusal(call: Callable[[], Any], *errors: type[Exception]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except errors as error:
        return str(error)
    return "no error"


TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "vmap": (lambda run, x: torch.func.vmap(run)(torch.stack([x, x])), "vmap"),
    "grad": (lambda run, x: torch.func.grad(lambda x: run(x)[0].sum())(x), "grad"),
    "vjp": (lambda run, x: torch.func.vjp(run, x), "grad"),
    "jvp": (lambda run, x: torch.func.jvp(run, (x,), (x,)), "jvp"),
    "jacrev": (lambda run, x: torch.func.jacrev(run)(x), "grad"),
    "jacfwd": (lambda run, x: torch.func.jacfwd(run)(x), "jvp"),
    "hessian": (lambda run, x: torch.func.hessian(lambda x: run(x)[0].sum())(x), "grad"),
    "functional_call": (lambda run, x: torch.func.grad(lambda x: run(x)[0].sum())(x.float().double()), "grad"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # a warning of PyTorch
@pytest.mark.parametrize(("subject", "name"), ARGUMENTS)
def test_a_transform_is_refused(subject: OperatorSpec, name: str):
    run, x = unary_function(subject, name)
    for transform, (make, kind) in TRANSFORMS.items():
        message = (
            rf"^{subject.operator}: no tensor may be under a transform of torch\.func, got {kind}; give a batch as"
        )
        said = refusal(lambda make=make: make(run, x), RuntimeError, ValueError)
        assert re.search(message if subject.backward else f"^{subject.operator}: ", said), f"{transform}: {said}"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # a warning of PyTorch
@pytest.mark.parametrize(("subject", "name"), ARGUMENTS)
def test_a_tangent_is_refused(subject: OperatorSpec, name: str):
    run, x = unary_function(subject, name)
    with forward_ad.dual_level():
        run(x)  # an unrelated open dual level is allowed
        with pytest.raises(RuntimeError, match=f"^{subject.operator}: no tensor may have a tangent"):
            run(forward_ad.make_dual(x, x))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a nested tensor": lambda x: torch.nested.nested_tensor(list(x.unbind(0))),
    "sparse_coo": lambda x: x.to_sparse(),
    "_mkldnn": lambda x: x.float().to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "quint8": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
}


# PyTorch's warning about nested tensors.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("subject", "name"), ARGUMENTS)
def test_a_layout_is_refused_by_name(subject: OperatorSpec, name: str):
    run, x = unary_function(subject, name)
    for layout, change in LAYOUTS.items():
        changed = change(x)
        if layout == "meta" and subject.operator in ("solve_tril", "l2norm", "fused_beta_sigmoid"):
            assert run(changed)[0].is_meta  # its only tensor, so no devices are mixed
            continue
        said = refusal(lambda changed=changed: run(changed), ValueError, wyfold.UnsupportedError)
        assert re.search(f"^{subject.operator}: (.*{layout}|.*device)", said), f"{layout}: {said}"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks. This process is one of them; the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


@pytest.mark.parametrize(("subject", "name"), ARGUMENTS)
def test_a_dtensor_is_refused_by_name(subject: OperatorSpec, name: str, mesh: DeviceMesh):
    run, x = unary_function(subject, name)
    with pytest.raises(ValueError, match=rf"^{subject.operator}: {name} must be .* got a DTensor; pass its to_local"):
        run(DTensor.from_local(x, mesh, [Replicate()], run_check=False))


def served(name: str, change: Callable[[Tensor], Tensor]) -> object:
    """A serving call with one argument changed."""
    x, w = torch.randn(2, 1, 2, 16), torch.ones(2, 16)
    pool = torch.zeros(2, 2, 16, 16)
    tokens = change(x)
    if name == "ttt_decode":
        c = torch.zeros(2, 2, 1, 16)
        states = TTTState(pool, c, pool.clone(), c.clone(), torch.zeros(2, dtype=torch.int32))
        return serving.ttt_decode(tokens, x, x, w, w, 0.1, states)
    if name.startswith("conv1d"):
        row = x.flatten(2) if name == "conv1d_prefill" else x.flatten(1)
        return getattr(serving, name)(change(row), torch.zeros(2, 32, 3), torch.ones(32, 4))
    if name == "decode_packed":
        raw = torch.randn(2, 2)
        sizes = {"heads": (2, 2), "dims": (16, 16), "state_v_first": False}
        return serving.decode_packed(change(torch.randn(2, 96)), raw, raw, None, None, pool, **sizes)
    slots = {"state_indices": torch.tensor([[0], [1]])} if name == "verify" else {}
    return getattr(serving, name)(tokens, x, x, None, x[..., 0], pool, state_v_first=False, **slots)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", serving.__all__)
def test_serving_refuses_both(name: str):
    served(name, lambda x: x)
    with pytest.raises(ValueError, match=f"^{name}: .*nested"):
        served(name, LAYOUTS["a nested tensor"])
    with pytest.raises(RuntimeError, match=f"^{name}: no tensor may be under a transform"):
        torch.func.vmap(lambda s: served(name, lambda x: x * s), randomness="same")(torch.ones(2))
