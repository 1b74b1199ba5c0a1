"""Unsupported transforms are refused: forward-mode gradients, vmap, functional gradients.

An operator that ignored a transform would silently return wrong results.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import wyfold
from wyfold.cli.operators import OPERATOR_SPECS, OperatorSpec
from wyfold.reference.shapes import Shape

REFUSED = (RuntimeError, NotImplementedError)
CASES = [
    pytest.param(subject, name, id=f"{subject.name}-{name}")
    for subject in OPERATOR_SPECS.values()
    for name, x in subject.arguments(Shape(1, 5, 1, 2, 8, 8), torch.float32, 0).items()
    if isinstance(x, Tensor) and x.is_floating_point()
]
# raised by PyTorch, in forward_ad
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def of_one(subject: OperatorSpec, name: str):
    """The operator as a function of one argument, and that argument."""
    arguments = subject.arguments(Shape(1, 5, 1, 2, 8, 8), torch.float32, 0)
    return lambda x: subject.ours(arguments | {name: x}), arguments[name]


def test_every_operator_is_tried():
    operators = {name for name in wyfold.__all__ if name.startswith(("chunk_", "fused_", "causal_", "rms_"))}
    operators |= {"l2norm", "parallel_path_attn", "solve_tril"}
    same = {name for name in operators if getattr(wyfold, name).__name__ != name}  # other names of the same function
    assert {subject.operator for subject in OPERATOR_SPECS.values()} == operators - same


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_vmap_is_refused(subject: OperatorSpec, name: str):
    run, x = of_one(subject, name)
    with pytest.raises(REFUSED, match=r"(?i)vmap|functorch|transform"):
        torch.func.vmap(run)(torch.stack([x, x]))


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_tangents_are_refused(subject: OperatorSpec, name: str):
    run, x = of_one(subject, name)
    with pytest.raises(REFUSED, match=r"(?i)forward|jvp"), forward_ad.dual_level():
        run(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(REFUSED, match=r"(?i)functorch|transform|jvp"):
        torch.func.jvp(run, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(("subject", "name"), CASES)
def test_a_functional_gradient_is_refused(subject: OperatorSpec, name: str):
    run, x = of_one(subject, name)
    with pytest.raises((*REFUSED, ValueError), match=r"(?i)functorch|transform|must not require a gradient"):
        torch.func.grad(lambda x: run(x)[0].sum())(x)
