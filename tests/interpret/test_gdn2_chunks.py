"""GDN-2 in chunks of 64 rows: on Hopper its forward is prepared by a kernel in Gluon, and its backward has 32 rows.

In Triton's interpreter both are Triton's kernels, at a cost that only `make compile` pays.
"""

from itertools import pairwise

import pytest
import torch
from tests.interpret.test_low_rank import BF16, PER_TOKEN, drawn, require_accurate, require_separate_bits
from tests.ops.low_rank_calls import OPERATORS

import wyfold
from wyfold import serving
from wyfold.autograd import low_rank_chunk
from wyfold.reference import inputs
from wyfold.reference.error import rms
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

slow = pytest.mark.release_if_interpreted
NAME = "chunk_gdn2"


@slow
@pytest.mark.parametrize("gate", ["any", "-1e-3", "-20", "-88", "reset one", "alternating"])
def test_gates(gate: str, device, guarded, results):
    a = drawn(NAME, Shape(1, 130, 1, 2, 128, 64), gate, dtype=BF16)
    require_accurate(NAME, a, device, guarded, results, chunk_size=64)


@slow
@pytest.mark.parametrize("options", [{"disable_recompute": True}, {"scale": 0.3}], ids=str)
def test_gate_inside_norms_and_grouped_heads(options, device, guarded, results):
    a = drawn(NAME, Shape(2, 64, 1, 2, 128, 128), "model", dtype=BF16)
    require_accurate(NAME, a, device, guarded, results, use_qk_l2norm_in_kernel=True, chunk_size=64, **options)


@slow
def test_without_an_erase_gate(device, guarded, results):
    a = drawn(NAME, Shape(1, 100, 2, 2, 128, 32), "weak", dtype=BF16)
    del a["b"]
    require_accurate(NAME, a, device, guarded, results, chunk_size=64)


@slow
@pytest.mark.parametrize("keys", ["identical", "two clusters"])
def test_repeated_keys(keys: str, device, guarded, results):
    a = drawn(NAME, Shape(1, 200, 1, 1, 128, 32), "-1e-3", keys=keys, dtype=BF16)
    require_accurate(NAME, a, device, guarded, results, chunk_size=64)


@slow
def test_segments(device, guarded, results):
    a = drawn(NAME, Shape(1, 600, 1, 1, 128, 128), "weak", dtype=BF16)
    with segment_rule.forced(4):
        require_accurate(NAME, a, device, guarded, results, chunk_size=64)


@pytest.mark.parametrize("boundaries", [None, [0, 70, 70, 75, 230]], ids=str)
def test_segments_of_longer_chunks(boundaries, device, guarded, results, monkeypatch):
    """A backward in shorter chunks has the segments that the forward cut."""

    def shorter(t, options):
        return options._replace(chunk_size=16, keep_factors=False)

    monkeypatch.setattr(low_rank_chunk, "backward_options", shorter)
    B, T, packed = (2, 235, {}) if boundaries is None else (1, 240, {"sequences": len(boundaries) - 1})
    a = drawn("chunk_dplr_delta_rule", Shape(B, T, 1, 1, 16, 16), "weak", dtype=torch.float32, **packed)
    if boundaries is not None:
        a["cu_seqlens"] = torch.tensor(boundaries)
        for part in PER_TOKEN:
            if part in a:
                a[part][:, boundaries[-1] :] = torch.nan
    with segment_rule.forced(4):
        require_accurate("chunk_dplr_delta_rule", a, device, guarded, results, chunk_size=32)


@slow
def test_packed_is_separate_and_repeats(device, results):
    op, borders = OPERATORS[NAME][0], [0, 65, 65, 150, 151]
    a = drawn(NAME, Shape(1, 160, 1, 2, 128, 64), sequences=4, dtype=BF16)
    a = {part: x.to(device) if isinstance(x, torch.Tensor) else x for part, x in a.items()}
    a |= {"backend": "triton", "chunk_size": 64}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    for x in (*(a[part] for part in PER_TOKEN if part in a), fed["o"]):
        x[:, 151:] = torch.nan
    cu = torch.tensor(borders, device=device)
    packed, again = (results(op, a, None, fed, cu_seqlens=cu) for _ in range(2))
    assert all(torch.equal(again[part], x) for part, x in packed.items())
    require_separate_bits(results, op, a, fed, packed, borders)


@slow
def test_split_calls(device):
    """At a border of chunks, outputs and states have the bits of the whole call."""
    a = drawn(NAME, Shape(1, 192, 1, 1, 128, 128), dtype=BF16)
    a = {part: x.to(device) if isinstance(x, torch.Tensor) else x for part, x in a.items()}
    a |= {"backend": "triton", "chunk_size": 64}
    o, state = wyfold.chunk_gdn2(**a)
    running, outputs = a["initial_state"], []
    for begin, end in pairwise([0, 64, 192]):
        piece = {part: x[:, begin:end] if part in PER_TOKEN else x for part, x in a.items()}
        one, running = wyfold.chunk_gdn2(**piece | {"initial_state": running})
        outputs.append(one)
    assert torch.equal(torch.cat(outputs, 1), o) and torch.equal(running, state)


@slow
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_prefill_with_a_float32_output(v_first: bool, device):
    """It is Triton's scan on Hopper too, which rounds no output; Gluon's stored bfloat16 into the buffer."""
    a = drawn(NAME, Shape(1, 150, 2, 2, 128, 128), "weak", dtype=BF16)
    a |= {"initial_state": a["initial_state"].mT.contiguous() if v_first else a["initial_state"]}
    a |= {"state_v_first": v_first}
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    truth, final = OPERATORS[NAME][1](**wide)
    a = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    o, state = OPERATORS[NAME][0](**a, backend="triton")
    pool = a.pop("initial_state").repeat(2, 1, 1, 1)
    del a["output_final_state"]
    out = torch.full(a["v"].shape, torch.nan, device=device)
    slot = torch.tensor([1], device=device)
    serving.prefill(**a, beta=None, pool=pool, state_indices=slot, rule="gdn2", out=out, backend="triton")
    assert rms(out.cpu(), truth) < rms(o.cpu(), truth) and rms(pool[1:].cpu(), final) < 1.1 * rms(state.cpu(), final)
