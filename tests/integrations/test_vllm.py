"""vLLM's plug-in: its adapters against a float64 token loop, its replacement of functions, and vLLM's own layer."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.integrations.engines import (
    Gates,
    assert_near,
    check_sources,
    entry_point,
    logged,
    paged_pool,
    parameters,
    run_script,
    stub_module,
    stub_source,
    token_loop,
)
from torch import Tensor, nn

from wyfold.integrations import vllm
from wyfold.integrations.vllm import gdn, glm, kda, olmo

H, HV, K, V = 2, 4, 16, 24
SLOTS = 12
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""(dtype of the tokens, dtype of the pool)."""

ADAPTERS = {
    (gdn.MODULE, "ChunkGatedDeltaRule.forward_native"): gdn.prefill,
    (gdn.MODULE, "fused_recurrent_gated_delta_rule_packed_decode"): gdn.decode,
    (gdn.MODULE, "fused_sigmoid_gating_delta_rule_update"): gdn.verify,
    (gdn.MODULE, "QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode"): gdn._use_no_fused_kernel,
    (kda.MODULE, "chunk_kda_with_fused_gate"): kda.prefill,
    (kda.MODULE, "fused_recurrent_kda_packed_decode"): kda.decode,
    (kda.MODULE, "fused_recurrent_kda"): kda.verify,
    (glm.MODULE, "chunk_kda_with_fused_gate"): glm.prefill,
    (glm.MODULE, "fused_recurrent_kda"): glm.verify,
    (olmo.MODULE, "chunk_gated_delta_rule"): olmo.prefill,
    (olmo.MODULE, "fused_recurrent_gated_delta_rule"): olmo.verify,
}


