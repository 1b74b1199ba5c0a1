"""Delta rules over the ranks of a group, on interpreted kernels, against float64 in one process.

Ranks are processes of a gloo group (`tests.context_parallel.ranks`). Shards begin and end at chunk boundaries and
inside chunks, and pieces are cut into segments themselves.
"""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks
from tests.context_parallel.test_context import Comparison, delta
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import wyfold
from wyfold.context_parallel import delta_by_segments, delta_segment_launches
from wyfold.cp import build_cp_context
from wyfold.reference.error import rms
from wyfold.runtime import segment_rule

C = 16


class Kernels:
    """A comparison whose ranks run kernels in `dtype`, with pieces cut into `count` segments or left whole.

    Args:
        limit: Bound on the relative RMS error of outputs, states and gradients.
    """

    def __init__(self, of: Comparison, dtype: torch.dtype = torch.float32, limit: float = 2e-6, count: int = 0):
        self.of, self.dtype, self.limit, self.count = of, dtype, limit, count
        of.arguments["chunk_size"] = C

    def prepare(self) -> dict[str, Tensor]:
        rounded = {name: self.cast(x, self.dtype) for name, x in self.of.arguments.items()}
        self.of.arguments = {name: self.cast(x, torch.float64) for name, x in rounded.items()}
        truth = self.of.prepare()
        self.of.arguments = rounded | {"backend": "triton"}
        return truth

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def run(self, truth: dict[str, Tensor], group: dist.ProcessGroup) -> None:
        cut = segment_rule.forced(self.count) if self.count else contextlib.nullcontext()
        with cut:
            self.of.run(truth, group, self.judge)

    def judge(self, name: str, found: Tensor, expected: Tensor) -> None:
        if expected.numel():
            error = rms(found, expected)
            assert error <= self.limit, f"{name}: {error:.2e}"


def kernels(rule: str, number: int, **options: Any) -> Kernels:
    own = {name: options.pop(name) for name in ("dtype", "limit", "count") if name in options}
    return Kernels(delta(rule, number, **options), **own)


COMPARISONS = {
    "packed": kernels("gated_delta_rule", 1),
    "packed, in segments": kernels("kda", 2, count=3, tokens=230),
    "packed, no gate": kernels("delta_rule", 3, count=2, beta="logits", use_qk_l2norm_in_kernel=True),
    "one sequence": kernels("gated_delta_rule", 4, B=1, tokens=192, layout="contiguous", count=4),
    "one sequence, zigzag": kernels("kda", 5, B=1, tokens=137, layout="zigzag", gate="model", disable_recompute=True),
    "rows": kernels("delta_rule", 6, B=2, layout="fragments", tokens=102, count=2),
    "shares of less than a chunk": kernels("gated_delta_rule", 7, B=2, layout="contiguous", tokens=40),
    "factors are kept": kernels("gated_delta_rule", 8, gate="model", disable_recompute=True, tokens=112),
    "no token on some": kernels("kda", 13, layout="contiguous", tokens=2),
    "nothing crosses": kernels("gated_delta_rule", 12, tokens=64, boundaries=[0, 32, 64], layout="contiguous", count=4),
    "row and column": kernels("dplr_delta_rule", 16, B=1, tokens=75, layout="zigzag"),
    "erase and write gates": kernels("gdn2", 17, gate="model", tokens=75, disable_recompute=True),
    "read key": kernels("comba", 19, tokens=75, dtype=torch.bfloat16, limit=8e-3),
    "float16": kernels("kda", 10, B=1, tokens=102, layout="zigzag", dtype=torch.float16, limit=2e-3),
    "bfloat16": kernels("gated_delta_rule", 9, B=1, tokens=192, count=2, dtype=torch.bfloat16, limit=6e-3),
}


def compiled_or_checkpointed(given: None, group: dist.ProcessGroup) -> None:
    """Compiled as one graph, or recomputed by activation checkpointing: the same bits."""
    warnings.simplefilter("ignore")  # warnings of PyTorch's compiler
    torch.manual_seed(0)
    # No state enters the first rank or leaves the second, so neither reads all that it gathers.
    context = build_cp_context(torch.tensor([0, 20, 90]), group)
    q, k, v, g = (context.shard(torch.randn(1, 90, 1, 16)) for _ in range(4))

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        flags = {"use_qk_l2norm_in_kernel": True, "chunk_size": C, "backend": "triton"}
        return wyfold.chunk_kda(q, k, v, -g.abs(), cp_context=context, **flags)[0]

    def step(run: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g)]
        o = run(*leaves)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    # The compiled call runs first, while the context has no cached tensors.
    compiled = step(torch.compile(call, fullgraph=True, backend="aot_eager"))
    expected = step(call)
    again = step(lambda *leaves: checkpoint(call, *leaves, use_reentrant=False))
    for found in (compiled, again):
        assert all(map(torch.equal, found, expected))


