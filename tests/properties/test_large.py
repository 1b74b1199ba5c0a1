"""Sizes beyond the small tests: long sequences, many sequences, many heads, lengths around many chunks.

A token loop would take minutes. Instead a large call must have the bits of calls on its parts, and small tests compare
those with the loop. A size that does not fit into memory is skipped; the message states the needed and available bytes.
"""

import os
from typing import Any

import pytest
import torch
from tests import processes

import wyfold
from wyfold import reference
from wyfold.autograd import delta as pipeline
from wyfold.reference import inputs, shapes
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
GIB = 2**30


def full_size(*values: Any) -> Any:
    """A parameter of a test that `make compile` runs before a release; `make test` runs a part of that size."""
    return pytest.param(*values, marks=[pytest.mark.release, pytest.mark.long])


def chunked(rule: str):
    return getattr(wyfold, f"chunk_{rule}")


def within(float64_bounds, got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert got.keys() == truth.keys()
    for name, x in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)


# --- against the token loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [*shapes.BORDER_LENGTHS, *map(full_size, shapes.FAR_BORDER_LENGTHS)])
@pytest.mark.parametrize("rule", RULES)
def test_around_multiples_of_the_chunk(rule: str, T: int, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, T, 1, 1, 8, 8), state="normal", dtype=torch.float64)
    truth = results(getattr(reference, rule), a, output_final_state=True)
    within(float64_bounds, results(chunked(rule), a, output_final_state=True), truth)


@pytest.mark.parametrize(("K", "V"), shapes.UNEQUAL_WIDTHS)
@pytest.mark.parametrize("rule", RULES)
def test_keys_and_values_of_unequal_widths(rule: str, K: int, V: int, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, 70, 1, 2, K, V), state="normal", dtype=torch.float64)
    truth = results(getattr(reference, rule), a, output_final_state=True)
    for form in ("chunk", "fused_recurrent"):
        within(float64_bounds, results(getattr(wyfold, f"{form}_{rule}"), a, output_final_state=True), truth)


@pytest.mark.parametrize("rule", RULES)
def test_heads_as_wide_as_a_model_has_them(rule: str, results, float64_bounds):
    a = inputs.draw("random", rule, shapes.WIDE, state="normal", dtype=torch.float64)
    truth = results(getattr(reference, rule), a, output_final_state=True)
    within(float64_bounds, results(chunked(rule), a, output_final_state=True), truth)


# --- against parts of itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [7_000, full_size(shapes.MANY_SEQUENCES.tokens)])
def test_many_sequences(N: int, results):
    """Each sequence, of one token, has the bits that it has in a small batch."""
    cu = torch.arange(N + 1)
    a = inputs.draw("random", "kda", Shape(1, N, 1, 1, 8, 8))
    every = results(wyfold.chunk_kda, a, output_final_state=True, cu_seqlens=cu)
    for first in (0, N // 2, N - 10):
        some = {name: x[:, first : first + 10] for name, x in a.items()}
        fed = {"o": inputs.incoming(a["v"], 0)[:, first : first + 10]}
        fed["state"] = inputs.incoming(every["state"], 1)[first : first + 10]
        alone = results(wyfold.chunk_kda, some, None, fed, output_final_state=True, cu_seqlens=torch.arange(11))
        for name, x in alone.items():
            assert torch.equal(x, every[name].narrow(0 if name == "state" else 1, first, 10)), name


def test_seventy_thousand_empty_sequences_return_their_states(results):
    """Only the last sequence has tokens, so only its state changes."""
    N = shapes.MANY_SEQUENCES.tokens
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 5, 1, 1, 8, 8), state="normal", sequences=N)
    cu = torch.zeros(N + 1, dtype=torch.int32)
    cu[-1] = 5
    found = results(wyfold.chunk_gated_delta_rule, a, output_final_state=True, cu_seqlens=cu)
    fed = {"o": inputs.incoming(found["o"], 0), "state": inputs.incoming(found["state"], 1)}
    assert torch.equal(found["state"][:-1], a["initial_state"][:-1])
    assert torch.equal(found["dinitial_state"][:-1], fed["state"][:-1])
    last = a | {"initial_state": a["initial_state"][-1:]}
    alone = results(
        wyfold.chunk_gated_delta_rule, last, None, fed | {"state": fed["state"][-1:]}, output_final_state=True
    )
    for name, x in alone.items():
        assert torch.equal(x, found[name][-1:] if "state" in name else found[name]), name


