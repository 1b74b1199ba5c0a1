"""SGLang's plug-in: its functions against a float64 token loop, and its replacement of SGLang's kernel classes."""

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
from torch import Tensor

from wyfold.integrations import sglang
from wyfold.integrations.sglang import classes, kernels

H, HV, K, V, SLOTS = 2, 4, 16, 24, 12
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""(dtype of the tokens, dtype of the pool)."""

FUNCTIONS = {
    "packed_decode": (kernels.packed_decode, kernels.packed_decode),
    "decode": (kernels.decode, kernels.decode),
    "target_verify": (kernels.target_verify, kernels.target_verify),
    "extend": (kernels.extend_gdn, kernels.extend_kda),
}
"""Method of SGLang's classes -> (function for GDN, function for KDA)."""


class Layer(NamedTuple):
    """One layer's tokens and gates: q, k [1, T, H, K], v [1, T, HV, V], raw gate a, raw write strength b [T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Gates

    def gates(self) -> dict[str, Any]:
        bound = {} if self.a.ndim == 2 else {"lower_bound": self.gate.lower_bound}
        return {"A_log": self.gate.A_log, "dt_bias": self.gate.dt_bias, **bound}

    def expected(self, first: int, last: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return token_loop(
            self.q[0, first:last], self.k[0, first:last], self.v[0, first:last], self.gate.decay(self.a[first:last]),
            torch.sigmoid(self.b[first:last].double()), state,
        )  # fmt: skip


def layer(T: int, dtype: torch.dtype, rule: str) -> Layer:
    """Random tokens of a rule: "gdn", "kda", or "kda bounded"."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    heads, channels = (H, ()) if rule == "gdn" else (HV, (K,))
    bias = torch.randn(HV if rule == "gdn" else HV * K)
    gate = Gates(torch.rand(HV).log(), bias, -5.0 if rule == "kda bounded" else None)
    return Layer(
        random(1, T, heads, K), random(1, T, heads, K), random(1, T, HV, V), random(T, HV, *channels), random(T, HV),
        gate,
    )  # fmt: skip


RULES = pytest.mark.parametrize("rule", ["gdn", "kda", "kda bounded"])
EVERY_DTYPE = pytest.mark.parametrize("dtypes", DTYPES, ids=str)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("module", "index"), [(classes.GDN, 0), (classes.KDA, 1)])
def test_functions_take_the_recorded_parameters(name: str, module: str, index: int):
    (recorded,) = (names for key, names in sglang.SIGNATURES.modules[module].items() if key.endswith(f".{name}"))
    ours = parameters(FUNCTIONS[name][index])
    given = [x for x in recorded[1:] if x in ours]
    assert given == [x for x in ours if x in given]  # in the same order
    assert "kwargs" in ours  # the rest is refused or has no meaning
    unnamed = set(recorded[1:]) - set(ours)
    assert unnamed <= {"cache_ring", "replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"}


def test_recorded_signatures_are_those_of_the_release():
    check_sources(sglang.SIGNATURES)


@RULES
@EVERY_DTYPE
@pytest.mark.parametrize("packed", [False, True])
def test_decode_updates_live_slots_alone(rule: str, dtypes: tuple[torch.dtype, torch.dtype], packed: bool):
    dtype, stored = dtypes
    x, pool = layer(4, dtype, rule), paged_pool(SLOTS, HV, V, K, stored)
    before, slots = pool.clone(), torch.tensor([7, -1, 3, 1], dtype=torch.int32)
    shared = {"ssm_states": pool, "cache_indices": slots, **x.gates()}
    if packed:
        mixed = torch.cat([y[0].flatten(1) for y in (x.q, x.k, x.v)], 1)
        o = kernels.packed_decode(
            mixed, x.a, x.b[:, None], scale=K**-0.5, num_v_heads=HV, head_v_dim=V, replayssm_d=None, **shared
        )  # fmt: skip
    else:
        o = kernels.decode(x.q, x.k, x.v, x.a, x.b, query_start_loc=torch.arange(5, dtype=torch.int32), **shared)
    assert o.shape == x.v.shape and o.dtype == dtype and not o[0, 1].any()
    for n, slot in ((0, 7), (2, 3), (3, 1)):
        outputs, state = x.expected(n, n + 1, before[slot])
        assert_near(o[0, n : n + 1], outputs, *dtypes)
        assert_near(pool[slot], state[-1], stored)
    untouched = [0, 2, *range(4, 7), *range(8, SLOTS)]
    assert torch.equal(pool[untouched], before[untouched])


