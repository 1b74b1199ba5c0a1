"""Second derivatives ignored the operator without an error.

A gradient penalty through `torch.autograd.grad` was completely wrong, and a Hessian was zeros; only a plain
`backward()` raised. The operators are once differentiable. Every request for a second derivative must be refused, even
if another path contributes to it.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

import wyfold
from wyfold.cli.operators import OPERATOR_SPECS, OperatorSpec
from wyfold.reference.shapes import Shape

SHAPE = Shape(1, 5, 1, 2, 8, 8)


def arguments_of(subject: OperatorSpec) -> list[str]:
    """The arguments that an operator can be differentiated by."""
    tensors = subject.arguments(SHAPE, torch.float64, 0).items()
    return [name for name, x in tensors if isinstance(x, Tensor) and x.is_floating_point()]


CASES = [
    pytest.param(subject, name, id=f"{subject.name}-{name}")
    for subject in OPERATOR_SPECS.values()
    if subject.backward
    for name in arguments_of(subject)
]
SENTENCE = "^wyfold operators are once differentiable: .* Take it of wyfold.reference"
REFUSED = "once differentiable|double backward"


def scalar_function(subject: OperatorSpec, name: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The sum of all results, plus a path past the operator, as a function of one argument; and that argument."""
    arguments = subject.arguments(SHAPE, torch.float64, 0)
    run = lambda x: sum(y.square().sum() for y in subject.ours(arguments | {name: x})) + x.pow(3).sum()
    return run, arguments[name]


def penalty(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(run(x), x, create_graph=True)
    return dx.square().sum()


def by_grad(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.requires_grad_()
    torch.autograd.grad(penalty(run, x), x)


def by_backward(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    penalty(run, x.requires_grad_()).backward()


def by_backward_of_inputs(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.requires_grad_()
    penalty(run, x).backward(inputs=[x])


def by_create_graph(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The first gradient by `backward`, as second-order optimizers compute it."""
    x = x.requires_grad_()
    run(x).backward(create_graph=True)
    torch.autograd.grad(x.grad.square().sum(), x)


def behind_another_function(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.requires_grad_()
    torch.autograd.grad(penalty(lambda x: run(2 * x), x), x)


def through_a_checkpoint(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x = x.requires_grad_()
    torch.autograd.grad(penalty(lambda x: checkpoint(run, x, use_reentrant=False), x), x)


def by_hessian(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    functional.hessian(run, x)


def by_hvp(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    functional.hvp(run, x, torch.ones_like(x))


def by_jvp(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """PyTorch computes it as the gradient of a gradient with respect to the incoming one."""
    functional.jvp(run, x, torch.ones_like(x))


WAYS = [
    by_grad,
    by_backward,
    by_backward_of_inputs,
    by_create_graph,
    behind_another_function,
    through_a_checkpoint,
    by_hessian,
    by_hvp,
    by_jvp,
]


# A warning of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def test_every_differentiable_operator_is_tried():
    assert len({subject.operator for subject in OPERATOR_SPECS.values() if subject.backward}) == 30


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_a_second_derivative_is_refused(subject: OperatorSpec, name: str, request: pytest.FixtureRequest):
    """By one argument of an operator in every way, by each other one in one way; with --draws 1 in every way too."""
    run, x = scalar_function(subject, name)
    every = name == arguments_of(subject)[0] or request.config.getoption("--draws")
    for way in WAYS if every else WAYS[:1]:
        said = ""
        try:
            way(run, x.clone())
        except RuntimeError as error:
            said = str(error)
        assert re.search(REFUSED, said), f"{way.__name__}: {said or 'no error'}"


@pytest.mark.parametrize("wrt", ["incoming", "k"])
def test_derivatives_with_respect_to_other_inputs_of_the_gradient(wrt: str):
    """dq depends on k and on the incoming gradient: those derivatives are second derivatives as well."""
    q, k, do = (torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(wyfold.chunk_delta_rule(q, k, k.detach())[0], q, do, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad((dq + k + do).sum(), {"incoming": do, "k": k}[wrt])


COMPILED = {
    "delta": lambda x: wyfold.chunk_delta_rule(x, x, x)[0],
    "recurrent": lambda x: wyfold.fused_recurrent_kda(x, x, x)[0],
    "ttt": lambda x: wyfold.chunk_ttt_linear(x, x, x, x.new_ones(2, 8), x.new_zeros(2, 8), 0.1)[0],
    "conv": lambda x: wyfold.causal_conv1d(x, x.new_ones(8, 4))[0],
    "l2norm": wyfold.l2norm,
    "rms_norm_gated": lambda x: wyfold.rms_norm_gated(x, x, x.new_ones(8)),
    "gate": wyfold.fused_kda_gate,
    "beta": wyfold.fused_beta_sigmoid,
}


@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *((name, "aot_eager") for name in ("ttt", "gate")),
        ("delta", "eager"),
        *(
            pytest.param(name, "aot_eager", marks=pytest.mark.release)
            for name in COMPILED
            if name not in ("ttt", "gate")
        ),
        pytest.param("l2norm", "eager", marks=pytest.mark.release),
    ],
)
def test_a_second_derivative_of_a_compiled_function_is_refused(name: str, compiler: str):
    """The function is compiled once. Each way differentiates its graph afresh."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(lambda x: COMPILED[name](x).square().sum() + x.sum(), backend=counter, fullgraph=True)
    x = torch.randn(*(1, 5) if name == "conv" else (1, 5, 2), 8, dtype=torch.float64)
    for way in (by_grad, by_backward, by_backward_of_inputs):
        with pytest.raises(RuntimeError, match=REFUSED):
            way(compiled, x.detach().clone())
    assert counter.frame_count == 1


@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.release), "aot_eager"])
def test_a_penalty_inside_a_compiled_function_is_refused(compiler: str):
    torch.compiler.reset()
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: penalty(lambda x: wyfold.l2norm(x).sum(), x) + x.sum(), backend=compiler)
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(x).backward()


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_create_graph_changes_no_gradient(subject: OperatorSpec, name: str):
    """With `create_graph` and no use of the graph, which is then freed without an error."""
    run, x = scalar_function(subject, name)
    x.requires_grad_()
    (plain,) = torch.autograd.grad(run(x), x)
    (with_graph,) = torch.autograd.grad(run(x), x, create_graph=True)
    assert torch.equal(plain, with_graph.detach())
    assert with_graph.requires_grad


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_batched_gradients_with_create_graph(subject: OperatorSpec, name: str):
    """The error was PyTorch's own, or advised on an operator that the user never called."""
    arguments = subject.arguments(SHAPE, torch.float64, 0)
    x = arguments[name].requires_grad_()
    y = subject.ours(arguments | {name: x})[0]
    dy = torch.ones(2, *y.shape, dtype=y.dtype, requires_grad=True)
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.func.vmap(lambda dy: torch.autograd.grad(y, x, dy, create_graph=True)[0])(dy)
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.autograd.grad(y, x, dy, is_grads_batched=True, create_graph=True)
