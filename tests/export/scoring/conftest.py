"""Pictures of known colours, as every kind of source."""

import io
import itertools
import os
import subprocess
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.export.colours import COLOURS, png
from topk_export.commands import score
from topk_export.scoring import files, work

BROKEN = "broken.png"


@pytest.fixture(scope="session")
def contents() -> dict[str, bytes]:
    """Thirty files by name, in order; one is no image and one is cut off."""
    colours = itertools.islice(itertools.cycle(COLOURS), 28)
    files = {f"{i:02d}-{colour}.png": png(colour) for i, colour in enumerate(colours)}
    return files | {"28-text.png": b"no image", "29-cut.png": png("red")[:60]}


@pytest.fixture
def folder(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    root = tmp_path / "images"
    root.mkdir()
    for name, content in contents.items():
        (root / name).write_bytes(content)
    (root / "notes.txt").write_text("no image, and not taken for one")
    return root


@pytest.fixture
def tars(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    """Three shards of ten, with labels beside the images as webdataset has them."""
    root = tmp_path / "shards"
    root.mkdir()
    for i in range(3):
        with tarfile.open(root / f"{i:03d}.tar", "w") as archive:
            for name in list(contents)[10 * i : 10 * i + 10]:
                for member, content in ((name, contents[name]), (name.replace("png", "cls"), b"1")):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return root


@pytest.fixture
def table(tmp_path: Path, contents: dict[str, bytes], folder: Path) -> Callable[[str], Path]:
    """``table("bytes")``, ``table("path")`` or ``table("struct")``: the images as a Parquet file."""

    def write(kind: str) -> Path:
        columns: dict[str, Any] = {
            "bytes": {"image": list(contents.values())},
            "path": {"path": list(contents)},
            "struct": {"image": [{"bytes": content, "path": name} for name, content in contents.items()]},
        }[kind]
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=7)
        return path

    return write


@pytest.fixture
def run(model_file, tmp_path, capsys, monkeypatch):
    """``run(source, ...)``: status, output folder, and what was printed; shards are done by a thread."""

    class Thread(ThreadPoolExecutor):
        workers = (None,)

        def kill(self):
            self.shutdown()

    monkeypatch.setattr(score, "_local", lambda args, place, total: Thread(1))
    work._predictor.cache_clear()

    def call(*argv, model=model_file, output="scores"):
        capsys.readouterr()
        output = output if files.is_url(output) else tmp_path / output
        status = score.main([str(model), *map(str, argv), "--output", str(output), "--device", "cpu"])
        return status, output, "".join(capsys.readouterr())

    return call


def parts(output: Path) -> dict[str, bytes]:
    """The files of scores by name; there may be no others."""
    return {path.name: path.read_bytes() for path in sorted(output.iterdir())}


def rows(output: Path) -> list[dict[str, Any]]:
    """All rows, in the order of the files' names."""
    return [row for path in sorted(output.iterdir()) for row in pq.read_table(path).to_pylist()]


class Held:
    """A named pipe in the place of an image: whoever reads it waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content, self._time = self.path.read_bytes(), self.path.stat().st_mtime_ns
        self.path.unlink()
        os.mkfifo(self.path)
        self._ends: list[int] = []

    def wait_for_a_reader(self, process: subprocess.Popen[str], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._ends.append(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
                return
            except OSError:  # nobody reads yet
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def readers(self, seconds: float = 120) -> list[int]:
        """The processes that have the pipe open, at least one, this one left out; Linux tells.

        A pipe can be opened for writing a moment before the reader that waits for it has its file descriptor.
        """
        deadline = time.monotonic() + seconds
        while True:
            links = (link for link in Path("/proc").glob("[0-9]*/fd/*") if int(link.parts[2]) != os.getpid())
            if found := sorted({int(link.parts[2]) for link in links if _target(link) == str(self.path)}):
                return found
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def release(self) -> None:
        """Put the image back; whoever waits for the pipe goes on waiting."""
        new = self.path.with_name("new")
        new.write_bytes(self._content)
        os.utime(new, ns=(self._time, self._time))  # a source of another time would be another source
        os.replace(new, self.path)

    def close(self) -> None:
        self.release()
        for end in self._ends:
            os.close(end)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the process has ended, or is another user's
        return ""
