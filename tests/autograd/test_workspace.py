"""Cutting a call into parts: every token once, states passed on, and no bit changed."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wyfold
from wyfold.autograd import workspace
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")


# --- the cut itself --------------------------------------------------------------------------------------------------


def times_covered(parts: list[workspace.WorkspacePart], rows: int, tokens: int) -> torch.Tensor:
    """Count the parts that contain each token of [rows, tokens]."""
    seen = torch.zeros(rows, tokens, dtype=torch.int64)
    for part in parts:
        seen[part.rows, part.tokens] += 1
    return seen


@given(st.integers(0, 5), st.integers(0, 300), st.sampled_from([16, 32, 64]), st.integers(8, 40))
def test_a_dense_batch(B: int, T: int, C: int, per_part: int):
    parts = workspace.parts(B, T, None, C, per_part)
    assert (times_covered(parts, B, T) == 1).all()
    assert len(parts) == (workspace.part_count(B, T, None, C, per_part) if B and T else 0)
    assert sum(part.table.chunks for part in parts) == workspace.chunk_rows(B, T, None, C)
    done, border, chunk = {}, 0, 0
    for part in parts:
        assert part.table.chunks <= per_part and part.first_chunk == chunk and part.index == border
        before = done.get(part.rows.start, 0)
        assert part.tokens.start == part.done == before and before % C == 0
        n = part.rows.stop - part.rows.start
        assert part.entered == (n if before else 0) and part.left == (n if part.tokens.stop < T else 0)
        assert part.sequences == part.rows
        done[part.rows.start] = part.tokens.stop
        border, chunk = border + n, chunk + part.table.chunks
    assert border <= max(workspace.border_rows(B, T, None, C, per_part), 0)


@given(st.lists(st.integers(0, 150), max_size=7), st.sampled_from([1, 16, 32]), st.integers(1, 9), st.integers(0, 5))
def test_a_packed_row(lengths: list[int], C: int, per_part: int, spare: int):
    cu = torch.tensor([0, *lengths]).cumsum(0)
    T = sum(lengths) + spare
    parts = workspace.parts(1, T, cu, C, per_part)
    seen = times_covered(parts, 1, T)[0]
    assert (seen[: sum(lengths)] == 1).all() and (seen[sum(lengths) :] == 0).all()
    assert len(parts) <= workspace.border_rows(1, T, len(lengths), C, per_part)
    assert sum(part.table.chunks for part in parts) <= workspace.chunk_rows(1, T, len(lengths), C)
    for number, part in enumerate(parts):
        assert part.index == number and part.table.chunks <= per_part
        first, last = part.sequences.start, part.sequences.stop - 1
        assert part.entered == int(part.tokens.start > cu[first]) and part.left == int(part.tokens.stop < cu[last + 1])
        assert part.done == part.tokens.start - int(cu[first]) and part.done % C == 0
        if number:
            assert part.tokens.start >= parts[number - 1].tokens.stop
            assert bool(part.entered) == bool(parts[number - 1].left)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(1, 6))
def test_where_chunks_end(lengths: list[int], per_part: int):
    """`chunk_ends` gives every chunk's sequence and end, compared with a list over sequences."""
    cu = torch.tensor([0, *lengths]).cumsum(0)
    found = []
    for part in workspace.parts(1, sum(lengths), cu, 16, per_part):
        sequence, position = part.chunk_ends()
        found += zip(sequence.tolist(), position.tolist())
    assert sorted(found) == [
        (n, end) for n, length in enumerate(lengths) for end in [*range(16, length, 16), length] if length
    ]


def test_a_part_holds_at_least_some_columns(monkeypatch):
    assert workspace.chunks_per_part(workspace.WORKSPACE_BYTES // 100) == 100
    assert workspace.chunks_per_part(10 * workspace.WORKSPACE_BYTES) == workspace.MIN_COLUMNS
    assert workspace.chunks_per_part(0) == workspace.WORKSPACE_BYTES


# --- no bit changes --------------------------------------------------------------------------------------------------


def cut_small(monkeypatch, columns: int) -> list[int]:
    """Limit parts to `columns` chunks; return a list that collects the number of parts of each pass."""
    counts = []
    parts = workspace.parts

    def counted(*sizes: Any) -> list[workspace.WorkspacePart]:
        found = parts(*sizes)
        counts.append(len(found))
        return found

    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(workspace, "MIN_COLUMNS", columns)
    monkeypatch.setattr(workspace, "parts", counted)
    return counts


BATCHES = {
    "dense": (Shape(3, 150, 1, 2, 8, 16), {}),
    "packed": (Shape(1, 300, 1, 2, 8, 16), {"cu_seqlens": torch.tensor([0, 1, 130, 130, 131, 163, 290])}),
    "one long sequence": (Shape(1, 300, 2, 2, 16, 8), {"cu_seqlens": torch.tensor([0, 0, 300, 300])}),
}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release), "gated_delta_rule", "kda"])
def test_many_parts_give_the_bits_of_one(rule: str, form: str, batch: str, columns: int, results, monkeypatch):
    shape, options = BATCHES[batch]
    N = options["cu_seqlens"].shape[0] - 1 if options else None
    a = inputs.draw("random", rule, shape, gate="any", state="normal", sequences=N) | options
    a |= {"output_final_state": True, "return_intermediate_states": True, "checkpoint_every": 16}
    a["use_qk_l2norm_in_kernel"] = True
    op = getattr(wyfold, f"{form}_{rule}")
    whole = results(op, a)
    counts = cut_small(monkeypatch, columns)
    cut = results(op, a)
    assert min(counts) > 5
    for name in whole:
        assert torch.equal(cut[name], whole[name]), name
    if form == "chunk":
        kept = results(op, a, disable_recompute=True)
        assert all(torch.equal(kept[name], whole[name]) for name in whole)


@pytest.mark.parametrize("form", FORMS)
def test_only_parameter_sums_may_differ_between_cuts(form: str, results, monkeypatch, float64_bounds):
    """dA_log and ddt_bias are summed over parts in another order; everything else is equal bit for bit."""
    a = inputs.draw("random", "kda", Shape(2, 200, 1, 2, 8, 8), gate="model", dtype=torch.float64)
    op = getattr(wyfold, f"{form}_kda")
    whole = results(op, a)
    counts = cut_small(monkeypatch, 1)
    cut = results(op, a)
    assert min(counts) > 5
    for name in whole:
        if name in ("dA_log", "ddt_bias"):
            float64_bounds.gradient(name, cut[name], whole[name])
        else:
            assert torch.equal(cut[name], whole[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_through_the_state_alone_crosses_parts(form: str, results, monkeypatch):
    a = inputs.draw("random", "gated_delta_rule", Shape(2, 150, 1, 2, 8, 8), state="normal") | {
        "output_final_state": True
    }
    op = getattr(wyfold, f"{form}_gated_delta_rule")
    fed = {"state": inputs.incoming(a["initial_state"], 1)}
    whole = results(op, a, None, fed)
    cut_small(monkeypatch, 2)
    cut = results(op, a, None, fed)
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    assert whole["dinitial_state"].any() and not whole["dq"].any()
