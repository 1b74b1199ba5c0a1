"""Rows that kernels cannot read in vectors, or by TMA, are copied to rows that they can."""

import pytest
import torch

from wyfold.autograd.row_alignment import aligned, contiguous_for_tma, readable_by_tma, vector_aligned

ROWS = torch.randn(2, 5, 3, 48)
LAID = {
    "contiguous": ROWS,
    "heads before tokens": ROWS.transpose(1, 2).contiguous().transpose(1, 2),
    "behind an odd address": torch.cat([torch.zeros(1), ROWS.flatten()])[1:].view(ROWS.shape),
    "rows 49 numbers apart": torch.nn.functional.pad(ROWS, (0, 1))[..., :48],
    "every second number": ROWS.repeat_interleave(2, -1)[..., ::2],
}
COPIED = ("behind an odd address", "rows 49 numbers apart", "every second number")


@pytest.mark.parametrize("kind", LAID)
def test_rows_are_copied_where_vectors_do_not_fit(kind: str):
    x = LAID[kind]
    found = aligned(x)
    assert vector_aligned(found) and torch.equal(found, ROWS)
    assert (found is x) == (kind not in COPIED)


def test_narrow_rows_are_copied_further_apart():
    x = torch.randn(2, 5, 3, 40)
    found = aligned(x)
    assert vector_aligned(found) and torch.equal(found, x) and found.stride(2) == 48


def test_numbers_per_token_and_absent_tensors_stay():
    x = torch.randn(2, 5, 3)
    assert aligned(x) is x and aligned(None) is None


@pytest.mark.parametrize("kind", LAID)
def test_rows_are_copied_where_no_descriptor_fits(kind: str):
    x = LAID[kind]
    found = contiguous_for_tma(x)
    assert readable_by_tma(found) and torch.equal(found, ROWS)
    assert (found is x) == (kind == "contiguous")
