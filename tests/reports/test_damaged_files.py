"""A damaged file of a run is reported by name, and undamaged data is never overwritten.

At 2ae98e3 a checkpoint with damage at its correct size ended in a traceback or ran for a minute, and a flipped bit was
resumed from. A run whose only checkpoint was truncated restarted at step 0 and overwrote the earlier metrics.

`--draws N` draws N variants, runs each command in a separate process, and prints a table of the results.
"""

import collections
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tests import processes
from tests.extras import need_plotly
from tests.reports import damage

from wyfold.cli import main
from wyfold.cli.train import headers, integrity, rundir, schema, sharded_checkpoint
from wyfold.models import MIXERS, Decoder, DecoderConfig

pytestmark = pytest.mark.usefixtures("undrawn")

SEED = 26
VARIANTS_PER_KIND = 2  # one of each kind from an interrupted run
TINY = "--depth 2 --width 16 --heads 2 --head-dim 8 --window 8 --batch 2 --length 24 --warmup 2 --eval-bytes 96".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("one two three " * 300)
    assert main(train(folder / "text.txt", folder / "run", "--save-every", 2)) == 0
    return folder / "run"


def train(text, out, *words):
    fixed = ["--data", text, "--layers", "gdn attention", *TINY, "--steps", 4, "--eval-every", 2]
    return ["train", *map(str, [*fixed, "--out", out, *words])]


def commands(run, folder):
    """Commands to run on a damaged run: name -> arguments."""
    return {
        "generate": ["generate", str(folder), "--prompt", "one", "--max-bytes", "2", "--temperature", "0"],
        "report": ["report", str(folder), "--out", str(folder.parent / "page.html")],
        # Last, because training changes the run.
        "train --resume": train(run.parent / "text.txt", folder, "--resume"),
    }


def contents(run):
    """Every undamaged checkpoint: its name and all its bytes."""
    return {
        folder.name: [(file.name, file.read_bytes()) for file in sorted(folder.rglob("*")) if file.is_file()]
        for folder in integrity.step_folders(run / "checkpoint")
        if integrity.newest_intact(run / "checkpoint", [folder])
    }


@pytest.fixture(scope="module")
def task_run(tmp_path_factory):
    """A finished run of a task with two checkpoints, a result and every optional field in its history."""
    folder = tmp_path_factory.mktemp("task") / "run"
    words = ["--task", "parity", "--layers", "gdn attention", *TINY, "--steps", 4, "--eval-every", 2]
    words += ["--save-every", 2, "--eval-lengths", 12, "--stop-at", 1, "--peak-tflops", 1, "--out", folder]
    assert main(["train", *map(str, words)]) == 0
    return folder


def resumed(run, folder):
    """Commands to run on a damaged run of a task, which cannot generate text."""
    return {
        "report": commands(run, folder)["report"],
        "train --resume": ["train", "--resume", "--out", str(folder)],
    }