@RULES
@EVERY_DTYPE
def test_verify_keeps_the_state_after_each_token_and_leaves_the_pool(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype]
):
    """Rows: 3 drafted tokens, padding, 2 drafted tokens. The buffer is the first steps of a longer one."""
    dtype, stored = dtypes
    x, pool = layer(6, dtype, rule), paged_pool(SLOTS, HV, V, K, stored)
    before, longer = pool.clone(), torch.randn(5, 6, HV, V, K).to(stored)
    buffer, kept = longer[:, :4], longer.clone()
    o = kernels.target_verify(
        q=x.q, k=x.k, v=x.v, a=x.a, b=x.b, ssm_states=pool, cache_indices=torch.tensor([7, -1, 3, 0]),
        query_start_loc=torch.tensor([0, 3, 4, 6]), intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([2, 4, 1, 4], dtype=torch.int32), cache_steps=3,
        retrieve_parent_token=None, stable_rows=False, **x.gates(),
    )  # fmt: skip
    assert torch.equal(pool, before) and o.shape == x.v.shape
    for first, last, slot, row in ((0, 3, 7, 2), (4, 6, 3, 1)):
        outputs, states = x.expected(first, last, before[slot])
        assert_near(o[0, first:last], outputs, *dtypes)
        assert_near(buffer[row, : last - first], states, stored)
    assert torch.equal(longer[[0, 3]], kept[[0, 3]]) and torch.equal(longer[:, 3:], kept[:, 3:])


@RULES
@EVERY_DTYPE
def test_extend_writes_the_pool_and_the_state_before_the_tracked_chunk(
    rule: str, dtypes: tuple[torch.dtype, torch.dtype]
):
    dtype, stored = dtypes
    lengths = [150, 1, 0, 70, 40, 3]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    chunk = torch.tensor([2, -1, -1, 1, 0, -1], dtype=torch.int32)
    x, pool = layer(sum(lengths), dtype, rule), paged_pool(SLOTS, HV, V, K, stored)
    before, slots = pool.clone(), torch.tensor([7, 3, 5, 0, 9, -1], dtype=torch.int32)
    track = torch.full((6, HV, V, K), 9.0)
    shared = {
        "ssm_states": pool, "cache_indices": slots, "query_start_loc": cu, "track_state": track,
        "track_chunk_idx": chunk, "layer_id": 0,
    }  # fmt: skip
    if rule == "gdn":
        g, beta = x.gate.decay(x.a).log().float()[None], torch.sigmoid(x.b.float())[None]
        o, final, h = kernels.extend_gdn(x.q, x.k, x.v, g, beta, **shared)
        assert final is None and h is None
    else:
        o, h = kernels.extend_kda(
            x.q,
            x.k,
            x.v,
            x.a[None],
            x.b[None],
            beta_is_raw=True,
            return_intermediate_states=True,
            **shared,
            **x.gates(),
        )
        assert h is None
    assert o.shape == x.v.shape
    for n, (first, last) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        slot = int(slots[n])
        if slot < 0:
            continue
        if first == last:
            assert torch.equal(pool[slot], before[slot])
            continue
        outputs, states = x.expected(first, last, before[slot])
        assert_near(o[0, first:last], outputs, *dtypes)
        assert_near(pool[slot], states[-1], *dtypes)
        if chunk[n] == 0:
            assert torch.equal(track[n], before[slot].float())
        elif chunk[n] > 0:
            assert_near(track[n], states[64 * int(chunk[n]) - 1], *dtypes)
    untouched = [1, 2, 4, 6, 8, 10, 11]
    assert torch.equal(pool[untouched], before[untouched])


def test_extend_of_fewer_tokens_than_a_chunk_tracks_the_state_it_starts_from():
    x, pool = layer(9, torch.float32, "gdn"), paged_pool(SLOTS, HV, V, K, torch.float32)
    before, track = pool.clone(), torch.zeros(1, HV, V, K)
    kernels.extend_gdn(
        x.q, x.k, x.v, -torch.rand(1, 9, HV), torch.rand(1, 9, HV), ssm_states=pool, cache_indices=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 9]), track_state=track, track_chunk_idx=torch.tensor([0]),
    )  # fmt: skip
    assert torch.equal(track[0], before[2])


