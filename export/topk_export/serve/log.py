"""A log of answers for monitoring: one JSON object a line, without the image and without its name."""

import json
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any


class AnswerLog:
    """Appends a line for each prediction: time, size of its set, softmax share and index of the best class.

    ``topk-registry monitor`` reads it. Each line is one write at the file's end, so that processes can share it.

    Args:
        path: the file; what it holds stays.
    """

    def __init__(self, path: str | Path) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._lock = threading.Lock()

    def __call__(self, ranking: Mapping[str, Any]) -> None:
        """Append the line of an answer's ranking."""
        best = ranking["top"][0]
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "size": ranking["set_size"],
            "probability": float(f"{best['probability']:.6g}"),  # as the file's reference is kept
            "class": best["index"],
        }
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
