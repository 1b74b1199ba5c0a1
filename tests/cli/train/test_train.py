"""Training runs: output, interruption, and resuming with equal results."""

import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.context_parallel.ranks import Case, failures_on_ranks
from tests.processes import run_ranks, with_package

from wyfold.cli import main
from wyfold.cli.distributed import DistributedWorld, World, process_device
from wyfold.cli.train import checkpoint
from wyfold.cli.train import history as history_file
from wyfold.cli.train.corpus import Batch, Corpus
from wyfold.cli.train.recipe import Recipe, build, optimizer
from wyfold.cli.train.trainer import Trainer
from wyfold.models import Decoder

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = "--depth 2 --width 16 --heads 2 --head-dim 8 --window 8 --batch 2 --length 24 --warmup 2 --eval-bytes 96".split()


HALF_PERCENT = 0.005  # allowed difference of losses between numbers of ranks; it is near 1e-6


@pytest.fixture
def data(tmp_path):
    """Three text files of about two thousand bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, word in {"a": "one two three ", "b": "red green blue ", "c": "spring summer autumn winter "}.items():
        (folder / f"{name}.txt").write_text(word * (2000 // len(word)))
    return folder


def train(data, out, *words, layers="gdn attention"):
    return main(["train", "--data", str(data), "--out", str(out), "--layers", layers, *TINY, *map(str, words)])


def history(out):
    """History of a run without timings."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        entry.pop("tokens_per_second", None)
        entry.pop("mfu", None)
    return entries


def newest(out):
    return max((out / "checkpoint").iterdir())


def weights(out):
    return (newest(out) / "model" / "model.safetensors").read_bytes()


def stop_after(monkeypatch, step):
    """Send SIGINT to this process during the given step."""
    take = Trainer._take_step

    def interrupted(self):
        if self.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self)

    monkeypatch.setattr(Trainer, "_take_step", interrupted)


def test_a_run_learns_and_writes_curve_metrics_and_two_checkpoints(data, tmp_path, capsys, drawn):
    out = tmp_path / "run"
    assert train(data, out, "--steps", 30, "--eval-every", 10, "--save-every", 10, "--lr", 0.02) == 0
    said = capsys.readouterr().out
    assert f"wyfold generate {out}" in said
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [folder.name for folder in sorted((out / "checkpoint").iterdir())] == ["step-00000020", "step-00000030"]
    entries = history(out)
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, 31))
    validation = {entry["step"]: entry["validation_bits_per_byte"] for entry in entries if "loss" not in entry}
    assert list(validation) == [0, 10, 20, 30]
    assert 7.5 < validation[0] < 8.5
    assert validation[30] < validation[0] - 1


