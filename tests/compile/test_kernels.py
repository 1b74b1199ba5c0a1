"""Every shipped launch configuration compiles for its architecture, fits, and spills no more than is recorded."""

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.compile import aot

import wyfold
from wyfold.runtime import kernel_configs, triton_support

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

ARCHITECTURES = tuple(name for name in aot.SHARED if kernel_configs.borrowed_from(name) == name)
TESTED = [(name, call) for name in aot.HOPPER + aot.ADA for call in aot.calls(name) if name in call.tested]
"""Calls that are compiled here. `make compile` compiles every call for every architecture."""

TWINS = {"sm_86": "sm_89"}
"""Architectures with equal shared memory and equal instructions for matrix products."""


@pytest.mark.parametrize("one, other", TWINS.items())
def test_twins_have_one_table(one: str, other: str):
    """Compiling for one of them checks both. `make compile` compiles for each."""
    assert kernel_configs.shipped(one) == kernel_configs.shipped(other)


@pytest.mark.long
@pytest.mark.parametrize("architecture, call", TESTED, ids=str)
def test_a_call_compiles_and_fits(architecture: str, call: aot.Call | aot.ServingCall | aot.RankCall):
    found = aot.compiled(call, architecture, aot.tested_functions(architecture)[call])
    assert found
    assert not aot.violations(call, architecture, found)


@pytest.mark.release
@pytest.mark.skipif(not aot.passes_are_known(), reason="nothing is cached across architectures under this Triton")
def test_modules_cached_from_another_architecture(tmp_path: Path, monkeypatch):
    """A kernel compiled from a cached module of another architecture equals one compiled from the source."""
    made = {}

    def launched(kernel, *given, **options) -> None:
        kernel.device_caches.clear()
        made.setdefault((aot.CACHE.name, kernel.fn.__name__), []).append(aot.code(kernel, *given, **options)[0])

    for folder, architectures in (("kept", ("sm_90", "sm_100", "sm_120")), ("fresh", ("sm_100", "sm_120"))):
        monkeypatch.setattr(aot, "CACHE", tmp_path / folder)
        monkeypatch.setattr(aot, "passes_are_known", lambda keeps=folder == "kept": keeps)
        for name in architectures:
            with aot.pretend_gpu(name, launched):
                aot.Call("chunk_scaled_dot_kkt", options=(("g", None),)).run()
    kernels = {name for _, name in made}
    assert kernels
    for kind in ("read", "laid_out"):
        assert len(list((tmp_path / "kept").glob(f"*.{kind}"))) == len(kernels)
        assert not list((tmp_path / "fresh").glob(f"*.{kind}"))
    for name in kernels:
        assert len({kernel.hash for kernel in made["kept", name]}) == 3
        for kept, fresh in zip(made["kept", name][1:], made["fresh", name], strict=True):
            assert kept.asm["ptx"] == fresh.asm["ptx"] and kept.metadata.shared == fresh.metadata.shared


