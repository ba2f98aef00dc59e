"""Logs of the service: one JSON object a line, without the image and without its name."""

import json
import os
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any


class Lines:
    """Appends lines to a file. Each is one write at its end, so that processes can share it.

    A file that was moved away or removed is opened anew, so that logs can be rotated. A full disk costs lines, not
    answers: it is told once, and again after it had room.

    Args:
        path: the file, whose content stays; ``-`` is the standard output.
    """

    def __init__(self, path: str) -> None:
        self._path, self._lock, self._failing = path, threading.Lock(), False
        self._file = -1 if path == "-" else self._opened()

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Append an entry as a line of JSON."""
        line = json.dumps(entry) + "\n"
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                if not self._failing:
                    print(f"warning: the log {self._path} loses lines: {error}", file=sys.stderr, flush=True)
                self._failing = True
            else:
                self._failing = False

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: str) -> None:
        if self._path == "-":
            print(line, end="", flush=True)
            return
        if self._moved():
            new = self._opened()
            self.close()
            self._file = new
        os.write(self._file, line.encode())

    def _moved(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return True

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def answer_entry(ranking: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a prediction: time, size of its set, softmax share and index of the best class.

    Of several labels it is the probability of the most probable class, which has no softmax share.

    ``topk-registry monitor`` reads it.

    Args:
        ranking: the fields of an answer's ranking.
        about: further facts of the request.
    """
    best = ranking["top"][0]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "size": ranking["set_size"],
        "probability": float(f"{best.get('softmax', best.get('probability')):.6g}"),  # as the file's reference is kept
        "class": best["index"],
        **about,
    }
