"""Runs the configurations that the cache lacks, on any executor; a run that fails is recorded and holds nothing up."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from topk_studies.engine.claims import Watch
from topk_studies.engine.job import Job, do, record_of
from topk_studies.engine.store import Seen, Store, canonical, unique
from topk_studies.engine.study import Configuration, Options, Record, Study
from topk_studies.old_trainer.executors.local import LocalExecutor
from topk_studies.old_trainer.executors.pool import PoolExecutor

Say = Callable[[str], None]

GRACE = 30.0  # seconds that a run gets, once interrupted, to save its state
TICK = 0.5  # seconds between two looks at what goes on
POLL = 2.0  # seconds between two looks at a run that another command does


def run_study(
    study: Study,
    options: Options,
    store: Store,
    *,
    jobs: int = 1,
    rerun: bool = False,
    say: Say = print,
    executor: Executor | None = None,
) -> list[Record]:
    """Every run that the study wants, from the cache where it is there; failed ones among them.

    A run that failed in an earlier call is tried again. A run that another command does at the same time is waited
    for, after all others, and not done twice. On an interrupt, runs that can save their state do so; KeyboardInterrupt
    is raised once all have stopped.

    Args:
        study: the study.
        options: as the command line gives them.
        store: the cache.
        jobs: how many runs to have under way.
        rerun: whether to run anew what was finished before this call.
        say: prints a line.
        executor: does the runs, on machines that see the cache's folder; by default, processes of this machine.
    """
    records: dict[str, Record] = {}
    jobs = 1 if study.ALONE else max(1, jobs)
    with _Executor(executor, jobs, options.device) as workers:
        while True:
            wanted = unique(study.configurations(options, list(records.values())))
            new = [configuration for configuration in wanted if canonical(configuration) not in records]
            if not new:
                return [records[canonical(configuration)] for configuration in wanted]
            tasks = [Task(c, store.seen(study.RUNS, study.VERSION, c)) for c in new]
            cached = [] if rerun else _cached(study, store, new)
            records |= {canonical(record.configuration): record for record in cached}
            missing = [task for task in tasks if canonical(task.configuration) not in records]
            if missing:
                say(f"{len(missing)} of {len(new)} runs to do, {len(cached)} are cached")
                done = _Runs(study, store, workers, jobs, missing, say).all()
                records |= {canonical(record.configuration): record for record in done}


def _cached(study: Study, store: Store, configurations: Sequence[Configuration]) -> list[Record]:
    records = (store.get(study.RUNS, study.VERSION, configuration) for configuration in configurations)
    return [record for record in records if record is not None and not record.error]


@dataclass
class Task:
    """A run to do, the records that it had when it was asked for, and when to look at it next."""

    configuration: Configuration
    seen: Seen
    again: float = 0.0


@dataclass(frozen=True)
class Started:
    """A run under way."""

    task: Task
    job: Job
    began: float


class _Executor:
    """The given executor, or one of this machine that is started when it is needed and ended at the end."""

    def __init__(self, given: Executor | None, jobs: int, device: str) -> None:
        self._given, self._jobs, self._device = given, jobs, device
        self._own: LocalExecutor | None = None

    def submit(self, job: Job) -> "Future[Record | None]":
        if self._given is not None:
            return self._given.submit(do, job)
        self._own = self._own or LocalExecutor(self._jobs, device=self._device)
        return self._own.submit(do, job)

    def __enter__(self) -> "_Executor":
        return self

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.kill()

    def interrupt(self, futures: Sequence["Future[Any]"]) -> None:
        """Let the runs under way save their state; a second interrupt ends them at once."""
        for future in futures:
            future.cancel()
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
        elif isinstance(self._given, PoolExecutor):
            self._given.interrupt()
        with suppress(KeyboardInterrupt):
            wait(futures, GRACE)


class _Runs:
    """Runs of one stage of a study: some wait, some are under way, some are done by others."""

    def __init__(
        self, study: Study, store: Store, executor: _Executor, jobs: int, tasks: Sequence[Task], say: Say
    ) -> None:
        self.study, self.store, self.executor, self.jobs, self.say = study, store, executor, jobs, say
        self.waiting = list(tasks)
        self.running: dict[Future[Record | None], Started] = {}
        self.records: list[Record] = []
        self.count = len(tasks)
        self.words = Words([task.configuration for task in tasks])
        self.watch = Watch()
        self.told = False

    def all(self) -> list[Record]:
        """All records; each is in the cache before it is told of, so that an interrupt loses no finished run."""
        terminal = sys.stderr.isatty()
        with tqdm(total=self.count, leave=False, dynamic_ncols=True, disable=not terminal) as bar:
            try:
                while self.waiting or self.running:
                    self._begin(bar)
                    if self.running:
                        done, _ = wait(self.running, TICK, FIRST_COMPLETED)
                        for future in done:
                            self._end(future, bar)
                        if terminal:
                            bar.set_postfix_str(self._progress())
                    elif self.waiting:
                        time.sleep(TICK)
            except KeyboardInterrupt:
                self.executor.interrupt(list(self.running))
                raise
        return self.records

    def _begin(self, bar: "tqdm[Any]") -> None:
        """Start runs while there is room, passing over those that others do."""
        for task in list(self.waiting):
            now = time.monotonic()
            if len(self.running) >= self.jobs:
                return
            if now < task.again:
                continue
            run = (self.study.RUNS, self.study.VERSION, task.configuration)
            record = self.store.newer(*run, task.seen)
            if record is not None:
                self.waiting.remove(task)
                self._told(record, bar, "by another command: ")
                continue
            state = self.watch.look(self.store.work(*run))
            if state.number is None:
                self._tell_of_others(state.owner, bar)
                task.again = now + POLL
                continue
            self.waiting.remove(task)
            root = str(self.store.root.resolve())
            job = Job(self.study.__name__, run[0], run[1], root, task.configuration, state.number, task.seen)
            self.running[self.executor.submit(job)] = Started(task, job, now)

    def _end(self, future: "Future[Record | None]", bar: "tqdm[Any]") -> None:
        run = self.running.pop(future)
        try:
            record = future.result()
        except KeyboardInterrupt:
            raise
        except Exception as error:  # its process died, or the executor lost it
            record = record_of(run.job, time.monotonic() - run.began, {}, f"{type(error).__name__}: {error}")
            self.store.put(record)
        if record is None:  # another command was a moment faster
            self.waiting.append(run.task)
        else:
            self._told(record, bar)

    def _told(self, record: Record, bar: "tqdm[Any]", by: str = "") -> None:
        self.records.append(record)
        bar.update()
        with bar.external_write_mode():
            self.say(f"[{len(self.records):{len(str(self.count))}}/{self.count}] {by}{self._line(record)}")

    def _tell_of_others(self, owner: str, bar: "tqdm[Any]") -> None:
        if not self.told:
            self.told = True
            with bar.external_write_mode():
                self.say(f"some runs are being done by another command ({owner}); they are waited for at the end")

    def _line(self, record: Record) -> str:
        words = self.words.of(record.configuration)
        if record.error:
            return f"FAILED {words}: {record.error.strip().splitlines()[-1]}"
        return f"{record.seconds:6.1f} s  {words}"

    def _progress(self) -> str:
        """How far one of the runs under way is."""
        for job in (run.job for run in self.running.values()):
            state = self.watch.look(self.store.work(job.kind, job.version, job.configuration))
            if state.progress is not None:
                share, words = state.progress
                return f"{share:.0%} of {self.words.of(job.configuration)}, {words}"
        return ""


class Words:
    """Configurations in a few words: the entries that not all of them share."""

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        flat = [dict(_entries(configuration)) for configuration in configurations]
        names = dict.fromkeys(name for entries in flat for name in entries)
        self.told = [name for name in names if len({repr(entries.get(name)) for entries in flat}) > 1]

    def of(self, configuration: Configuration) -> str:
        entries = dict(_entries(configuration))
        told = [name for name in self.told if entries.get(name) is not None] or entries
        return " ".join(f"{name}={entries[name]}" for name in told)


def _entries(configuration: Configuration) -> Iterator[tuple[str, Any]]:
    for name, value in configuration.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield name, value
