"""Runs configurations that the cache lacks, in worker processes; a run that fails is recorded and holds nothing up."""

import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeAlias

from tqdm import tqdm

from topk_studies.engine.processes import Worker
from topk_studies.engine.store import Store, canonical, unique, versions
from topk_studies.engine.study import Configuration, Options, Record, Study

Say = Callable[[str], None]
Events: TypeAlias = "queue.SimpleQueue[Record | str | Exception]"  # a run's end, its progress, a fault of the runner

GRACE = 30.0  # seconds that a run gets, once interrupted, to save where it is


def run_study(
    study: Study, options: Options, store: Store, *, jobs: int = 1, rerun: bool = False, say: Say = print
) -> list[Record]:
    """Every run that the study wants, from the cache where it is there; failed ones among them.

    A run that failed in an earlier call is tried again. On an interrupt, runs that can save where they are do so;
    KeyboardInterrupt is raised once all have stopped.
    """
    records: dict[str, Record] = {}
    while True:
        wanted = unique(study.configurations(options, list(records.values())))
        new = [configuration for configuration in wanted if canonical(configuration) not in records]
        if not new:
            return [records[canonical(configuration)] for configuration in wanted]
        cached = [] if rerun else _cached(study, store, new)
        records |= {canonical(record.configuration): record for record in cached}
        missing = [configuration for configuration in new if canonical(configuration) not in records]
        if missing:
            say(f"{len(missing)} of {len(new)} runs to do, {len(cached)} are cached")
            done = Pool(study, store, 1 if study.ALONE else jobs).run(missing, say)
            records |= {canonical(record.configuration): record for record in done}


def _cached(study: Study, store: Store, configurations: Sequence[Configuration]) -> list[Record]:
    found = (store.get(study.RUNS, study.VERSION, configuration) for configuration in configurations)
    return [record for record in found if record is not None and not record.error]


class Pool:
    """Worker processes, each with its share of the processors, and a thread that talks to each."""

    def __init__(self, study: Study, store: Store, jobs: int) -> None:
        self.study, self.store = study, store
        self.jobs = max(1, jobs)
        self.workers: list[Worker] = []
        self.words = Words(())
        self.stopping = threading.Event()

    def run(self, configurations: Sequence[Configuration], say: Say) -> list[Record]:
        """Run all; each record is in the cache before it is told of, so that an interrupt loses no finished run."""
        self.words = Words(configurations)
        todo: queue.SimpleQueue[Configuration] = queue.SimpleQueue()
        for configuration in configurations:
            todo.put(configuration)
        events: Events = queue.SimpleQueue()
        count = min(self.jobs, len(configurations))
        threads = [threading.Thread(target=self._serve, args=(todo, events), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            return self._collect(events, len(configurations), say)
        except KeyboardInterrupt:
            self._interrupt(threads)
            raise
        finally:
            self.stopping.set()
            for worker in self.workers:
                worker.close()

    def _collect(self, events: "Events", count: int, say: Say) -> list[Record]:
        records: list[Record] = []
        with tqdm(total=count, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
            while len(records) < count:
                event = events.get()
                if isinstance(event, str):
                    bar.set_postfix_str(event)
                    continue
                if isinstance(event, Exception):
                    raise event
                records.append(event)
                bar.update()
                with bar.external_write_mode():
                    say(f"[{len(records):{len(str(count))}}/{count}] {self._line(event)}")
        return records

    def _line(self, record: Record) -> str:
        words = self.words.of(record.configuration)
        if record.error:
            return f"FAILED {words}: {record.error.strip().splitlines()[-1]}"
        return f"{record.seconds:6.1f} s  {words}"

    def _serve(self, todo: "queue.SimpleQueue[Configuration]", events: "Events") -> None:
        worker = None
        try:
            while not self.stopping.is_set():
                configuration = todo.get_nowait()
                if worker is None or worker.process.poll() is not None:
                    worker = Worker(max(1, (os.cpu_count() or 1) // self.jobs))
                    self.workers.append(worker)
                record = self._one(worker, configuration, events)
                if record.error and self.stopping.is_set():
                    return  # interrupted, not failed
                self.store.put(record)
                events.put(record)
        except queue.Empty:
            pass
        except Exception as error:
            events.put(error)

    def _one(self, worker: Worker, configuration: Configuration, events: "Events") -> Record:
        study = self.study
        work = self.store.work(study.RUNS, study.VERSION, configuration)
        began = time.perf_counter()
        answer = worker.ask(
            {"module": study.__name__, "configuration": configuration, "work": str(work)},
            lambda share, words: events.put(f"{share:.0%} of {self.words.of(configuration)}, {words}"),
        )
        if "result" in answer:
            shutil.rmtree(work, ignore_errors=True)
        return Record(
            kind=study.RUNS,
            version=study.VERSION,
            configuration=configuration,
            result=answer.get("result", {}),
            seconds=round(answer.get("seconds", time.perf_counter() - began), 3),
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=versions(),
            error=answer.get("error", ""),
        )

    def _interrupt(self, threads: Sequence[threading.Thread]) -> None:
        self.stopping.set()
        for worker in self.workers:
            worker.interrupt()
        end = time.monotonic() + GRACE
        try:
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        except KeyboardInterrupt:
            pass  # asked twice: at once


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
