"""A process that runs configurations, one after another, for the runner.

Started as ``python -m topk_studies.engine.worker``. It reads a job a line (JSON: study's module, configuration, work
folder) and answers in lines: ``{"progress": [share, words]}`` any number of times, then ``{"result": ...}`` or
``{"error": ...}``. It ends when its input does.
"""

import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from topk_studies.engine.study import ConfigurationError

PROGRESS_INTERVAL = 0.2


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a run prints is not an answer
    try:
        for line in sys.stdin:
            _send(answers, _run(json.loads(line), answers))
    except (KeyboardInterrupt, BrokenPipeError):  # asked to stop, or nobody listens
        return 130
    return 0


def _run(job: dict[str, Any], answers: TextIO) -> dict[str, Any]:
    began = last = time.perf_counter()

    def progress(share: float, words: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > PROGRESS_INTERVAL:
            last = now
            _send(answers, {"progress": [share, words]})

    try:
        result = import_module(job["module"]).run(job["configuration"], Path(job["work"]), progress)
        json.dumps(result)
    except ConfigurationError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}
    return {"result": result, "seconds": time.perf_counter() - began}


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