@pytest.mark.parametrize("mode", [[], ["--packed"], ["--grad-accum", "2"], ["--dtype", "bfloat16"]])
def test_an_interrupted_run_continues_with_equal_losses(data, tmp_path, monkeypatch, capsys, mode):
    words = ["--steps", 8, "--eval-every", 3, "--save-every", 100, *mode]
    assert train(data, tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patched:
        stop_after(patched, step=3)  # a step before an evaluation, which the resumed run takes
        assert train(data, tmp_path / "parts", *words) == 130
    assert "stopped after step 3" in capsys.readouterr().out
    assert newest(tmp_path / "parts").name == "step-00000003"
    assert train(data, tmp_path / "parts", *words, "--resume") == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_processes_that_share_rows_take_the_steps_of_one(data, tmp_path, monkeypatch, capsys):
    """A run of one process, continued by two that share every row and every parameter."""
    words = ["--steps", 4, "--eval-every", 2, "--packed"]
    assert train(data, tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patched:
        stop_after(patched, step=1)
        assert train(data, tmp_path / "parts", *words) == 130
    arguments = ["--data", data, "--out", tmp_path / "parts", "--layers", "gdn attention", *TINY, *words, "--cp", 2]
    first, second = run_ranks(["-m", "wyfold", "train", *arguments])
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    said = first.stdout + second.stdout
    assert "1 x 2 processes" in said
    assert "continuing" in said and said.count("sample from it") == 1
    written = {path.name for path in (newest(tmp_path / "parts") / "shards").iterdir()}
    assert written == {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert main(["generate", str(tmp_path / "parts"), "--prompt", "one", "--max-bytes", "3"]) == 0
    ends = []
    for entry, whole in zip(history(tmp_path / "parts"), history(tmp_path / "whole"), strict=True):
        assert entry.keys() == whole.keys()
        ends += [abs(entry[name] - value) / max(1e-6, abs(value)) for name, value in whole.items()]
    assert max(ends) < HALF_PERCENT


@pytest.mark.long
def test_a_refusal_reaches_all_ranks_and_creates_nothing(data, tmp_path):
    arguments = ["--data", data, "--out", tmp_path / "run", "--layers", "gru", *TINY, "--cp", 2]
    for done in run_ranks(["-m", "wyfold", "train", *arguments]):
        assert done.returncode == 2
        assert "wyfold train: no model can be built so: " in done.stderr
    assert not (tmp_path / "run").exists()


def test_ranks_without_a_launcher_are_refused(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--cp", 2) == 2
    assert "--cp 2: start the processes by torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layers",
    [
        "ttt_linear",
        "gla gdn2 gdp",
        "rwkv7*2",
        *(pytest.param(layers, marks=pytest.mark.release) for layers in ("delta_net", "kda", "path_attention")),
    ],
)
def test_every_mixer_trains_and_resumes(data, tmp_path, monkeypatch, layers):
    words = ["--steps", 3, "--eval-every", 10]
    assert train(data, tmp_path / "whole", *words, layers=layers) == 0
    with monkeypatch.context() as patched:
        stop_after(patched, step=2)
        assert train(data, tmp_path / "parts", *words, layers=layers) == 130
    assert train(data, tmp_path / "parts", *words, layers=layers) == 0
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_gla_layers_get_a_convolution(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--steps", 1, "--gla-conv", layers="gla attention") == 0
    gla, attention = checkpoint.load_model(tmp_path / "run", torch.device("cpu"), None).blocks
    assert gla.mixer.conv.conv_size == 4 and not hasattr(attention.mixer, "conv")
    assert train(data, tmp_path / "other", "--steps", 1, "--gla-conv", layers="kda") == 2
    assert "--gla-conv: there is no gla layer in --layers 'kda'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_entries_after_the_last_checkpoint_are_not_duplicated(data, tmp_path):
    words = ["--steps", 6, "--eval-every", 100, "--save-every", 2]
    assert train(data, tmp_path / "run", *words) == 0
    whole = history(tmp_path / "run")
    # As if the process was killed after step 6 was recorded and before its checkpoint; that of step 4 exists.
    shutil.rmtree(newest(tmp_path / "run"))
    assert train(data, tmp_path / "run", *words) == 0
    assert history(tmp_path / "run") == whole


@pytest.mark.long
def test_a_signal_stops_a_process_with_its_state_saved(data, tmp_path):
    out = tmp_path / "run"
    command = ["-m", "wyfold", "train", "--data", data, "--out", out, *TINY, "--steps", "1000000"]
    taken = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        program = with_package().start(command)
        wait_for_steps(program, out / "metrics.jsonl", taken + 2)
        os.kill(program.pid, number)
        done = program.wait()
        assert done.returncode == 130, done.stderr
        assert "to continue, give the same command again" in done.stdout
        record = json.loads((newest(out) / "training.json").read_text())
        assert record["step"] >= taken + 2
        assert history(out)[-1]["step"] == record["history"][-1]["step"] == record["step"]
        taken = record["step"]
        assert (out / "curve.png").exists()
    assert "continuing" in done.stdout


def wait_for_steps(program, file, count):
    for _ in range(600):
        if file.exists() and file.read_text().count('"loss"') >= count:
            return
        time.sleep(0.1)
    os.kill(program.pid, signal.SIGKILL)
    raise AssertionError(f"no {count} steps within a minute: {program.wait()}")


def test_a_finished_run_is_not_changed(data, tmp_path, capsys):
    words = ["--steps", 2, "--save-every", 1]
    assert train(data, tmp_path / "run", *words) == 0
    before = newest(tmp_path / "run").stat().st_mtime_ns
    capsys.readouterr()
    assert train(data, tmp_path / "run", *words) == 0
    assert "already finished, at step 2" in capsys.readouterr().out
    assert newest(tmp_path / "run").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("words", "field", "here", "there"),
    [
        (["--lr", "0.5"], "--lr", "0.5", "0.003"),
        (["--width", "24"], "--width", "24", "16"),
        (["--packed"], "--packed", "True", "False"),
    ],
)
def test_another_configuration_in_the_same_folder_is_refused_by_name(data, tmp_path, capsys, words, field, here, there):
    assert train(data, tmp_path / "run", "--steps", 2) == 0
    before = weights(tmp_path / "run")
    capsys.readouterr()
    assert train(data, tmp_path / "run", "--steps", 2, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"wyfold train: {field} is {here} here, but the run in {tmp_path / 'run'} was started with ")
    assert f"with {there}:" in said
    assert weights(tmp_path / "run") == before


def test_other_text_in_the_same_folder_is_refused(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--steps", 2) == 0
    (data / "a.txt").write_text("something else " * 150)
    assert train(data, tmp_path / "run", "--steps", 2) == 2
    assert "the text of --data is not the one that the run in" in capsys.readouterr().err


def test_a_run_without_its_text_asks_for_it(data, tmp_path, capsys):
    """The message said that the text of --data was another one, though no --data was given."""
    assert train(data, tmp_path / "run", "--steps", 2) == 0
    before = weights(tmp_path / "run")
    for words in (["--resume"], []):
        assert main(["train", "--out", str(tmp_path / "run"), *words]) == 2
        said = capsys.readouterr().err
        assert f"wyfold train: give --data FILE: the run in {tmp_path / 'run'} learns another text" in said
    assert weights(tmp_path / "run") == before


@pytest.mark.parametrize("words", [["--steps", "9"], ["--minutes", "2"]])
def test_the_length_of_a_finished_run_cannot_be_changed(data, tmp_path, capsys, words):
    assert train(data, tmp_path / "run", "--steps", 2) == 0
    assert train(data, tmp_path / "run", *words) == 2
    said = capsys.readouterr().err
    assert (
        f"{' '.join(words)} here, but the run in {tmp_path / 'run'} was started with --steps 2: the length of" in said
    )
    assert "also if it is finished" in said and "another --out for a longer or shorter one" in said


def test_the_layers_that_are_built_are_printed(data, tmp_path, capsys):
    """The pattern was printed, although a depth of 2 builds none of its attention."""
    assert train(data, tmp_path / "run", "--steps", 1, layers="gdn*3 attention") == 0
    said = capsys.readouterr().out
    assert (
        "parameters, 2 layers: gdn*2 (the pattern has 4 layers, a depth of 2 uses the first 2: no attention)\n" in said
    )
    assert "bytes in 3 documents\n" in said
    assert train(data / "a.txt", tmp_path / "one", "--steps", 1, "--depth", 1, layers="gdn") == 0
    said = capsys.readouterr().out
    assert "1 layer: gdn\n" in said and "bytes in 1 document\n" in said


def test_decoder_load_names_the_model_of_a_run(data, tmp_path):
    out = tmp_path / "run"
    assert train(data, out, "--steps", 2, "--save-every", 1) == 0
    (out / "checkpoint" / "step-00000009.damaged" / "model").mkdir(parents=True)
    for folder in (out, out / "checkpoint", newest_step(out, 2)):
        with pytest.raises(FileNotFoundError, match="give the decoder inside: ") as refused:
            Decoder.load(folder)
        named = str(refused.value).rpartition(": ")[2]
        assert named == str(newest_step(out, 2) / "model")
        assert Decoder.load(named).config.num_layers == 2
    with pytest.raises(FileNotFoundError, match=r"give the decoder inside: .*step-00000001/model"):
        Decoder.load(newest_step(out, 1))
    with pytest.raises(FileNotFoundError, match=r"give a folder that Decoder\.save wrote"):
        Decoder.load(tmp_path)


def newest_step(out, step):
    return out / "checkpoint" / f"step-{step:08}"


def test_checkpoints_are_at_multiples_after_a_resume(data, tmp_path, monkeypatch):
    """They were at multiples counted from the step of the interruption."""
    words = ["--steps", 8, "--save-every", 3, "--eval-every", 100]
    with monkeypatch.context() as patched:
        stop_after(patched, step=4)
        assert train(data, tmp_path / "run", *words) == 130
    assert train(data, tmp_path / "run", *words) == 0
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoint").iterdir())] == [
        "step-00000006",
        "step-00000008",
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_slow_start_on_several_threads_names_the_setting(data, tmp_path, monkeypatch, capsys, threads):
    take = Trainer._take_step

    def slow(self):
        time.sleep(0.3)
        return take(self)

    monkeypatch.setattr(Trainer, "_take_step", slow)
    monkeypatch.setattr("wyfold.cli.train.progress.PATIENCE_S", 0.2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert train(data, tmp_path / "run", "--steps", 1) == 0
    said = capsys.readouterr().err
    assert "please wait: the first step of this process" in said
    assert ("--threads 1" in said) == ("on 2 threads" in said) == (threads == 2)


def test_threads_are_set_before_the_first_step(data, tmp_path, monkeypatch):
    seen, take = [], Trainer._take_step
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(Trainer, "_take_step", lambda self: seen.append("step") or take(self))
    assert train(data, tmp_path / "some", "--steps", 1, "--threads", 2) == 0
    assert train(data, tmp_path / "others", "--steps", 1) == 0
    assert seen == [2, "step", "step"]


def test_the_commands_of_the_first_page_run(tmp_path, monkeypatch, capsys):
    """docs/first_model.md with fewer steps; `report` is tested elsewhere."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "first_model.md").read_text(encoding="utf-8")
    fewer = {
        "--steps 600": "--steps 4",
        "-00000600": "-00000004",
        "-bytes 200": "-bytes 20",
        "prompt, 100": "prompt, 9",
    }
    for words, others in fewer.items():
        assert words in page
        page = page.replace(words, others)
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("one two three " * 4000)
    commands = re.findall(r"^wyfold (.*)", page, re.M)
    assert [command.split()[0] for command in commands] == ["train", "report", "train", "generate"]
    for command in commands:
        if not command.startswith("report"):
            assert main(shlex.split(command)) == 0, command
    said = capsys.readouterr().out
    assert "parameters, 4 layers: gdn*3, attention\n" in said and "already finished, at step 4" in said
    exec(compile(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0], "first_model.md", "exec"), {})
    assert "'attention')\nThe " in capsys.readouterr().out


def test_a_nan_loss_ends_the_run_before_the_update(data, tmp_path, monkeypatch, capsys):
    loss = Trainer._loss

    def broken(self, batch: Batch):
        return loss(self, batch) * (float("nan") if self.step == 4 else 1.0)

    monkeypatch.setattr(Trainer, "_loss", broken)
    assert train(data, tmp_path / "run", "--steps", 8, "--save-every", 2, "--eval-every", 100) == 1
    assert "step 5: loss nan" in capsys.readouterr().err
    assert newest(tmp_path / "run").name == "step-00000004"


def read_behind(monkeypatch):
    """Read the metrics of a step while the next one runs, as on a GPU."""
    monkeypatch.setattr(World, "__init__", lambda self, device: vars(self).update(device=device, async_metrics=True))


def test_a_run_with_deferred_reading_is_the_same_run(data, tmp_path, monkeypatch):
    """With prefetch and deferred reading, also around evaluations, checkpoints and an interruption."""
    words = ["--steps", 9, "--eval-every", 4, "--save-every", 3, "--grad-accum", 2]
    assert train(data, tmp_path / "waiting", *words) == 0
    with monkeypatch.context() as patched:
        read_behind(patched)
        stop_after(patched, step=6)
        assert train(data, tmp_path / "behind", *words) == 130
    assert newest(tmp_path / "behind").name == "step-00000006"
    with monkeypatch.context() as patched:
        read_behind(patched)
        assert train(data, tmp_path / "behind", *words) == 0
    assert history(tmp_path / "behind") == history(tmp_path / "waiting")
    assert weights(tmp_path / "behind") == weights(tmp_path / "waiting")


def test_no_step_is_faster_than_its_launch(data, tmp_path, monkeypatch):
    """Before an evaluation or a checkpoint a step is read right after its launch; the device may be finished."""
    loss, clock = Trainer._loss, [0.0]

    def slow(self, batch: Batch):
        clock[0] += 10.0
        return loss(self, batch)

    monkeypatch.setattr(Trainer, "_loss", slow)
    monkeypatch.setattr("wyfold.cli.train.trainer.time.perf_counter", lambda: clock[0])
    read_behind(monkeypatch)
    assert train(data, tmp_path / "run", "--steps", 7, "--save-every", 3, "--eval-every", 100) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [entry["tokens_per_second"] for entry in map(json.loads, lines) if "tokens_per_second" in entry]
    assert len(rates) == 7 and set(rates) == {max(rates), max(rates) // 2}


def test_a_nan_loss_changes_no_parameter_with_deferred_reading(data, tmp_path, monkeypatch, capsys):
    """Two steps are launched before the NaN is read; neither may change a parameter."""
    loss, runs, before = Trainer._loss, [], []

    def broken(self, batch: Batch):
        if self.step == 4:
            runs.append(self)
            before.extend(x.detach().clone() for x in self.model.parameters())
        return loss(self, batch) * (float("inf") if self.step == 4 else 1.0)

    monkeypatch.setattr(Trainer, "_loss", broken)
    read_behind(monkeypatch)
    assert train(data, tmp_path / "run", "--steps", 8, "--save-every", 2, "--eval-every", 100) == 1
    assert "step 5: loss inf" in capsys.readouterr().err
    assert newest(tmp_path / "run").name == "step-00000004"
    assert runs[0].step == 6 and all(map(torch.equal, before, runs[0].model.parameters()))


def test_a_timed_run_ends(data, tmp_path):
    assert train(data, tmp_path / "run", "--minutes", 0.005, "--eval-every", 10**6) == 0
    record = json.loads((newest(tmp_path / "run") / "training.json").read_text())
    assert record["elapsed"] * (1 + 1 / record["step"]) > 0.3  # another step of average length would not have fitted


@pytest.mark.parametrize("behind", [False, True], ids=["read at once", "read behind"])
def test_a_timed_run_ends_before_a_step_that_does_not_fit(data, tmp_path, monkeypatch, capsys, behind):
    """Where metrics are read behind, the time so far lacks that of the last step."""
    if behind:
        read_behind(monkeypatch)
    loss, clock = Trainer._loss, [0.0]

    def slow(self, batch: Batch):
        clock[0] += 10.0
        return loss(self, batch)

    monkeypatch.setattr(Trainer, "_loss", slow)
    monkeypatch.setattr("wyfold.cli.train.trainer.time.perf_counter", lambda: clock[0])
    for minutes, steps in ((0.75, 4), (0.05, 1)):
        words = ["--minutes", minutes, "--eval-every", 10**6]
        assert train(data, tmp_path / str(steps), *words) == 0
        assert train(data, tmp_path / str(steps), *words) == 0
        assert f"already finished, at step {steps};" in capsys.readouterr().out


def recipe(**changes):
    values = {
        "data": "", "layers": "gdn kda ttt_linear attention", "depth": 4, "width": 16, "heads": 2, "head_dim": 8,
        "window": 8, "packed": False, "batch": 2, "length": 16, "grad_accum": 1, "steps": 100, "minutes": None,
        "lr": 1.0, "warmup": 10, "lr_end": 0.1, "weight_decay": 0.1, "clip": 1.0, "held_out": 0.1, "eval_every": 10,
        "eval_bytes": 100, "seed": 0, "dtype": "float32",
    }  # fmt: skip
    return Recipe(**{**values, **changes})


def test_the_learning_rate_is_warm_up_and_cosine():
    rates = [recipe().learning_rate(step, step / 100) for step in range(101)]
    assert rates[0] < 0.11
    assert max(rates) == max(rates[9:12])
    assert rates[11:] == sorted(set(rates[11:]), reverse=True)
    assert abs(rates[100] - 0.1) < 1e-12
    assert abs(rates[50] - 0.55) < 1e-12


def test_weight_decay_applies_to_matrices_only():
    model = build(recipe())
    decayed, spared = optimizer(model, recipe()).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    spared_names = {names[id(parameter)] for parameter in spared["params"]}
    assert {name for name in names.values() if "norm" in name or "decay_parameters" in name} <= spared_names
    assert "embedding.weight" in spared_names
    assert not any(name.endswith(("qkv.weight", "out.weight", "up.weight")) for name in spared_names)


def test_seeds_change_initial_parameters_and_batches(data, tmp_path):
    for seed in (0, 1):
        assert train(data, tmp_path / str(seed), "--steps", 2, "--seed", seed) == 0
    first, second = (history(tmp_path / str(seed)) for seed in (0, 1))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_packed_documents_give_the_results_of_separate_ones(data, tmp_path):
    from wyfold.cli.train.corpus import read

    run = Trainer(recipe(packed=True, length=24), read(data), tmp_path / "run", torch.device("cpu"))
    run.model.double()
    batch = run.objective.at(0)
    assert len(batch.lengths) > 1
    with torch.no_grad():
        alone = [
            run.model(ids, labels)[1] * ids.numel()
            for ids, labels in zip(batch.ids.split(batch.lengths, 1), batch.labels.split(batch.lengths, 1), strict=True)
        ]
        together = run._loss(batch)
    assert abs(together.item() - sum(alone).item() / batch.ids.numel()) < 1e-12


def test_the_backend_option_reaches_the_operators(data, tmp_path, capsys, planned_as_cuda):
    assert train(data, tmp_path / "run", "--steps", 2, "--backend", "eager", "--packed") == 0
    assert len(planned_as_cuda) > 0 and {backend for _, backend in planned_as_cuda} == {"eager"}
    assert train(data, tmp_path / "unasked", "--steps", 2) == 1
    assert 'ask for it with backend="eager"' in capsys.readouterr().err


def test_a_run_may_continue_with_another_backend(data, tmp_path, monkeypatch, planned_as_cuda):
    words = (data, tmp_path / "run", "--steps", 4)
    with monkeypatch.context() as context:
        stop_after(context, 2)
        assert train(*words, "--backend", "eager") == 130
    before = len(planned_as_cuda)
    assert train(*words) == 1  # resumed, and refused by the first operator
    assert planned_as_cuda[before:] == [("causal_conv1d", None)]
    assert train(*words, "--backend", "eager") == 0


# --- several processes -----------------------------------------------------------------------------------------------

PROCESSES = 4
DATA = Corpus.of("words", [word * 60 for word in (b"one two three ", b"red green blue ", b"spring summer ")])


def replicated(**changes):
    sizes = {"layers": "gdn kda", "depth": 2, "length": 24, "steps": 4, "eval_every": 2, "eval_bytes": 96, "lr": 0.02}
    return recipe(**sizes | changes)


def alone():
    """Run of one process that takes the batches of two replicas in turn. Returns folder and history."""
    folder = Path(tempfile.mkdtemp(prefix="wyfold-"))
    run = Trainer(replicated(grad_accum=2), DATA, folder / "alone", torch.device("cpu"))
    assert run.train(100)
    return folder, history(folder / "alone")


def test_the_backward_of_a_single_process_stays_on_its_thread():
    seen = []
    for cp in (1, 2):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda dx: seen.append(torch.autograd.is_multithreading_enabled()))
        world = World(torch.device("cpu"))
        world.cp = cp
        world.backward(x.sum())
    assert seen == [False, True] and torch.autograd.is_multithreading_enabled()


def two_replicas_of_two_ranks(given, group):
    """Run of four processes: two replicas, the rows of each shared by two ranks."""
    folder, truth = given

    def take_up():
        return Trainer(replicated(replicas=2), DATA, folder / "ranks", torch.device("cpu"), world=world, **means)

    means = {"recompute": "selective", "peak": 1e12}
    world = DistributedWorld(torch.device("cpu"), cp=2)
    first = take_up()
    history_file.rewrite(first.folder, first.history)
    first._take_step()
    first.save()
    second = take_up()
    assert second.step == 1 and second.history == first.history
    assert second.train(100)
    assert 0 < second.history[-2]["mfu"] < 1
    if world.is_main:
        found = [entry for entry in history(folder / "ranks") if "loss" in entry]
        expected = [entry for entry in truth if "loss" in entry]
        assert [entry["step"] for entry in found] == [1, 2, 3, 4]
        ends = [
            abs(entry[name] - value) / max(1e-6, abs(value))
            for entry, whole in zip(found, expected, strict=True)
            for name, value in whole.items()
        ]
        assert max(ends) < HALF_PERCENT, ends
    whole = {name: world.full_tensor(x) for name, x in second.model.state_dict().items()}
    # One process reads the checkpoint of four.
    model = checkpoint.load_model(folder / "ranks", torch.device("cpu"), None)
    assert all(torch.equal(x, whole[name]) for name, x in model.state_dict().items())


def deferred_reading(given, group):
    """Reading a step's metrics while the next one runs changes nothing; hosts agree without their devices."""
    folder, weights = given[0], []
    settings = replicated(replicas=2, steps=2, eval_every=1)
    for behind in (False, True):
        world = DistributedWorld(torch.device("cpu"), cp=2)
        assert not world.async_metrics
        world.async_metrics = behind
        run = Trainer(settings, DATA, folder / f"behind {behind}", torch.device("cpu"), world=world)
        assert run.train(100)
        weights.append({name: world.full_tensor(x) for name, x in run.model.state_dict().items()})
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    if group.rank() == 0:
        assert history(folder / "behind True") == history(folder / "behind False")


@pytest.mark.parametrize(
    "name, launched, expected",
    [("cuda", True, "cuda:3"), ("cuda", False, "cuda"), ("cuda:1", True, "cuda:1"), ("cpu", True, "cpu")],
)
def test_a_process_tries_the_gpu_of_its_local_rank(monkeypatch, name, launched, expected):
    """All processes of a host tried GPU 0, and each kept a context and its memory there."""
    monkeypatch.setattr("wyfold.cli.distributed.launched", lambda: launched)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert process_device(name) == expected


OF_A_GROUP = {
    "two replicas of two ranks": Case(alone, two_replicas_of_two_ranks),
    "deferred reading": Case(alone, deferred_reading),
}


@pytest.mark.long
def test_replicas_of_ranks_take_the_steps_of_one_process(tmp_path):
    assert not failures_on_ranks([PROCESSES], tmp_path, __name__, "OF_A_GROUP")


def test_mfu_counts_every_product_once(data, tmp_path, capsys):
    from wyfold.cli.train import mfu

    words = ["--steps", 2, "--eval-every", 10, "--peak-tflops", 0.001, "--recompute", "blocks", "--grad-accum", 2]
    assert train(data, tmp_path / "run", *words, layers="delta_net") == 0
    said = capsys.readouterr()
    assert "MFU" in said.err and "MFU" in said.out
    of_run = Recipe(**json.loads((newest(tmp_path / "run") / "training.json").read_text())["recipe"])
    model = build(of_run)
    matrices = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    products = 2 * sum(weight.numel() for weight in [*matrices, model.embedding.weight])
    mixer = model.blocks[0].mixer
    rule, conv = 6 * mixer.value_size * mixer.head_dim, 2 * mixer.conv.weight.numel()
    tokens = 2 * of_run.batch * of_run.length
    assert mfu.step_flops(of_run, 256) == 3 * tokens * (products + of_run.depth * (rule + conv))
    # With 5 labels per row, logits of the other positions are not computed.
    spared = 2 * model.embedding.weight.numel() * 2 * of_run.batch * (of_run.length - 5)
    assert mfu.step_flops(of_run, 256, 5) == mfu.step_flops(of_run, 256) - 3 * spared
