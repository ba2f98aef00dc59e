"""``timm train --logger gce-json-lines``: measurements as lines of JSON."""

import json
from collections.abc import Mapping
from typing import Any


class JsonLines:
    """Log to a file of JSON lines in the run's folder.

    Args:
        run: what the trainer tells of the run: ``name``, ``folder``, ``settings``, ``update``, ``resumed_id``.
        file: its name.
    """

    run_id = None  # a service would give its own name of the run, and get it back as run.resumed_id

    def __init__(self, *, run: Any, file: str = "measurements.jsonl") -> None:
        self._file = open(run.folder / file, "a" if run.update else "w", encoding="utf-8")  # noqa: SIM115

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        self._file.write(json.dumps({"update": update, **values}) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()
