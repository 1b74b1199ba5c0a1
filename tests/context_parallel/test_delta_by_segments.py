"""Replay of a rank's kernel calls, with all launches and all-gathers recorded, on both streams."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wyfold.context_parallel import delta_segment_launches
from wyfold.cp import build_cp_context
from wyfold.runtime import recorded_launch, recording, replay_cache, segment_rule, side_stream
from wyfold.runtime.recording import Operation
from wyfold.runtime.replay_cache import Recording

triton = pytest.importorskip("triton")

from tests.runtime.test_replay_cache import alike, chunked, convolved, grad_of, memory_once, without_replay  # noqa: E402, F401
from tests.runtime.test_replay_cache import lines as launches  # noqa: E402, F401
from tests.runtime.test_side_stream import CARD, Stream, lines  # noqa: E402, F401
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from triton.runtime import driver  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter")

WORLD = 3


@pytest.fixture(params=range(WORLD))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of a fake group, whose other ranks send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    dist.destroy_process_group()


def all_gathers(name: str) -> dict[str, int]:
    """Number of all-gathers in the recording of each operator of this name."""
    entries = replay_cache._entries.items()
    found = {key[0]: known.recording for key, known in entries if isinstance(key[0], str) and name in key[0]}
    assert all(type(known) is Recording for known in found.values()), found
    gathers = torch.ops._c10d_functional.all_gather_into_tensor.default
    return {
        operator: sum(type(step) is Operation and step.operator is gathers for step in known.steps)
        for operator, known in found.items()
    }


@pytest.mark.parametrize("keep", [False, True], ids=["made again", "kept"])
@pytest.mark.parametrize("bounds", [[0, 384], [0, 40, 300, 384]], ids=["one sequence", "packed"])
@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_a_rank_repeats_itself(
    rule: str,
    bounds: list[int],
    keep: bool,
    rank: int,
    lines: list[str],  # noqa: F811
    launches: list[tuple],  # noqa: F811
    memory_once: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """Both operators are replayed with the launches of an ordinary call, also if pieces end inside a chunk."""
    context = build_cp_context(torch.tensor(bounds), dist.group.WORLD, check="never")
    made = chunked(rule, disable_recompute=keep, cp_context=context)
    assert context.tokens == made[1]["q"].shape[1]
    fork_side_stream = side_stream.fork_side_stream
    monkeypatch.setattr(delta_segment_launches, "fork_side_stream", lambda device: fork_side_stream(CARD))
    current = lambda device: torch.cuda.current_stream(device).cuda_stream
    monkeypatch.setattr(driver.active, "get_current_stream", current, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: Stream(lines, handle))
    wait = recording.wait_collective

    waited_for: list[torch.Tensor] = []

    def waited(x: torch.Tensor) -> None:
        wait(x)
        waited_for.append(x)  # kept alive for the whole test, like all memory
        launches.append(("wait", "", 0, current(0)))

    monkeypatch.setattr(recording, "wait_collective", waited)

    with segment_rule.forced(2):
        with without_replay():
            grad_of(made, launches)
            gradients, found, tensors = grad_of(made, launches)
        grad_of(made, launches)
        for _ in range(3):
            again, repeated, others = grad_of(made, launches)
            assert alike(found, repeated, tensors, others)
    assert [dx.shape for dx in again] == [dx.shape for dx in gradients]
    assert all_gathers("delta_rank") == {"delta_rank_fwd": 1, "delta_rank_bwd": 1}
    carried = [n for n, (name, *_) in enumerate(found) if "_carry_" in name]
    assert all(found[n - 1][0] == "wait" and found[n - 1][3] == found[n][3] == 10 for n in carried)
    names = [name.removeprefix("wyfold_").removesuffix("_triton") for name, *_ in found]
    assert names.count("rank_carry") == (rank > 0) + (rank < WORLD - 1)
    assert names.count("rank_send") == (rank < WORLD - 1) + (rank > 0)


@pytest.mark.parametrize("bounds", [None, [0, 40, 300, 384]], ids=["one sequence", "packed"])
def test_a_rank_repeats_its_convolution(
    bounds: list[int] | None,
    rank: int,
    launches: list[tuple],  # noqa: F811
    memory_once: None,  # noqa: F811
):
    """Both directions are replayed with their all-gathers."""
    boundaries = None if bounds is None else torch.tensor(bounds)
    context = build_cp_context(boundaries, dist.group.WORLD, total_tokens=384, check="never")
    made = convolved(cp_context=context, bias=torch.randn(64))
    with without_replay():
        grad_of(made, launches)
        gradients, found, tensors = grad_of(made, launches)
    for _ in range(4):
        again, repeated, others = grad_of(made, launches)
        assert found and alike(found, repeated, tensors, others)
    assert [dx.shape for dx in again] == [dx.shape for dx in gradients]
    assert all_gathers("conv_rank") == {"conv_rank_fwd": 1, "conv_rank_bwd": 1}


def test_an_interrupted_replay_waits(rank: int, launches: list[tuple], monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """If a launch fails after a replay has launched a collective, the collective is waited for."""
    context = build_cp_context(torch.tensor([0, 384]), dist.group.WORLD, check="never")
    call, given = chunked("gdn", cp_context=context)
    for _ in range(3):
        call(**given)
    gathered: list[bool] = []
    operate, launch = Operation.replay, recorded_launch.RecordedLaunch.replay

    def operated(step: Operation, *where: Any) -> None:
        operate(step, *where)
        gathered.append("all_gather" in str(step.operator))

    def failing(step: Any, *where: Any) -> None:
        if any(gathered):
            raise RuntimeError("broken off")
        launch(step, *where)

    monkeypatch.setattr(Operation, "replay", operated)
    monkeypatch.setattr(recorded_launch.RecordedLaunch, "replay", failing)
    waiting = torch._C._distributed_c10d._get_work_registry_size
    before = waiting()
    with pytest.raises(RuntimeError, match="broken off"):
        call(**given)
    assert any(gathered) and waiting() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_default_dtype(dtype: torch.dtype, rank: int, launches: list[tuple], monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """Internal states are float32 whatever PyTorch's default dtype is."""
    context = build_cp_context(torch.tensor([0, 384]), dist.group.WORLD, check="never")
    made = chunked("gdn", cp_context=context)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with without_replay():
            gradients, _, _ = grad_of(made, launches)
    finally:
        torch.set_default_dtype(usual)
    assert [dx.dtype for dx in gradients] == [torch.bfloat16] * 3 + [torch.float32] * 2
