"""`kkt` against float64, for both kinds of gate, every chunk grid, and gates of any strength."""

import pytest
import torch

from wyfold.autograd import workspace
from wyfold.kernels import table
from wyfold.reference import error, shapes
from wyfold.reference.inputs import GATES

HEADS, WIDTH = 2, 24


def launch(
    backend: str,
    k: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    C: int,
    per_part: int = 1000,
) -> torch.Tensor:
    L = torch.zeros(*beta.shape[:3], C, dtype=k.dtype)
    for part in workspace.parts(k.shape[0], k.shape[1], cu_seqlens, C, per_part):
        tokens = (part.block(x) for x in (k, beta, g))
        table.kernel_module("kkt", backend).kkt(*tokens, part.table, k.dtype, part.block(L))
    return L


def drawn(T: int, channels: int, gate: str = "weak", B: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(T)
    k = torch.nn.functional.normalize(torch.randn(B, T, HEADS, WIDTH, generator=generator), dim=-1)
    beta = torch.rand(B, T, 2 * HEADS, 1, generator=generator)
    return k, beta, GATES[gate]((B, T, 2 * HEADS, channels), generator).float()


@pytest.mark.parametrize("packing", shapes.PACKINGS)
@pytest.mark.parametrize("channels", [1, WIDTH])
def test_packed_against_float64_and_cut_into_parts(packing: str, channels: int, backend: str):
    packed = shapes.PACKINGS[packing]
    cu_seqlens = torch.tensor(packed.cu_seqlens)
    tensors = drawn(packed.tokens, channels)
    truth = launch("eager", *(x.double() for x in tensors), cu_seqlens, 32)
    got, yardstick = (launch(name, *tensors, cu_seqlens, 32) for name in (backend, "eager"))
    error.require(error.judge(got, truth, yardstick, name="L"))
    assert torch.equal(launch(backend, *tensors, cu_seqlens, 32, per_part=8), got)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("channels", [1, WIDTH])
@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
def test_any_gate(gate: str, channels: int, C: int, backend: str):
    tensors = drawn(67, channels, gate, B=2)
    truth = launch("eager", *(x.double() for x in tensors), None, C)
    got, yardstick = (launch(name, *tensors, None, C) for name in (backend, "eager"))
    assert got.isfinite().all()
    error.require(error.judge(got, truth, yardstick, name="L"))
