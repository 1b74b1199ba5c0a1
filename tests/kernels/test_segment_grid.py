"""The `segment_grid` launch against PyTorch operators: every sequence is cut by its own length."""

import itertools

import pytest
import torch

from wyfold.kernels import table
from wyfold.runtime import chunk_layout
from wyfold.runtime.chunk_layout import Cut

CUTS = (Cut(1, 2, 4), Cut(1, 16, 4), Cut(2, 3, 8), Cut(3, 64, 6), Cut(2, 8, 8))
LENGTHS = {
    "ragged": (0, 17, 1, 300, 0, 64, 63, 65, 128, 0),
    "more than a step holds": tuple(range(0, 120, 2)) + (500,),
    "none long": (5, 1),
    "no sequence": (),
}


def expected_segments(grid: chunk_layout.ChunkGrid, cut: Cut) -> list[tuple[int, int, int]]:
    """(sequence, first token in the buffer, first chunk) of each segment, by counting."""
    C = grid.chunk_size
    begins = [n * grid.tokens for n in range(grid.sequences + 1)] if grid.cu is None else grid.cu.tolist()
    found, chunk = [], 0
    for n in range(grid.sequences):
        held = -(-(begins[n + 1] - begins[n]) // C)
        count = cut.segments(held)
        length = held if count == 1 else cut.length(held)
        found += [(n, begins[n] + i * length * C, chunk + i * length) for i in range(count)]
        chunk += held
    return found


def borders(found: chunk_layout.Segments) -> tuple[list[int], list[int]]:
    """Segments followed by another segment of their sequence, and sequences that are cut, from the segments'
    sequences."""
    numbers = found.sequence.tolist()
    goes_on = [i for i, (n, behind) in enumerate(itertools.pairwise(numbers)) if n == behind < found.sequences]
    return goes_on, sorted({numbers[i] for i in goes_on})


def check_borders(found: chunk_layout.Segments) -> None:
    """Unused borders name no segment in front of a border or behind it."""
    goes_on, divided = borders(found)
    leading, spare = found.leading[: len(goes_on)].tolist(), found.leading[len(goes_on) :].tolist()
    assert leading == goes_on and len(found.leading) == found.borders
    for i in spare:
        assert i not in goes_on and found.sequence[i + 1] == found.sequences
    assert found.divided.tolist() == divided + [found.sequences] * (len(found.divided) - len(divided))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("packing", LENGTHS)
def test_a_packed_batch(packing: str, cut: Cut):
    lengths = LENGTHS[packing]
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    grid = chunk_layout.chunk_grid(1, sum(lengths) + 13, 16, cu)
    found = chunk_layout.segment_grid(grid, cut, cu.device)
    truth, count = expected_segments(grid, cut), found.grid.sequences
    used = len(truth)
    assert used <= count == len(lengths) + found.borders
    rows = zip(found.sequence.tolist(), found.grid.cu.tolist(), found.grid.first.tolist())
    assert list(rows) == truth + [(len(lengths), sum(lengths), int(grid.first[-1]))] * (count - used)
    assert found.grid.cu[-1] == sum(lengths)
    assert found.first.diff().tolist() == [cut.segments(-(-length // 16)) for length in lengths]
    check_borders(found)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_largest_number_of_cut_sequences(cut: Cut):
    """All sequences have the least length that is cut, so every entry of the tables is used."""
    shortest = (4 * cut.chunks - 1) * 16 + 1
    cu = torch.arange(0, 6 * shortest, shortest)
    found = chunk_layout.segment_grid(chunk_layout.chunk_grid(1, int(cu[-1]), 16, cu), cut, cu.device)
    assert found.divided.tolist() == [0, 1, 2, 3, 4]
    check_borders(found)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 301])
def test_a_dense_batch_has_no_spare_segment(tokens: int, cut: Cut):
    grid = chunk_layout.chunk_grid(3, tokens, 16, None)
    found = chunk_layout.segment_grid(grid, cut, torch.device("cpu"))
    rows = zip(found.sequence.tolist(), found.grid.cu.tolist(), found.grid.first.tolist())
    assert list(rows) == expected_segments(grid, cut)
    assert (found.grid.tokens, found.grid.chunks) == (3 * tokens, grid.chunks)
    assert found.expected == found.grid.sequences
    check_borders(found)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("packing", [*LENGTHS, None])
def test_the_kernel_equals_eager(packing: str | None, cut: Cut, device: torch.device):
    if packing is None:
        grid = chunk_layout.chunk_grid(3, 301, 16, None)
    else:
        cu = torch.tensor([0, *itertools.accumulate(LENGTHS[packing])], device=device)
        grid = chunk_layout.chunk_grid(1, sum(LENGTHS[packing]) + 13, 16, cu)
    truth = chunk_layout.segment_grid(grid, cut, device)
    found = table.kernel_module("segment_grid", "triton").segment_grid(grid, cut, device)
    assert (found.sequences, found.borders, found.expected) == (truth.sequences, truth.borders, truth.expected)
    for name in ("sequence", "first", "leading", "divided"):
        assert torch.equal(getattr(found, name), getattr(truth, name)), name
    for name in ("cu", "first"):
        assert torch.equal(getattr(found.grid, name), getattr(truth.grid, name)), name
    assert (found.grid.sequences, found.grid.tokens) == (truth.grid.sequences, truth.grid.tokens)