class Tokens(NamedTuple):
    """Tokens of packed sequences: q, k [1, T, H, K], v [1, T, HV, V], raw gate and raw write strength [T, ..]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.q[0, first:last],
            self.k[0, first:last],
            self.v[0, first:last],
            self.a[first:last],
            self.b[first:last],
        )


def tokens(T: int, dtype: torch.dtype, *, heads: int = H, channels: bool = False) -> Tokens:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    a = random(T, HV, K) if channels else random(T, HV)
    return Tokens(random(1, T, heads, K), random(1, T, heads, K), random(1, T, HV, V), a, random(T, HV))


def gates(*, channels: bool = False, lower_bound: float | None = None) -> Gates:
    return Gates(torch.rand(HV).log(), torch.randn(HV * K if channels else HV), lower_bound)


def expected(x: Tokens, first: int, last: int, gate: Gates, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, a, b = x.rows(first, last)
    return token_loop(q, k, v, gate.decay(a), torch.sigmoid(b.double()), state)


@pytest.mark.parametrize("key", ADAPTERS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_adapters_take_the_recorded_parameters(key: tuple[str, str]):
    module, name = key
    recorded = vllm.SIGNATURES.modules[module][name]
    if name == "ChunkGatedDeltaRule.forward_native":
        recorded = recorded[1:]  # self
    assert parameters(ADAPTERS[key]) == recorded


def test_recorded_signatures_are_those_of_the_release():
    check_sources(vllm.SIGNATURES)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gdn_decode_updates_live_slots_alone(dtypes: tuple[torch.dtype, torch.dtype]):
    dtype, stored = dtypes
    x, gate, pool = tokens(4, dtype), gates(), paged_pool(SLOTS, HV, V, K, stored)
    slots, before = torch.tensor([7, 0, 3, 9], dtype=torch.int32), pool.clone()
    mixed = torch.cat([x.q[0].flatten(1), x.k[0].flatten(1), x.v[0].flatten(1)], 1)
    out = torch.full((4, 1, HV, V), 5.0, dtype=dtype)
    given, states = gdn.decode(mixed, x.a, x.b, gate.A_log, gate.dt_bias, K**-0.5, pool, out, slots, True)
    assert given is out and states is pool
    for n, slot in enumerate(slots.tolist()):
        if slot == 0:  # the null block
            assert not out[n].any()
            continue
        o, state = expected(x, n, n + 1, gate, before[slot])
        assert_near(out[n], o, *dtypes)
        assert_near(pool[slot], state[-1], stored)
    untouched = [slot for slot in range(SLOTS) if slot not in (7, 3, 9)]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gdn_verify_resumes_after_the_accepted_token(dtypes: tuple[torch.dtype, torch.dtype]):
    """Rows: 3 drafted tokens, none, the null block, 2 drafted tokens. The buffer of slots has a row more."""
    dtype, stored = dtypes
    gate, pool = gates(), paged_pool(SLOTS, HV, V, K, stored)
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 8, 9], [0, 0, 0]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 1, 3, 9], dtype=torch.int32)
    cu = torch.tensor([0, 3, 3, 5, 7], dtype=torch.int32)
    for _ in range(2):  # the second call starts from states that the first one left
        x, before = tokens(7, dtype), pool.clone()
        o, states = gdn.verify(
            gate.A_log, x.a, x.b, gate.dt_bias, x.q, x.k, x.v, initial_state=pool, cu_seqlens=cu,
            ssm_state_indices=slots, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert states is pool and o.shape == x.v.shape and o.dtype == dtype
        for n, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
            start = int(slots[n, accepted[n] - 1])
            if start == 0 or first == last:
                continue
            outputs, after = expected(x, first, last, gate, before[start])
            assert_near(o[0, first:last], outputs, *dtypes)
            assert_near(pool[slots[n, : last - first].long()], after, stored)
        assert torch.equal(pool[[0, 4, 5, 6, 9, 10, 11]], before[[0, 4, 5, 6, 9, 10, 11]])


def test_gdn_verify_takes_single_tokens_with_one_slot_a_row():
    gate, pool, x = gates(), paged_pool(SLOTS, HV, V, K, torch.float32), tokens(3, torch.float32)
    before, slots = pool.clone(), torch.tensor([5, 0, 2, 0, 0], dtype=torch.int32)
    o, _ = gdn.verify(
        gate.A_log, x.a, x.b, gate.dt_bias, x.q, x.k, x.v, initial_state=pool,
        cu_seqlens=torch.tensor([0, 1, 2, 3]), ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for n, slot in ((0, 5), (2, 2)):
        outputs, state = expected(x, n, n + 1, gate, before[slot])
        assert_near(o[0, n : n + 1], outputs, torch.float32)
        assert_near(pool[slot], state[-1], torch.float32)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_gdn_prefill_returns_states_and_leaves_those_given(dtypes: tuple[torch.dtype, torch.dtype], normed: bool):
    dtype, stored = dtypes
    x, cu = tokens(90, dtype), torch.tensor([0, 70, 71, 71, 90], dtype=torch.int32)
    unit = (
        x
        if normed
        else x._replace(**{n: nn.functional.normalize(getattr(x, n).float(), dim=-1).to(dtype) for n in "qk"})
    )
    given = torch.randn(4, HV, V, K).mul(0.3).to(stored)
    before, g, beta = given.clone(), -torch.rand(1, 90, HV), torch.rand(1, 90, HV)
    buffer = torch.zeros(100, HV, V, dtype=dtype)
    o, states = gdn.prefill(
        unit.q, unit.k, unit.v, g, beta, given, True, cu_seqlens=cu, use_qk_l2norm_in_kernel=normed,
        core_attn_out=buffer,
    )  # fmt: skip
    assert torch.equal(given, before) and states is not None and states.dtype == torch.float32
    assert torch.equal(buffer[:90], o[0]) and not buffer[90:].any()
    for n, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        q, k, v, *_ = unit.rows(first, last)
        if first == last:
            assert torch.equal(states[n], before[n].float())
            continue
        outputs, after = token_loop(q, k, v, g[0, first:last].exp(), beta[0, first:last], before[n], l2norm=normed)
        assert_near(o[0, first:last], outputs, dtype)
        assert_near(states[n], after[-1], dtype)
    assert gdn.prefill(unit.q, unit.k, unit.v, g, beta, given, False, cu_seqlens=cu)[1] is None


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kda_serves_a_prompt_then_single_then_drafted_tokens(
    dtypes: tuple[torch.dtype, torch.dtype], lower_bound: float | None
):
    dtype, stored = dtypes
    gate, pool = gates(channels=True, lower_bound=lower_bound), paged_pool(SLOTS, HV, V, K, stored)
    x, cu = tokens(40, dtype, heads=HV, channels=True), torch.tensor([0, 33, 40])
    fresh = torch.zeros(2, HV, V, K, dtype=stored)
    o, states = kda.prefill(
        x.q, x.k, x.v, x.a[None], x.b[None], gate.A_log, gate.dt_bias, initial_state=fresh, output_final_state=True,
        lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
    )  # fmt: skip
    assert states is not None
    for n, (first, last) in enumerate(((0, 33), (33, 40))):
        outputs, after = expected(x, first, last, gate, fresh[n])
        assert_near(o[0, first:last], outputs, dtype)
        assert_near(states[n], after[-1], dtype)
    pool[torch.tensor([4, 8])] = states.to(stored)

    x, before, out = tokens(3, dtype, heads=HV, channels=True), pool.clone(), torch.ones(1, 3, HV, V, dtype=dtype)
    mixed = torch.cat([y[0].flatten(1) for y in (x.q, x.k, x.v)], 1)
    slots = torch.tensor([4, 0, 8])
    o, _ = kda.decode(mixed, x.a[None], x.b[None], gate.A_log, gate.dt_bias, lower_bound, pool, slots, out=out)
    allocated, _ = kda.decode(
        mixed, x.a[None], x.b[None], gate.A_log, gate.dt_bias, lower_bound, before.clone(), slots
    )  # fmt: skip
    assert o is out and torch.equal(o, allocated) and not o[0, 1].any()
    for n, slot in ((0, 4), (2, 8)):
        outputs, after = expected(x, n, n + 1, gate, before[slot])
        assert_near(o[0, n], outputs[0], *dtypes)
        assert_near(pool[slot], after[-1], stored)

    x, before = tokens(5, dtype, heads=HV, channels=True), pool.clone()
    slots = torch.tensor([[4, 5, 6], [8, 9, 10]])
    o, _ = kda.verify(
        x.q, x.k, x.v, x.a[None], x.b[None], gate.A_log, gate.dt_bias, lower_bound, pool, torch.tensor([0, 3, 5]),
        slots, num_accepted_tokens=torch.tensor([1, 1]),
    )  # fmt: skip
    for n, (first, last) in enumerate(((0, 3), (3, 5))):
        outputs, after = expected(x, first, last, gate, before[slots[n, 0]])
        assert_near(o[0, first:last], outputs, *dtypes)
        assert_near(pool[slots[n, : last - first]], after, stored)


GDN_STUB = """
current_platform = types.SimpleNamespace(is_cuda=lambda: True)
def forward_native(self, *args, **kwargs): return "vLLM's own"
"""


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_olmos_gdn_takes_computed_gates_and_negative_eigenvalues(dtypes: tuple[torch.dtype, torch.dtype]):
    dtype, stored = dtypes
    x, pool, cu = tokens(7, dtype), paged_pool(SLOTS, HV, V, K, stored), torch.tensor([0, 3, 3, 5, 7])
    g, beta, before = -torch.rand(1, 7, HV), 2 * torch.rand(1, 7, HV), pool.clone()
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]])
    o, states = olmo.verify(
        q=x.q, k=x.k, v=x.v, g=g, beta=beta, initial_state=pool, cu_seqlens=cu, ssm_state_indices=slots,
        num_accepted_tokens=torch.tensor([2, 1, 1, 1]), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    fresh = torch.randn(4, HV, V, K).mul(0.3).to(stored)
    o2, final = olmo.prefill(
        q=x.q, k=x.k, v=x.v, g=g, beta=beta, initial_state=fresh, output_final_state=True, cu_seqlens=cu,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert states is pool and final is not None
    for n, (first, last, start) in enumerate(((0, 3, 2), (3, 3, 4), (3, 5, 7))):
        if first == last:
            continue
        q, k, v, *_ = x.rows(first, last)
        given = g[0, first:last].exp(), beta[0, first:last]
        outputs, after = token_loop(q, k, v, *given, before[start])
        assert_near(o[0, first:last], outputs, *dtypes)
        assert_near(pool[slots[n, : last - first]], after, stored)
        outputs, after = token_loop(q, k, v, *given, fresh[n])
        assert_near(o2[0, first:last], outputs, dtype)
        assert_near(final[n], after[-1], dtype)
    assert torch.equal(pool[[0, 4, 5, 6, 9, 10, 11]], before[[0, 4, 5, 6, 9, 10, 11]])


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_glms_kda_serves_a_prompt_then_drafted_tokens(dtypes: tuple[torch.dtype, torch.dtype]):
    dtype, stored = dtypes
    gate, pool = gates(channels=True, lower_bound=-5.0), paged_pool(SLOTS, HV, V, K, stored)
    x, fresh = tokens(40, dtype, heads=HV, channels=True), torch.randn(2, HV, V, K).mul(0.3).to(stored)
    A_log, before = gate.A_log.view(1, 1, HV, 1), fresh.clone()
    o, states = glm.prefill(
        x.q, x.k, x.v, x.a[None], torch.sigmoid(x.b.float())[None], A_log, gate.dt_bias, initial_state=fresh,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 33, 40]), safe_gate=True,
    )  # fmt: skip
    assert states is not None and torch.equal(fresh, before)
    for n, (first, last) in enumerate(((0, 33), (33, 40))):
        outputs, after = expected(x, first, last, gate, before[n])
        assert_near(o[0, first:last], outputs, dtype)
        assert_near(states[n], after[-1], dtype)

    x, before = tokens(5, dtype, heads=HV, channels=True), pool.clone()
    slots, out = torch.tensor([[4, 5, 6], [8, 9, 10], [0, 0, 0]]), torch.zeros(1, 5, HV, V, dtype=dtype)
    o, _ = glm.verify(
        x.q, x.k, x.v, x.a[None], x.b[None], initial_state=pool, cu_seqlens=torch.tensor([0, 3, 5]),
        ssm_state_indices=slots, num_accepted_tokens=torch.tensor([2, 1]), out=out, sigmoid_beta=True, a_log=A_log,
        g_bias=gate.dt_bias, compute_gate=True,
    )  # fmt: skip
    assert o is out
    for n, (first, last, start) in enumerate(((0, 3, 5), (3, 5, 8))):
        outputs, after = expected(x, first, last, gate, before[start])
        assert_near(o[0, first:last], outputs, *dtypes)
        assert_near(pool[slots[n, : last - first]], after, stored)


@pytest.fixture
def gdn_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Importer of a stub of vLLM's GDN module, with automatic choices, on a card that FlashInfer serves."""
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_GDN_DECODE_KERNEL", raising=False)
    results = {"_resolve_gdn_prefill_backend": ("auto", "flashinfer")}
    source = stub_source(vllm.SIGNATURES, gdn.MODULE, results) + GDN_STUB
    with stub_module(tmp_path, {gdn.MODULE: source}) as load:
        yield lambda: load(gdn.MODULE)


