"""Tensors on CUDA: every operator honours `backend=`, and without kernels refuses calls that do not demand eager.

No card is needed: with PyTorch's fake tensors a call is checked, planned and traced, and nothing is computed.
"""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wyfold
from wyfold import UnsupportedError
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.kernels import table
from wyfold.reference.shapes import Shape
from wyfold.runtime import triton_support

QUESTIONS = {"checked", "doctor", "explain"}
OPERATORS = sorted(
    name for name in wyfold.__all__ if inspect.isfunction(getattr(wyfold, name)) and name not in QUESTIONS
)
SHAPE = Shape(2, 40, 1, 2, 8, 16)


def on_cuda(value):
    """A fake CUDA tensor with the shape and dtype of x."""
    return torch.empty(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else value


def tensors(returned) -> list[torch.Tensor]:
    return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]


def test_every_operator_is_called_here():
    assert {getattr(wyfold, name) for name in OPERATORS} == {
        getattr(wyfold, s.operator) for s in OPERATOR_SPECS.values()
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_accepts_a_backend(name: str):
    backend = inspect.signature(getattr(wyfold, name)).parameters["backend"]
    assert (backend.kind, backend.default) == (backend.KEYWORD_ONLY, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATOR_SPECS)
def test_without_kernels_only_a_demanded_eager_runs_on_cuda(name: str, dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(
        triton_support,
        "support_of",
        lambda device: triton_support.Support("sm_00", "", False, "no kernel for such a card"),
    )
    operator = getattr(wyfold, OPERATOR_SPECS[name].operator)
    arguments = OPERATOR_SPECS[name].arguments(SHAPE, dtype, 0)
    expected = [(x.shape, x.dtype, "cuda") for x in tensors(operator(**arguments))]
    with FakeTensorMode():
        there = {argument: on_cuda(value) for argument, value in arguments.items()}
        got = tensors(operator(**there, backend="eager"))
        with pytest.raises(UnsupportedError) as refused:
            operator(**there)
    assert [(x.shape, x.dtype, x.device.type) for x in got] == expected
    assert set(refused.value.reasons) == set(table.BACKENDS)
    assert str(refused.value).startswith(f"{operator.__name__}: no backend serves tensors on cuda\n")
    assert 'ask for it with backend="eager"' in refused.value.reasons["eager"]


@pytest.mark.parametrize("name", OPERATOR_SPECS)
def test_unknown_backends_are_refused_by_name(name: str):
    operator = getattr(wyfold, OPERATOR_SPECS[name].operator)
    arguments = OPERATOR_SPECS[name].arguments(SHAPE, torch.float32, 0)
    with pytest.raises(UnsupportedError, match=r"backend='triton' cannot serve this call on cpu"):
        operator(**arguments, backend="triton")
    with pytest.raises(ValueError, match=f"^{operator.__name__}: backend must be one of None, 'eager'"):
        operator(**arguments, backend="cuda")
