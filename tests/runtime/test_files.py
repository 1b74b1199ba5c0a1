"""Atomic writes: a file is replaced as a whole or not at all, and no planted link is followed."""

from pathlib import Path

import pytest

from wyfold.runtime import files


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch):
    """Even if someone guesses the name, which is random."""
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".guessed.part").symlink_to(outside)
    with pytest.raises(FileExistsError):
        files.write(tmp_path / "text.txt", "other")
    assert outside.read_text() == "mine" and not (tmp_path / "text.txt").exists()


def test_a_failed_write_leaves_the_file_and_no_other(tmp_path: Path):
    file = tmp_path / "text.txt"
    files.write(file, "before")
    with pytest.raises(MemoryError), files.replacing(file) as temporary:
        temporary.write_text("half")
        raise MemoryError
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]
