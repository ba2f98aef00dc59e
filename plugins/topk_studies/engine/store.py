"""The cache of finished runs: one JSON file each, named by a hash of what was asked.

A folder of studies holds ``runs/KIND/KEY.json`` (finished runs), ``runs/KIND/KEY.failed.json`` (the last failure of a
run), ``studies/NAME.json`` (which runs belong to a study) and ``work/KIND/KEY/`` (the claims on an unfinished run, and
the state that an interrupted one resumes from). Several processes may use a folder at the same time: every file is
written whole, and a failure cannot replace a finished run because it has a file of its own.
"""

import hashlib
import json
import os
import platform
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from topk_studies.engine.study import Configuration, Record

Seen = tuple[str, str]  # digests of the finished and of the failed record; "" where there is none
PACKAGES = ("topk-registry", "torch", "timm", "numpy", "numba")


class Store:
    """Records under a folder.

    Args:
        root: the folder; it is made when something is written.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def get(self, kind: str, version: int, configuration: Configuration) -> Record | None:
        """The finished record of this run, or else its last failure; None if there is none that can be read."""
        return self._best(kind, key_of(version, configuration))

    def put(self, record: Record) -> None:
        """Write a record; a reader sees all of it or none."""
        key = key_of(record.version, record.configuration)
        write_json(self._path(record.kind, key, failed=bool(record.error)), asdict(record))
        if not record.error:
            self._path(record.kind, key, failed=True).unlink(missing_ok=True)

    def seen(self, kind: str, version: int, configuration: Configuration) -> Seen:
        """The records of this run as they are now, for :meth:`newer`."""
        key = key_of(version, configuration)
        return _digest(self._path(kind, key)), _digest(self._path(kind, key, failed=True))

    def newer(self, kind: str, version: int, configuration: Configuration, seen: Seen) -> Record | None:
        """The record that another process has written since; a finished one rather than a failure."""
        key, now = key_of(version, configuration), self.seen(kind, version, configuration)
        changed = [failed for failed in (False, True) if now[failed] and now[failed] != seen[failed]]
        records = (self._read(self._path(kind, key, failed=failed)) for failed in changed)
        return next((record for record in records if record is not None), None)

    def work(self, kind: str, version: int, configuration: Configuration) -> Path:
        """The folder of this run while it is unfinished."""
        return self.root / "work" / kind / key_of(version, configuration)

    def write_study(self, name: str, records: Sequence[Record], about: dict[str, Any]) -> None:
        """Note which records belong to a study, and what its command was."""
        runs = [f"{record.kind}/{key_of(record.version, record.configuration)}" for record in records]
        write_json(self.root / "studies" / f"{name}.json", {**about, "runs": runs})

    def read_study(self, name: str) -> tuple[list[Record], dict[str, Any]] | None:
        """The records of a study and what was noted with them; None if it was never run here."""
        path = self.root / "studies" / f"{name}.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            runs = [run.split("/") for run in about["runs"]]
            records = [self._best(kind, key) for kind, key in runs]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}): run the study again", stacklevel=2)
            return None
        return [record for record in records if record is not None], about

    def _path(self, kind: str, key: str, *, failed: bool = False) -> Path:
        return self.root / "runs" / kind / f"{key}{'.failed' if failed else ''}.json"

    def _best(self, kind: str, key: str) -> Record | None:
        """The finished record, or else the failed one."""
        return self._read(self._path(kind, key)) or self._read(self._path(kind, key, failed=True))

    def _read(self, path: Path) -> Record | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return Record(**{field.name: content[field.name] for field in fields(Record)})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} is no record of a run ({error}): the run is repeated", stacklevel=3)
            return None


def key_of(version: int, configuration: Configuration) -> str:
    """Return a key of the run; equal configurations have equal keys, whatever the order of their entries."""
    return hashlib.sha256(f"{version}:{canonical(configuration)}".encode()).hexdigest()[:20]


def canonical(configuration: Configuration) -> str:
    return json.dumps(configuration, sort_keys=True, separators=(",", ":"))


def write_json(path: Path, content: Any) -> None:
    """Write beside the old file, then rename."""
    write_file(path, json.dumps(content, indent=1) + "\n")


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def unique(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Without repeats, in order."""
    return list({canonical(configuration): configuration for configuration in configurations}.values())


def versions() -> dict[str, str]:
    """Return the versions and the machine that a record notes."""
    return {"python": platform.python_version(), "machine": _machine(), **{name: _version(name) for name in PACKAGES}}


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
