"""Same inputs, same bits: repeated, in another process, in many threads, between other calls, on every code path."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests import processes
from torch.utils.checkpoint import checkpoint

import wyfold
from wyfold import SequenceLayout
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
CASES = [(rule, form) for rule in RULES for form in FORMS]


def case(rule: str, dtype: torch.dtype = torch.float32):
    a = inputs.draw("random", rule, Shape(1, 75, 2, 4, 16, 24), gate="model", state="normal", sequences=3, dtype=dtype)
    return a | {"cu_seqlens": torch.tensor([0, 33, 33, 70]), "output_final_state": True}


@pytest.mark.parametrize("rule, form", CASES)
def test_repeated_call(rule: str, form: str, threads: int, results):
    op = getattr(wyfold, f"{form}_{rule}")
    a = case(rule, torch.bfloat16 if form == "chunk" else torch.float32)
    first = results(op, a)
    for _ in range(3):
        again = results(op, a)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("rule, form", CASES)
def test_in_eight_threads_at_once(rule: str, form: str, results):
    op, a = getattr(wyfold, f"{form}_{rule}"), case(rule)
    other = {name: x[:, :40] if name in ("q", "k", "v", "g", "beta") else x for name, x in a.items()}
    other["cu_seqlens"] = torch.tensor([0, 7, 20, 39])
    truths = [results(op, x) for x in (a, other)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: results(op, (a, other)[n % 2]), range(24)))
    for n, got in enumerate(found):
        assert all(torch.equal(got[name], x) for name, x in truths[n % 2].items())


FRESH = """
import hashlib, torch, wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
torch.set_num_threads(1)
for rule in ("delta_rule", "gated_delta_rule", "kda"):
    a = inputs.draw("random", rule, Shape(1, 75, 2, 4, 16, 24), gate="model", state="normal", sequences=3)
    cu = torch.tensor([0, 33, 33, 70])
    for form in ("chunk", "fused_recurrent"):
        leaves = {n: x.requires_grad_() if isinstance(x, torch.Tensor) else x for n, x in a.items()}
        results = getattr(wyfold, f"{form}_{rule}")(**leaves, cu_seqlens=cu, output_final_state=True)
        arrows = [inputs.incoming(x, seed) for seed, x in enumerate(results)]
        tensors = [x for x in leaves.values() if isinstance(x, torch.Tensor)]
        for x in (*results, *torch.autograd.grad(results, tensors, arrows)):
            print(hashlib.sha256(x.detach().numpy().tobytes()).hexdigest())
"""


def test_in_a_fresh_process(results):
    run = processes.fresh().run(["-c", FRESH])
    assert run.returncode == 0, run.stderr
    here = []
    for rule in RULES:
        for form in FORMS:
            here += results(getattr(wyfold, f"{form}_{rule}"), case(rule)).values()
    assert run.stdout.split() == [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in here]


@pytest.mark.parametrize("rule, form", CASES)
def test_boundaries_edited_in_place_between_calls(rule: str, form: str, results):
    """No cache is keyed by the identity of a tensor or a layout."""
    op, a = getattr(wyfold, f"{form}_{rule}"), case(rule)
    cu = torch.tensor([0, 33, 33, 70])
    layout = SequenceLayout(cu.clone(), 75)
    first = results(op, a, cu_seqlens=cu)
    for boundaries in ([0, 1, 16, 75], [0, 0, 0, 0], [0, 33, 33, 70]):
        fresh = results(op, a, cu_seqlens=torch.tensor(boundaries))
        cu.copy_(torch.tensor(boundaries))
        layout.update_(torch.tensor(boundaries))
        for edited in (cu, layout):
            got = results(op, a, cu_seqlens=edited)
            assert all(torch.equal(got[name], x) for name, x in fresh.items()), boundaries
    assert all(torch.equal(got[name], x) for name, x in first.items())


@pytest.mark.parametrize("rule, form", CASES)
def test_other_shapes_in_between(rule: str, form: str, results):
    op, a = getattr(wyfold, f"{form}_{rule}"), case(rule)
    first = results(op, a)
    for shape in (Shape(2, 16, 1, 1, 8, 8), Shape(1, 0, 1, 1, 8, 8), Shape(3, 33, 2, 6, 24, 16)):
        results(op, inputs.draw("random", rule, shape, gate="any"))
        again = results(op, a)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rule, form", CASES)
def test_activation_checkpointing(rule: str, form: str, reentrant: bool, results):
    op, a = getattr(wyfold, f"{form}_{rule}"), case(rule)
    plain = results(op, a)
    leaves = {name: x.clone().requires_grad_() for name, x in a.items() if f"d{name}" in plain}
    flags = {name: x for name, x in a.items() if name not in leaves}

    def call(*xs: torch.Tensor):
        return op(**dict(zip(leaves, xs)), **flags)

    o, state = checkpoint(call, *leaves.values(), use_reentrant=reentrant)
    torch.autograd.backward([o, state], [inputs.incoming(o, 0), inputs.incoming(state, 1)])
    assert torch.equal(o, plain["o"]) and torch.equal(state, plain["state"])
    for name, x in leaves.items():
        assert torch.equal(x.grad, plain[f"d{name}"]), name


@pytest.mark.parametrize("rule, form", CASES)
def test_a_backward_may_run_twice(rule: str, form: str):
    """With `retain_graph`: the backward overwrites none of its inputs."""
    a = {
        name: x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in case(rule).items()
    }
    o, state = getattr(wyfold, f"{form}_{rule}")(**a)
    leaves = [x for x in a.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    arrows = [inputs.incoming(o), inputs.incoming(state)]
    kept = [x.clone() for x in arrows]
    first = torch.autograd.grad([o, state], leaves, arrows, retain_graph=True)
    second = torch.autograd.grad([o, state], leaves, arrows)
    assert all(torch.equal(x, y) for x, y in zip(first, second))
    assert all(torch.equal(x, y) for x, y in zip(arrows, kept))
