"""Files of this machine and, by fsspec, of wherever a URL leads."""

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, BinaryIO

from topk_export.errors import OutputError, SourceError, naming
from topk_export.runtime.locks import HeldError, lock

LOCK = ".lock"  # readers of Parquet folders leave hidden files out


def is_url(name: str) -> bool:
    return "://" in name or "::" in name


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path on it."""
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"{url} is a URL: pip install 'topk-registry[score]'") from error
    try:
        return fsspec.url_to_fs(url)
    except (ValueError, ImportError) as error:  # no such protocol, or its package is missing
        raise SourceError(f"{url}: {error}") from error


@contextlib.contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file or URL, open for reading."""
    if is_url(name):
        system, path = filesystem(name)
        with system.open(path, "rb") as file:
            yield file
    else:
        with open(name, "rb") as file:
            yield file


def stamp_of(name: str) -> str:
    """Return the size of a file or URL and the time of its last change, or its tag, as its file system tells them."""
    if not is_url(name):
        info = os.stat(name)
        return f"{info.st_size} {info.st_mtime_ns}"
    system, path = filesystem(name)
    return _stamp(system.info(path))


def _stamp(info: Mapping[str, Any]) -> str:
    # each file system of fsspec has a key of its own
    keys = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modified", "updated", "created")
    return f"{info.get('size')} {next((info[key] for key in keys if info.get(key)), '')}"


def sha256_of(name: str) -> str:
    """Return the SHA-256 of a file or URL."""
    sha = hashlib.sha256()
    with opened(name) as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def is_folder(name: str) -> bool:
    if not is_url(name):
        return os.path.isdir(name)
    system, path = filesystem(name)
    return bool(system.isdir(path))


def below(folder: str, skipped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield every file below a folder, in an order that depends on the names alone; count hidden ones as skipped.

    With its name comes its stamp, where listing the folder told it, else nothing.
    """
    if is_url(folder):
        system, path = filesystem(folder)
        for file, info in sorted(system.find(path, detail=True).items()):
            if _hidden(file.removeprefix(path)):
                skipped["hidden"] += 1
            else:
                yield system.unstrip_protocol(file), _stamp(info)
        return
    for root, folders, names in os.walk(folder, onerror=_refuse):
        skipped["hidden"] += sum(map(_hidden, (*folders, *names)))
        folders[:] = sorted(name for name in folders if not _hidden(name))
        for name in sorted(names):
            if not _hidden(name):
                yield os.path.join(root, name), ""


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be listed: {error.strerror}") from error


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def expanded(name: str) -> list[str]:
    """The names that a pattern stands for: ``{000..012}``, ``{train,val}``, ``*``, ``?`` and ``[...]``."""
    names = _braces(name)
    if not any(sign in name for sign in "*?[") or (not is_url(name) and os.path.exists(name)):
        return names
    matches = [match for each in names for match in sorted(_globbed(each))]
    if not matches:
        raise SourceError(f"{name} matches no file")
    return matches


def _globbed(pattern: str) -> list[str]:
    if not is_url(pattern):
        import glob

        return glob.glob(pattern, recursive=True)
    system, path = filesystem(pattern)
    return [system.unstrip_protocol(match) for match in system.glob(path)]


def _braces(name: str) -> list[str]:
    parts = re.split(r"\{([^{}]*(?:\.\.|,)[^{}]*)\}", name)
    choices = [[part] if i % 2 == 0 else _choices(part) for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers[1], numbers[2]
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [str(i).zfill(width) for i in range(int(first), int(last) + 1)]


@contextlib.contextmanager
def written_whole(name: str) -> Iterator[Any]:
    """A file to write; under its name it appears whole or not at all.

    An object store shows an object once all of it has arrived; everywhere the last step is a rename.

    Raises:
        OSError: it cannot be written; the error names it.
        OutputError: another command took its half away.
    """
    ending = f".{uuid.uuid4().hex}.tmp"
    if is_url(name):
        system, path = filesystem(name)
        half = path + ending
        with naming(name), _removed_on_error(system.rm, half):
            with system.open(half, "wb") as file:
                yield file
            with _still_there(name):
                system.mv(half, path)
    else:
        half = name + ending
        with naming(name), _removed_on_error(os.unlink, half):
            with open(half, "wb") as file:
                yield file
            with _still_there(name):
                os.replace(half, name)


@contextlib.contextmanager
def _still_there(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise OutputError(
            f"{name} was taken away while it was written: another command writes into the same output"
        ) from error


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """Hold a folder of this machine, or of one that it shares, for this command alone; a URL cannot be held.

    The lock is the system's, on a file of the folder, so that it ends with its process however that ends.

    Raises:
        OutputError: another command holds it.
    """
    name = os.path.join(folder, LOCK)
    try:
        file = None if is_url(folder) else lock(name)
    except HeldError as error:
        raise OutputError(f"{error} writes into {folder} now: wait for it, or name another --output") from error
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # while it is held: the next one makes its own
            os.close(file)


@contextlib.contextmanager
def _removed_on_error(remove: Callable[[str], None], name: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            remove(name)
        raise


def make_folder(name: str) -> None:
    if is_url(name):
        system, path = filesystem(name)
        system.makedirs(path, exist_ok=True)
    else:
        os.makedirs(name, exist_ok=True)


def names_in(folder: str) -> list[str]:
    """The names of the files of a folder; none where it does not exist."""
    if is_url(folder):
        system, path = filesystem(folder)
        system.invalidate_cache()
        return sorted(os.path.basename(file) for file in system.ls(path, detail=False)) if system.exists(path) else []
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def remove(folder: str, name: str) -> None:
    if is_url(folder):
        system, path = filesystem(folder)
        system.rm(f"{path}/{name}")
    elif os.path.isdir(path := os.path.join(folder, name)):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)
