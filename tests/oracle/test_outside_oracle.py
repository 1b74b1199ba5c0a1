"""Random calls of every operator against token loops that were written from the papers alone.

A difference must stay below the bound that docs/numerics.md derives ("The bound of the outside oracle"). `--draws N`
draws N calls of each operator.
"""

import functools
import itertools

import pytest
import torch
from tests.oracle import calls, further, loops
from tests.oracle.calls import Call, compare

OPERATORS = calls.OPERATORS | further.OPERATORS
draw_call = functools.partial(calls.draw_call, table=OPERATORS)
DRAWS = 4
WITHOUT_KERNELS = ("fused_recurrent_ttt_linear",)
INTERPRETED = ("fused_recurrent_gla", "chunk_dplr_delta_rule", "chunk_comba", "fused_recurrent_gdn2")
"""Of the further rules, those that run interpreted, one for each kind of kernels; on a GPU all of them run."""
WITH_KERNELS = [
    name
    for name in OPERATORS
    if name not in (WITHOUT_KERNELS if torch.cuda.is_available() else {*WITHOUT_KERNELS, *further.OPERATORS})
    or name in INTERPRETED
]
INTERPRETED_NUMBERS = 4000  # elements per tensor: interpreted kernels are slow


@pytest.mark.parametrize("operator", OPERATORS)
def test_random_calls_are_within_the_derived_bound(operator: str, request: pytest.FixtureRequest):
    draws = request.config.getoption("--draws") or DRAWS
    beyond = []
    for seed in range(draws):
        beyond += [x for x in compare(draw_call(operator, seed)) if not x.error <= x.bound]
    assert not beyond, "\n".join(f"{x.call}\n  {x.name}: {x.error:.3e}, bound {x.bound:.3e}" for x in beyond)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warnings about values that interpreted kernels mask later
@pytest.mark.parametrize("operator", WITH_KERNELS)
def test_random_calls_on_kernels_are_within_the_derived_bound(
    operator: str, device: torch.device, request: pytest.FixtureRequest
):
    draws = request.config.getoption("--draws") or (8 if device.type == "cuda" else 1)
    calls = (draw_call(operator, seed, "triton", (torch.float32,)) for seed in itertools.count())
    if device.type == "cpu":
        calls = (call for call in calls if max(x.numel() for x in call.leaves.values()) <= INTERPRETED_NUMBERS)
    beyond = []
    for call in itertools.islice(calls, draws):
        beyond += [x for x in compare(call, device=device) if not x.error <= x.bound]
    assert not beyond, "\n".join(f"{x.call}\n  {x.name}: {x.error:.3e}, bound {x.bound:.3e}" for x in beyond)


PLANTED = {
    "a result off by 1 in 10,000": lambda x: x * 1.0001,
    "the last row is that of the token before": lambda x: torch.cat([x[:, :-1], x[:, -2:-1]], 1),
    "one entry is NaN": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 0, torch.nan, x),
}


SPOILED = ("chunk_delta_rule", "chunk_kda", "chunk_ttt_linear", "chunk_rwkv7", "chunk_gla")
PAIRS = [
    pytest.param(operator, fault, marks=[] if i % len(PLANTED) == j else pytest.mark.release)
    for i, operator in enumerate(SPOILED)
    for j, fault in enumerate(PLANTED)
]


@pytest.mark.parametrize(("operator", "fault"), PAIRS)
def test_a_planted_fault_is_beyond_the_bound(operator: str, fault: str):
    call = first_wide_call(operator)
    run = call.run

    def spoiled(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: PLANTED[fault](x) if name == "o" else x for name, x in run(**tensors).items()}

    assert all(x.error <= x.bound for x in compare(call))
    call.run = spoiled
    assert not {x.name: x.error <= x.bound for x in compare(call)}["o"]


def first_wide_call(operator: str) -> Call:
    """A small float64 call of several tokens whose result depends on all of its rows."""
    for seed in range(1000):
        call = draw_call(operator, seed, dtypes=(torch.float64, torch.float32))
        name = "r" if "r" in call.leaves else "q"
        q = call.views.get(name, lambda x: x)(call.leaves[name])
        small = q.numel() <= 2000 and q.shape[1] <= 48
        if q.dtype == torch.float64 and small and q.shape[1] >= 16 and call.padding in (None, q.shape[1]):
            return call
    raise AssertionError


def test_the_inner_gradient_equals_autograd(float64_bounds):
    z, target = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    w, b = torch.rand(3, 8, dtype=torch.float64), torch.rand(3, 8, dtype=torch.float64)
    z.requires_grad_()
    normed = torch.nn.functional.layer_norm(z, (8,), eps=1e-6)
    (expected,) = torch.autograd.grad((w * normed + b - target).square().sum() / 2, z)
    float64_bounds.output("inner gradient", loops.inner_gradient(z, w, b, target, 1e-6).detach(), expected)
