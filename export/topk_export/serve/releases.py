"""Releases of a served model: private copies of its files, so that every process serves what was read once.

A file that is overwritten in place, or a worker that starts later, would else make one service answer by two models.
The copies lie in a folder of the temporary directory that is locked while the service lives; those of services that
were killed are removed by the next one.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topk_export.errors import ModelFileError, naming
from topk_export.runtime.locks import HeldError, lock
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.weights import copy_model, digest_of, files_of

PREFIX = "topk-serve-"
LOCK = "lock"
TRIES = 5  # at a file that is being written
Stamps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Release:
    """One content of a model's files.

    Args:
        path: the model file.
        sha256: of the model file and its weights.
        version: counts the contents that a service has had.
        source: the file that it was copied from, which errors name.
    """

    path: str
    sha256: str
    version: int = 1
    source: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "version": self.version}


def release_of(predictor: Predictor) -> Release:
    """Return the first release of a model that is served from its own file."""
    return Release(predictor.path, digest_of(*files_of(predictor.path)))


def open_release(release: Release, options: Mapping[str, Any]) -> Predictor:
    """Load a release with further arguments of :class:`Predictor`."""
    try:
        predictor = Predictor(release.path, **options)
        weights, wanted = files_of(release.path)[1:], predictor.metadata.weights_sha256
        if wanted is not None and len(weights) == 1 and digest_of(*weights) != wanted:
            raise ModelFileError(f"{release.path} lies beside the weights of another model: copy both again")
    except ModelFileError as error:
        raise ModelFileError(str(error).replace(release.path, release.source or release.path)) from error
    return predictor


class Releases:
    """The contents that a model's files have while a service runs; as a context manager, with their folder.

    Args:
        model: the model file, which may be replaced at any time.
    """

    def __init__(self, model: str | Path) -> None:
        self._model = Path(model)
        self.current: Release | None = None
        self.seen: Stamps | None = None  # of the files that were copied last

    def __enter__(self) -> "Releases":
        files_of(self._model)
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = lock(str(self.folder / "new"))
        if self._lock is not None:
            (self.folder / "new").rename(self.folder / LOCK)  # whoever sees it finds it locked
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def read(self) -> Release | None:
        """Copy the files as they are now; None where their content is the current release's.

        Raises:
            ModelFileError: they are no model, or are being written.
        """
        version = 1 if self.current is None else self.current.version + 1
        folder = self.folder / str(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = self._copied(folder / self._model.name)
        release = Release(str(path), digest_of(*files_of(path)), version, str(self._model))
        if self.current is not None and release.sha256 == self.current.sha256:
            shutil.rmtree(folder)
            return None
        return release

    def keep(self, release: Release) -> None:
        """Make a release the current one, and remove all others."""
        self.current = release
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder.name.isdigit() and folder.name != str(release.version):
                shutil.rmtree(folder, ignore_errors=True)

    def stamps(self) -> Stamps | None:
        """Tell the files from others by their sizes and times; None where they are not whole."""
        try:
            stats = [file.stat() for file in files_of(self._model)]
        except (ModelFileError, OSError):
            return None
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in stats)

    def _copied(self, target: Path) -> Path:
        for _ in range(TRIES):
            before = self.stamps()
            with naming(target):
                *_, copy = copy_model(self._model, target)
            if before is not None and before == self.stamps():
                self.seen = before
                return copy
            time.sleep(0.1)
        raise ModelFileError(f"{self._model} is being written: try again once it is whole")


def _remove_abandoned() -> None:
    """Remove the folders of services that were killed: nobody holds their locks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not (folder / LOCK).is_file():  # one that begins
                continue
            with contextlib.suppress(HeldError):
                held = lock(str(folder / LOCK))
                if held is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(held)
