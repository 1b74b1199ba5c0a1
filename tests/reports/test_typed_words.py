"""Numbers and names that a user can type ended in tracebacks of PyTorch and matplotlib.

Among them were `--temperature 1e-300`, `--top-p 1e-300`, `--seed 18446744073709551616`, a run's folder named `$...$` or
in bytes that are not text, and `bench --shapes 1,64,2,2,257,8`. Control bytes that a model generates reached the
terminal.
"""

import argparse
import importlib
import io
import json
import math
from pathlib import Path

import pytest
import torch
from tests.extras import need_plotly

from wyfold import cli
from wyfold.cli import catalog, generate, main
from wyfold.cli.bench import cases
from wyfold.cli.bench import options as bench_options
from wyfold.cli.bench.cases import Case
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference.shapes import Shape

EXTREMES = (
    "nan",
    "inf",
    "-inf",
    "0",
    "-0.0",
    "-1",
    "1e-300",
    "1e300",
    "5e-324",
    str(2**31 - 1),
    str(2**63),
    str(2**64),
    str(10**30),
    "1" * 5000,
    "",
    " ",
    "1,2",
    "０",
    "\ud800",
)


def options(verb: str) -> list[argparse.Action]:
    """Every option and positional argument of a verb that takes a value."""
    parser = argparse.ArgumentParser(prog=verb)
    importlib.import_module(f"wyfold.cli.{verb}").add_arguments(parser)
    return [action for action in parser._actions if action.nargs != 0]


READERS = [
    pytest.param(action.type, id=f"{verb} {action.option_strings[-1] if action.option_strings else action.dest}")
    for verb in cli.VERBS
    for action in options(verb)
    if action.type not in (None, Path)
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("word", EXTREMES, ids=lambda word: ascii(word)[:24])
def test_every_option_accepts_a_usable_number_or_explains(read, word: str):
    """New options are covered too: every type but a path reads numbers, a device or shapes."""
    try:
        value = read(word)
    except argparse.ArgumentTypeError as error:
        assert str(error)
        return
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (int, float)):
            assert (math.isfinite(number) and 0 <= number < 2**63) or isinstance(number, float)


def test_no_option_uses_an_unchecked_number_type():
    """`type=int` accepts 10**30, and `type=float` accepts nan."""
    bare = [
        (verb, action.dest) for verb in cli.VERBS for action in options(verb) if action.type in (int, float, complex)
    ]
    assert not bare


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A saved model whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = DecoderConfig(pattern="gdn", hidden_size=16, num_layers=1, num_heads=1, head_dim=8)
    decoder = Decoder(config)
    with torch.no_grad():
        decoder.embedding.weight.mul_(60)
    decoder.save(folder := tmp_path_factory.mktemp("model"))
    return folder


@pytest.mark.parametrize(
    "option",
    [action.option_strings[-1] for action in options("generate") if action.type not in (None, Path)],
)
def test_generate_takes_or_refuses_every_number(option: str, model: Path, capsys):
    for word in EXTREMES:
        if (option, word) == ("--max-bytes", str(2**31 - 1)):
            continue  # valid, but would run for days
        words = ["generate", str(model), "--prompt", "ab", "--max-bytes", "2", f"{option}={word}"]
        code, said = main(words), capsys.readouterr().err
        assert code in (0, 2), words
        assert code == 0 or (said.startswith(f"wyfold generate: argument {option}: ") and said.count("\n") == 1)


PROMPT = torch.tensor([[72, 101]])


