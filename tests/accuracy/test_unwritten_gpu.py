"""Uninitialised shared memory does not change a result.

It holds what the multiprocessor ran last, maybe for another process; zero times a stale NaN is NaN.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import wyfold
from wyfold import SequenceLayout
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import triton_support

RULES = ("delta_rule", "gated_delta_rule", "kda")
GATES = ("weak", "-20", "any", "strong model")
BF16 = torch.bfloat16
LENGTHS = [70, 0, 128, 1, 201]
Spoilt = Callable[..., contextlib.AbstractContextManager[None]]


@pytest.fixture
def poisoned_shared_memory(card: torch.device) -> Spoilt:
    """`with spoilt()`: before every launch all shared memory of the GPU is filled with NaNs, or with another word."""
    if triton_support.architecture(card) != "sm_90":
        pytest.skip("a program of 224 KiB of shared memory fills a multiprocessor of sm_90 alone")
    from tests.accuracy import shared_memory
    from triton import knobs

    sink, filling = shared_memory.sink(card), []

    @contextlib.contextmanager
    def filled(word: int = shared_memory.NANS) -> Iterator[None]:
        def before(_: Any) -> None:
            if not filling:
                filling.append(True)
                shared_memory.fill(sink, word)
                filling.clear()

        knobs.runtime.launch_enter_hook.add(before)
        try:
            yield
        finally:
            knobs.runtime.launch_enter_hook.remove(before)

    return filled


def same_under_nans(run: Callable[[], dict[str, torch.Tensor]], poisoned_shared_memory: Spoilt) -> None:
    with poisoned_shared_memory(0):
        expected = run()
    assert all(bool(x.isfinite().all()) for x in expected.values())
    with poisoned_shared_memory():
        for _ in range(3):
            got = run()
            for name, x in expected.items():
                assert torch.equal(got[name], x), name


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES)
def test_delta_rules(rule: str, gate: str, packed: bool, placed, results, poisoned_shared_memory):
    """As a model calls them: q, k and v are slices of one tensor, norm, gate and sigmoid inside, few gradients."""
    if rule == "delta_rule" and gate != "weak":
        pytest.skip("the delta rule has no gate")
    T, N = (sum(LENGTHS) + 5, len(LENGTHS)) if packed else (512, None)
    kind = {"delta_rule": None}.get(rule, gate.removeprefix("strong "))
    shape = Shape(1 if packed else 4, T, 2, 2, 128, 128)
    a = inputs.draw("random", rule, shape, gate=kind, beta="logits", state="normal", sequences=N, dtype=BF16)
    joined = torch.cat([a[name].flatten(2) for name in ("q", "k", "v")], dim=-1)
    a |= {name: x.unflatten(-1, (2, 128)) for name, x in zip("qkv", joined.split(256, dim=-1), strict=True)}
    if gate == "strong model":
        a |= {"A_log": torch.full_like(a["A_log"], 2.5), "dt_bias": a["dt_bias"] * 0.2}
    if packed:
        a["cu_seqlens"] = SequenceLayout.from_lengths(LENGTHS, tokens=T).cu_seqlens
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    fed["o"] *= torch.arange(T)[None, :, None, None] % 8 == 7
    op, a, fed = getattr(wyfold, f"chunk_{rule}"), placed(a), placed(fed)
    flags = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    same_under_nans(lambda: results(op, a, None, fed, **flags), poisoned_shared_memory)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype, D", [(BF16, 64), (BF16, 128), (torch.float32, 64)], ids=str)
def test_ttt_linear(dtype: torch.dtype, D: int, packed: bool, placed, results, poisoned_shared_memory):
    T, N = (sum(LENGTHS) + 5, len(LENGTHS)) if packed else (200, None)
    a = inputs.draw("random", "ttt_linear", Shape(1, T, 2, 2, D, D), state="normal", sequences=N, dtype=dtype)
    if packed:
        a["cu_seqlens"] = SequenceLayout.from_lengths(LENGTHS, tokens=T).cu_seqlens
    op, a, fed = wyfold.chunk_ttt_linear, placed(a), placed({"o": inputs.incoming(a["v"], 1)})
    same_under_nans(lambda: results(op, a, None, fed), poisoned_shared_memory)
