"""`solve_tril` with float32 and 16-bit inputs against float64, for every chunk grid."""

import pytest
import torch

from wyfold.autograd import workspace
from wyfold.kernels import table
from wyfold.reference import error, shapes


def launch(backend: str, L: torch.Tensor, cu_seqlens: torch.Tensor | None, per_part: int) -> torch.Tensor:
    X = torch.zeros_like(L, dtype=torch.promote_types(L.dtype, torch.float32))
    for part in workspace.parts(L.shape[0], L.shape[1], cu_seqlens, L.shape[-1], per_part):
        table.kernel_module("solve_tril", backend).solve_tril(part.block(L), part.table, part.block(X))
    return X


@pytest.mark.parametrize("packing", shapes.PACKINGS)
@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
def test_packed_against_float64_and_cut_into_parts(packing: str, C: int, backend: str):
    packed = shapes.PACKINGS[packing]
    cu_seqlens = torch.tensor(packed.cu_seqlens)
    L = torch.randn(1, packed.tokens, 2, C) / C
    truth = launch("eager", L.double(), cu_seqlens, 1000)
    got = launch(backend, L, cu_seqlens, 1000)
    yardstick = launch("eager", L, cu_seqlens, 1000)
    error.require(error.judge(got, truth, yardstick, name="X"))
    assert torch.equal(launch(backend, L, cu_seqlens, 8), got)


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65, 130])
def test_dense_is_packed(T: int, backend: str):
    L = torch.randn(3, T, 2, 16) / 16
    got = launch(backend, L, None, 1000)
    packed = launch(backend, L.flatten(0, 1)[None], torch.arange(4) * T, 1000)
    assert torch.equal(got.flatten(0, 1), packed[0])
