"""Suites of `bench`, their parallel compilation, and runs that a budget ended and a later run resumes."""

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from wyfold.cli import catalog, main
from wyfold.cli.bench import _cases, memory, options, precompile, runner, suites
from wyfold.cli.bench.cases import Case
from wyfold.cli.bench.implementations import AccuracyCheck, implementations_of, make_call, plan
from wyfold.cli.bench.peer import Adapter, Loaded, Peer
from wyfold.cli.bench.peers import PEERS
from wyfold.cli.bench.suites import BOTH, SuiteRow
from wyfold.reference.shapes import Shape

TIMEOUT = subprocess.TimeoutExpired

SMALL = (
    SuiteRow("gdn", Shape(1, 20, 1, 2, 8, 16), modes=("fwd",)),
    SuiteRow("kda", Shape(1, 20, 1, 2, 8, 8), gate="bounded"),
    SuiteRow("delta_rule", Shape(1, 20, 1, 1, 8, 8), gate="none", norm="outside"),
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a small suite on the CPU, without child processes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "in_fresh_process", lambda request: {"above_inputs_mib": 2.0, "process_mib": 300.0})
    monkeypatch.setitem(suites.SUITES, "groups", SMALL)


def bench(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and record of the small suite."""
    code = main(["bench", "--suite", "groups", "--rounds", "1", "--peers", "none", "--out", str(folder), *words])
    (file,) = folder.glob("*.json")
    return code, json.loads(file.read_text())


def ran(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(row["op"], row["gate"], row["norm"], row["mode"]) for row in record["rows"]]


ALL = [
    ("gdn", "mid", "inside", "fwd"),
    *[("kda", "bounded", "inside", mode) for mode in ("fwd", "fwdbwd")],
    *[("delta_rule", "none", "outside", mode) for mode in ("fwd", "fwdbwd")],
]


def test_every_row_of_every_suite_is_a_call_that_wyfold_takes(monkeypatch):
    monkeypatch.undo()
    assert tuple(suites.SUITES) == catalog.SUITES
    for name, rows in suites.SUITES.items():
        assert len(set(rows)) == len(rows), name
        for row in rows:
            case = Case(row.op, row.shape, row.gate, "bfloat16", row.modes[0], 0, norm=row.norm)
            assert not case.refusal(), (name, row)
    heads = {(row.shape.H, row.shape.HV) for row in suites.SUITES["groups"]}
    assert heads == {(16, 32), (16, 48), (16, 64), (8, 32), (4, 16), (2, 8)}
    assert {row.shape.T for row in suites.SUITES["prompts"]} == {1024, 2048, 4096, 8192, 16384}


def test_a_suite_is_one_result_which_its_command_repeats(tmp_path):
    code, record = bench(tmp_path / "first", "--label", "peers")
    assert code == 0 and ran(record) == ALL
    assert all(row["correct"] and row["milliseconds"] for row in record["rows"])
    (file,) = (tmp_path / "first").glob("*.json")
    assert file.name == f"cpu-{record['date'][:10]}-bench-groups-peers.json"
    assert "--suite groups" in record["command"] and "--gates" not in record["command"]
    again = tmp_path / "again"
    assert main([*record["command"].split()[1:], "--out", str(again)]) == 0
    assert ran(json.loads((again / file.name).read_text())) == ALL


@pytest.mark.parametrize("suite", catalog.SUITES)
def test_a_suite_has_all_of_its_rows_in_a_run(suite: str, monkeypatch):
    monkeypatch.undo()
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    args = parser.parse_args(["--suite", suite, "--device", "cpu"])
    options.parse_lists(args)
    options.resolve_defaults(args)
    rows = suites.SUITES[suite]
    assert [(group[0].op, group[0].shape, len(group)) for group in _cases(args)] == [
        (row.op, row.shape, len(row.modes)) for row in rows
    ]


def test_named_operators_restrict_a_suite(tmp_path):
    code = main(["bench", "kda", "--suite", "groups", "--rounds", "1", "--peers", "none", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*-bench-groups-kda.json")
    record = json.loads(file.read_text())
    assert code == 0 and ran(record) == ALL[1:3]
    assert record["command"].startswith("wyfold bench kda --suite groups ")


def test_a_run_that_its_budget_ended_is_resumed(monkeypatch, tmp_path, capsys):
    seconds = iter([1.0, 6.0, 7.0])
    with monkeypatch.context() as patch:
        patch.setattr(runner.BenchSession, "spent", property(lambda self: next(seconds, 8.0)))
        patch.setattr(runner.BenchSession, "log", lambda self, line: None)
        code, record = bench(tmp_path / "first", "--budget", "5")
    assert code == 1 and ran(record) == ALL[:1]
    assert [lost["error"] for lost in record["lost"]] == ["not started within --budget 5; --resume runs it"] * 4
    assert "not measured: kda 1,20,1,2,8,8 fwdbwd, bounded gate, float32: not started" in capsys.readouterr().out
    (file,) = (tmp_path / "first").glob("*.json")
    code, second = bench(tmp_path / "second", "--resume", str(file))
    assert code == 0 and ran(second) == ALL and not second["lost"]
    assert second["rows"][0] == record["rows"][0], "the first row was measured again"
    (file,) = (tmp_path / "second").glob("*.json")
    code, third = bench(tmp_path / "third", "--resume", str(file))
    assert code == 0 and third["rows"] == second["rows"]


@pytest.mark.parametrize("name, value", [("commit", "0" * 40), ("versions", {}), ("peers", {}), ("hardware", {})])
def test_rows_of_another_run_are_not_mixed_in(name: str, value: Any, tmp_path, capsys):
    _, record = bench(tmp_path / "first")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record | {name: value}))
    words = ["bench", "--suite", "groups", "--rounds", "1", "--peers", "none"]
    assert main([*words, "--resume", str(other)]) == 2
    assert f"--resume {other}: was measured with other {name}: " in capsys.readouterr().err


def test_kernels_are_compiled_once_for_each_operator_and_set_of_heads():
    """One process has all lengths, directions and given decays; implementations of other libraries come first."""
    rows = [
        Case("gdn", Shape(1, T, 1, 2, 8, 8), "mid", "float32", mode, 0) for T in (20, 30) for mode in ("fwd", "fwdbwd")
    ]
    rows.append(Case("gdn", Shape(1, 20, 1, 2, 8, 8), "slow", "float32", "fwd", 0))
    rows.append(Case("gdn", Shape(1, 20, 2, 2, 8, 8), "mid", "float32", "fwd", 0))
    found = list(precompile.jobs(rows, [PEERS["transformers"], PEERS["flashinfer"]], ["batch_invariant"]))
    assert [job.contender for job in found[-4:]] == ["wyfold"] * 4
    assert all(job.contender != "wyfold" for job in found[:-4])
    ours = [job for job in found if job.ran == "wyfold.chunk_gated_delta_rule"]
    assert [job.cases for job in ours] == [rows[:5], rows[5:]]
    paths = [Case("path", Shape(1, T, 1, 1, 8, 8), "none", "float32", mode, 0) for T in (20, 30) for mode in BOTH]
    assert [job.cases for job in precompile.jobs(paths, [], [])] == [paths[:2], paths[2:]]


@pytest.mark.parametrize("op, K, V", [("gdn_layer", 8, 16), ("kda_layer", 8, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_are_functions_of_their_parameters(op: str, K: int, V: int, dtype: str, monkeypatch):
    """Wyfold's layer, and fla's by an invented module with the integration's layer, which has fla's parameters."""
    from wyfold.integrations import fla

    name = catalog.LAYERS[op]
    module = types.ModuleType("fla.layers")
    setattr(module, name, getattr(fla, name))
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", module)
    case = Case(op, Shape(2, 20, 2, 2 if op == "kda_layer" else 4, K, V), "model", dtype, "fwdbwd", 0)
    arguments = case.arguments()
    assert next(iter(arguments)) == "x" and arguments["x"].shape == (2, 20, 16)
    assert arguments["decay_parameters.A_log"].dtype == torch.float32
    check = AccuracyCheck(case, arguments)
    ours, theirs = implementations_of(case, [PEERS["fla"]])
    assert ours.ran == f"wyfold.layers.{name}" and plan(ours, case, arguments) == {}
    for implementation in (ours, theirs):
        found = check.check_call(implementation, True, ours=True)
        assert found.within_limits, (implementation.ran, [str(verdict) for verdict in found.verdicts])
        assert len(found.verdicts) == len(arguments)  # o in place of the number of heads
        gradients = make_call(implementation, case, arguments)()
        assert [x.shape for x in gradients] == [x.shape for x in arguments.values() if isinstance(x, torch.Tensor)]
    assert case.floor_bytes(arguments) > 2 * arguments["qkv.weight"].nbytes


class Child:
    """A child process that answers in this one. With `seconds` it takes too long for a shorter timeout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0):
        self.calls: list[dict[str, Any]] = []
        self.limits: list[float | None] = []
        self.seconds = seconds
        monkeypatch.setattr(precompile, "subprocess", mock.Mock(wraps=subprocess, run=self, TimeoutExpired=TIMEOUT))

    def __call__(self, command: list[str], *, timeout: float | None, **_: Any) -> Any:
        request = json.loads(command[-1])
        self.calls.append(request)
        self.limits.append(timeout)
        assert command[:2] == ["env", "FLA_CACHE_RESULTS=0"] and command[3:7] == ["-m", "wyfold", "bench", "--measure"]
        if timeout is not None and timeout < self.seconds:
            raise TIMEOUT(command, timeout)
        answer = precompile.compile_here(request)
        return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(answer)}\n", "")