def test_extend_without_an_update_reads_a_slot_for_several_sequences():
    """Multi-item scoring: items of one request start from the state after its query."""
    x, pool = layer(20, torch.float32, "gdn"), paged_pool(SLOTS, HV, V, K, torch.float32)
    before, g, beta = pool.clone(), -torch.rand(1, 20, HV), torch.rand(1, 20, HV)
    o, *_ = kernels.extend_gdn(
        x.q, x.k, x.v, g, beta, ssm_states=pool, cache_indices=torch.tensor([4, 4]),
        query_start_loc=torch.tensor([0, 12, 20]), inplace_update=False,
    )  # fmt: skip
    assert torch.equal(pool, before)
    for first, last in ((0, 12), (12, 20)):
        outputs, _ = token_loop(
            x.q[0, first:last], x.k[0, first:last], x.v[0, first:last], g[0, first:last].exp(), beta[0, first:last],
            before[4],
        )  # fmt: skip
        assert_near(o[0, first:last], outputs, torch.float32)


def test_kdas_extend_takes_a_computed_gate():
    x, pool = layer(20, torch.float32, "kda"), paged_pool(SLOTS, HV, V, K, torch.float32)
    before, g, beta = pool.clone(), -torch.rand(1, 20, HV, K), torch.rand(1, 20, HV)
    o = kernels.extend_kda(
        x.q, x.k, x.v, g, beta, ssm_states=pool, cache_indices=torch.tensor([4]),
        query_start_loc=torch.tensor([0, 20]),
    )  # fmt: skip
    outputs, states = token_loop(x.q[0], x.k[0], x.v[0], g[0].exp(), beta[0], before[4])
    assert isinstance(o, Tensor)
    assert_near(o[0], outputs, torch.float32)
    assert_near(pool[4], states[-1], torch.float32)


def test_states_of_chunks_are_found_where_sglangs_kernel_puts_them():
    """Sequences of 130, 64 and 5 tokens have 3, 1 and 1 chunks."""
    h, track = torch.arange(5.0).view(1, 5, 1, 1, 1).expand(1, 5, HV, V, K), torch.zeros(3, HV, V, K)
    kernels.copy_chunk_states(h, torch.tensor([0, 130, 194, 199]), track, torch.tensor([2, -1, 0]))
    assert track[[0, 2], 0, 0, 0].tolist() == [2, 4]


STUBS = {
    "sglang.srt.utils": "def is_cuda(): return True\n",
    "sglang.srt.plugins.hook_registry": """
import collections, contextvars, enum, importlib
HookSource = collections.namedtuple("HookSource", "plugin_name dist_name")
HookType = enum.Enum("HookType", "REPLACE")
_current_plugin_source = contextvars.ContextVar("_current_plugin_source", default=None)
class HookRegistry:
    hooks = {}
    @classmethod
    def register(cls, target, hook, hook_type, *, source): cls.hooks[target] = hook
    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks.items():
            module, _, name = target.rpartition(".")
            setattr(importlib.import_module(module), name, hook)
""",
}


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Importer of stubs of SGLang's modules, with the recorded methods, and of its hook registry."""
    monkeypatch.delenv(sglang.VARIABLE, raising=False)
    sources = dict(STUBS)
    for module in sglang.SIGNATURES.modules:
        snapshot = "TritonKDAKernel" in str(sglang.SIGNATURES.modules[module])
        source = stub_source(sglang.SIGNATURES, module, {"TritonGDNKernel.extend": ("o", None, None)})
        sources[module] = source.replace("Kernel:\n", f"Kernel:\n    supports_track_state_snapshot = {snapshot}\n")
    sources[classes.GDN_DEFAULT] += f"from {classes.GDN} import TritonGDNKernel\n"
    with stub_module(tmp_path, sources) as load:
        yield load


