"""Functions that write files durably: after a crash, a file has either its old content or its new content."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Context manager for a new file ``path``. The ``with`` block gets a path in the same folder, and writes this file.

    If the block raises no error, the written file replaces ``path``. If ``path`` is not a regular file, for example
    ``/dev/stdout``, the block gets ``path`` itself.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path))  # a symbolic link stays
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield staged
        move(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Replace the content of a file by ``text``, encoded as UTF-8."""
    with replacing(path) as staged:
        staged.write_text(text, encoding="utf-8")


def move(source: str | Path, target: str | Path) -> None:
    """Rename a file. The content of the file is on the disk before the rename, and the rename when this returns."""
    sync(source)
    os.replace(source, target)
    sync(Path(target).absolute().parent)


def sync(path: str | Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    windows = os.name == "nt"
    if windows and os.path.isdir(path):  # Windows syncs no folders
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
