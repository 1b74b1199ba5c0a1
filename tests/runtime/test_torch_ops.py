"""Registered operators: no autocast inside, no second derivative, and the dispatcher is skipped where possible."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import wyfold
from wyfold.autograd import delta as pipeline
from wyfold.reference.error import judge, require
from wyfold.reference.targets import target
from wyfold.runtime import torch_ops

TOKENS = (1, 20, 2, 8)
ONCE = {
    "delta": lambda x: wyfold.chunk_delta_rule(x, x, x)[0],
    "recurrent": lambda x: wyfold.fused_recurrent_delta_rule(x, x, x)[0],
    "ttt": lambda x: wyfold.chunk_ttt_linear(x, x, x, x.new_ones(2, 8), x.new_zeros(2, 8), 0.1)[0],
    "conv": lambda x: wyfold.causal_conv1d(x.flatten(2), x.new_ones(16, 4))[0],
    "norm": wyfold.l2norm,
    "gate": lambda x: wyfold.fused_kda_gate(x),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused_and_never_left_out(name: str):
    """Also if the incoming gradient requires no gradient, as after a sum. A gradient penalty must not lose its term."""
    x = torch.randn(TOKENS, requires_grad=True)
    (dx,) = torch.autograd.grad(ONCE[name](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dx.square().sum().backward()


@pytest.mark.parametrize("name", ONCE)
def test_create_graph_changes_no_gradient(name: str):
    x = torch.randn(TOKENS, requires_grad=True)
    (plain,) = torch.autograd.grad(ONCE[name](x).sum(), x)
    (with_graph,) = torch.autograd.grad(ONCE[name](x).sum(), x, create_graph=True)
    assert torch.equal(plain, with_graph.detach())


@pytest.mark.parametrize("name", ["delta", "recurrent", "ttt", "conv"])
def test_compiled_gradients_without_a_final_state(name: str):
    """A compiler passes the backward a zero gradient even for the empty result that stands for a missing state.

    It also refuses an autograd.Function that gets one tensor twice, as these calls do on purpose. The three gradients
    of x are then added in another order.
    """
    compiled = torch.compile(ONCE[name], fullgraph=True, backend="aot_eager")
    x = torch.randn(TOKENS, dtype=torch.float64, requires_grad=True)
    do = torch.randn_like(ONCE[name](x))
    assert torch.equal(ONCE[name](x), compiled(x))
    (eager,), (graph,) = (torch.autograd.grad(f(x), x, do) for f in (ONCE[name], compiled))
    require(judge(graph, eager, name="dx", target=target("dq", torch.float64)))


@pytest.mark.parametrize("name", ["delta", "recurrent", "ttt", "conv"])
def test_autocast_stays_outside(name: str):
    """The operator casts q, k and v by its rule. The products inside stay in float32, forward and backward."""
    x, do = torch.randn(TOKENS), torch.randn(ONCE[name](torch.zeros(TOKENS)).shape)
    cast = (x if name == "conv" else x.bfloat16()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        under = ONCE[name](cast)
        (gradient,) = torch.autograd.grad(under, cast, do.to(under.dtype))
    wanted = ONCE[name](cast)
    assert torch.equal(under, wanted)
    assert torch.equal(gradient, torch.autograd.grad(wanted, cast, do.to(wanted.dtype))[0])


@pytest.mark.parametrize("name", ["delta", "ttt"])
@pytest.mark.parametrize("precision", ["medium", "high"])
def test_float32_products_stay_float32(name: str, precision: str):
    """Also if the process allows TF32 or bfloat16 products. Its setting is restored afterwards."""
    x = torch.randn(TOKENS, requires_grad=True)
    do = torch.randn_like(x)
    exact = ONCE[name](x)
    (wanted,) = torch.autograd.grad(exact, x, do)
    torch.set_float32_matmul_precision(precision)
    try:
        allowed = torch.backends.mkldnn.matmul.fp32_precision
        found = ONCE[name](x)
        (gradient,) = torch.autograd.grad(found, x, do)
        assert torch.backends.mkldnn.matmul.fp32_precision == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, exact)
    assert torch.equal(gradient, wanted)


# --- calls that skip the dispatcher ----------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """Log of the operators that are called through PyTorch's dispatcher."""
    names: list[str] = []

    def counted(operator):
        def carried(*arguments):
            names.append(operator.__name__)
            return operator(*arguments)

        return carried

    for name in ("_forward_op", "_backward_op"):
        operator = getattr(pipeline, name)
        carried = counted(operator)
        monkeypatch.setitem(torch_ops._registered, carried, torch_ops._registered[operator])
        monkeypatch.setattr(pipeline, name, carried)
    return names