@pytest.mark.skipif(not aot.passes_are_known(), reason="nothing is cached across architectures under this Triton")
@pytest.mark.parametrize("asked", ["driver", "option"])
def test_a_kernel_that_queries_its_architecture_is_not_cached(asked: str, tmp_path: Path, monkeypatch):
    """It is not compiled either: its module would be reused for another architecture."""
    from triton.compiler import compiler
    from triton.runtime import driver

    usual = compiler.ASTSource.make_ir

    def asking(self, target, options, *rest):
        driver.active.get_current_target() if asked == "driver" else options.arch
        return usual(self, target, options, *rest)

    def launched(kernel, *given, **options) -> None:
        kernel.device_caches.clear()
        aot.code(kernel, *given, **options)

    monkeypatch.setattr(aot, "CACHE", tmp_path)
    monkeypatch.setattr(compiler.ASTSource, "make_ir", asking)
    with pytest.raises(AttributeError), aot.pretend_gpu("sm_90", launched):
        aot.Call("l2norm").run()
    assert not list(tmp_path.glob("*.read"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_configuration_is_left_out(architecture: str):
    """Some call that `make compile` compiles for the architecture uses every row."""
    taken = {used for call in aot.calls(architecture) for used in aot.uncompiled(call, architecture).rows}
    shipped = {(kernel, row) for kernel, rows in kernel_configs._table(architecture).items() for row in rows}
    assert not shipped - taken


def test_every_kernel_is_compiled_here():
    """For the architecture with Gluon kernels, also kernels without a configuration; each call has a new one."""
    calls = aot.calls("sm_90")
    launched = ((call, launch) for call in calls for launch in aot.uncompiled(call, "sm_90").launches)
    every = {launch.function for call, launch in launched if aot.is_compiled(call, launch.kernel)}
    tested = aot.tested_functions("sm_90")
    assert every and set().union(*tested.values()) == every
    assert all(tested.values())


def test_every_launch_decides_about_fused_multiply_adds():
    """Triton's default depends on its version, and 3.9 warns where it is taken."""
    launches = [launch for call in aot.calls("sm_90") for launch in aot.uncompiled(call, "sm_90").launches]
    assert launches and not {launch.function for launch in launches if "enable_fp_fusion" not in launch.options}


@pytest.mark.release
def test_kernels_compile_for_amd():
    """In another process, which pretends to have PyTorch for ROCm."""
    words = ["-j", "1", "-a", "gfx942", "-c", "chunk_gated_delta_rule float16 K64 V64"]
    done = subprocess.run([sys.executable, "-m", "tests.compile.aot", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(" registers " in line for line in done.stdout.splitlines()) == 5


@pytest.mark.parametrize("call", [call for call in (*aot.CALLS, *aot.EXTENDED) if not call.wrt], ids=str)
def test_explain_names_the_rows_that_the_call_uses(call: aot.Call):
    assert aot.explained_rows(call, "sm_90") == aot.uncompiled(call, "sm_90").rows


def test_explain_names_the_language_of_each_launch():
    """`segment_summary` is launched in Gluon in both directions."""
    calls = [call for call in aot.PER_ARCHITECTURE["sm_90"] if getattr(call, "segments", 0) == 4]
    call = next(call for call in calls if call.subject == "chunk_gated_delta_rule")
    with aot.pretend_gpu("sm_90", lambda *_, **__: None), call.segmented():
        plan = wyfold.explain(wyfold.chunk_gated_delta_rule, **call.arguments())
    there = {"prepare": "gluon", "segment_summary": "gluon", "segment_fold": "gluon", "scan": "gluon"}
    back = {"prepare": "gluon", "segment_summary": "gluon", "segment_fold": "gluon", "scan_bwd": "gluon"}
    for launches, wanted in ((plan.forward, there), (plan.backward, back)):
        assert {f"{stage} (wyfold.kernels.{stage}.{language})" for stage, language in wanted.items()} <= set(launches)


def test_violations_are_listed(monkeypatch):
    call, usage = aot.CALLS[0], aot.Usage("wyfold_scan_triton", 100 * aot.KIB, 255, 8, 600, True, ["%barrier: a tile"])
    monkeypatch.setattr(aot, "allowances", dict)
    assert len(aot.violations(call, "sm_89", [usage])) == 5
    assert len(aot.violations(call, "sm_90", [usage])) == 4
    minor = ".".join(triton_support.triton_version().split(".")[:2])
    monkeypatch.setattr(aot, "allowances", lambda: {minor: {"sm_90": {f"{call}: wyfold_scan_triton": 8}}})
    assert len(aot.violations(call, "sm_90", [usage])) == 3


def test_a_call_that_does_not_compile_fails_the_run_and_not_the_other_calls(monkeypatch, capsys):
    def compiled(call, architecture):
        if call.gate == "scalar":
            raise RuntimeError("source and result must have the same logical storage size")
        return [aot.Usage("wyfold_recurrent_triton", 0, 32, 0, 0, False, [])]

    monkeypatch.setattr(aot, "compiled", compiled)
    monkeypatch.setattr(aot, "ProcessPoolExecutor", lambda *_, **__: nullcontext(SimpleNamespace(map=map)))
    monkeypatch.setattr("sys.argv", ["aot", "-a", "sm_90", "-c", "serving.decode bfloat16"])
    assert aot.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("wyfold_recurrent_triton" in line for line in lines) == 3
    failed = [line for line in lines if "does not compile: RuntimeError: source and result" in line]
    assert len(failed) == 2 and all("scalar gate" in line for line in failed)
    assert lines[-1].startswith("2 failed")