@pytest.mark.parametrize("draws_page", [False, True], ids=["load", "report"])
@pytest.mark.parametrize(
    ("learned", "asked", "kinds"),
    [
        ("run", commands, tuple(damage.KINDS)),
        ("task_run", resumed, ("retyped", "huge", "renamed", "nulled", "dropped")),
    ],
)
def test_every_damaged_variant_is_refused_by_name_or_accepted(
    learned, asked, kinds, draws_page, tmp_path, capsys, request
):
    if draws_page:
        need_plotly()
    draws, run = request.config.getoption("--draws"), request.getfixturevalue(learned)
    found = collections.defaultdict(list)
    for variant, folder in damage.variants(run, tmp_path / "run", draws or VARIANTS_PER_KIND * len(kinds), SEED, kinds):
        whole, continued = contents(folder), damage.newest(folder).name
        history = read_or_none(folder / "metrics.jsonl")
        chosen = {name: words for name, words in asked(run, folder).items() if (name == "report") == draws_page}
        for command, words in chosen.items():
            began = time.perf_counter()
            code, said = in_process(words, capsys) if draws is None else as_process(words)
            found[variant.kind, command].append((code, time.perf_counter() - began, variant))
            # A signed change may set a learning rate at which nothing is learned.
            diverged = f"What is in {folder / 'checkpoint'} is from before; a smaller --lr may help" in said
            may_diverge = command == "train --resume" and variant.signed and variant.interrupted
            assert code in (0, 2) or (code == 1 and diverged and may_diverge), (variant, command, code, said)
            assert code == variant.expected.get(command, code), (variant, command, code, said)
            assert "Traceback" not in said, (variant, command, said)
            if code == 2:
                assert len(said.strip().splitlines()) == 1, (variant, command, said)
                # A signed change may be a valid run with other settings.
                assert str(folder) in said and ("damaged" in said or variant.signed), (variant, command, said)
                assert read_or_none(folder / "metrics.jsonl") == history, (variant, command)
            if code == 0 and variant.signed:
                whole.pop(continued, None)  # an unfinished run writes its last checkpoint again
            assert whole.items() <= contents(folder).items(), (variant, command)
        # Damage that a digest covers, or that another file contradicts, is never accepted.
        covered = not variant.signed and variant.file.startswith(f"checkpoint/{continued}/")
        for command in chosen if covered and not draws_page else ():
            assert found[variant.kind, command][-1][0] == 2, (variant, command)
    if draws is not None:
        with capsys.disabled():
            print_table(found)


def read_or_none(file):
    return file.read_bytes() if file.is_file() and not file.is_symlink() else None


def in_process(words, capsys):
    capsys.readouterr()
    code = main(words)
    return code, capsys.readouterr().err


def as_process(words):
    done = processes.fresh().run(["-m", "wyfold", *words])
    return done.returncode, done.stderr


def print_table(found):
    print(f"\n{'kind':12} {'command':15} {'variants':>8} {'exit 0':>6} {'exit 2':>6} {'longest exit 2, s':>18}")
    for (kind, command), rows in found.items():
        refused = [(seconds, variant) for code, seconds, variant in rows if code == 2]
        seconds, variant = max(refused, key=lambda row: row[0], default=(0.0, None))
        counts = f"{len(rows):8} {len(rows) - len(refused):6} {len(refused):6}"
        print(f"{kind:12} {command:15} {counts} {seconds:18.2f}  {variant}")


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run, to be damaged."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def newest(run):
    return integrity.step_folders(run / "checkpoint")[-1]