def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o = ONCE["delta"](x)
    return o.detach(), torch.autograd.grad(o, x, torch.ones_like(o))[0]


def test_a_plain_call_skips_the_dispatcher_and_an_observed_one_does_not(seen: list[str]):
    """The bits are the same. Modes, profilers and tangents see the operator's name."""
    x = torch.randn(TOKENS, requires_grad=True)
    plain = there_and_back(x)
    with torch.no_grad():
        assert torch.equal(ONCE["delta"](x), plain[0])
    assert not seen

    watched = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            watched.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        again = there_and_back(x)
    assert all(map(torch.equal, again, plain)) and len(seen) == 2
    assert [name for name in watched if "wyfold" in name] == ["wyfold.delta_fwd.default", "wyfold.delta_bwd.default"]

    with torch.profiler.profile() as profile:
        there_and_back(x)
    assert {"wyfold::delta_fwd", "wyfold::delta_bwd"} <= {event.key for event in profile.key_averages()}
    assert len(seen) == 4

    with torch.device("cpu"), torch.no_grad():  # a mode as well
        ONCE["delta"](x)
    assert len(seen) == 5


def test_tensors_whose_memory_does_not_hold_their_values(seen: list[str]):
    """The memory of a negated view has the other sign; PyTorch's dispatcher resolves it."""
    x = torch.randn(TOKENS)
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg() and torch.equal(negated, x)
    with torch.no_grad():
        assert torch.equal(wyfold.chunk_delta_rule(negated, x, x)[0], wyfold.chunk_delta_rule(x, x, x)[0])
    assert len(seen) == 1
    with torch.no_grad():
        zero = torch._efficientzerotensor(TOKENS)
        assert not wyfold.chunk_delta_rule(x, x, zero)[0].any()
    assert len(seen) == 2
    meta = x.to("meta")
    assert wyfold.chunk_delta_rule(meta, meta, meta)[0].shape == x.shape
    assert len(seen) == 3


class Sub(torch.Tensor):
    pass


def test_only_plain_tensors_skip_the_dispatcher():
    x = torch.zeros(3)
    with torch.no_grad():
        assert torch_ops.can_skip_dispatch(x, [x, x], None, 1, 1.0, True, "word", torch.float32)
        assert torch_ops.can_skip_dispatch(torch.nn.Parameter(x))
        for other in (x.as_subclass(Sub), [x, x.as_subclass(Sub)], x.to("meta"), object()):
            assert not torch_ops.can_skip_dispatch(other)
        with forward_ad.dual_level():
            assert not torch_ops.can_skip_dispatch(x)
    assert not torch_ops.can_skip_dispatch(x)  # with gradients on


FIRST_CALLS = """
import torch
called = []
for name in ("exp", "log1p"):
    function = getattr(torch, name)
    setattr(torch, name, lambda x, f=function, n=name: (called.append((n, x.dtype, x.numel())), f(x))[1])
import wyfold
assert {(n, d) for n, d, size in called if size == 1} == {
    (n, d) for n in ("exp", "log1p") for d in (torch.float32, torch.float64)
}, called
torch.set_num_threads(2)
for dtype in (torch.float32, torch.float64):
    x = -torch.rand(128, 16, 16, dtype=dtype)
    first, second = torch.exp(x), torch.exp(x)
    assert torch.equal(first, second), f"{dtype}: the first exponential is off by {(first - second).abs().max():.1e}"
"""


@pytest.mark.parametrize("attempt", range(2))
def test_the_first_exponential_of_a_process_is_exact(attempt: int):
    """Without the package's first call, the first parallel result has half the digits in one process in six."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
