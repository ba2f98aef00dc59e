"""Runs configurations that the cache lacks, in worker processes; a run that fails is recorded and holds nothing up."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from topk_registry.studies.store import Store, canonical, unique, versions
from topk_registry.studies.study import Configuration, Options, Record, Study

GRACE = 30.0  # seconds that a run gets, once interrupted, to save where it is


def run_study(
    study: Study,
    options: Options,
    store: Store,
    *,
    jobs: int = 1,
    rerun: bool = False,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Every run that the study wants, from the cache where it is there; failed ones among them.

    A run that failed in an earlier call is tried again. On an interrupt, runs that can save where they are do so;
    KeyboardInterrupt is raised once all have stopped.
    """
    records: dict[str, Record] = {}
    kept: set[str] = set()
    while True:
        wanted = unique(study.configurations(options, list(records.values())))
        new = [configuration for configuration in wanted if canonical(configuration) not in records]
        if not new:
            return [records[canonical(configuration)] for configuration in wanted]
        missing = []
        for configuration in new:
            record = None if rerun else store.get(study.RUNS, study.VERSION, configuration)
            if record is None or record.error:
                missing.append(configuration)
            else:
                kept.add(canonical(configuration))
                records[canonical(configuration)] = record
        if missing:
            say(f"{len(missing)} of {len(new)} runs to do, {len(new) - len(missing)} are cached")
            for record in Pool(study, store, 1 if study.ALONE else jobs).run(missing, say):
                records[canonical(record.configuration)] = record


class Pool:
    """Worker processes, each with its share of the processors, and a thread that talks to each."""

    def __init__(self, study: Study, store: Store, jobs: int) -> None:
        self.study, self.store = study, store
        self.jobs = max(1, jobs)
        self.workers: list[Worker] = []
        self.words = Words(())
        self.stopping = threading.Event()

    def run(self, configurations: Sequence[Configuration], say: Callable[[str], None]) -> list[Record]:
        self.words = Words(configurations)
        todo: queue.SimpleQueue[Configuration] = queue.SimpleQueue()
        for configuration in configurations:
            todo.put(configuration)
        done: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        count = min(self.jobs, len(configurations))
        threads = [threading.Thread(target=self._serve, args=(todo, done), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            return self._collect(done, len(configurations), say)
        except KeyboardInterrupt:
            self._interrupt(threads)
            raise
        finally:
            self.stopping.set()
            for worker in self.workers:
                worker.close()

    def _collect(
        self, done: "queue.SimpleQueue[tuple[str, Any]]", count: int, say: Callable[[str], None]
    ) -> list[Record]:
        records: list[Record] = []
        with tqdm(total=count, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
            while len(records) < count:
                kind, content = done.get()
                if kind == "progress":
                    bar.set_postfix_str(content)
                    continue
                if kind == "broken":
                    raise content
                records.append(content)
                self.store.put(content)
                bar.update()
                with bar.external_write_mode():
                    say(f"[{len(records):{len(str(count))}}/{count}] {_line(content, self.words.of(content.configuration))}")
        return records

    def _serve(self, todo: "queue.SimpleQueue[Configuration]", done: "queue.SimpleQueue[tuple[str, Any]]") -> None:
        worker = None
        while not self.stopping.is_set():
            try:
                configuration = todo.get_nowait()
            except queue.Empty:
                break
            try:
                if worker is None or worker.process.poll() is not None:
                    worker = Worker(max(1, (os.cpu_count() or 1) // self.jobs))
                    self.workers.append(worker)
                record = self._one(worker, configuration, done)
            except Exception as error:
                done.put(("broken", error))
                return
            if not self.stopping.is_set() or not record.error:
                done.put(("record", record))

    def _one(
        self, worker: "Worker", configuration: Configuration, done: "queue.SimpleQueue[tuple[str, Any]]"
    ) -> Record:
        study = self.study
        work = self.store.work(study.RUNS, study.VERSION, configuration)
        began = time.perf_counter()
        answer = worker.ask(
            {"module": study.__name__, "configuration": configuration, "work": str(work)},
            lambda share, words: done.put(("progress", f"{share:.0%} of {self.words.of(configuration)}, {words}")),
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


class Worker:
    """A worker process in a session of its own: Ctrl-C reaches it through the runner alone."""

    def __init__(self, threads: int) -> None:
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "topk_registry.studies.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **count},
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
        """Have a job done; a worker that dies of it answers with an error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                answer = json.loads(line)
                if "progress" not in answer:
                    return answer
                progress(*answer["progress"])
        except BrokenPipeError:
            pass
        return {"error": f"its process ended with status {self.process.wait()} (a negative one is a signal: 9 is the "
                "system's, for want of memory)"}  # fmt: skip

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


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


def _line(record: Record, words: str) -> str:
    if record.error:
        return f"FAILED {words}: {record.error.strip().splitlines()[-1]}"
    return f"{record.seconds:6.1f} s  {words}"