def test_a_temperature_near_zero_takes_the_likeliest(model: Path):
    decoder = Decoder.load(model)
    greedy = decoder.generate(PROMPT, 8, temperature=0)
    for temperature in (5e-324, 1e-300, 1e-40, 1e-12):
        assert torch.equal(decoder.generate(PROMPT, 8, temperature=temperature, seed=3), greedy)
    assert torch.equal(decoder.generate(PROMPT, 8, top_p=1e-300, seed=3), greedy)
    assert torch.equal(decoder.generate(PROMPT, 8, top_p=5e-324, seed=3), greedy)
    assert torch.equal(decoder.generate(PROMPT, 8, top_k=2**63 - 1, seed=3), decoder.generate(PROMPT, 8, seed=3))
    assert decoder.generate(PROMPT, 8, temperature=1e300, seed=2**64 - 1).shape == (1, 10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": 2**64}, "seed must be at most 18446744073709551615"),
        ({"top_k": 2**63}, "top_k must be at most 9223372036854775807"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"stop": 10**30}, "stop must be at most 255"),
        ({"stop": 256}, "stop must be at most 255"),
        ({"temperature": 10**400}, "temperature must be finite"),
        ({"top_p": 10**400}, "top_p must be finite"),
    ],
)
def test_the_library_refuses_by_name(given: dict, said: str, model: Path):
    with pytest.raises(ValueError, match=f"Decoder.generate: {said}"):
        Decoder.load(model).generate(PROMPT, 2, **given)


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = ("$x$", r"$\frac{$", "a\nb\x1b[2J", "%s{}", "😀\u202e", "[bold][/x]", "-")
TINY = (
    "--layers gdn --depth 1 --width 16 --heads 1 --head-dim 8 --length 16 --batch 2 --eval-bytes 32 --steps 1".split()
)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_run_may_have_any_name_that_a_folder_may_have(name: str, tmp_path: Path, capsys):
    (tmp_path / "text").write_bytes(b"some text to learn " * 40)
    words = ["train", "--data", str(tmp_path / "text"), *TINY, "--out", str(tmp_path / name)]
    assert main(words) == 0
    assert {"curve.png", "metrics.jsonl", "checkpoint"} <= {path.name for path in (tmp_path / name).iterdir()}


def test_a_name_that_safetensors_cannot_open_is_refused_before_any_work(tmp_path: Path, capsys):
    (tmp_path / "text").write_bytes(b"some text to learn " * 40)
    assert main(["train", "--data", str(tmp_path / "text"), *TINY, "--out", str(tmp_path / "\udcff")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "\udcff").exists()


def test_a_report_page_accepts_runs_of_any_name(tmp_path: Path, capsys):
    need_plotly()
    (tmp_path / "text").write_bytes(b"some text to learn " * 40)
    for name, later in (("$x$", "$x$"), ("plain", "\udcff<b>")):
        assert main(["train", "--data", str(tmp_path / "text"), *TINY, "--out", str(tmp_path / name)]) == 0
        (tmp_path / name).rename(tmp_path / later)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html"), "--title", "\ud800 $x$"]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert r"\udcff&lt;b&gt;" in page and "$x$" in page


@pytest.mark.parametrize(
    "words",
    [
        f"--batch {2**31 - 1}",
        f"--length {2**31 - 1}",
        f"--depth {10**9}",
        "--lr-end 1e300",
        "--peak-tflops 1e300",
        "--peak-tflops 1e-300",
    ],
)
def test_sizes_of_a_run_that_no_machine_has_are_refused_before_any_work(words: str, tmp_path: Path, capsys):
    (tmp_path / "text").write_bytes(b"some text to learn " * 40)
    assert main(["train", "--data", str(tmp_path / "text"), *TINY, *words.split(), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words.split()[0] in said
    assert not (tmp_path / "run").exists()


# --- output of a model
# -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class RecitingModel:
    """A model that generates given bytes."""

    def __init__(self, content: bytes):
        self.content = content
        self.embedding = torch.nn.Embedding(1, 1)

    def stream(self, ids, max_new_tokens, **options):
        for byte in self.content[:max_new_tokens]:
            yield torch.tensor([byte])


COMMANDS = "\x1b]0;owned\x07é\t\n\x9b2J\r\u202eabc".encode()
ESCAPED = "\\x1b]0;owned\\x07é\t\n\\x9b2J\\r\\u202eabc"


@pytest.mark.parametrize(("out", "expected"), [(Terminal, ESCAPED), (io.StringIO, COMMANDS.decode())])
def test_a_terminal_gets_no_commands_from_a_model_and_a_file_gets_its_bytes(out, expected: str):
    sampling = generate.Sampling(100, 1.0, None, None, 0)
    generate.stream_text(RecitingModel(COMMANDS), b"", sampling, alone := out())
    assert alone.getvalue() == f"{expected}\n"
    generate.generate_batch(
        RecitingModel(COMMANDS[:4]), [COMMANDS], generate.Sampling(0, 1.0, None, None, 0), among := out()
    )
    assert among.getvalue() == f"{expected}\n"


# --- bench and verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "gdn --shapes 1,64,2,2,257,8",
            "--shapes 1,64,2,2,257,8: gdn: chunk_gated_delta_rule: q and k must have width K",
        ),
        ("gdn --shapes 1,64,2,3,8,8", "--shapes 1,64,2,3,8,8: gdn: chunk_gated_delta_rule: v must have a multiple"),
        ("kda --shapes 1,64,2,2,8,513", "--shapes 1,64,2,2,8,513: kda: chunk_kda: v must have width V"),
        ("solve --shapes 1,64,2,257", "--shapes 1,64,2,2,257,257: solve: chunk_scaled_dot_kkt: k must have width K"),
        (f"l2norm --shapes 1,{10**30},1,8", f"--shapes 1,{10**30},1,1,8,8: l2norm: its tensors must have at most"),
        ("gdn --gates none", "nothing to run: none of gdn has --gates none"),
        ("solve --mode fwdbwd", "nothing to run: none of solve has --gates mid and --mode fwdbwd"),
        ("gdn --gates ,", "nothing to run: none of gdn has --gates "),
    ],
)
def test_a_shape_that_an_operator_refuses_is_one_line_before_any_work(words: str, said: str, tmp_path: Path, capsys):
    assert main(["bench", *words.split(), "--device", "cpu", "--peers", "none", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wyfold bench: {said}") and printed.err.count("\n") == 1 and not printed.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["text"], "text: is a file; give the folder of a run of `wyfold train`"),
        (["nowhere"], "nowhere: no such folder"),
        (["MODEL", "--prompts", "binary"], "--prompts binary: is no text, it has a NUL byte"),
    ],
)
def test_generate_reports_its_arguments(words: list[str], said: str, model: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("binary").write_bytes(b"\x7fELF\0\0")
    assert main(["generate", *(str(model) if word == "MODEL" else word for word in words)]) == 2
    assert f"wyfold generate: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "device", ["hpu", "xla", "cpu:99999999999999999999", "cuda:99", "mkldnn", "CPU", "cpu:-1", "\ud800"]
)
@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer used")
def test_a_device_of_any_name_is_refused_in_one_line(device: str, capsys):
    assert main(["verify", f"--device={device}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("wyfold verify: argument --device: ") and said.count("\n") == 1


# --- shapes that an operator does not have
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in catalog.OPS if op.startswith("decode_")])
@pytest.mark.parametrize("shape", ["1,64,2,16", "dense", "short"])
def test_decoding_more_than_a_token_is_refused(op: str, shape: str, capsys):
    """`--shapes 1,64,2,16` ran 64 rows over a pool of one slot, and reported wrong results."""
    assert main(["bench", op, "--shapes", shape, "--device", "cpu", "--peers", "none"]) == 2
    assert f"--shapes {shape}" in (said := capsys.readouterr().err) or "1,64,2,2,16,16" in said
    assert f"{op}: decodes one token of each sequence, so T must be 1, got " in said