def test_nothing_is_imported_and_kernels_are_replaced_when_the_layer_is(gdn_stub: Callable[[], Any]):
    with logged("vllm.wyfold") as lines:
        vllm.register()
        vllm.register()  # vLLM loads plug-ins more than once in some processes
        assert "vllm" not in sys.modules and not lines
        module = gdn_stub()
    assert lines == [("INFO", "Wyfold serves vLLM's GDN layers: prompts, single tokens and drafted tokens.")]
    assert module.calls == ["CustomOp.register_oot"]
    assert module.QwenGatedDeltaNetAttention()._can_use_fused_gdn_mtp_decode(None) is False
    gate, pool, x = gates(), torch.zeros(SLOTS, HV, V, K), tokens(1, torch.float32)
    o, _ = module.fused_sigmoid_gating_delta_rule_update(
        A_log=gate.A_log, a=x.a, b=x.b, dt_bias=gate.dt_bias, q=x.q, k=x.k, v=x.v, initial_state=pool,
        inplace_final_state=True, cu_seqlens=torch.tensor([0, 1]), ssm_state_indices=torch.tensor([3]),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert o.shape == x.v.shape and pool[3].any() and module.calls == ["CustomOp.register_oot"]


def test_the_prefill_operator_turns_flashinfers_plans_off(gdn_stub: Callable[[], Any]):
    module = gdn_stub()
    operator = gdn.prefill_operator(module)()
    assert operator.gdn_prefill_backend == "triton"
    x, states = tokens(5, torch.float32), torch.zeros(1, HV, V, K)
    o, final = operator._forward_method(
        q=x.q, k=x.k, v=x.v, g=-torch.rand(1, 5, HV), beta=torch.rand(1, 5, HV), initial_state=states,
        output_final_state=True, cu_seqlens=torch.tensor([0, 5]), chunk_indices=None, chunk_offsets=None,
        use_qk_l2norm_in_kernel=False, aiter_prefill_metadata=None,
    )  # fmt: skip
    assert o.shape == x.v.shape and final.any()


def test_explicit_choices_of_vllms_kernels_are_respected(gdn_stub: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "cuda")
    with logged("vllm.wyfold") as lines:
        vllm.register()
        module = gdn_stub()
        module._resolve_gdn_prefill_backend = lambda config: ("flashinfer", "flashinfer")
        operator = gdn.prefill_operator(module)()
    assert not hasattr(operator, "_forward_method") and not hasattr(operator, "gdn_prefill_backend")
    assert module.QwenGatedDeltaNetAttention()._can_use_fused_gdn_mtp_decode(None) is not False
    assert "drafted tokens by VLLM_GDN_DECODE_KERNEL" in lines[0][1] and "--gdn-prefill-backend" in lines[1][1]


def test_a_call_that_is_refused_runs_vllms_own_kernel_and_is_logged_once(gdn_stub: Callable[[], Any]):
    with logged("vllm.wyfold") as lines:
        vllm.register()
        module = gdn_stub()
        arguments = dict.fromkeys(("A_log", "a", "b", "dt_bias", "q", "k", "v"))
        for _ in range(2):
            name = "fused_sigmoid_gating_delta_rule_update"
            assert getattr(module, name)(**arguments, beta=2.0) == name
    assert [level for level, _ in lines] == ["INFO", "ERROR"] and "needs beta=1" in lines[1][1]


def test_other_signatures_leave_every_kernel_to_vllm(gdn_stub: Callable[[], Any], tmp_path: Path):
    file = tmp_path / (gdn.MODULE.replace(".", "/") + ".py")
    file.write_text(file.read_text().replace("num_accepted_tokens=None", "num_accepted=None"))
    with logged("vllm.wyfold") as lines:
        vllm.register()
        module = gdn_stub()
    assert [level for level, _ in lines] == ["ERROR"] and "num_accepted," in lines[0][1] and "0.33.0" in lines[0][1]
    assert module.calls == [] and module.fused_sigmoid_gating_delta_rule_update() is not None


def test_a_missing_function_is_named(gdn_stub: Callable[[], Any], tmp_path: Path):
    file = tmp_path / (gdn.MODULE.replace(".", "/") + ".py")
    file.write_text(file.read_text().replace("def _resolve_gdn_prefill_backend", "def _choose_prefill_backend"))
    with logged("vllm.wyfold") as lines:
        vllm.register()
        assert gdn_stub().calls == []
    assert "has no function _resolve_gdn_prefill_backend" in lines[0][1]


def test_an_environment_variable_turns_the_plug_in_off(gdn_stub: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(vllm.VARIABLE, "0")
    with logged("vllm.wyfold") as lines:
        vllm.register()
        assert gdn_stub().calls == []
    assert lines == [("INFO", "Wyfold replaces nothing in vllm, because WYFOLD_VLLM=0.")]


def test_a_failing_replacement_is_logged_and_does_not_reach_vllm(gdn_stub: Callable[[], Any], tmp_path: Path):
    file = tmp_path / (gdn.MODULE.replace(".", "/") + ".py")
    file.write_text(file.read_text().replace("is_cuda=lambda: True", "is_cuda=lambda: 1 / 0"))
    with logged("vllm.wyfold") as lines:
        vllm.register()
        assert gdn_stub().calls == []
    assert [level for level, _ in lines] == ["ERROR"] and gdn.MODULE in lines[0][1]


@pytest.mark.parametrize("options", [{"compute_gate": False}, {"scale": 1.0}, {"beta": None}], ids=str)
def test_glms_other_options_run_vllms_own_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
):
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    x, gate = tokens(4, torch.float32, heads=HV, channels=True), gates(channels=True)
    arguments = {
        "q": x.q, "k": x.k, "v": x.v, "g": x.a[None], "beta": x.b[None], "initial_state": torch.zeros(SLOTS, HV, V, K),
        "cu_seqlens": torch.tensor([0, 4]), "ssm_state_indices": torch.tensor([[1, 2, 3, 4]]), "sigmoid_beta": True,
        "compute_gate": True, "a_log": gate.A_log, "g_bias": gate.dt_bias, "lower_bound": -5.0,
        "use_qk_l2norm_in_kernel": True, "inplace_final_state": True,
    }  # fmt: skip
    with stub_module(tmp_path, {glm.MODULE: stub_source(vllm.SIGNATURES, glm.MODULE)}) as load:
        with logged("vllm.wyfold") as lines:
            vllm.register()
            module: Any = load(glm.MODULE)
            assert module.fused_recurrent_kda(**arguments)[0].shape == x.v.shape and not module.calls
            assert module.fused_recurrent_kda(**{**arguments, **options}) == "fused_recurrent_kda"
    assert [level for level, _ in lines] == ["INFO", "ERROR"] and "GLM" in lines[0][1]


def test_kdas_three_functions_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    with stub_module(tmp_path, {kda.MODULE: stub_source(vllm.SIGNATURES, kda.MODULE)}) as load:
        with logged("vllm.wyfold") as lines:
            vllm.register()
            module: Any = load(kda.MODULE)
        assert [level for level, _ in lines] == ["INFO"] and "KDA" in lines[0][1]
        x, gate = tokens(4, torch.float32, heads=HV, channels=True), gates(channels=True)
        o, states = module.chunk_kda_with_fused_gate(
            q=x.q, k=x.k, v=x.v, raw_g=x.a[None], raw_beta=x.b[None], A_log=gate.A_log, g_bias=gate.dt_bias,
            lower_bound=None, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor([0, 4]),
        )  # fmt: skip
        assert o.shape == x.v.shape and states.shape == (1, HV, V, K) and not module.calls


def test_vllms_own_layers_serve_requests_on_the_cpu():
    run_script("tests.integrations.vllm_layer", "served 5 batches each of Qwen, Qwen unpacked, OLMo and Kimi")


def test_the_entry_point_names_the_plug_in():
    assert entry_point("vllm.general_plugins") is vllm.register
