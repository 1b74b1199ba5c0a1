"""Corpus: files that are read or refused, and batches whose labels never cross a document or the split."""

import sys

import pytest
import torch

from wyfold.cli import UsageError
from wyfold.cli.train.corpus import Corpus, PackedBatches, WindowBatches, read


def text(corpus: Corpus) -> bytes:
    return bytes(corpus.text.tolist())


def test_a_file_is_one_document_byte_for_byte(tmp_path):
    content = "é\r\n\x01\xff".encode("latin-1")
    (tmp_path / "a.txt").write_bytes(content)
    corpus = read(tmp_path / "a.txt")
    assert text(corpus) == content
    assert corpus.borders == (0, len(content))


def test_a_folder_is_read_as_its_sorted_text_files(tmp_path):
    for name, content in {
        "b.txt": b"second",
        "a/z.md": b"last of the folder",
        "a.py": b"first",
        "empty.txt": b"",
        "picture.png": b"\x89PNG\0\0",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    corpus = read(tmp_path)
    documents = [text(corpus)[a:b] for a, b in zip(corpus.borders[:-1], corpus.borders[1:], strict=True)]
    assert documents == [b"first", b"second", b"last of the folder"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_bytes("text".encode("utf-16")), "is no text, it has a NUL byte"),
        (lambda path: path.mkdir(), "no text file with anything in it"),
    ],
)
def test_unreadable_paths_are_named(tmp_path, make, message):
    path = tmp_path / "the-corpus"
    make(path)
    with pytest.raises(UsageError, match=f"the-corpus: {message}"):
        read(path)


@pytest.mark.parametrize("cut", [WindowBatches, PackedBatches])
def test_a_too_short_file_is_named_with_the_needed_size(tmp_path, cut):
    (tmp_path / "short.txt").write_bytes(b"0123456789")
    with pytest.raises(UsageError, match=r"short\.txt: 10 bytes are too few, .* at least (17|33)"):
        cut(read(tmp_path / "short.txt"), batch=2, length=16, seed=0)


def test_the_default_is_prose_without_repeats():
    corpus = read(None)
    assert corpus.documents > 20
    documents = [text(corpus)[a:b] for a, b in zip(corpus.borders[:-1], corpus.borders[1:], strict=True)]
    bodies = [document.split(b"\n", 3)[-1].strip() for document in documents]
    for place, body in enumerate(bodies):
        assert not any(body in other for other in bodies[:place] + bodies[place + 1 :])


def test_without_topics_the_library_sources_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    corpus = read(None)
    assert "sources" in corpus.name
    assert b"def " in text(corpus)


def test_digest_follows_the_content_and_the_borders():
    whole, parts = Corpus.of("a", [b"abcd"]), Corpus.of("a", [b"ab", b"cd"])
    assert whole.digest() == Corpus.of("b", [b"abcd"]).digest()
    assert len({whole.digest(), parts.digest(), Corpus.of("a", [b"abce"]).digest()}) == 3


def test_split_holds_out_the_tail():
    training, validation = Corpus.of("x", [bytes(range(100))]).split(0.1, at_document=False)
    assert (text(training), text(validation)) == (bytes(range(90)), bytes(range(90, 100)))


def test_split_at_documents_cuts_no_document():
    corpus = Corpus.of("x", [b"a" * 50, b"b" * 40, b"c" * 30])
    training, validation = corpus.split(0.3, at_document=True)
    assert (text(training), training.borders) == (b"a" * 50, (0, 50))
    assert (text(validation), validation.borders) == (b"b" * 40 + b"c" * 30, (0, 40, 70))


def test_windows_label_each_byte_with_the_next():
    batch = WindowBatches(Corpus.of("x", [bytes(range(200))]), batch=3, length=16, seed=1).at(5)
    assert batch.ids.shape == (3, 16)
    assert torch.equal(batch.labels, batch.ids + 1)


@pytest.mark.parametrize("cut", [WindowBatches, PackedBatches])
def test_batches_depend_on_seed_and_index_alone(cut):
    corpus = Corpus.of("x", [bytes([65 + i]) * (20 + 7 * i) for i in range(12)])
    forward = cut(corpus, batch=2, length=8, seed=3)
    taken = [forward.at(index) for index in range(40)]
    later = cut(corpus, batch=2, length=8, seed=3)
    for index in (39, 0, 17):
        again = later.at(index)
        assert torch.equal(again.ids, taken[index].ids)
        assert torch.equal(again.labels, taken[index].labels)
        assert again.lengths == taken[index].lengths
    other = cut(corpus, batch=2, length=8, seed=4)
    assert any(not torch.equal(other.at(index).ids, taken[index].ids) for index in range(5))


def test_an_epoch_visits_each_window_once_and_the_next_is_shifted():
    windows = WindowBatches(Corpus.of("x", [bytes(range(256))]), batch=1, length=16, seed=0)
    first = [int(windows.at(index).ids[0, 0]) for index in range(windows.per_epoch)]
    second = [int(windows.at(windows.per_epoch + index).ids[0, 0]) for index in range(windows.per_epoch)]
    assert len(set(first)) == windows.per_epoch
    assert {start - min(first) for start in first} == set(range(0, 16 * windows.per_epoch, 16))
    assert first != second


def test_a_pack_has_pieces_and_no_label_crosses_a_border():
    # Document i repeats the byte i: a label across a border would differ from its id.
    documents = [bytes([i]) * n for i, n in enumerate([1, 2, 30, 5, 9, 64, 17, 3, 2, 40])]
    packs = PackedBatches(Corpus.of("x", documents), batch=2, length=16, seed=0)
    learned = 0
    for index in range(packs.per_epoch):
        batch = packs.at(index)
        assert batch.ids.shape == (1, 32)
        assert torch.equal(batch.ids, batch.labels)
        assert sum(batch.lengths) == 32
        assert max(batch.lengths) <= 16
        pieces = batch.ids[0].split(list(batch.lengths))
        assert all(len(piece.unique()) == 1 for piece in pieces)
        learned += 32
    pairs = sum(len(document) - 1 for document in documents)
    assert pairs - 32 < learned <= pairs


def test_validation_reads_in_order_up_to_its_limit():
    windows = WindowBatches(Corpus.of("x", [bytes(range(100))]), batch=2, length=16, seed=0)
    ids = torch.cat([batch.ids for batch in windows.in_order(64)])
    assert torch.equal(ids.flatten(), torch.arange(64))
    assert sum(batch.ids.numel() for batch in windows.in_order(10**9)) == 96
