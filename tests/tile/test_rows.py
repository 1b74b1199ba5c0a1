"""Blocks of rows cover every row once, and sums are taken in one layout."""

import pytest
import torch

from wyfold.tile.rows.eager import BLOCK, contiguous_rows, row_blocks, widest


@pytest.mark.parametrize("rows", [0, 1, 2, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("width", [0, 1, 128, BLOCK - 1, BLOCK, BLOCK + 1])
def test_blocks_cover_every_row_once_and_fit(rows: int, width: int):
    blocks = list(row_blocks(rows, width))
    assert [row for block in blocks for row in range(rows)[block]] == list(range(rows))
    assert all(block.stop - block.start == 1 or (block.stop - block.start) * width <= BLOCK for block in blocks)


def test_widest():
    half, single, double = (torch.empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert widest(half, None) == widest(half, single) == torch.float32
    assert widest(half, None, double) == torch.float64


def test_sums_over_rows_do_not_depend_on_layout():
    x = torch.randn(100, 130)
    layouts = (x.t().contiguous().t(), torch.randn(100, 260)[:, ::2].copy_(x), torch.randn(101, 131)[1:, 1:].copy_(x))
    for strided in layouts:
        assert not strided.is_contiguous()
        assert torch.equal(contiguous_rows(strided, torch.float32).square().sum(-1), x.square().sum(-1))
    assert contiguous_rows(x, torch.float32) is x


def test_a_row_stride_in_units():
    triton = pytest.importorskip("wyfold.tile.rows.triton", reason="Triton is not installed", exc_type=ImportError)
    known, other = torch.empty(4, 24), torch.empty(4, 20)
    unit = triton.row_unit(known, None)
    assert unit == 8 and triton.row_stride(known, unit) == 3
    with pytest.raises(ValueError, match=r"^row_stride: x must have a row stride that is a multiple of 8, got 20$"):
        triton.row_stride(other, unit)
