"""`verify` reports errors in its table, its JSON and its exit code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wyfold
from wyfold.cli import main, operators, verify
from wyfold.cli.operators import OPERATOR_SPECS, incoming, judged, measured
from wyfold.kernels.gradients import eager as gradients_stage
from wyfold.kernels.scan import eager as scan_stage
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, triton_support

SMALL = Shape(1, 40, 1, 2, 8, 8)
FEW = ("chunk_delta_rule", "l2norm", "solve_tril")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the catalogue to three operators, one without a backward."""
    monkeypatch.setattr(operators, "OPERATOR_SPECS", {name: OPERATOR_SPECS[name] for name in FEW})


def wrong_row(monkeypatch: pytest.MonkeyPatch, size: float = 1e-4) -> None:
    """Change one row of the scan's output slightly."""
    usual = scan_stage.scan

    def planted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        out[:, 5] *= 1 + size
        return left

    monkeypatch.setattr(scan_stage, "scan", planted)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in verify.DTYPES], ids=str)
@pytest.mark.parametrize("name", OPERATOR_SPECS)
def test_every_operator_and_gradient_is_near_the_recurrence(name, dtype):
    verdicts = judged(OPERATOR_SPECS[name], SMALL, dtype, seed=7)
    assert not [str(verdict) for verdict in verdicts if not verdict.passed]


def test_every_floating_argument_has_its_gradient():
    arguments = OPERATOR_SPECS["chunk_kda, bounded gate"].arguments(SMALL, torch.float32, 0)
    got = measured(OPERATOR_SPECS["chunk_kda, bounded gate"].ours, arguments, ("o", "state"))
    assert set(got) == {"o", "state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"}


def test_output_gradients_are_not_parallel_to_inputs():
    x = OPERATOR_SPECS["l2norm"].arguments(SMALL, torch.float64, 0)["x"]
    fed = incoming({"y": x}, 0)["y"]
    assert torch.linalg.matrix_rank(torch.stack([x.flatten(), fed.flatten()])) == 2


