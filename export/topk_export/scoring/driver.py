"""Hand shards to workers, skip those that are done, and count."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field

from topk_export.errors import OutputError, SourceError
from topk_export.scoring import files
from topk_export.scoring.sources import Shard
from topk_export.scoring.work import Job, Place, Scored, Settings, finished, part_name, score_shard
from topk_registry.executors.errors import WorkerDiedError

ATTEMPTS = 3  # a shard that ended three workers would end the next one too
AHEAD = 2  # shards handed out for each worker: one under way, one that waits


@dataclass
class Summary:
    """Outcome of a call: counts of files, rows and errors, and the shards that could not be scored."""

    shards: int = 0
    before: int = 0  # shards that an earlier call finished
    changed: int = 0  # shards that are done again, as their sources have changed since
    rows: int = 0
    errors: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, scored: Scored) -> None:
        self.shards += 1
        self.rows += scored.rows
        self.errors += scored.errors


def prepare(output: str, count: int, *, overwrite: bool) -> None:
    """See that the folder of scores holds no others, and remove what may go.

    Raises:
        OutputError: it holds files of more shards than there are.
    """
    wanted = {part_name(number) for number in range(count)}
    for name in files.names_in(output):
        ours = name.startswith("part-") and ".parquet" in name
        if ours and (overwrite or name.endswith(".tmp")):
            files.remove(output, name)
        elif ours and name not in wanted:
            raise OutputError(
                f"{files.joined(output, name)} belongs to none of the {count} shards of this source: name another "
                "--output, or give --overwrite"
            )


def tidy(output: str) -> None:
    """Remove the halves of files that killed workers left."""
    for name in files.names_in(output):
        if name.startswith("part-") and name.endswith(".tmp"):
            files.remove(output, name)


def jobs(shards: Iterable[Shard], settings: Settings, place: Place) -> Iterator[Job]:
    return (Job(number, shard, settings, place) for number, shard in enumerate(shards))


def score(
    work: Iterable[Job],
    executor: Executor,
    *,
    workers: int,
    again: bool = False,
    told: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Score what is not yet scored.

    Args:
        work: the shards, in order.
        executor: does them.
        workers: how many it does at once.
        again: whether to repeat finished shards that have errors.
        told: is called whenever a shard is done.

    Raises:
        OutputError: a file of scores is there that was made otherwise.
    """
    summary = Summary()
    running: dict[Future[Scored], tuple[Job, int]] = {}
    for job in work:
        if (scored := _before(job, summary, again=again)) is not None:
            summary.before += 1
            summary.add(scored)
            told(summary)
            continue
        while len(running) >= AHEAD * workers:
            _collect(executor, running, summary, told)
        running[executor.submit(score_shard, job)] = job, 1
    while running:
        _collect(executor, running, summary, told)
    return summary


def _before(job: Job, summary: Summary, *, again: bool) -> Scored | None:
    """The counts of a finished shard; None where it must be scored, as one whose sources have changed."""
    earlier = finished(job)
    if earlier is None:
        return None
    scored, about = earlier
    wanted = job.settings.about(job.shard)
    differ = {key for key in {*about, *wanted} if about.get(key) != wanted.get(key)}
    if differ - {"content"}:
        raise OutputError(
            f"{job.part} was made {_otherwise(differ)}: name another --output, or give --overwrite to begin anew"
        )
    if differ:
        summary.changed += 1
        return None
    return None if again and scored.errors else scored


def _otherwise(differ: set[str]) -> str:
    if "schema" in differ:
        return "by another version of this command"
    kinds = {"shard": "from other images", "model": "by another model"}
    options = ", ".join(sorted(differ - {*kinds, "content"}))
    return " and ".join(
        [text for key, text in kinds.items() if key in differ] + ([f"with other {options}"] if options else [])
    )


def _collect(
    executor: Executor,
    running: dict["Future[Scored]", tuple[Job, int]],
    summary: Summary,
    told: Callable[[Summary], None],
) -> None:
    """Wait for a shard; one whose worker died is handed out again."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        job, attempt = running.pop(future)
        try:
            summary.add(future.result())
        except WorkerDiedError as error:
            if attempt == ATTEMPTS:
                raise WorkerDiedError(f"{job.shard.title} ended {ATTEMPTS} workers; the last time {error}") from error
            running[executor.submit(score_shard, job)] = job, attempt + 1
            continue
        except SourceError as error:
            summary.failed.append(str(error))
        else:
            _see(job)
        told(summary)


def _see(job: Job) -> None:
    if part_name(job.number) not in files.names_in(job.place.output):
        raise OutputError(
            f"a worker wrote {job.part}, which is not there on this machine: --output must be a folder that all "
            "machines share, or a URL"
        )