def test_classes_are_replaced_when_they_are_imported(stubs: Callable[[str], Any]):
    with logged("wyfold.sglang") as lines:
        sglang.register()
        sglang.register()  # SGLang loads plug-ins once in a process, but a user may call this as well
        assert "sglang" not in sys.modules and not lines
        backend, kda = stubs(classes.GDN_DEFAULT), stubs(classes.KDA)
    assert [level for level, _ in lines] == ["INFO"] * 3 and "GDN layers" in lines[0][1] and "KDA" in lines[2][1]
    assert backend.flashinfer_gdn_prefill_default(None) is None and not backend.calls
    assert backend.TritonGDNKernel.__name__ == "WyfoldGDNKernel" and kda.TritonKDAKernel.__name__ == "WyfoldKDAKernel"
    assert backend.TritonGDNKernel.supports_track_state_snapshot
    x, pool = layer(2, torch.float32, "gdn"), torch.zeros(SLOTS, HV, V, K)
    o = backend.TritonGDNKernel().decode(
        x.q, x.k, x.v, x.a, x.b, ssm_states=pool, cache_indices=torch.tensor([1, 2]),
        query_start_loc=torch.arange(3), **x.gates(),
    )  # fmt: skip
    assert o.shape == x.v.shape and pool[1].any() and not stubs(classes.GDN).calls


def test_what_is_refused_runs_sglangs_method_and_is_logged_once(stubs: Callable[[str], Any]):
    with logged("wyfold.sglang") as lines:
        sglang.register()
        module = stubs(classes.GDN)
        kernel = module.TritonGDNKernel()
        for _ in range(2):
            name = "TritonGDNKernel.target_verify"
            arguments = dict.fromkeys(sglang.SIGNATURES.modules[classes.GDN][name][1:-1])
            arguments["retrieve_parent_token"] = torch.zeros(1)
            assert kernel.target_verify(**arguments) == name
    assert [level for level, _ in lines] == ["INFO", "ERROR"] and "retrieve_parent_token" in lines[1][1]


def test_sglangs_own_extend_also_writes_the_tracked_states(stubs: Callable[[str], Any]):
    with logged("wyfold.sglang"):
        sglang.register()
        module = stubs(classes.GDN)
    h = torch.arange(2.0).view(1, 2, 1, 1, 1).expand(1, 2, HV, V, K)
    base = module.TritonGDNKernel.__mro__[1]
    base.extend = lambda self, *args, **kwargs: ("o", None, h)
    kernel = classes.kernel_class(base, kernels.extend_gdn)()
    track = torch.zeros(1, HV, V, K)
    result = kernel.extend(
        q=None, k=None, v=torch.zeros(1, 70, HV, V), g=None, beta=None, ssm_states=torch.zeros(SLOTS, HV, V, K),
        cache_indices=torch.tensor([1]), query_start_loc=torch.tensor([0, 70]), track_state=track,
        track_chunk_idx=torch.tensor([1]),
    )  # fmt: skip
    assert result[0] == "o" and track.unique().tolist() == [1]


def test_hooks_wait_while_sglang_loads_plug_ins(stubs: Callable[[str], Any]):
    registry, module = stubs("sglang.srt.plugins.hook_registry"), stubs(classes.GDN)
    token = registry._current_plugin_source.set("loading")
    with logged("wyfold.sglang"):
        sglang.register()
    assert module.TritonGDNKernel.__name__ == "TritonGDNKernel"
    registry._current_plugin_source.reset(token)
    registry.HookRegistry.apply_hooks()  # SGLang does
    assert module.TritonGDNKernel.__name__ == "WyfoldGDNKernel"


def test_other_signatures_leave_the_class_and_the_default_to_sglang(stubs: Callable[[str], Any], tmp_path: Path):
    file = tmp_path / (classes.GDN.replace(".", "/") + ".py")
    file.write_text(file.read_text().replace("cache_steps=None", "steps=None"))
    with logged("wyfold.sglang") as lines:
        sglang.register()
        backend = stubs(classes.GDN_DEFAULT)
    assert [level for level, _ in lines] == ["ERROR"] and "steps" in lines[0][1] and "0.5.23" in lines[0][1]
    assert backend.TritonGDNKernel.__name__ == "TritonGDNKernel"
    assert backend.flashinfer_gdn_prefill_default(None) is not None


def test_an_environment_variable_turns_the_plug_in_off(stubs: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(sglang.VARIABLE, "0")
    with logged("wyfold.sglang") as lines:
        sglang.register()
        assert stubs(classes.KDA).TritonKDAKernel.__name__ == "TritonKDAKernel"
    assert lines == [("INFO", "Wyfold replaces nothing in sglang, because WYFOLD_SGLANG=0.")]


def test_the_entry_point_names_the_plug_in():
    assert entry_point("sglang.srt.plugins") is sglang.register


def test_sglangs_own_loader_and_backend_call_the_plug_in_on_the_cpu():
    run_script("tests.integrations.sglang_layer", "loaded by SGLang, served 5 batches of GDN")