def test_a_wrong_row_fails_with_exit_code_1(few, monkeypatch, capsys):
    wrong_row(monkeypatch)
    assert main(["verify", "--quick", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "FAIL chunk_delta_rule, float64: o " in said
    assert "FAIL chunk_delta_rule, float32: o " in said
    assert "FAIL l2norm" not in said


def test_a_wrong_gradient_fails(monkeypatch):
    usual = gradients_stage.unload

    def planted(*arguments):
        usual(*arguments)
        arguments[-1].k[:, 3] = 0

    monkeypatch.setattr(gradients_stage, "unload", planted)
    failed = {v.name for v in judged(OPERATOR_SPECS["chunk_delta_rule"], SMALL, torch.float32) if not v.passed}
    assert failed == {"dk"}


def test_correct_results_end_with_0_and_json(few, tmp_path, capsys):
    assert main(["verify", "--quick", "--device", "cpu", "--seed", "4", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("cpu-*-verify-errors.json")
    record = json.loads(file.read_text())
    assert {"date", "command", "hardware", "versions", "commit", "modified", "threads", "seed"} <= set(record)
    assert record["command"].replace(" --device cpu", "") == "wyfold verify --quick --seed 4"  # as on a CPU
    assert [(o["operator"], o["dtype"]) for o in record["operators"]] == [(n, d) for n in FEW for d in verify.DTYPES]
    for operator in record["operators"]:
        assert operator["pass"] is True
        for tensor in operator["tensors"].values():
            assert 0 <= tensor["value"] <= tensor["target"]
    assert "tensors within their limits" in capsys.readouterr().out


def test_the_device_is_in_the_name_the_record_and_the_table(few, tmp_path, capsys):
    assert main(["verify", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("cpu-*-verify-errors.json")
    record = json.loads(file.read_text())
    assert (record["device"], record["not_run"]) == ("cpu", {})
    assert {operator["backend"] for operator in record["operators"]} == {"eager"}
    assert "error on cpu, against the float64 recurrence" in capsys.readouterr().out


@pytest.mark.parametrize("name", OPERATOR_SPECS)
def test_tensors_and_backend_reach_another_device(name, monkeypatch):
    """Uses the device "meta", which every machine has; it has no data, so the operator's results are mocked."""
    spec, called = OPERATOR_SPECS[name], []
    arguments = spec.arguments(SMALL, torch.float32, 0)
    played = spec.ours(arguments)
    monkeypatch.setattr(wyfold, spec.operator, lambda **given: called.append(given) or played)
    monkeypatch.setattr(operators.OperatorSpec, "backend", lambda self, moved: "gluon")
    assert all(map(torch.equal, spec.ours_on(torch.device("meta"), arguments), played))
    assert called[0].keys() == {*arguments, "backend"} and called[0]["backend"] == "gluon"
    assert {x.device.type for x in called[0].values() if isinstance(x, torch.Tensor)} == {"meta"}


def test_the_dispatched_backend_is_measured_else_eager(monkeypatch):
    monkeypatch.setattr(triton_support, "support_of", lambda device: triton_support.support_for("sm_90", "3.6.0"))
    monkeypatch.setattr(triton_support, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(kernel_configs, "processors", lambda device: 132)
    kernels = ("chunk_kda", "chunk_ttt_linear", "fused_recurrent_kda")
    for name in (*kernels, "fused_recurrent_ttt_linear"):
        backend = "triton" if name in kernels else "eager"
        arguments = OPERATOR_SPECS[name].arguments(SMALL, torch.float32, 0)
        assert OPERATOR_SPECS[name].backend(arguments) == "eager"
        with FakeTensorMode():
            there = {
                key: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
                for key, x in arguments.items()
            }
            assert OPERATOR_SPECS[name].backend(there) == backend


def test_a_dtype_that_the_device_lacks_is_reported_and_skipped(few, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "missing_dtypes", lambda device: {"float64": "no such dtype here"})
    assert main(["verify", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("cpu-*-verify-errors.json")
    record = json.loads(file.read_text())
    assert record["not_run"] == {"float64": "no such dtype here"}
    assert {operator["dtype"] for operator in record["operators"]} == {"float32", "bfloat16"}
    assert "float64 not run: cpu has none (no such dtype here)" in capsys.readouterr().out


def test_missing_dtypes_are_found_on_the_device():
    class Narrow(torch.overrides.TorchFunctionMode):
        """A device without float64, like Apple's."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.to and args[0].dtype == torch.float64:
                raise TypeError("no float64 here\nand more")
            return function(*args, **(kwargs or {}))

    assert verify.missing_dtypes(torch.device("cpu")) == {}
    with Narrow():
        assert verify.missing_dtypes(torch.device("cpu")) == {"float64": "no float64 here"}


def test_a_missing_device_is_refused(capsys):
    assert main(["verify", "--device", "cuda:99"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("wyfold verify: argument --device: 'cuda:99' is not a device of this machine: ")
    assert said.count("\n") == 1


@pytest.fixture
def pretended_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """Three simulated calls of kernels on a simulated GPU; the records of their self-checks can be changed."""
    records = {name: {"operator": name, "passed": True, "refusal": "", "tensors": {}} for name in ("one", "two")}
    records["one"]["tensors"] = {"o": {"error": 1e-3, "allowed": 4e-3}}
    monkeypatch.setattr(verify, "checked_kernels", lambda device, quick: list(records.values()))
    return records


def test_checks_of_kernels_are_reported_and_recorded(few, pretended_kernels, tmp_path, capsys):
    assert main(["verify", "--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "o 1.0e-03" in said and "2 of 2 checks of kernels passed" in said
    (file,) = tmp_path.glob("*-verify-errors.json")
    record = json.loads(file.read_text())
    assert record["kernels"] == list(pretended_kernels.values())
    assert {"triton", "torch", "cuda", "ptxas", "sources"} <= set(record["toolchain"])


def test_a_failed_check_of_a_kernel_ends_with_1(few, pretended_kernels, capsys):
    pretended_kernels["two"] |= {"passed": False, "refusal": "dk has relative error 1"}
    assert main(["verify", "--quick"]) == 1
    assert "FAIL dk has relative error 1\n1 of 2 checks of kernels passed" in capsys.readouterr().out


def test_a_cpu_has_no_kernels_to_check(few, capsys):
    assert main(["verify", "--quick", "--device", "cpu"]) == 0
    assert "no kernels on cpu: the eager backend is compared with the reference" in capsys.readouterr().err


def test_on_a_gpu(tmp_path):
    """In a new process, without the suite's deterministic algorithms. Kernels are checked, eager is measured."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    words = ["-m", "wyfold", "verify", "--quick", "--device", "cuda", "--out", str(tmp_path)]
    environment = {**os.environ, "WYFOLD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("cuda-*-verify-errors.json")
    record = json.loads(file.read_text())
    assert record["device"] == "cuda:0"
    assert record["kernels"] and all(check["passed"] for check in record["kernels"])
    assert {check["operator"].partition(" ")[0] for check in record["kernels"]} >= {"chunk_kda", "l2norm", "decode"}
    measured = {(o["operator"], o["dtype"]): o["backend"] for o in record["operators"]}
    assert set(measured.values()) == {"eager"} and ("chunk_kda", "bfloat16") not in measured
    assert {("chunk_kda", "float64"), ("fused_recurrent_ttt_linear", "bfloat16")} <= set(measured)
