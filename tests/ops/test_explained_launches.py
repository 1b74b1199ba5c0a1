"""What `explain` says of a call is what the call launches, for random calls on a recorded driver, and on a card."""

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.runtime import kernel_launch, replay_cache, segment_rule
from wyfold.runtime.plan import Plan

triton = pytest.importorskip("triton")

from tests.runtime.test_replay_cache import lines  # noqa: E402, F401
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter")

ON_CARD = torch.cuda.is_available()
CALLS = 40 if ON_CARD else 200
OPERATORS = {
    "none": (wyfold.chunk_delta_rule, wyfold.fused_recurrent_delta_rule),
    "scalar": (wyfold.chunk_gdn, wyfold.fused_recurrent_gdn),
    "channel": (wyfold.chunk_kda, wyfold.fused_recurrent_kda),
}


class Call:
    """A random call of the delta family: the operator, its arguments, and which results get which gradients.

    Attributes:
        words: What was drawn, for messages.
        gradient: "whole", "expanded" (that of a sum) or "state" (none for the output); None without a backward.
        forced: Chunks of the segments into which sequences are forced to be cut, or None.
    """

    def __init__(self, seed: int):
        draw = random.Random(seed)
        self.seed, device = seed, "cuda" if ON_CARD else "cpu"
        gate = draw.choice([*OPERATORS])
        chunked = draw.random() < 0.75
        self.op = OPERATORS[gate][not chunked]
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        K, V = draw.choice([(128, 128), (128, 128), (64, 64), (128, 64), (72, 128), (256, 256)])
        H, T = draw.choice([1, 2]), draw.choice([64, 100, 256])
        HV, packed = H * draw.choice([1, 1, 2]), draw.random() < 0.4
        B = 1 if packed else draw.choice([1, 2])
        layouts = ["rows", "rows", "heads first", "padded", "odd rows", "apart", "one token"]

        def rows(heads: int, width: int, layout: str) -> Tensor:
            """[B, T, heads, width] in a memory layout."""
            make = lambda *sizes: torch.randn(*sizes, device=device, dtype=dtype)
            if layout == "heads first":
                return make(B, heads, T, width).transpose(1, 2)
            if layout == "padded":
                return make(B, T, heads, width + 16)[..., :width]
            if layout == "odd rows":
                return make(B, T, heads, width + 1)[..., :width]
            if layout == "apart":
                return make(B, T, heads, 2 * width)[..., ::2]
            if layout == "one token":
                return make(B, 1, heads, width).expand(B, T, heads, width)
            return make(B, T, heads, width)

        places = [draw.choice(layouts) for _ in range(3)]
        q, k, v = (rows(*size, place) for size, place in zip(((H, K), (H, K), (HV, V)), places, strict=True))
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": torch.rand(B, T, HV, device=device)}
        if gate != "none":
            given["g"] = -torch.rand(B, T, HV, *([K] if gate == "channel" else []), device=device)
        N = B
        if packed:
            given["cu_seqlens"] = torch.tensor([0, 10, 10, T - 3], device=device)
            N = 3
        state = draw.random() < 0.4
        if state:
            given["initial_state"] = torch.randn(N, HV, K, V, device=device)
        self.gradient = draw.choice(["whole", "expanded", "expanded", "state", None])
        if state or self.gradient == "state":
            given["output_final_state"] = True
        given["use_qk_l2norm_in_kernel"] = draw.random() < 0.5
        if chunked:
            given["chunk_size"] = draw.choice([64, 64, None, 32, 16])
            given["disable_recompute"] = draw.random() < 0.2
        if self.gradient is None and draw.random() < 0.3:
            given |= {"return_intermediate_states": True, "checkpoint_every": 64}
        self.forced = 1 if chunked and draw.random() < 0.3 else None
        self.given = {**given, "backend": "triton"}
        self.words = f"{self.op.__name__} {gate} {dtype} {B} {T} {H} {HV} {K} {V} {places} packed={packed} "
        self.words += f"{self.gradient} forced={self.forced} {[*given]} {given.get('chunk_size')}"

    def run(self) -> Iterator[None]:
        """Make the call; yields after each direction."""
        leaves = [x for x in self.given.values() if isinstance(x, Tensor) and x.is_floating_point()]
        with torch.set_grad_enabled(self.gradient is not None):
            o, state, *_ = self.op(**self.given)
            yield
            if self.gradient == "expanded":
                torch.autograd.grad(o.sum(), leaves, allow_unused=True)
            elif self.gradient == "state":
                torch.autograd.grad(state, leaves, torch.ones_like(state), allow_unused=True)
            elif self.gradient == "whole":
                torch.autograd.grad(o, leaves, torch.ones_like(o))
            yield

    def explain(self) -> Plan:
        with torch.set_grad_enabled(self.gradient is not None):
            return wyfold.explain(self.op, **self.given)


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """The kernels that are launched, in order: nothing is recorded, and each launch goes through Triton."""
    if not ON_CARD:
        request.getfixturevalue("lines")
    found: list[Any] = []
    run = JITFunction.run

    def seen(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            found.append(self)
        return run(self, *arguments, warmup=warmup, **options)

    with mock.patch.object(JITFunction, "run", seen), mock.patch.object(replay_cache, "DEVICES", frozenset()):
        yield found


def stages(kernels: list[Any]) -> list[str]:
    """Stages and modules of launches, as a plan names them, each once."""
    found = []
    for kernel in kernels:
        _, _, stage, backend, *_ = kernel.fn.__module__.split(".")
        found.append(f"{stage} (wyfold.kernels.{stage}.{backend})")
    return [*dict.fromkeys(found)]


@pytest.mark.parametrize("start", range(0, CALLS, 20))
def test_explain_names_what_launches(start: int, launched: list[Any]):
    for seed in range(start, start + 20):
        call = Call(seed)
        for x in call.given.values():
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_(call.gradient is not None)
        with segment_rule.forced(2, call.forced) if call.forced else mock.MagicMock():
            plan = call.explain()
            assert plan.backend == "triton"
            names, steps = [], call.run()
            for expected in (plan.forward, plan.backward if call.gradient else ()):
                kernel_launch._launches.clear()
                launched.clear()
                next(steps)
                assert stages(launched) == [*expected], f"{seed}: {call.words}"
                names += [kernel.fn.__name__ for kernel in launched]
            if not ON_CARD and call.gradient is not None:  # on a card some may have run before
                assert sorted({*names}) == sorted(plan.compiles), f"{seed}: {call.words}"
