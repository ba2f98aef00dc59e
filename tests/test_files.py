"""Durable writes: the order of the calls of the operating system, and what a failure leaves."""

import os
import stat

import pytest

from tests.system_calls import Calls
from topk_registry.files import write_text


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("before")
    calls = Calls(monkeypatch)
    write_text(path, "é")
    calls.check_written(path)
    opened = [os.path.basename(call.path) for call in calls if call.name == "open"]
    assert all(name.startswith(".") for name in opened)  # programs that read a folder skip such names
    assert path.read_bytes() == "é".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("before")

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "after")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
