"""`bench` over ranks: results for every number of ranks are checked, and wrong ones get no time."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.extras import need_plotly
from tests.processes import run_ranks

from wyfold.cli import UsageError, main
from wyfold.cli.bench import scaling, tables
from wyfold.cli.bench.cases import Case
from wyfold.cli.catalog import OVER_RANKS
from wyfold.cli.distributed import DistributedWorld
from wyfold.reference.shapes import Shape

WORDS = ["bench", "gdn", "ttt", "--shapes", "1,100,1,2,8", "--rounds", "2", "--peers", "none"]
CASE = Case("gdn", Shape(1, 70, 1, 2, 8, 8), "mid", "float32", "fwdbwd", 0)


@pytest.mark.long
def test_each_number_of_ranks_has_a_row(tmp_path: Path, capsys):
    first, second = run_ranks(["-m", "wyfold", *WORDS, "--out", tmp_path])
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert file.with_suffix(".png").stat().st_size > 1000
    assert record["kind"] == OVER_RANKS and record["processes"] == 2
    rows = record["rows"]
    wanted = {(op, mode, ranks) for op in ("gdn", "ttt") for mode in ("fwd", "fwdbwd") for ranks in (1, 2)}
    assert {(row["op"], row["mode"], row["ranks"]) for row in rows} == wanted
    for row in rows:
        assert row["within_limits"] and row["milliseconds"]["rounds"] == 2
        assert (row["times_one_rank"] == 1) == (row["ranks"] == 1)
        # The state [2, 8, 8] and its map in float32, in both directions; for TTT-Linear W and b.
        collectives = 0 if row["ranks"] == 1 else 2 if row["mode"] == "fwdbwd" else 1
        assert row["sent"]["collectives"] == collectives
        each = 2 * 8 * (8 + 8) * 4 if row["op"] == "gdn" else 2 * (8 * 8 + 8) * 4
        assert row["sent"]["bytes"] == collectives * each
    assert first.stdout.count("over ranks") == 1 and not second.stdout
    need_plotly()
    page = tmp_path / "page.html"
    assert main(["report", str(file), "--out", str(page)]) == 0
    assert "speed relative to Wyfold on one rank" in page.read_text()


@pytest.fixture
def world() -> Iterator[DistributedWorld]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedWorld(torch.device("cpu"), 1)
    dist.destroy_process_group()


def test_wrong_results_get_no_time(world: DistributedWorld, monkeypatch):
    def wrong(case, peers):
        (ours,) = usual(case, peers)
        return [replace(ours, call=lambda arguments: ours.call(arguments) * 1.01)]

    usual = scaling.implementations_of
    monkeypatch.setattr(scaling, "implementations_of", wrong)
    (rows,) = scaling._run_cases([[CASE]], [], [1], 1, world)
    (row,) = rows
    assert row["failed"] and not row["correct"] and row["milliseconds"] is None
    assert row["errors"]["o"]["rms"] > 5e-3


def test_a_refusal_has_its_reason(world: DistributedWorld, monkeypatch, capsys):
    def refusing(case, peers):
        (ours,) = usual(case, peers)

        def call(arguments):
            raise NotImplementedError("no such thing")

        return [replace(ours, name="peer", ran="peer.op", call=call)]

    usual = scaling.implementations_of
    monkeypatch.setattr(scaling, "implementations_of", refusing)
    (rows,) = scaling._run_cases([[CASE]], [], [1], 1, world)
    assert rows[0]["refused"] == "rank 0: NotImplementedError: no such thing"
    tables.report_ranks(rows)
    assert "refused: gdn fwdbwd on 1 by peer.op: rank 0: NotImplementedError" in capsys.readouterr().out


BEYOND = """
import sys
import torch.distributed as dist
from wyfold.cli import main
from wyfold.cli.bench import implementations, scaling

usual = scaling.implementations_of
def broken(case, peers):
    (ours,) = usual(case, peers)
    def call(arguments):
        o = ours.call(arguments)
        if dist.get_rank() == 1 and "{how}" == "raises":
            raise MemoryError("no room")
        return o * 1.5 if dist.get_rank() == 1 else o
    return [implementations.replace(ours, call=call)]
scaling.implementations_of, scaling.FAILED_WAIT_S = broken, 1.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_single_failing_rank(how: str, tmp_path: Path):
    """An error after the first tokens, while the other rank waits in a collective."""
    script = tmp_path / "script.py"
    script.write_text(BEYOND.replace("{how}", how))
    words = ["bench", "gdn", "--shapes", "1,128,1,8", "--rounds", "1", "--peers", "none", "--mode", "fwd"]
    words += ["--ranks", "2", "--dtype", "bfloat16"]
    first, second = run_ranks([script, *words])
    assert first.returncode == 1, first.stderr
    if how == "wrong":
        assert "wrong: gdn fwd on 2 by wyfold.chunk_gated_delta_rule: o" in first.stdout
        (row,) = (line for line in first.stdout.splitlines() if line.startswith("gdn "))
        assert row.endswith("wrong")  # the columns of times are empty
    else:
        assert second.returncode == 1 and "MemoryError: no room" in second.stderr


@pytest.mark.parametrize(
    "word, world, found", [("", 1, [1]), ("", 4, [1, 2, 4]), ("", 6, [1, 2, 4, 6]), ("3,1", 4, [1, 3])]
)
def test_numbers_of_ranks(word: str, world: int, found: list[int]):
    assert scaling.counts(word, world) == found


@pytest.mark.parametrize("word", ["0", "5", "two", "1,,2", "-1"])
def test_invalid_numbers_of_ranks_are_refused(word: str):
    with pytest.raises(UsageError, match="--ranks: must be numbers from 1 to 4, the number of processes"):
        scaling.counts(word, 4)


def test_ranks_without_a_launcher_are_refused(capsys):
    assert main(["bench", "gdn", "--ranks", "2"]) == 2
    assert "--ranks 2: start the processes by torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, refusal",
    [
        (["solve"], "OP: several processes run delta_rule, gdn, kda, ttt only, got solve"),
        (["gdn", "--cold"], "--cold, --also and --mode graph need a single process"),
    ],
)
def test_options_of_a_single_process_are_refused(words: list[str], refusal: str, monkeypatch, capsys):
    monkeypatch.setattr("wyfold.cli.distributed.launched", lambda: True)
    monkeypatch.setattr("wyfold.cli.distributed.DistributedWorld", lambda device, cp: SimpleNamespace(is_main=True))
    assert main(["bench", *words, "--peers", "none"]) == 2
    assert refusal in capsys.readouterr().err