@pytest.mark.parametrize("shape", [Shape(256, 2, 24, 24, 8, 8), full_size(shapes.MANY_HEADS)], ids=["part", "full"])
def test_many_rows_and_heads(shape: Shape, results):
    """A call with a few of them has the same bits."""
    a = inputs.draw("random", "kda", shape)
    every = results(wyfold.chunk_kda, a)
    part = slice(107, 109), slice(None), slice(20, 23)
    some = {name: x[part] for name, x in a.items()}
    alone = results(wyfold.chunk_kda, some, None, {"o": inputs.incoming(every["o"])[part]})
    assert all(torch.equal(x, every[name][part]) for name, x in alone.items())


CHUNK = 64  # its multiples are boundaries for every chunk size; a cut elsewhere rounds differently


def tokens(a: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """The arguments of a range of tokens; the state is kept."""
    return {name: x if name == "initial_state" else x[:, rows] for name, x in a.items()}


@pytest.mark.parametrize("T", [8_193, full_size(shapes.LONG_LENGTHS[0])])
@pytest.mark.parametrize("rule", RULES)
def test_a_long_sequence_equals_its_pieces(rule: str, T: int, results):
    """Forward and backward: the state is passed on, and its gradient is passed back."""
    options = {"output_final_state": True}
    a = inputs.draw("random", rule, Shape(1, T, 1, 1, 8, 8), state="normal")
    whole = results(chunked(rule), a, **options)
    fed = {"o": inputs.incoming(whole["o"], 0), "state": inputs.incoming(whole["state"], 1)}
    cut = T // 2 // CHUNK * CHUNK
    before, after = tokens(a, slice(0, cut)), tokens(a, slice(cut, T))
    _, after["initial_state"] = chunked(rule)(**before, **options)
    last = results(chunked(rule), after, None, fed | {"o": fed["o"][:, cut:]}, **options)
    first = results(chunked(rule), before, None, {"o": fed["o"][:, :cut], "state": last["dinitial_state"]}, **options)
    assert torch.equal(last["state"], whole["state"])
    assert torch.equal(first["dinitial_state"], whole["dinitial_state"])
    for name in ("o", *(f"d{x}" for x in a if x != "initial_state")):
        assert torch.equal(torch.cat([first[name], last[name]], 1), whole[name]), name


@pytest.mark.parametrize("T", [shapes.LONG_LENGTHS[0], full_size(shapes.LONG_LENGTHS[1])])
def test_a_long_sequence_has_the_final_state_of_its_last_piece(T: int, results):
    options = {"output_final_state": True}
    a = inputs.draw("random", "gated_delta_rule", Shape(1, T, 1, 1, 8, 8), state="normal")
    whole = results(wyfold.chunk_gated_delta_rule, a, **options)
    fed = {"o": inputs.incoming(whole["o"], 0), "state": inputs.incoming(whole["state"], 1)}
    cut = T // CHUNK * CHUNK - 10 * CHUNK
    after = tokens(a, slice(cut, T))
    _, after["initial_state"] = wyfold.chunk_gated_delta_rule(**tokens(a, slice(0, cut)), **options)
    last = results(wyfold.chunk_gated_delta_rule, after, None, fed | {"o": fed["o"][:, cut:]}, **options)
    assert torch.equal(last["state"], whole["state"])
    for name in ("o", *(f"d{x}" for x in a if x != "initial_state")):
        assert torch.equal(last[name], whole[name][:, cut:]), name
        assert whole[name].isfinite().all(), name


# --- memory ----------------------------------------------------------------------------------------------------------

LONG_TRAINING = """
import sys, torch, wyfold
torch.set_num_threads(1)
T, H, D = int(sys.argv[1]), 2, 64
q, k, v = (torch.randn(1, T, H, D) for _ in range(3))
k, beta, g = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, T, H), -0.1 * torch.rand(1, T, H)
o, _ = wyfold.chunk_gated_delta_rule(*(x.requires_grad_() for x in (q, k, v, g, beta)))
o.backward(torch.ones_like(o))
assert all(x.grad.isfinite().all() for x in (q, k, v, g, beta))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc/self/status: the peak cannot be read")
@pytest.mark.parametrize("T, limit", [(32_768, 0.75), full_size(131_072, 2.0)])
def test_a_long_training_step_fits(T: int, limit: float):
    """Peak memory in GiB, including what PyTorch takes for itself."""
    done = processes.fresh().run(["-c", LONG_TRAINING, T])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 <= limit * GIB, f"peak {int(done.stdout) / 2**20:.2f} GiB"


class OperationCount(torch.utils._python_dispatch.TorchDispatchMode):
    """Dispatch mode that counts operations, and the elements of the largest result."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += 1
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                # Stored elements only: those of an expanded view take no memory.
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return found


def operation_counts(monkeypatch, rule: str, shape: Shape, results, **options: Any) -> dict[str, OperationCount]:
    """Counts of the launches of each direction. They are taken inside of the operators, which hide them from outer
    modes.
    """
    counts = {}

    def watched(direction: str):
        run = getattr(pipeline, direction)

        def counted(*arguments: Any) -> Any:
            counts[direction] = OperationCount()
            with counts[direction]:
                return run(*arguments)

        return counted

    with monkeypatch.context() as patch:
        for direction in ("_forward", "_backward"):
            patch.setattr(pipeline, f"{direction}_op", watched(direction))
        results(chunked(rule), inputs.draw("random", rule, shape), output_final_state=True, **options)
    return counts


@pytest.mark.parametrize("keep", [False, True], ids=["rebuild", "keep"])
def test_no_tensor_holds_a_chunk_of_rows_for_every_channel(keep: bool, results, monkeypatch):
    """A channel-wise decay is no [T, C, K] table; not even of one head."""
    T, K, C, H = 4096, 64, 64, 2
    counts = operation_counts(
        monkeypatch, "kda", Shape(1, T, H, H, K, K), results, chunk_size=C, disable_recompute=keep
    )
    for direction, tally in counts.items():
        assert 0 < tally.largest < T * C * K * H / 4, f"{direction}: {tally.largest}"


@pytest.mark.parametrize("rule", RULES)
def test_no_loop_over_tokens(rule: str, results, monkeypatch):
    """One more token costs the chunk form less than five operations, over all launches and both directions."""
    short, long = (
        operation_counts(monkeypatch, rule, Shape(1, T, 1, 1, 8, 8), results, chunk_size=64) for T in (1024, 4096)
    )
    extra = sum(long[direction].count - short[direction].count for direction in long)
    assert 0 <= extra < 5 * (4096 - 1024)


# --- what does not fit -----------------------------------------------------------------------------------------------


def available_memory() -> int:
    """Bytes of memory that are available now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(what: str, needed: int) -> None:
    """Skip unless the machine has `needed` bytes available."""
    if available_memory() < needed:
        there = f"{needed / GIB:.0f} GiB, this machine has {available_memory() / GIB:.0f}"
        pytest.skip(f"{what} need {there}: waits for the GPU")


def test_more_than_two_to_the_31_elements(results):
    """Forward and backward; the last head, beyond that offset, has the bits of a call with that head alone."""
    size = shapes.OVER_INT32
    elements = size.T * size.H * size.K
    assert elements > 2**31
    require_memory("2^31 elements in each of q, k, v, o and their gradients", 10 * 4 * elements)
    head = inputs.draw("random", "delta_rule", Shape(1, size.T, 1, 1, size.K, size.V))
    every = {name: x.repeat_interleave(size.H, 2) for name, x in head.items()}
    fed = inputs.incoming(head["v"])
    alone = results(wyfold.chunk_delta_rule, head, None, {"o": fed})
    found = results(wyfold.chunk_delta_rule, every, None, {"o": fed.repeat_interleave(size.H, 2)})
    assert all(torch.equal(found[name][:, :, -1:], x) for name, x in alone.items())


def test_more_chunks_than_a_launch_grid_has_rows():
    T = shapes.past_the_grid(CHUNK)
    if not torch.cuda.is_available():
        pytest.skip(f"{T:,} tokens take a CPU core minutes, and no CUDA device is here: waits for the GPU")
    a = inputs.draw("random", "gated_delta_rule", Shape(1, T, 1, 1, 8, 8))
    a = {name: x.cuda() for name, x in a.items()}
    cut = T // 2 // CHUNK * CHUNK
    o, _ = wyfold.chunk_gated_delta_rule(**a, chunk_size=CHUNK)
    _, S = wyfold.chunk_gated_delta_rule(**tokens(a, slice(0, cut)), chunk_size=CHUNK, output_final_state=True)
    last, _ = wyfold.chunk_gated_delta_rule(**tokens(a, slice(cut, T)), chunk_size=CHUNK, initial_state=S)
    assert torch.equal(o[:, cut:], last)
