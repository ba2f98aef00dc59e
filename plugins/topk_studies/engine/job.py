"""One run, from its claim to its record: the call that an executor does, on any machine that sees the folder."""

import json
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from topk_studies.engine.catalogue import study_of
from topk_studies.engine.claims import acquire, own_folder
from topk_studies.engine.store import Seen, Store, versions
from topk_studies.engine.study import Configuration, ConfigurationError, Progress, Record, Study


@dataclass(frozen=True)
class Job:
    """A run to do.

    Args:
        study: the name of the study's module.
        kind, version: of its runs in the cache.
        root: the folder of the cache.
        configuration: what to run.
        number: of the claim to create.
        seen: the records that there were when the run was asked for; a newer one takes the run's place.
    """

    study: str
    kind: str
    version: int
    root: str
    configuration: Configuration
    number: int
    seen: Seen


def do(job: Job) -> Record | None:
    """Claim a run, do it, and store its record; None if another process has claimed it first.

    Raises:
        KeyboardInterrupt: the run was interrupted, and has saved its state.
    """
    study, store = study_of(job.study), Store(job.root)
    run = (job.kind, job.version, job.configuration)
    claim = acquire(store.work(*run), job.number)
    if claim is None:
        return None
    with claim:
        record = store.newer(*run, job.seen)
        if record is None:
            record = _done(study, job, own_folder(claim.folder, job.number), claim.tell)
            store.put(record)
        if not record.error:
            claim.forget()
    return record


def _done(study: Study, job: Job, folder: Path, tell: Progress) -> Record:
    began, error = time.perf_counter(), ""
    result: dict[str, Any] = {}
    try:
        result = study.run(job.configuration, folder, tell)
        json.dumps(result)
    except ConfigurationError as refusal:
        error = str(refusal)
    except Exception:
        error = traceback.format_exc()
    return record_of(job, time.perf_counter() - began, {} if error else result, error)


def record_of(job: Job, seconds: float, result: dict[str, Any], error: str) -> Record:
    """A record of a run that ended now."""
    return Record(
        kind=job.kind,
        version=job.version,
        configuration=job.configuration,
        result=result,
        seconds=round(seconds, 3),
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        error=error,
    )
