"""verify tells right from wrong, in its table, its JSON and its exit code."""

import json

import pytest
import torch

from wyfold.cli import main, verify
from wyfold.cli.scorecard import ROWS
from wyfold.cli.scorecard.finding import Finding, Row
from wyfold.cli.subjects import SUBJECTS, incoming, judged, measured
from wyfold.reference.shapes import Shape
from wyfold.stages.gradients import eager as gradients_stage
from wyfold.stages.scan import eager as scan_stage

SMALL = Shape(1, 40, 1, 2, 8, 8)
FEW = ("chunk_delta_rule", "l2norm", "solve_tril")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only three operators, one without a backward."""
    monkeypatch.setattr(verify, "SUBJECTS", {name: SUBJECTS[name] for name in FEW})


def wrong_row(monkeypatch: pytest.MonkeyPatch, size: float = 1e-4) -> None:
    """One row of the scan's output a little off."""
    usual = scan_stage.scan

    def planted(inputs, factors, S, table, scale, out, leaving):
        left = usual(inputs, factors, S, table, scale, out, leaving)
        out[:, 5] *= 1 + size
        return left

    monkeypatch.setattr(scan_stage, "scan", planted)


@pytest.mark.parametrize("dtype", verify.DTYPES.values(), ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_operator_and_gradient_is_near_the_recurrence(name, dtype):
    verdicts = judged(SUBJECTS[name], SMALL, dtype, seed=7)
    assert not [str(verdict) for verdict in verdicts if not verdict.passed]


def test_every_floating_argument_has_its_gradient():
    arguments = SUBJECTS["chunk_kda, bounded gate"].arguments(SMALL, torch.float32, 0)
    got = measured(SUBJECTS["chunk_kda, bounded gate"].ours, arguments, ("o", "state"))
    assert set(got) == {"o", "state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"}


def test_what_is_fed_back_is_no_multiple_of_what_was_drawn():
    x = SUBJECTS["l2norm"].arguments(SMALL, torch.float64, 0)["x"]
    fed = incoming({"y": x}, 0)["y"]
    assert torch.linalg.matrix_rank(torch.stack([x.flatten(), fed.flatten()])) == 2


def test_a_wrong_row_fails_with_exit_code_1(few, monkeypatch, capsys):
    wrong_row(monkeypatch)
    assert main(["verify", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "FAIL chunk_delta_rule, float64: o " in said
    assert "FAIL chunk_delta_rule, float32: o " in said
    assert "FAIL l2norm" not in said


def test_a_wrong_gradient_fails(monkeypatch):
    usual = gradients_stage.unload

    def planted(tiles, inputs, g, A_log, dt_bias, table, options, out):
        usual(tiles, inputs, g, A_log, dt_bias, table, options, out)
        out.k[:, 3] = 0

    monkeypatch.setattr(gradients_stage, "unload", planted)
    failed = {v.name for v in judged(SUBJECTS["chunk_delta_rule"], SMALL, torch.float32) if not v.passed}
    assert failed == {"dk"}


def test_what_is_right_ends_with_0_and_json(few, tmp_path, capsys):
    assert main(["verify", "--quick", "--seed", "4", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("cpu-*-verify-errors.json")
    record = json.loads(file.read_text())
    assert {"date", "command", "hardware", "versions", "commit", "modified", "threads", "seed"} <= set(record)
    assert record["command"] == "wyfold verify --quick --seed 4"
    assert [(o["operator"], o["dtype"]) for o in record["operators"]] == [(n, d) for n in FEW for d in verify.DTYPES]
    for operator in record["operators"]:
        assert operator["pass"] is True
        for tensor in operator["tensors"].values():
            assert 0 <= tensor["value"] <= tensor["target"]
    assert "tensors within their limits" in capsys.readouterr().out


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_a_row_decides_the_exit_code_and_keeps_its_record(holds, code, monkeypatch, tmp_path, capsys):
    def check(scope):
        finding = Finding(scope)
        finding.case(holds, "broke here")
        return finding

    monkeypatch.setitem(ROWS, 12, Row(12, "packed equals separate", "0 bits", check))
    assert main(["verify", "--row", "12", "--row", "34", "--out", str(tmp_path)]) == code
    (file,) = tmp_path.glob("cpu-*-verify-rows-12-34.json")
    rows = {row["row"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows[12]["pass"], rows[34]["pass"]) == (holds, None)
    assert rows[12]["target"] == "0 bits"
    said = capsys.readouterr().out
    assert "row 34 not run: " in said
    assert ("row 12 broken: broke here" in said) is not holds


def test_an_unknown_tier_is_refused(capsys):
    assert main(["verify", "--tier", "moon"]) == 2
    assert "--tier" in capsys.readouterr().err
