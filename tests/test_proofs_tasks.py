"""The program that trains known tasks side by side: its runs start, and its table has the further layers."""

import argparse
import json
import shlex

from tools.proofs import tasks

from wyfold.cli import train


def test_a_run_starts_in_a_new_folder(tmp_path):
    """`wyfold train` refused the folder, in which the program had put a log."""
    words = "--task parity --layers rwkv7 --depth 1 --width 16 --heads 1 --head-dim 8 --batch 2 --length 8"
    run = tasks.Run("one", f"{words} --steps 1 --eval-bytes 64 --eval-lengths 16", 60)
    run.start(tmp_path / "runs", "cpu")
    assert run.process is not None and run.process.wait() == 0, run._output(tmp_path / "runs").read_text()
    run.close()
    assert run.found(tmp_path / "runs")["result"]["step"] == 1
    assert "model: " in run._output(tmp_path / "runs").read_text()


def test_the_table_has_the_further_layers(tmp_path):
    made = {cell.name: cell.tries for cell in tasks.cells(["mqar", "parity", "s5"], small=False)}
    assert {"mqar gla --gla-conv 128", "mqar gated_delta_net2 128", "parity gated_delta_product [0, 1]"} <= made.keys()
    assert "s5 rwkv7 [-1, 1]" in made and "s5 rwkv7 [0, 1]" not in made and "mqar gla --gla-conv 64" not in made
    assert all(run.words.endswith("--steps 4000") for run in made["parity rwkv7 [-1, 1]"])
    assert len({run.name for tries in made.values() for run in tries}) == sum(map(len, made.values()))
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    for tries in made.values():
        for run in tries:
            train.check_run(parser.parse_args([*shlex.split(run.words), "--out", str(tmp_path / run.name)]))


def test_results_as_published_have_no_goal(tmp_path):
    (cell,) = (cell for cell in tasks.cells(["s5"], small=True) if cell.name == "s5 rwkv7 as published")
    assert not any("--neg-eigval" in run.words for run in cell.tries)
    cell.taken = 2
    for run, right in zip(cell.tries, (0.2, 0.9)):
        (tmp_path / run.name).mkdir()
        look = {"step": 20, "accuracy": right}
        (tmp_path / run.name / "metrics.jsonl").write_text(json.dumps(look) + "\n")
        assert cell.verdict(tmp_path)[0] is None
        (tmp_path / run.name / "result.json").write_text(json.dumps({"accuracy_at": {"24": right, "48": right}}))
    assert cell.verdict(tmp_path) == (True, "90.00%, 90.00% at 48")
