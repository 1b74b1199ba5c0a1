"""The program that trains known tasks side by side: its runs start, and its table has the further layers."""

from tools.proofs import tasks


def test_a_run_starts_in_a_new_folder(tmp_path):
    """`wyfold train` refused the folder, in which the program had put a log."""
    words = "--task parity --layers rwkv7 --depth 1 --width 16 --heads 1 --head-dim 8 --batch 2 --length 8"
    run = tasks.Run("one", f"{words} --steps 1 --eval-bytes 64 --eval-lengths 16", 60)
    run.start(tmp_path / "runs", "cpu")
    assert run.process is not None and run.process.wait() == 0, run._output(tmp_path / "runs").read_text()
    run.close()
    assert run.found(tmp_path / "runs")["result"]["step"] == 1
    assert "model: " in run._output(tmp_path / "runs").read_text()


def test_the_table_has_the_further_layers():
    made = {cell.name: cell.tries for cell in tasks.cells(["mqar", "parity", "s5"], small=False)}
    assert {"mqar gla 128", "mqar gated_delta_net2 128", "parity gated_delta_product [0, 1]"} <= made.keys()
    assert "s5 rwkv7 [-1, 1]" in made and "s5 rwkv7 [0, 1]" not in made and "mqar gla 64" not in made
    assert all(run.words.endswith("--steps 800 --steps 4000") for run in made["parity rwkv7 [-1, 1]"])
