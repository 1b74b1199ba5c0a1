"""Replay of a rank's kernel calls, with all launches recorded, on both streams."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from wyfold.context_parallel import delta_segment_launches
from wyfold.cp import build_cp_context
from wyfold.runtime import recording, replay_cache, segment_rule, side_stream
from wyfold.runtime.replay_cache import Recording

triton = pytest.importorskip("triton")

from tests.runtime.test_replay_cache import alike, chunked, grad_of, memory_once, without_replay  # noqa: E402, F401
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
    """All five operators are replayed with the launches of an ordinary call, also if pieces end inside a chunk."""
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
        launches.append(("wait", 0, current(0)))

    monkeypatch.setattr(recording, "wait_collective", waited)

    with segment_rule.forced(2):
        with without_replay():
            grad_of(made, launches)
            gradients, found, tensors = grad_of(made, launches)
        grad_of(made, launches)  # waits once more, because its kernels are compiled
        for _ in range(3):
            again, repeated, others = grad_of(made, launches)
            assert alike(found, repeated, tensors, others)
    assert [dx.shape for dx in again] == [dx.shape for dx in gradients]
    operators = {key[0][0]: known for key, known in replay_cache._recordings.items() if "delta_rank" in key[0][0]}
    assert len(operators) == 5
    for operator, found_of in operators.items():
        assert type(found_of) is Recording, (operator, found_of)
    carried = [n for n, (name, *_) in enumerate(found) if "_carry_" in name]
    assert all(found[n - 1][0] == "wait" and found[n - 1][2] == found[n][2] == 10 for n in carried)
    names = [name.removeprefix("wyfold_").removesuffix("_triton") for name, *_ in found]
    assert names.count("rank_carry") == (rank > 0) + (rank < WORLD - 1)
    assert names.count("rank_send") == (rank < WORLD - 1) + (rank > 0)


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
