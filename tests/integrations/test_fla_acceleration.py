"""fla's functions run on Wyfold with fla's meaning, what Wyfold cannot run is left to fla, and all of it is undone."""

import copy
import importlib
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.extras import need_fla
from tests.integrations.fake_fla import SIGNATURES, VERSIONS, OwnCall, imported
from torch import Tensor

import wyfold
from wyfold.integrations.fla import accelerate, calls, install
from wyfold.integrations.fla.acceleration import DEFAULT
from wyfold.integrations.fla.calls import OPERATORS
from wyfold.reference import error

T, H, HV, K, V = 21, 2, 4, 16, 24


@pytest.fixture(params=VERSIONS)
def fla(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A fake fla of each version; `test_installed_*` use the real one."""
    with imported(request.param) as module:
        yield module


def function(name: str) -> Any:
    return getattr(importlib.import_module(OPERATORS[name].module), name)


def tensors(B: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    q, k, v = (torch.randn(B, T, heads, width, dtype=dtype) for heads, width in ((H, K), (H, K), (HV, V)))
    return {"q": q, "k": k, "v": v, "beta": torch.rand(B, T, HV)}


def gate(name: str, B: int = 2) -> dict[str, Tensor]:
    if "kda" in name:
        return {"g": -torch.rand(B, T, HV, K)}
    return {"g": -torch.rand(B, T, HV)} if "gated" in name else {}


RULES = tuple(name for name in OPERATORS if "rule" in name or "kda" in name)


# --- calls that Wyfold runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_rules_are_wyfolds_with_flas_defaults(fla: ModuleType, name: str):
    given = {**tensors(), **gate(name)}
    ours = getattr(wyfold, name)
    with accelerate() as accelerated:
        o, state = function(name)(**given)
        assert torch.equal(o, ours(**given)[0])
        assert state is None
        S0 = torch.randn(2, HV, K, V)
        found = function(name)(**given, initial_state=S0, output_final_state=True, use_qk_l2norm_in_kernel=True)
        expected = ours(**given, initial_state=S0, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert all(map(torch.equal, found, expected))
    assert found[1].dtype == torch.float32
    assert accelerated.report.calls == {(name, "wyfold"): 2}


@pytest.mark.parametrize("name", RULES)
def test_positions_are_those_of_the_version(fla: ModuleType, name: str):
    B, cu = 1, torch.tensor([0, 9, T])
    given = {**tensors(B), **gate(name, B), "cu_seqlens": cu, "scale": 0.5, "output_final_state": True}
    signature = SIGNATURES[fla.__version__][name]
    last = list(signature).index("cu_seqlens")
    row = [given.get(parameter, default) for parameter, default in list(signature.items())[: last + 1]]
    expected = getattr(wyfold, name)(**given)
    with accelerate():
        assert all(map(torch.equal, function(name)(*row), expected))


def test_gates_inside_and_flags_that_are_none(fla: ModuleType):
    x = {**tensors(), **gate("chunk_gated_delta_rule")}
    parameters = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True, **parameters}
    with accelerate() as accelerated:
        found = function("chunk_gated_delta_rule")(**x, **inside, output_final_state=True, cp_context=None)
        assert all(map(torch.equal, found, wyfold.chunk_gated_delta_rule(**x, **inside, output_final_state=True)))
        # fla's layers pass use_cache, which may be None, and their parameters in any case
        o, state = function("chunk_gated_delta_rule")(**x, **parameters, output_final_state=None)
        assert torch.equal(o, wyfold.chunk_gated_delta_rule(**x)[0])
        assert state is None
    assert not accelerated.report.left


def test_safe_gates_of_kda(fla: ModuleType):
    x = {**tensors(), **gate("chunk_kda")}
    parameters = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * K)}
    with accelerate() as accelerated:
        # A ready-made gate is promised to be bounded; a bound is not applied to it.
        o, _ = function("chunk_kda")(**{**x, "g": 4 * x["g"]}, safe_gate=True, lower_bound=-1.0)
        assert torch.equal(o, wyfold.chunk_kda(**{**x, "g": 4 * x["g"]}, safe_gate=True)[0])
        for options in ({"safe_gate": True}, {}):
            bounded = {"use_gate_in_kernel": True, "lower_bound": -3.0, **parameters, **options}
            o, _ = function("chunk_kda")(**x, **bounded)
            assert torch.equal(o, wyfold.chunk_kda(**x, **bounded)[0])
    assert not accelerated.report.left


def test_gradients_pass(fla: ModuleType):
    x = {**tensors(), **gate("chunk_gated_delta_rule")}
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    expected = torch.autograd.grad(wyfold.chunk_gated_delta_rule(**x)[0].square().sum(), leaves)
    with accelerate():
        found = torch.autograd.grad(function("chunk_gated_delta_rule")(**x)[0].square().sum(), leaves)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_delta_rule"])
def test_autocast_changes_no_dtype(fla: ModuleType, name: str):
    given = {**tensors(), **gate(name)}
    expected = getattr(wyfold, name)(**given)[0]
    with accelerate(), torch.autocast("cpu", torch.bfloat16):
        found = function(name)(**given)[0]
    assert torch.equal(found, expected)


def test_convolution_and_norm_when_they_are_asked_for(fla: ModuleType):
    x, weight, g = torch.randn(2, T, 8), torch.randn(8, 4), torch.randn(2, T, 8)
    with accelerate() as accelerated:
        assert isinstance(function("causal_conv1d")(x, weight), OwnCall)
    assert not accelerated.report.calls
    with accelerate(["causal_conv1d", "rms_norm_gated"]) as accelerated:
        y, state = function("causal_conv1d")(x, weight, activation="silu", output_final_state=True)
        assert torch.equal(y, wyfold.causal_conv1d(x, weight, activation="silu")[0])
        assert torch.equal(state, x[:, -4:].mT)
        scale = torch.randn(8)
        found = function("rms_norm_gated")(x, g, scale, None, "sigmoid", eps=1e-5)
        assert torch.equal(found, wyfold.rms_norm_gated(x, g, scale, activation="sigmoid", eps=1e-5))
    assert accelerated.report.served == 2


def test_served_as_fla_returns_them(fla: ModuleType):
    """States that enter each chunk, in inference mode, and different dtypes token by token."""
    x = tensors()
    with accelerate() as accelerated, torch.inference_mode():
        kda = function("chunk_kda")(**x, **gate("chunk_kda"), return_intermediate_states=True)
        name = "fused_recurrent_gated_delta_rule"
        o, _ = function(name)(**{**x, "v": x["v"].half()}, **gate(name))
    assert kda[2].shape == (2, 1, HV, K, V) and kda[2].dtype == x["k"].dtype
    assert o.dtype == torch.float16
    assert accelerated.report.served == 2


# --- calls that are left to fla --------------------------------------------------------------------------------------

LEFT: dict[str, tuple[str, dict[str, Any], str]] = {
    "context": ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context"),
    "keyword": ("chunk_gated_delta_rule", {"head_first": False}, "unknown keyword head_first"),
    "value heads": ("chunk_gated_delta_rule", {"v": torch.randn(2, T, 3, V)}, "HV"),
    "mixed": ("chunk_gated_delta_rule", {"q": torch.randn(2, T, H, K).bfloat16()}, "dtype"),
    "no rate": ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, "without A_log"),
    "wide": ("chunk_delta_rule", {"k": torch.randn(2, T, H, 264), "q": torch.randn(2, T, H, 264)}, "K"),
    "states": ("chunk_kda", {"return_intermediate_states": True}, "outside of inference mode"),
    "graph": ("chunk_kda", {"use_graph": True}, "use_graph"),
    "no bound": ("chunk_kda", {"safe_gate": True, "use_gate_in_kernel": True, "A_log": torch.zeros(HV)}, "lower_bound"),
    "scale": ("fused_recurrent_delta_rule", {"scale": "1"}, "scale"),
    "gv": ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(2, T, HV, V)}, "gv"),
    "vector": ("fused_recurrent_delta_rule", {"beta": torch.rand(2, T, HV, V)}, "beta"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_wyfold_cannot_run_is_left_to_fla(fla: ModuleType, case: str):
    name, changes, reason = LEFT[case]
    given = {**tensors(), **gate(name), **changes}
    with accelerate() as accelerated:
        found = function(name)(**given)
    assert isinstance(found, OwnCall)
    assert found[2].keys() == given.keys()  # unchanged
    assert all(found[2][key] is value for key, value in given.items())
    ((left, times),) = accelerated.report.left.items()
    assert reason in left
    assert "\n" not in left
    assert times == 1
    assert accelerated.report.served == 0
    assert left in str(accelerated.report)


def test_convolutions_are_left_to_a_backend_that_was_asked_for(fla: ModuleType):
    x, weight = torch.randn(2, T, 8), torch.randn(8, 4)
    with accelerate(["causal_conv1d"]) as accelerated:
        for options in ({"backend": "cuda"}, {"initial_state": torch.zeros(2, 8, 4).bfloat16()}, {"seq_idx": None}):
            assert isinstance(function("causal_conv1d")(x, weight, **options), OwnCall)
        assert isinstance(function("causal_conv1d")(x), OwnCall)
    assert sum(accelerated.report.left.values()) == 4


def test_norms_without_a_kernel_are_left_to_fla(fla: ModuleType):
    x = torch.randn(2, T, 8)
    with accelerate(["rms_norm_gated"]) as accelerated:
        for options in ({"residual": x}, {"prenorm": True}, {"eps": 0}):
            assert isinstance(function("rms_norm_gated")(x, x, None, None, **options), OwnCall)
    assert sum(accelerated.report.left.values()) == 3 and accelerated.report.served == 0


def test_other_backends_are_asked_after_wyfold(fla: ModuleType):
    backends = importlib.import_module("fla.ops.backends" if fla.__version__ == "0.5.2" else "fla.backends")

    class Other(backends.BaseBackend):
        backend_type, priority = "other", 0

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> str:
            return "other"

    backends._registries["gated_delta_rule"].register(Other())
    given = {**tensors(), **gate("chunk_gated_delta_rule")}
    rule = function("chunk_gated_delta_rule")
    assert rule(**given) == "other"
    with accelerate():
        assert isinstance(rule(**given), tuple)
        assert rule(**given, unknown=1) == "other"
    assert rule(**given) == "other"


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_delta_rule"])
def test_other_errors_are_raised_not_left(fla: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch):
    def fails(**arguments: Any) -> None:
        raise RuntimeError("out of memory")

    fails.__signature__ = inspect.signature(OPERATORS[name].ours)  # type: ignore[attr-defined]
    monkeypatch.setitem(calls.OPERATORS, name, OPERATORS[name]._replace(ours=fails))
    with accelerate() as accelerated, pytest.raises(RuntimeError, match="out of memory"):
        function(name)(**tensors(), **gate(name))
    assert not accelerated.report.calls


# --- undo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_undo_gives_every_function_back(fla: ModuleType, name: str):
    given = {**tensors(), **gate(name)}
    before = {key: vars(module).copy() for key, module in sys.modules.items() if key.startswith("fla")}
    accelerated = accelerate()
    taken_while_active = function(name)
    assert not isinstance(sys.modules["fla.layers"].__dict__[name](**given), OwnCall)
    report = accelerated.undo()
    assert accelerated.undo() is report
    assert {key: vars(module) for key, module in sys.modules.items() if key.startswith("fla")} == before
    for held in (function(name), sys.modules["fla.layers"].__dict__[name], taken_while_active):
        assert isinstance(held(**given), OwnCall)
    assert report.served == 1
    with accelerate() as second:  # the backend of the first is not registered again
        function(name)(**given)
    assert second.report.served == 1
    assert report.served == 1


def test_several_accelerations_share_a_function(fla: ModuleType):
    given = tensors()
    first, second = accelerate(["chunk_delta_rule"]), accelerate()
    function("chunk_delta_rule")(**given)
    first.undo()
    function("chunk_delta_rule")(**given)
    second.undo()
    assert isinstance(function("chunk_delta_rule")(**given), OwnCall)
    assert (first.report.served, second.report.served) == (1, 2)


def test_names_that_other_code_has_assigned_stay(fla: ModuleType):
    accelerated = accelerate()
    sys.modules["fla.layers"].chunk_delta_rule = print  # type: ignore[attr-defined]
    accelerated.undo()
    assert sys.modules["fla.layers"].chunk_delta_rule is print


def test_threads_get_their_own_results(fla: ModuleType):
    given = [{**tensors(), **gate("chunk_kda")} for _ in range(4)]
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = function("chunk_kda")(**given[i])[0]

    with accelerate() as accelerated:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[i], wyfold.chunk_kda(**given[i])[0]) for i in range(4))
    assert accelerated.report.served == 20


def test_the_report_names_what_was_taken(fla: ModuleType):
    with accelerate() as accelerated:
        function("chunk_delta_rule")(**tensors())
    report = accelerated.report
    assert report.version == fla.__version__
    assert report.registered == ["chunk_gated_delta_rule", "chunk_kda"]
    assert list(report.rebound) == [name for name in DEFAULT if not OPERATORS[name].registry]
    assert report.rebound["chunk_delta_rule"] == ["fla.layers", "fla.ops.delta_rule"]
    assert str(report).splitlines()[-1] == "  1 x chunk_delta_rule: wyfold"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", ["chunk_kda", 1, [], [1]])
def test_operators_must_be_names(fla: ModuleType, operators: Any):
    with pytest.raises(TypeError, match="accelerate: operators must be names"):
        accelerate(operators)


def test_operators_must_be_known(fla: ModuleType):
    with pytest.raises(ValueError, match=r"operators must be among .*got 'chunk_gla'"):
        accelerate(["chunk_kda", "chunk_gla"])


def test_fla_must_be_installed(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)  # what import takes for a missing module
    with pytest.raises(ModuleNotFoundError, match="accelerate: needs fla"):
        accelerate()


def test_the_stand_in_is_not_accelerated():
    with install(force=True), pytest.raises(ValueError, match="stand-in"):
        accelerate()


def test_fla_must_have_a_registry_that_is_on(fla: ModuleType):
    name = "fla.ops.backends" if fla.__version__ == "0.5.2" else "fla.backends"
    sys.modules[name]._DISPATCH_DISABLED = True  # type: ignore[attr-defined]
    with pytest.raises(wyfold.UnsupportedError, match="switched off"):
        accelerate()
    del sys.modules[name]
    with pytest.raises(wyfold.UnsupportedError, match="no registry"):
        accelerate(["chunk_delta_rule", "chunk_kda"])
    assert isinstance(function("chunk_delta_rule")(**tensors()), OwnCall)  # the first one was given back
    with accelerate(["chunk_delta_rule"]):  # needs no registry
        assert not isinstance(function("chunk_delta_rule")(**tensors()), OwnCall)


# --- fla's signatures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_recorded_parameter_is_known(name: str, version: str):
    """And has the default that fla has, so that leaving it out means the same."""
    ours = inspect.signature(OPERATORS[name].ours).parameters
    for parameter, default in SIGNATURES[version][name].items():
        if parameter != "**":
            assert parameter in ours
            if default not in ("required", None):
                assert ours[parameter].default == default


@pytest.fixture
def installed() -> ModuleType:
    """The installed fla."""
    return need_fla()


@pytest.mark.parametrize("name", OPERATORS)
def test_installed_signatures_are_those_recorded(installed: ModuleType, name: str):
    if installed.__version__ not in VERSIONS:
        pytest.skip(f"signatures are recorded of fla {' and '.join(VERSIONS)}, installed is {installed.__version__}")
    found = inspect.signature(inspect.unwrap(function(name))).parameters
    recorded = SIGNATURES[installed.__version__][name]
    assert [key for key in found if key != "kwargs"] == [key for key in recorded if key != "**"]
    for key, parameter in found.items():
        if key != "kwargs":
            value = "required" if parameter.default is parameter.empty else parameter.default
            assert value == recorded[key]


@pytest.mark.parametrize("name", RULES)
def test_installed_rules_agree_with_flas_references(installed: ModuleType, name: str):
    """fla's own token loops, in float32 on the CPU."""
    x = {**tensors(), **gate(name)}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    repeated = {**x, **{key: x[key].repeat_interleave(HV // H, 2) for key in ("q", "k")}}
    if "kda" in name:
        from fla.ops.kda.naive import naive_recurrent_kda

        expected, S = naive_recurrent_kda(**x, output_final_state=True)
    elif "gated" in name:
        from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

        expected, S = naive_recurrent_gated_delta_rule(**repeated, output_final_state=True)
    else:
        from fla.ops.delta_rule.naive import delta_rule_recurrence

        rows = {key: value.transpose(1, 2) for key, value in repeated.items()}
        expected, S = delta_rule_recurrence(**rows, output_final_state=True)
        expected = expected.transpose(1, 2)
    with accelerate() as accelerated:
        o, state = function(name)(**x, output_final_state=True)
    assert accelerated.report.served == 1
    exact = getattr(wyfold, name)(**{key: value.double() for key, value in x.items()}, output_final_state=True)
    error.require(error.judge(expected, exact[0], o, name="o"), error.judge(S, exact[1], state, name="state"))


@pytest.mark.parametrize("layer", ["GatedDeltaNet", "KimiDeltaAttention", "DeltaNet"])
def test_installed_layers_run_on_wyfold_and_come_back(installed: ModuleType, layer: str):
    import fla.layers
    from fla.modules import RMSNorm

    sizes = {"head_dim": 32, "expand_v": 1, "num_v_heads": 4} if layer != "DeltaNet" else {}
    net = getattr(fla.layers, layer)(hidden_size=64, num_heads=2, **sizes)
    if isinstance(net.o_norm, RMSNorm):  # no CPU form
        net.o_norm = torch.nn.RMSNorm(32, eps=net.o_norm.eps)
    x = torch.randn(2, 70, 64, requires_grad=True)
    with accelerate(OPERATORS) as accelerated:
        y = net(x)[0]
        y.sum().backward()
        with torch.no_grad():
            net.eval()
            short = net(x[:, :9])[0]
            exact = copy.deepcopy(net).double()(x[:, :9].double())[0]
    assert not accelerated.report.left
    chunk, recurrent = (name for name in accelerated.report.calls if name[0] in RULES)
    assert (chunk[0][:5], recurrent[0][:5]) == ("chunk", "fused")
    assert x.grad is not None
    error.require(error.judge(short, exact, y[:, :9], name="y"))
    with pytest.raises(RuntimeError):  # fla's kernels have no CPU form
        net(x)


def test_installed_transformers_models_run_on_wyfold(installed: ModuleType):
    """transformers binds fla's functions when it imports a model's file, so it runs in a new process."""
    pytest.importorskip("transformers", reason="transformers, which calls fla, is not installed")
    script = """
        import warnings
        warnings.simplefilter("ignore")
        import torch
        from tests.integrations.hybrids import hybrid
        from wyfold.integrations.fla import accelerate
        model, ids = hybrid("qwen3_next").train(), torch.randint(64, (2, 70))
        with accelerate() as accelerated:
            model(ids, labels=ids, use_cache=False).loss.backward()
        print(dict(accelerated.report.calls), all(p.grad is not None for p in model.model.layers[0].parameters()))
    """
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True, timeout=250
    )
    assert found.stdout.splitlines()[-1:] == ["{('chunk_gated_delta_rule', 'wyfold'): 2} True"], found.stderr
