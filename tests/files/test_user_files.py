"""Files that a user names are replaced in one go."""

import os
import threading
from pathlib import Path

import pytest

from deft_backend.files.user_files import replace_file


def test_an_interrupted_command_leaves_the_old_file(tmp_path, monkeypatch):
    out = tmp_path / "trace.jsonl"
    out.write_text("old\n")

    def interrupted(part, path):
        assert part.read_text() == "new\n"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace_file(out, "new\n")
    assert out.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [out]
    replace_file(out, "new\n")
    assert out.read_text() == "new\n"


def test_a_file_is_written_where_a_link_points(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    replace_file(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_a_pipe_is_written_in_place(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    replace_file(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        replace_file(tmp_path / "missing" / "file", "text")
    assert list(tmp_path.iterdir()) == []
