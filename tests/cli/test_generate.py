"""Streamed text equals the decoder's output, in whole characters and constant memory."""

import io
import sys

import pytest
import torch

from wyfold.cli import generate, main
from wyfold.models import Decoder, DecoderConfig

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8}


@pytest.fixture
def model(tmp_path):
    """A saved hybrid whose output distribution is far from uniform."""
    torch.manual_seed(1)
    decoder = Decoder(DecoderConfig(pattern="gdn attention", options={"attention": {"window": 6}}, **SIZES))
    with torch.no_grad():
        decoder.embedding.weight.mul_(60)
    decoder.save(tmp_path / "model")
    return decoder


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {"temperature": 0.8, "seed": 0}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--seed", "7", "--temperature", "1.5"], {"temperature": 1.5, "seed": 7}),
        (["--top-k", "5", "--top-p", "0.9"], {"temperature": 0.8, "seed": 0, "top_k": 5, "top_p": 0.9}),
    ],
)
def test_the_text_is_what_the_decoder_generates(model, tmp_path, capsys, words, options):
    assert main(["generate", str(tmp_path / "model"), "--prompt", "Hé", "--max-bytes", "60", *words]) == 0
    said = capsys.readouterr()
    expected = model.generate(torch.tensor([list("Hé".encode())]), 60, **options)
    assert said.out == bytes(expected[0].tolist()).decode("utf-8", "replace") + "\n"
    assert "60 bytes after a prompt of 3" in said.err
    assert "bytes/s" in said.err


def test_threads_are_set(model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "H", "--max-bytes", "1", "--threads", "2"]) == 0
    assert seen == [2]


class Recited:
    """A model that outputs given bytes."""

    def __init__(self, content):
        self.content = content
        self.embedding = torch.nn.Embedding(1, 1)

    def stream(self, ids, max_new_tokens, **options):
        self.prompt = bytes(ids[0].tolist())
        for byte in self.content[:max_new_tokens]:
            yield torch.tensor([byte])


def pieces(model, prompt=b"", **changes):
    """The separate writes of `stream_text`."""
    written = []

    class Sink(io.StringIO):
        def write(self, piece):
            written.append(piece)
            return len(piece)

    sampling = {"max_bytes": 100, "temperature": 1.0, "top_k": None, "top_p": None, "seed": 0}
    generate.stream_text(model, prompt, generate.Sampling(**{**sampling, **changes}), Sink())
    return [piece for piece in written if piece]


def test_characters_are_complete_and_invalid_bytes_are_replaced():
    assert pieces(Recited("aé€".encode())) == ["a", "é", "€", "\n"]
    assert pieces(Recited(b"a\xffb")) == ["a", "\ufffd", "b", "\n"]
    assert pieces(Recited("€".encode()), max_bytes=2) == ["\ufffd\n"]


def test_a_prompt_may_end_inside_a_character():
    assert pieces(Recited("é".encode()[1:]), prompt="né".encode()[:2]) == ["n", "é", "\n"]


def test_an_empty_prompt_starts_a_line():
    model = Recited(b"x")
    assert pieces(model) == ["x", "\n"]
    assert model.prompt == b"\n"


def test_the_prompt_comes_from_standard_input_unless_given(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from the pipe")))
    assert main(["generate", str(tmp_path / "model"), "--max-bytes", "0"]) == 0
    assert capsys.readouterr().out == "from the pipe\n"


def test_each_line_of_a_file_is_continued_as_if_alone(model, tmp_path, capsys):
    (tmp_path / "prompts").write_text("one\n\ntwo\n")
    words = ["generate", str(tmp_path / "model"), "--max-bytes", "9"]
    assert main([*words, "--prompts", str(tmp_path / "prompts")]) == 0
    together = capsys.readouterr().out
    for prompt in ("one", "two"):
        assert main([*words, "--prompt", prompt]) == 0
    assert capsys.readouterr().out == together


def test_the_text_may_go_to_a_file(model, tmp_path, capsys):
    words = ["generate", str(tmp_path / "model"), "--prompt", "é", "--max-bytes", "30"]
    assert main([*words, "--out", str(tmp_path / "text")]) == 0
    assert capsys.readouterr().out == ""
    assert main(words) == 0
    assert (tmp_path / "text").read_text(encoding="utf-8") == capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_model_of_unknown_kind_is_refused(model, tmp_path, capsys):
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("hidden_size", "hidden_sise"))
    assert main(["generate", str(tmp_path / "model"), "--prompt", "x"]) == 2
    assert "hidden_sise" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "message"), [(b"\n\n", "no line to continue"), (None, "cannot be read")])
def test_a_file_without_prompts_is_refused(model, tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "prompts").write_bytes(content)
    assert main(["generate", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts")]) == 2
    assert message in capsys.readouterr().err


def test_the_backend_option_reaches_the_operators(model, tmp_path, capsys, planned_as_cuda):
    words = ["generate", str(tmp_path / "model"), "--prompt", "x", "--max-bytes", "2"]
    assert main([*words, "--backend", "eager"]) == 0
    assert {backend for _, backend in planned_as_cuda} == {"eager"}
    capsys.readouterr()
    assert main(words) == 1
    assert "wyfold generate: causal_conv1d: no backend serves tensors on cuda" in capsys.readouterr().err


def test_the_cache_does_not_grow(model):
    cache = model.new_cache(1)
    sizes = []
    with torch.no_grad():
        for t in range(40):
            model(torch.tensor([[65 + t % 20]]), cache=cache)
            sizes.append(cache.nbytes)
    assert len(set(sizes[10:])) == 1  # the window of 6 is full