def test_kernels_compile_before_anything_is_timed(monkeypatch, tmp_path):
    child = Child(monkeypatch)
    code, record = bench(tmp_path, "--compile", "2")
    assert code == 0 and ran(record) == ALL
    assert sorted(len(call["cases"]) for call in child.calls) == [1, 2, 2]
    assert "--compile" not in record["command"]


@pytest.mark.parametrize(
    ("budgets", "most", "named"),
    [
        (("--budget", "1000"), 500, "half of --budget"),
        (("--budget", "1000", "--compile-budget", "800"), 800, "--compile-budget"),
    ],
)
def test_a_peer_that_was_not_compiled_in_time_is_not_run(
    budgets: tuple[str, ...], most: int, named: str, monkeypatch, tmp_path
):
    """Wyfold is: a result without a time of Wyfold is worth nothing. The row names the option that was given."""
    adapter = Adapter(lambda: Loaded("library.gdn", lambda arguments: pytest.fail("runs")))
    library = Peer("library", "json", "", {"chunk_gated_delta_rule": (adapter,)}, device="cpu")
    monkeypatch.setitem(PEERS, "library", library)
    child = Child(monkeypatch, seconds=1e6)
    code, record = bench(tmp_path, "--compile", "2", *budgets, "--peers", "library")
    assert len(child.calls) == 4 and all(most - 60 < seconds <= most for seconds in child.limits)
    ours = [row for row in record["rows"] if row["contender"] == "wyfold"]
    (theirs,) = (row for row in record["rows"] if row["contender"] == "library")
    assert code == 0 and len(ours) == len(ALL) and all(row["milliseconds"] for row in ours)
    assert theirs["refused"] == f"not compiled within {named}" and not theirs["milliseconds"]


def test_a_failing_compilation_leaves_its_error_to_the_row(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(precompile, "make_call", lambda *_: (_ for _ in ()).throw(RuntimeError("no compiler")))
    Child(monkeypatch)
    code, record = bench(tmp_path, "--compile", "1")
    assert (
        "compiling wyfold.chunk_gated_delta_rule, gdn 1,20,1,2,8,16 fwd, mid gate, float32: RuntimeError: no compiler"
        in (capsys.readouterr().err)
    )
    assert code == 0 and ran(record) == ALL and all(row["milliseconds"] for row in record["rows"])