def second_backward(given: None, group: dist.ProcessGroup) -> None:
    """A second backward through the same call gives the same gradients, also with kept factors."""
    context = build_cp_context(torch.tensor([0, 20, 90]), group)
    for keep in (False, True):
        q = torch.randn(1, context.tokens, 1, 16, requires_grad=True)
        o = wyfold.chunk_kda(q, q, q, cp_context=context, disable_recompute=keep, chunk_size=C, backend="triton")[0]
        first, second = (torch.autograd.grad(o.sum(), q, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


def changed_boundaries(given: None, group: dist.ProcessGroup) -> None:
    """Boundaries that change between forward and backward are refused before anything is sent."""
    context = build_cp_context(torch.tensor([0, 40]), group)
    q = torch.ones(1, context.tokens, 1, 16, requires_grad=True)
    for backend in ("triton", "eager"):
        o = wyfold.chunk_kda(q, q, q, cp_context=context.update_(torch.tensor([0, 40])), backend=backend)[0]
        context.update_(torch.tensor([0, 20, 40]))
        try:
            o.sum().backward()
        except ValueError as error:
            assert "cp_context must be as in the forward" in str(error)
        else:
            raise AssertionError("not refused")


def zero_batch_rows(given: None, group: dist.ProcessGroup) -> None:
    """A batch of no rows gives empty results over ranks, as on one process."""
    context = build_cp_context(None, group, total_tokens=40)
    q = torch.ones(0, context.tokens, 1, 16, requires_grad=True)
    flags = {"cp_context": context, "output_final_state": True, "backend": "triton", "chunk_size": C}
    assert wyfold.explain(wyfold.chunk_kda, q, q, q, **flags).forward.count("segment_summary") == 0
    o, final = wyfold.chunk_kda(q, q, q, **flags)
    assert o.shape == q.shape and final.shape == (0, 1, 16, 16)
    (dq,) = torch.autograd.grad(o.sum() + final.sum(), q)
    assert dq.shape == q.shape


def waits_after_a_failure(given: None, group: dist.ProcessGroup) -> None:
    """No collective is left without a wait, also if the call raises after starting it or does not need its result."""
    context = build_cp_context(torch.tensor([0, 40]), group)
    q = torch.ones(1, context.tokens, 1, 16)
    fork, waiting = delta_segment_launches.fork_side_stream, torch._C._distributed_c10d._get_work_registry_size
    before = waiting()

    def failing(_: torch.device) -> None:
        raise RuntimeError("broken off")

    delta_segment_launches.fork_side_stream = failing
    try:
        wyfold.chunk_kda(q, q, q, cp_context=context, backend="triton", chunk_size=C)
    except RuntimeError as error:
        assert "broken off" in str(error)
    else:
        raise AssertionError("it went on")
    finally:
        delta_segment_launches.fork_side_stream = fork
    assert waiting() == before
    q.requires_grad_()
    wyfold.chunk_kda(q, q, q, cp_context=context, backend="triton", chunk_size=C)[0].sum().backward()
    assert waiting() == before


def registered(keep: bool, group: dist.ProcessGroup) -> None:
    """PyTorch's checks of registered operators: sizes come from metadata alone; no input is changed or aliased."""
    warnings.simplefilter("ignore")  # PyTorch's warnings
    asked: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def call_operator(operator: Any, *arguments: Any) -> Any:
        asked[operator.name()] = operator, arguments
        return call(operator, *arguments)

    call, delta_by_segments.call_operator = delta_by_segments.call_operator, call_operator
    try:
        context = build_cp_context(torch.tensor([0, 20, 90]), group, total_tokens=93)
        q = torch.randn(1, context.tokens, 1, 16, requires_grad=True)
        flags = {"disable_recompute": keep, "output_final_state": True, "chunk_size": C, "backend": "triton"}
        o, final = wyfold.chunk_gated_delta_rule(q, q, q, -q[..., 0].abs(), cp_context=context, **flags)
        (o.sum() + final.sum()).backward()
        assert len(asked) == 2
        for operator, arguments in asked.values():
            plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
            torch.library.opcheck(operator, tuple(plain))
    finally:
        delta_by_segments.call_operator = call


def explained(given: None, group: dist.ProcessGroup) -> None:
    """The plan lists the launches for communication if there is any and kernels can run it."""
    crossing = build_cp_context(torch.tensor([0, 20, 90]), group)
    apart = build_cp_context(torch.tensor([0, 45, 90]), group)
    q, wide = (torch.ones(1, crossing.tokens, 1, K) for K in (16, 256))
    between = {"segment_summary", "segment_fold", "rank_carry"}
    for x, context, summed in ((q, crossing, True), (q, apart, False), (wide, crossing, False)):
        plan = wyfold.explain(wyfold.chunk_kda, x, x, x, chunk_size=C, cp_context=context, backend="triton")
        for launches in (plan.forward, plan.backward):
            assert [name.partition(" ")[0] in between for name in launches].count(True) == 3 * summed
        assert between <= {launch.stage for launch in plan.rows} or not summed


VARIANTS = "packed, no gate", "erase and write gates", "one sequence", "one sequence, zigzag", "factors are kept"
"""Comparisons whose layout, rule and options others have too."""

# At least three ranks, so that one has neighbours on both sides.
EVERY_COMPARISON = {name: Case(x.prepare, x.run, least=3) for name, x in COMPARISONS.items()}
CASES = {name: case for name, case in EVERY_COMPARISON.items() if name not in VARIANTS}
CASES |= {
    run.__name__: Case(lambda: None, run, most=2)
    for run in (
        compiled_or_checkpointed,
        explained,
        second_backward,
        changed_boundaries,
        waits_after_a_failure,
        zero_batch_rows,
    )
}
CASES["registered"] = Case(lambda: True, registered, most=2)
EVERY_COMPARISON["registered"] = Case(lambda: False, registered, most=2)


@pytest.mark.long
def test_ranks_compute_what_one_process_does(interpreter, tmp_path: Path):
    found = failures_on_ranks([2, 3], tmp_path, "tests.interpret.test_context", "CASES")
    assert not found, found


@pytest.mark.release
def test_every_comparison_of_ranks(interpreter, tmp_path: Path):
    found = failures_on_ranks([2, 3], tmp_path, "tests.interpret.test_context", "EVERY_COMPARISON")
    assert not found, found
