"""Documented promises of serving that did not hold.

`prefill` was documented to have the bits of `chunk_*`, but `chunk_*` cut long calls into segments and `prefill` did
not. `decode_packed` had a `lower_bound` but, unlike `decode`, no `safe_gate`.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compile import aot

import wyfold
from wyfold import serving
from wyfold.models import Decoder, DecoderConfig
from wyfold.models.decoder_call import check_ids
from wyfold.ops import serving_call, serving_checks
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import check, segment_rule

RULES = ("delta_rule", "gated_delta_rule", "kda")


@pytest.mark.parametrize("rule", RULES)
def test_prefill_has_the_bits_of_the_operator(rule: str, float64_bounds):
    """In segments and without them."""
    a = inputs.draw("random", rule, Shape(1, 300, 1, 2, 16, 16), gate="weak", state="normal", dtype=torch.float64)
    op, state = getattr(wyfold, f"chunk_{rule}"), a.pop("initial_state").float()
    found = {}
    with segment_rule.forced(4):
        for splits in (None, 3, 1):
            pool = state.clone()
            o = serving.prefill(**{"g": None, **a}, pool=pool, state_v_first=False, max_splits=splits)
            expected, final = op(**a, initial_state=state, output_final_state=True, max_splits=splits)
            assert torch.equal(o, expected) and torch.equal(pool, final.float())
            found[splits] = o
    assert not torch.equal(found[None], found[1]) and not torch.equal(found[None], found[3])
    float64_bounds.output("o", found[None], found[1])


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("bound", [None, -2.0])
def test_decode_packed_clamps_the_gate_as_decode_does(rule: str, bound: float | None):
    rows, H, HV, K, V = 3, 1, 2, 16, 24
    q, k = torch.randn(2, rows, 1, H, K)
    v, beta = torch.randn(rows, 1, HV, V), torch.randn(rows, 1, HV)
    g = 10 * torch.randn(rows, 1, HV, *([K] if rule == "kda" else []))
    pools = [torch.ones(rows, HV, K, V) for _ in range(3)]
    common = {"state_v_first": False, "lower_bound": bound}
    gate = {"A_log": torch.zeros(HV), "dt_bias": None}
    inside = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    packed = (mixed, g[:, 0], beta[:, 0], gate["A_log"], None)
    sizes = {"heads": (H, HV), "dims": (K, V)}
    o = serving.decode(q, k, v, g, beta, pools[0], safe_gate=True, **gate, **inside, **common)
    p = serving.decode_packed(*packed, pools[1], safe_gate=True, **sizes, **common)
    assert torch.equal(p, o[:, 0]) and torch.equal(pools[1], pools[0])
    unsafe = serving.decode_packed(*packed, pools[2], **sizes, **common)
    assert torch.equal(unsafe, p) == (bound is not None)  # a bounded gate never reaches its bound


def test_a_bound_outside_of_safe_gates_range_is_refused():
    x = torch.randn(1, 48)
    with pytest.raises(ValueError, match=r"^decode_packed: lower_bound must be in \[-5, 0\) with safe_gate=True"):
        serving.decode_packed(
            x, torch.randn(1, 1), torch.randn(1, 1), None, None, torch.zeros(1, 1, 16, 16), heads=(1, 1),
            dims=(16, 16), state_v_first=False, safe_gate=True, lower_bound=-9.0,
        )  # fmt: skip


def test_every_operator_with_a_bound_inside_has_safe_gate():
    operators = [getattr(wyfold, name) for name in wyfold.__all__] + [
        getattr(serving, name) for name in serving.__all__
    ]
    functions = [op for op in operators if inspect.isfunction(op)]
    recurrences = [op for op in functions if "lower_bound" in inspect.signature(op).parameters]
    without = {op.__name__ for op in recurrences if "safe_gate" not in inspect.signature(op).parameters}
    assert without == {"fused_kda_gate"}  # only an activation


@pytest.mark.parametrize("asked", ["plain", "odd v", "odd out", "float32 out", "states"])
def test_explain_names_the_launches_of_prefill(asked: str, monkeypatch):
    """The plan is that of an H100."""
    monkeypatch.setattr(serving_call, "best_chunk_size", lambda *_, **__: 64)  # the value on a GPU
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 128, 1, 1, 128, 128), dtype=torch.bfloat16)
    odd = a["v"].new_zeros(a["v"].numel() + 1)[1:].view(a["v"].shape)
    a |= {"pool": torch.zeros(2, 1, 128, 128), "state_v_first": False, "backend": "triton"}
    a |= {"odd v": {"v": odd}, "odd out": {"out": odd}, "float32 out": {"out": odd.float()}}.get(asked, {})
    if asked == "states":
        a |= {"checkpoint_every": 64, "checkpoint_pool": torch.zeros(2, 1, 128, 128)}
        a |= {"checkpoint_indices": torch.tensor([[0, 1]])}
    seen = set()
    with aot.pretend_gpu("sm_90", lambda kernel, *_, **__: seen.add(aot.kernel_name(kernel))):
        serving.prefill(**a)
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        plan = wyfold.explain(serving.prefill, **a)
    named = {".".join(x.partition("(wyfold.kernels.")[2].rstrip(")").split(".")[:2]) for x in plan.forward}
    assert seen - {"chunk_grid.triton"} == named
    assert plan.copies == (("v",) if asked == "odd v" else ())
    assert ("scan.gluon" in seen) == (asked in ("plain", "odd v", "odd out"))


@pytest.fixture
def gpu_tensors(monkeypatch: pytest.MonkeyPatch):
    """Tensors that claim to be on a GPU. Reading their contents raises, as during a graph capture."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(check, "Tensor", FakeTensor)
    with FakeTensorMode():
        yield lambda *shape: torch.empty(*shape, dtype=torch.int64, device="cuda")


def test_a_captured_step_inside_checked_reads_no_contents(gpu_tensors, monkeypatch: pytest.MonkeyPatch):
    """`stream` captures its second step as a CUDA graph; reading token ids or slots would abort the capture."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(hidden_size=32, num_layers=1, pattern="gdn", num_heads=2, head_dim=16))
    ids, q = gpu_tensors(2, 1), gpu_tensors(2, 1, 2, 16)
    given: Any = SimpleNamespace(
        q=q,
        has_initial_state=None,
        num_accepted_tokens=None,
        cu_seqlens=None,
        state_indices=None,
        output_state_indices=None,
        pool=gpu_tensors(2, 2, 16, 16),
    )
    flags: Any = SimpleNamespace(op="op", pad_slot_id=-1, each=False)
    reads = (
        lambda: check_ids(model, ids, None, None),
        lambda: serving_checks._check_distinct(given, flags, {"N": 2, "T": 1}),
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with wyfold.checked():
        for read in reads:
            with pytest.raises(RuntimeError):
                read()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for read in reads:
            read()