def test_rectangular_states_of_ttt_are_refused(capsys):
    """It ran with V = K, but its row listed the requested V."""
    assert main(["bench", "ttt", "--shapes", "1,64,2,2,16,32", "--device", "cpu", "--peers", "none"]) == 2
    assert "ttt: its states are square, so V must be K = 16, got 32" in capsys.readouterr().err


@pytest.mark.parametrize("op", catalog.OPS)
def test_every_operator_accepts_the_generated_shapes(op: str):
    names = ("token64", "token1024") if op.startswith("decode_") else ("h96", "short", "token64")
    for name in names:
        (gate, *_) = cases.gates_of(op, ("mid",))
        assert Case(op, cases.PINNED[name], gate, "bfloat16", "fwd", 0, name=name).refusal() == ""


def test_decoding_has_its_own_default_shape(monkeypatch, tmp_path):
    monkeypatch.setitem(cases.PINNED, bench_options.DECODED, Shape(3, 1, 1, 1, 8, 8))
    monkeypatch.setattr(
        bench_options,
        "DEVICE_DEFAULTS",
        bench_options.DEVICE_DEFAULTS | {"cpu": bench_options.DeviceDefaults("1,20,1,8", "float32", "inside", 1)},
    )
    words = "bench gdn decode_gdn --mode fwd --device cpu --peers none --out".split()
    monkeypatch.setattr(
        "wyfold.cli.bench.memory.in_fresh_process", lambda request: {"above_inputs_mib": 1, "process_mib": 2}
    )
    assert main([*words, str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert [(row["op"], row["shape"]["B"], row["shape"]["T"]) for row in record["rows"]] == [
        ("gdn", 1, 20),
        ("decode_gdn", 3, 1),
    ]
    assert "--shapes" not in record["command"]
