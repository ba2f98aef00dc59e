"""Scores on disk, by the content of model and images; a pass that was interrupted goes on where it stopped.

Rows are written at their own places, so that two processes that compute the same rows write the same bytes.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FORMAT = 1


def default_folder() -> Path:
    """The folder of kept scores: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "topk_registry", "scores")


class Entry:
    """The scores and labels of one model over one set of images.

    Args:
        folder: holds the entry's files; made when rows come.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scores, self.labels, self.about = (folder / name for name in ("scores.f32", "labels.i64", "about.json"))

    def class_names(self) -> list[str] | None:
        """The names of the model's classes, where rows were kept; None where there is no usable entry."""
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            return about["class_names"] if about["format"] == FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def complete(self) -> bool:
        return self.class_names() is not None and bool(json.loads(self.about.read_text(encoding="utf-8"))["complete"])

    def rows(self) -> int:
        """The number of whole rows that are kept."""
        names = self.class_names()
        if not names or not (self.scores.is_file() and self.labels.is_file()):
            return 0
        return min(self.scores.stat().st_size // (4 * len(names)), self.labels.stat().st_size // 8)

    def begin(self, class_names: Sequence[str]) -> int:
        """Make the entry ready for rows of these classes, and return how many it has already."""
        if self.class_names() != list(class_names):
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in (self.scores, self.labels):
                file.unlink(missing_ok=True)
                file.touch()
            self._write(class_names, complete=False)
        return self.rows()

    def put(self, start: int, scores: np.ndarray, labels: np.ndarray) -> None:
        """Write rows at their places."""
        for file, values, kind in ((self.scores, scores, np.float32), (self.labels, labels, np.int64)):
            rows = np.ascontiguousarray(values, kind)
            with file.open("r+b") as out:
                out.seek(start * (rows.nbytes // max(1, len(rows))))
                out.write(rows.tobytes())

    def finish(self) -> None:
        """Mark the entry as complete."""
        self._write(self.class_names() or [], complete=True)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """The scores [N, n], read from disk where they are looked at, and the labels [N]."""
        count, n = self.rows(), len(self.class_names() or ())
        if not count:
            return np.zeros((0, n), np.float32), np.zeros(0, np.int64)
        labels = np.fromfile(self.labels, np.int64, count)
        return np.memmap(self.scores, np.float32, "r", shape=(count, n)), labels

    def _write(self, class_names: Sequence[str], *, complete: bool) -> None:
        half = self.about.with_name(f".{self.about.name}.{os.getpid()}")
        about = {"format": FORMAT, "class_names": list(class_names), "complete": complete}
        half.write_text(json.dumps(about), encoding="utf-8")
        os.replace(half, self.about)