def flip(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_one_bit_of_a_weight_or_a_moment_is_found(copy, run, capsys):
    """Earlier, 24 of 24 such bits were resumed from without an error, 11 of them with a different result."""
    for name in ("model/model.safetensors", "training.safetensors"):
        flip(newest(copy) / name)
        for command in ("generate", "train --resume"):
            code, said = in_process(commands(run, copy)[command], capsys)
            assert code == 2
            assert f"{newest(copy) / name} is damaged: its SHA-256 is " in said
            assert f"The checkpoint {copy / 'checkpoint' / 'step-00000002'} is whole: give " in said
        flip(newest(copy) / name)
    assert in_process(commands(run, copy)["train --resume"], capsys)[0] == 0


def test_a_run_whose_only_checkpoint_is_damaged_is_not_restarted(copy, run, capsys):
    """It restarted from step 0 and overwrote the metrics and the curve of the earlier run."""
    shutil.rmtree(copy / "checkpoint" / "step-00000002")
    file = newest(copy) / "model" / "model.safetensors"
    os.truncate(file, 1000)
    kept = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert main(train(run.parent / "text.txt", copy, "--resume", "--if-damaged", "restart")) == 2
    for words in ([], ["--resume"], ["--if-damaged", "older"]):
        code, said = in_process(train(run.parent / "text.txt", copy, *words), capsys)
        assert code == 2
        assert f"{file} is damaged: it is no whole safetensors file (" in said
        assert "No other checkpoint of this run is whole: put the file back" in said
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == kept


def test_a_damaged_run_is_restarted_on_request(copy, run, capsys):
    shutil.rmtree(copy / "checkpoint" / "step-00000002")
    flip(newest(copy) / "training.json")
    metrics, damaged = (copy / "metrics.jsonl").read_bytes(), (newest(copy) / "training.json").read_bytes()
    assert main(train(run.parent / "text.txt", copy, "--if-damaged", "restart")) == 0
    assert (copy / "metrics.jsonl.before-restart").read_bytes() == metrics
    assert (copy / "checkpoint" / "step-00000004.damaged" / "training.json").read_bytes() == damaged
    assert contents(copy)["step-00000004"]


def test_an_older_checkpoint_is_resumed_from_on_request(copy, run, capsys):
    expected = (newest(run) / "model" / "model.safetensors").read_bytes()
    (newest(copy) / "training.json").write_text("{}")
    code, said = in_process(train(run.parent / "text.txt", copy, "--if-damaged", "restart"), capsys)
    assert code == 2 and "give --if-damaged older to continue from it" in said
    assert main(train(run.parent / "text.txt", copy, "--resume", "--if-damaged", "older")) == 0
    assert (newest(copy) / "model" / "model.safetensors").read_bytes() == expected
    assert (copy / "checkpoint" / "step-00000004.damaged" / "training.json").read_text() == "{}"
    assert len((copy / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_folder_that_is_no_run_is_not_taken_over(run, tmp_path, capsys):
    for name in ("metrics.jsonl", "notes.txt", "checkpoint/step-notes/mine.txt", "step-00000001/mine.txt"):
        folder = tmp_path / name.partition("/")[0].partition(".")[0]
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        for words in (train(run.parent / "text.txt", folder), ["demo", "--out", str(folder), "--fresh"]):
            code, said = in_process(words, capsys)
            assert code == 2 and f"--out {folder}: is no run of `wyfold train`, and not empty: there is " in said
        assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["mine"]


def test_foreign_folders_among_the_checkpoints_are_kept(copy, run):
    for name in ("step-notes", "step-00000001"):
        (copy / "checkpoint" / name).mkdir()
        (copy / "checkpoint" / name / "mine.txt").write_text("mine")
    shutil.rmtree(newest(copy))
    assert main(train(run.parent / "text.txt", copy, "--save-every", 1)) == 0
    for name in ("step-notes", "step-00000001"):
        assert (copy / "checkpoint" / name / "mine.txt").read_text() == "mine"


def test_links_planted_under_temporary_names_are_not_followed(copy, run, tmp_path):
    """Every writer of a run's folder is tested with links under its former and current temporary names."""
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    shutil.rmtree(newest(copy))
    (copy / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", ".curve.png", ".result.json", "checkpoint/.unfinished-step-00000004"):
        (copy / name).symlink_to(outside)
    assert main(train(run.parent / "text.txt", copy)) == 0
    assert outside.read_text() == "mine"
    need_plotly()
    page = tmp_path / "page.html"
    (tmp_path / ".page.html").symlink_to(outside)
    assert main(["report", str(copy), "--out", str(page)]) == 0
    assert outside.read_text() == "mine" and page.stat().st_size > 1000


def test_two_processes_do_not_train_into_one_folder(copy, run, tmp_path, capsys):
    """Both used to write: 26 rows of metrics for 25 steps."""
    before = (copy / "metrics.jsonl").read_bytes()
    with rundir.locked(copy):
        for words in ([], ["--resume"]):
            code, said = in_process(train(run.parent / "text.txt", copy, *words), capsys)
            assert code == 2
            assert f"--out {copy}: another process of `wyfold train` is writing into this folder" in said
    assert (copy / "metrics.jsonl").read_bytes() == before
    with rundir.locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


def test_metrics_that_are_not_those_of_the_checkpoint_are_named(copy, run, capsys):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    for damaged, complaint in {
        "\n".join([*lines[:2], "{", *lines[3:]]) + "\n": "line 3: it is no whole JSON file",
        "\n".join(lines[:3]) + "\n": "it ends after 3 entries, the newest checkpoint has 7",
        "\n".join([json.dumps(first | {"step": 1}), *lines[1:]]) + "\n": "line 1 is not what the newest checkpoint",
        "\n".join([*lines, json.dumps(first | {"step": 1})])
        + "\n": "entry 8 of the history is of step 1, out of order",
        "\n".join([*lines, '{"step": 5, "loss": 1e999}']) + "\n": "line 8: it has another form: Number out of range",
        "\n".join([*lines, '{"step": 5, "loss": 0.5, "x": 1}']) + "\n": "line 8: it has another form: Object contains",
    }.items():
        (copy / "metrics.jsonl").write_text(damaged)
        code, said = in_process(commands(run, copy)["report"], capsys)
        assert code == 2
        assert f"{copy / 'metrics.jsonl'} is damaged: {complaint}" in said
        assert "remove the file to draw what the run's newest checkpoint has" in said
    need_plotly()
    (copy / "metrics.jsonl").unlink()
    assert in_process(commands(run, copy)["report"], capsys)[0] == 0


RESULTS = {
    "tasks": {"kind": "tasks", "runs": [{"recipe": {}}]},
    "bench": {
        "rows": [{"contender": "wyfold", "op": "gdn", "shape": {"B": 1}, "gate": "g", "mode": "fwd", "ran": "x"}]
    },
    "ranks": {"kind": "bench-ranks", "rows": [{"ranks": 0}]},
    "errors": {"operators": [{"operator": "gdn", "dtype": "float32", "pass": True, "tensors": {"o": 1}}]},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_other_verbs_are_read_by_their_schema(kind, tmp_path, capsys):
    """Each of these files ended in a traceback of `report`."""
    record = RESULTS[kind]
    if kind == "bench":  # valid except for its times
        record["rows"][0] |= {"milliseconds": {"median": "fast"}, "worst_error": "nan", "worst_tensor": "o"}
    (tmp_path / "result.json").write_text(json.dumps(record))
    code, said = in_process(["report", str(tmp_path), "--out", str(tmp_path / "x.html")], capsys)
    assert code == 2 and f"{tmp_path / 'result.json'} is damaged: it has another form: " in said


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, '{"a": NaN}', '{"a": "\\ud800"}', ""]
)
def test_invalid_or_too_deep_json_is_refused(text, tmp_path, capsys):
    (tmp_path / "result.json").write_text(text)
    code, said = in_process(["report", str(tmp_path), "--out", str(tmp_path / "x.html")], capsys)
    assert code == 2 and f"{tmp_path / 'result.json'} is damaged: it" in said


def test_a_result_with_a_nan_error_is_drawn(tmp_path):
    """`results.write` stores a NaN or infinity as a word."""
    need_plotly()
    times = {"median": 1.0, "quartile1": 0.9, "quartile3": 1.1}
    row = RESULTS["bench"]["rows"][0] | {"milliseconds": times, "worst_error": "nan", "worst_tensor": "o"}
    (tmp_path / "result.json").write_text(json.dumps({"rows": [row]}))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 0


CONFIG = {
    "not an object": ("[]", "text must be a JSON object, got list"),
    "cut": ('{"vocab_size": 2', "text must be a JSON object, got none"),
    "deep": ("[" * 100_000, "got brackets nested too deeply"),
    "not a number": ("NaN", "numbers must be finite, got NaN"),
    "digits": ("9" * 5000, "whole numbers must have at most 18 digits, got 5000"),
    "no UTF-8": (b"\xff\xfe", "codec can't decode"),
}
FIELDS = {
    "pattern": ("gdn*1000000000", "pattern must have at most 65536 layers, got 'gdn\\*1000000000' in it"),
    "hidden_size": (10**12, "hidden_size must be at most 16777216, got 1000000000000"),
    "num_layers": (10**9, "num_layers must be at most 65536, got 1000000000"),
    "num_heads": (10**12, "num_heads must be at most 16777216, got 1000000000000"),
    "vocab_size": (None, "vocab_size must be an int, got NoneType"),
    "norm_eps": (-1.0, "norm_eps must be above 0, got -1.0"),
    "options": ({"attention": {"num_kv_heads": 10**17}}, "must"),
    "extra": (1, "fields must be known to this version, got extra"),
}


def saved(folder):
    config = DecoderConfig(hidden_size=16, num_heads=2, head_dim=8, num_layers=2, pattern="gdn attention")
    Decoder(config).save(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", [*CONFIG, *FIELDS, "missing field"])
def test_a_damaged_configuration_is_refused_in_a_library_too(kind, tmp_path, capsys):
    fields = saved(tmp_path)
    content, complaint = CONFIG.get(kind, (None, ""))
    if kind in FIELDS:
        value, complaint = FIELDS[kind]
        content = json.dumps(fields | {kind: value})
    elif kind == "missing field":
        content = json.dumps({name: value for name, value in fields.items() if name != "norm_eps"})
        complaint = "norm_eps must be given, because no tensor's shape shows what the model was trained with"
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^Decoder.load: {tmp_path}/config.json is damaged: .*{complaint}"):
        Decoder.load(tmp_path)
    code, said = in_process(["generate", str(tmp_path), "--prompt", "x", "--max-bytes", "1"], capsys)
    assert code == 2 and str(tmp_path) in said and "damaged" in said


SMALL = {"vocab_size": 16, "hidden_size": 16, "num_layers": 1, "mlp_size": 16}
UNLIKE_DEFAULTS = {
    "vocab_size": 16,
    "hidden_size": 32,
    "num_layers": 2,
    "pattern": "attention",
    "num_heads": 8,
    "num_v_heads": 8,
    "head_dim": 32,
    "head_v_dim": 8,
    "conv_size": 3,
    "mlp_size": 16,
    "tied": False,
    "norm_eps": 1e-5,
    "options": {"attention": {"window": 8}},
}


@pytest.mark.parametrize("pattern", ["gdn attention", "attention"])
def test_fields_missing_next_to_weights_are_defaults_or_refused(pattern, tmp_path):
    """For hand-written files and files from before a field existed. A missing field never changes the model."""
    config = DecoderConfig(**UNLIKE_DEFAULTS | {"pattern": pattern})
    model = Decoder(config)
    model.save(tmp_path)
    ids = torch.randint(16, (1, 20))
    fields = json.loads((tmp_path / "config.json").read_text())
    refused = set()
    for missing in fields:
        (tmp_path / "config.json").write_text(json.dumps({name: fields[name] for name in fields if name != missing}))
        try:
            loaded = Decoder.load(tmp_path)
        except ValueError:
            refused.add(missing)
            continue
        assert torch.equal(loaded(ids)[0], model(ids)[0]), missing
    assert {"head_dim", "norm_eps", "options"} <= refused
    # Value heads equal heads here; attention has neither value heads nor a convolution.
    ignored = {"num_v_heads", "head_v_dim", "conv_size"} if pattern == "attention" else {"num_v_heads"}
    assert fields.keys() - refused == ignored


def test_a_configuration_with_defaults_left_out_loads(tmp_path):
    fields = {"hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_layers": 2, "pattern": "gdn attention"}
    model = Decoder(DecoderConfig(**fields))
    model.save(tmp_path)
    given = fields | {"norm_eps": 1e-6, "options": {}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert Decoder.load(tmp_path).config == model.config
    assert main(["generate", str(tmp_path), "--prompt", "x", "--max-bytes", "1"]) == 0
    assert DecoderConfig.from_json("{}") == DecoderConfig()  # without weights every field has its default


@pytest.mark.parametrize("mixer", MIXERS)
def test_tensors_and_three_fields_identify_the_model(mixer):
    """Shows why `Decoder.load` requires exactly head_dim, norm_eps and options."""
    settings = {}
    for H, HV, V, conv in itertools.product((1, 2, 4), (None, 2, 4), (None, 4), (2, 4)):
        sizes = {"num_heads": H, "num_v_heads": HV, "head_v_dim": V, "conv_size": conv}
        try:
            config = DecoderConfig(**SMALL, **sizes, pattern=mixer, head_dim=8)
        except (TypeError, ValueError):  # value heads that are not a multiple of the heads
            continue
        with torch.device("meta"):
            model = Decoder(config)
        shapes = tuple((name, x.shape) for name, x in model.state_dict().items())
        kept = {name: value for name, value in vars(model.blocks[0].mixer).items() if isinstance(value, int | float)}
        assert settings.setdefault(shapes, kept) == kept, sizes


@pytest.mark.parametrize("damaged", ["cut", "long", "empty", "length", "garbled", "renamed", "dtype", "layers"])
def test_damaged_weights_are_refused_in_a_library_too(damaged, tmp_path, capsys):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    changes = {
        "cut": content[:-1],
        "long": content + b"\0",
        "empty": b"",
        "length": b"\xff" * 8 + content[8:],
        "garbled": content[:8] + b"x" + content[9:],
        "renamed": content.replace(b"blocks.0.mixer.out.weight", b"blocks.0.mixer.out.wieght"),
        "dtype": content.replace(b'"F32"', b'"I32"'),
        "layers": content.replace(b"blocks.1.", b"blocks.7."),
    }
    assert changes[damaged] != content
    file.write_bytes(changes[damaged])
    with pytest.raises(ValueError, match=rf"^Decoder.load: {file} .*damaged"):
        Decoder.load(tmp_path)
    code, said = in_process(["generate", str(tmp_path), "--prompt", "x", "--max-bytes", "1"], capsys)
    assert code == 2 and str(file) in said and "damaged" in said


def test_no_model_is_built_before_sizes_are_compared(tmp_path, monkeypatch):
    """A legal configuration that contradicts the tensors: 16 million channels, 60 thousand layers."""
    fields = saved(tmp_path)
    monkeypatch.setattr(Decoder, "__init__", lambda *arguments, **options: pytest.fail("a model was built"))
    for change in ({"hidden_size": 2**24}, {"num_layers": 60_000}, {"vocab_size": 2**31 - 1}):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=r"must hold what config\.json beside it describes"):
            Decoder.load(tmp_path)


def test_mixers_are_identified_by_the_names_of_their_parameters():
    for mixer in MIXERS:
        assert headers.mixer_of(DecoderConfig().mixer(mixer).state_dict(), "") == mixer


def test_schemas_have_the_fields_of_what_is_written():
    names = {field.name for field in dataclasses.fields(DecoderConfig)}
    model = {field.name: field for field in msgspec.structs.fields(schema.Model)}
    assert model.keys() == names
    assert {name for name, field in model.items() if field.default is msgspec.NODEFAULT} == {
        "head_dim",
        "norm_eps",
        "options",
    }
    assert all(field.default == getattr(DecoderConfig(), name) for name, field in model.items() if not field.required)


def sign(folder):
    (folder / integrity.SUMS).unlink()
    integrity.write_sums(folder)


def test_shards_of_several_processes_are_checked_too(copy, run, capsys):
    folder = newest(copy)
    stored = [folder / "model" / "model.safetensors", folder / "training.safetensors"]
    sharded_checkpoint.write(folder / "shards", load_file(stored[0]) | load_file(stored[1]))
    for file in stored:
        file.unlink()
    sign(folder)
    assert in_process(commands(run, copy)["train --resume"], capsys)[0] == 0
    (shard,) = (folder / "shards").iterdir()
    flip(shard)
    for command in ("generate", "train --resume"):
        code, said = in_process(commands(run, copy)[command], capsys)
        assert code == 2 and f"{shard} is damaged: its SHA-256 is " in said
    flip(shard)
    # Signed changes: no model is built that the tensors contradict.
    kept = {name: (folder / name).read_text() for name in ("model/config.json", "training.json")}
    for field, setting, value, complaint in (
        ("num_layers", "depth", 60_000, "its files have 2 layers, model/config.json 60000"),
        ("hidden_size", "width", 10**12, "embedding.weight must have 256000000000000 numbers"),
    ):
        config, record = map(json.loads, kept.values())
        config[field] = record["recipe"][setting] = value
        for name, fields in zip(kept, (config, record)):
            (folder / name).write_text(json.dumps(fields))
        sign(folder)
        code, said = in_process(commands(run, copy)["generate"], capsys)
        assert code == 2 and f"{folder / 'shards'} is damaged: {complaint}" in said
    shard.unlink()
    assert in_process(commands(run, copy)["generate"], capsys)[0] == 2


LIMITED = """
import resource, signal, sys
from wyfold.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def test_a_full_disk_is_one_sentence(copy, run):
    """A file size limit simulates a full disk: both fail within the serializer's write."""
    shutil.rmtree(newest(copy))
    before = contents(copy)
    words = train(run.parent / "text.txt", copy)
    done = processes.with_package().run(["-c", LIMITED, "60000", *words])
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("wyfold train: the checkpoint of step 4 could not be written into ") and "Traceback" not in last
    )
    assert f"{copy / 'checkpoint' / 'step-00000002'} is whole. Once it can be written" in last
    assert contents(copy) == before
    assert [path.name for path in (copy / "checkpoint").iterdir()] == ["step-00000002"]


def test_metrics_that_cannot_be_written_are_one_sentence_too(run, tmp_path):
    words = train(run.parent / "text.txt", tmp_path / "new")
    done = processes.with_package().run(["-c", LIMITED, "300", *words])
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert f"{tmp_path / 'new' / 'metrics.jsonl'} cannot be written (File too large). What is in " in last


REFUSED_RECIPES = {
    "batch": (10**9, "--batch 1000000000 x --length 24: must be at most "),
    "pairs": (5, "--pairs: the definition of parity has no such choice"),
    "eval_lengths": ([12, 2**40], f"--eval-lengths {2**40}: must be at most "),
    "curriculum": (2, "--curriculum: is for --task mqar, got parity"),
}


def with_recipe(run, copy, field):
    """A copy of a run, interrupted after its first checkpoint, whose record has a setting that is refused."""
    shutil.copytree(run, copy)
    shutil.rmtree(newest(copy))
    file = newest(copy) / "training.json"
    record = json.loads(file.read_text())
    record["recipe"][field] = REFUSED_RECIPES[field][0]
    file.write_text(json.dumps(record))
    (newest(copy) / integrity.SUMS).unlink()
    integrity.write_sums(newest(copy))
    return resumed(run, copy)["train --resume"]


@pytest.mark.parametrize("field", REFUSED_RECIPES)
def test_a_stored_recipe_that_is_refused_is_named_with_its_run(field, task_run, tmp_path, capsys):
    """The error named an option that was not on the command line, and no file."""
    code, said = in_process(with_recipe(task_run, tmp_path / "copy", field), capsys)
    complaint = REFUSED_RECIPES[field][1]
    assert code == 2 and f"{tmp_path / 'copy'}: the recipe of this run is refused: {complaint}" in said


@pytest.mark.parametrize("field", ["batch", "pairs", "eval_lengths"])
def test_a_stored_recipe_is_refused_before_torch_is_imported(field, task_run, tmp_path):
    words = with_recipe(task_run, tmp_path / "copy", field)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True)
    assert done.returncode == 2 and REFUSED_RECIPES[field][1] in done.stderr, done.stderr


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "plotly"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Refuse())
from wyfold.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["generate", "train --resume", "report"])
def test_damage_is_reported_before_torch_is_imported(copy, run, command):
    """Importing torch takes longer than all of the checks."""
    flip(newest(copy) / "training.json")
    words = commands(run, copy)[command]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"{newest(copy) / 'training.json'} is damaged: " in done.stderr


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("kda attention", "model.safetensors is damaged: layer 0 is gated_delta_net, config.json beside it has kda"),
        ("gdn*1000000000", "config.json is damaged: DecoderConfig: pattern must have at most 65536 layers"),
    ],
)
def test_a_model_of_other_layers_is_refused_before_torch_is_imported(run, tmp_path, pattern, complaint):
    shutil.copytree(newest(run) / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pattern": pattern}))
    words = ["generate", str(tmp_path / "model"), "--prompt", "one"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr
