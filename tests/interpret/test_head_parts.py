"""A backward that takes some heads after the others: the same bits with less memory at once."""

import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import wyfold
from wyfold.autograd import delta_chunk, kernel_call
from wyfold.autograd import head_parts as module
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.autograd.head_parts import head_parts
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import replay_cache
from wyfold.runtime.chunk_layout import chunk_grid
from wyfold.runtime.kernel_configs import Config

MIB = 1 << 20


def call(rule: str, shape: Shape, device: torch.device, N: int | None = None, **drawn: Any) -> dict[str, Any]:
    """Arguments on the device of a call with norm, gate, logits and states."""
    drawn = {"gate": "model", "beta": "logits", "state": "normal", "sequences": N} | drawn
    a = inputs.draw("random", rule, shape, **drawn)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": 16, "backend": "triton"}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch):
    """`small_parts(heads)`: parts of so many key heads, whatever their memory."""

    def split(heads: int) -> None:
        parts = [(i, min(i + heads, 6)) for i in range(0, 6, heads)]

        def of(t: DeltaTensors, *_: Any) -> list[module.HeadPart]:
            H, group = t.q.shape[2], t.v.shape[2] // t.q.shape[2]
            return [module.HeadPart(slice(a, b), slice(a * group, b * group)) for a, b in parts if a < H]

        monkeypatch.setattr(delta_chunk, "head_parts", of)
        monkeypatch.setattr(kernel_call, "tuned", lambda *_: Config(blocks={"HEAD_PARTS": 1}))
        replay_cache.forget()

    yield split
    replay_cache.forget()


@pytest.mark.parametrize("rule, group, packed", [("gated_delta_rule", 1, False), ("kda", 2, True)])
def test_parts_have_the_bits_of_the_whole(rule: str, group: int, packed: bool, small_parts, device, results):
    op, N = getattr(wyfold, f"chunk_{rule}"), 3 if packed else None
    a = call(rule, Shape(1 if packed else 2, 19, 3, 3 * group, 16, 8), device, N)
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 17, 17, 18], device=device)
    if "A_log" in a:  # strided parameters
        a["A_log"] = torch.stack([a["A_log"], a["A_log"]], -1)[..., 1]
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    whole = results(op, a, None, fed)
    small_parts(2)
    parts = results(op, a, None, fed)
    assert parts.keys() == whole.keys()
    for name, x in whole.items():
        if name in ("dA_log", "ddt_bias"):  # summed over chunks, in an order that depends on the number of heads
            terms = math.ceil(19 / 16) * (1 if packed else 2)
            assert (parts[name] - x).abs().max() <= terms * torch.finfo(x.dtype).eps * x.abs().max(), name
        else:
            assert torch.equal(parts[name], x), name


def test_parts_write_the_gradients_that_are_wanted(small_parts, device):
    a = call("gated_delta_rule", Shape(1, 20, 2, 2, 16, 8), device, state="none", gate="weak", beta="sigmoid")
    a["output_final_state"] = False

    def gradients() -> tuple[Tensor, ...]:
        asked = [a[name].detach().requires_grad_() for name in ("k", "beta")]
        o, _ = wyfold.chunk_gated_delta_rule(**(a | dict(zip(("k", "beta"), asked, strict=True))))
        return torch.autograd.grad(o.sum(), asked)

    whole = gradients()
    small_parts(1)
    assert all(torch.equal(x, y) for x, y in zip(gradients(), whole, strict=True))


class Live(TorchDispatchMode):
    """Count the bytes of the storages that operations allocate, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and func._schema.name.startswith("aten::") and "empty" in func._schema.name:
                gc.collect()  # the interpreter's launches are cycles, which hold their tensors
                storage = x.untyped_storage()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, storage.nbytes())
        return result

    def freed(self, size: int) -> None:
        self.now -= size


def test_parts_need_less_memory_at_once(small_parts, device, monkeypatch):
    """Gradients in full, and the borders of one part. Norm and gate are outside: inside they add sums in float32."""
    a = call("gated_delta_rule", Shape(1, 32, 6, 6, 64, 64), device, state="none", gate="weak", beta="sigmoid")
    a |= {"output_final_state": False, "use_qk_l2norm_in_kernel": False}
    names, found, usual = ("q", "k", "v", "g", "beta"), {}, delta_chunk.backward
    asked = [a[name].detach().requires_grad_() for name in names]

    def counted(given: Any) -> list[Tensor]:
        gc.collect()
        gc.freeze()  # so that collections inside do not visit every object of the test run
        with Live() as live:
            result = usual(given)
        gc.unfreeze()
        found[heads] = live.most
        return result

    monkeypatch.setattr(delta_chunk, "backward", counted)
    for heads in (6, 3, 1):
        small_parts(heads)
        o, _ = wyfold.chunk_gated_delta_rule(**(a | dict(zip(names, asked, strict=True))))
        torch.autograd.grad(o, asked, torch.ones_like(o))
    chunks, C, wide = 32 // 16, 16, 4
    borders, gradients = 6 * chunks * 2 * 64 * (64 + C) * wide, 3 * a["q"].nbytes + 2 * a["g"].nbytes
    for heads in (6, 3, 1):
        factors = heads * chunks * (4 * C + 1 + 2 * 3 * C * C // 4) * wide  # rows, total, F and W
        assert gradients + borders * heads // 6 <= found[heads] <= gradients + borders * heads // 6 + factors, heads


def shares(t: DeltaTensors, C: int = 64, processors: int = 132) -> list[int]:
    """Key heads of each part."""
    grid = chunk_grid(t.q.shape[0], t.q.shape[1], C, t.cu_seqlens)
    found = head_parts(t, grid, processors)
    edges = [part.keys.start for part in found] + [found[-1].keys.stop]
    group = t.v.shape[2] // t.q.shape[2]
    assert edges[0] == 0 and edges[-1] == t.q.shape[2]
    assert all(part.values == slice(part.keys.start * group, part.keys.stop * group) for part in found)
    return [b - a for a, b in itertools.pairwise(edges)]


def tensors(
    B: int, T: int, H: int, HV: int, K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16
) -> DeltaTensors:
    """Tensors without memory."""
    q, v = (torch.empty(B, T, h, w, dtype=dtype, device="meta") for h, w in ((H, K), (HV, V)))
    return DeltaTensors(q, q, v, None, None, None, None, None, None, None)


@pytest.mark.parametrize(
    "sizes, heads",
    [
        ((1, 8192, 96, 96), [32, 32, 32]),  # one wave of programs each, 384 MiB
        ((4, 4096, 64, 64), [16] * 4),  # two waves each: one has 192 MiB
        ((1, 8192, 16, 64), [8, 8]),
        ((1, 8192, 16, 48), [8, 8]),
        ((1, 8192, 16, 32), [16]),  # does not fill the GPU twice
        ((1, 32768, 32, 32), [32]),
        ((1, 8192, 40, 40), [24, 16]),  # begin at a multiple of eight heads
        ((8, 4096, 8, 8), [8]),
        ((1, 1024, 96, 96), [96]),  # too little memory
    ],
)
def test_parts_fill_the_gpu_and_have_much_memory(sizes: tuple[int, ...], heads: list[int]):
    assert shares(tensors(*sizes)) == heads


def test_memory_of_a_part():
    """The borders of a part have at least `LEAST_BYTES`; those of 96 heads at 8,192 tokens have 1,152 MiB."""
    t = tensors(1, 8192, 96, 96)
    tiles = 8192 // 64 * 96
    assert tiles * 2 * 128 * (128 + 64) * 2 == 1152 * MIB
    assert all(count * 12 * MIB >= module.LEAST_BYTES for count in shares(t))
