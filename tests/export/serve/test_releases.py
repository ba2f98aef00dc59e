"""Releases of a served model: read once, alike in all processes, and swapped without a lost request."""

import itertools
import re
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.export.colours import COLOURS, png
from tests.export.serve.service import Held, Service, attempt, request, served_by, wait_until
from topk_export import ModelFileError
from topk_export.runtime.weights import digest_of
from topk_export.serve import releases as module
from topk_export.serve.limits import Limits
from topk_export.serve.releases import PREFIX, Releases, open_release
from topk_export.serve.server import Plan
from topk_export.serve.swaps import Swaps
from topk_export.serve.workers import Workers

IMAGE = {"Content-Type": "image/png"}
REVERSED = list(COLOURS)[::-1]
OPTIONS = {"device": "cpu", "threads": 1}


@pytest.fixture
def model(model_file, tmp_path):
    """A model file that may be overwritten."""
    return Path(shutil.copy(model_file, tmp_path / "colours.onnx"))


@pytest.fixture
def other(edited):
    """The same model with its class names in reversed order."""
    return edited(props={"class_names": REVERSED})


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def overwrite(path: Path, content: bytes) -> None:
    """Write into the file that is there, as cp does."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def test_a_release_does_not_change_with_its_file(model, other, temporary):
    with Releases(model) as releases:
        first = releases.read()
        assert first is not None
        releases.keep(first)
        assert (first.version, first.sha256) == (1, digest_of(model))
        assert releases.read() is None
        overwrite(model, other.read_bytes())
        assert open_release(first, OPTIONS).metadata.class_names == tuple(COLOURS)
        second = releases.read()
        assert second is not None
        assert (second.version, second.sha256) == (2, digest_of(other))
        releases.keep(second)
        assert open_release(second, OPTIONS).metadata.class_names == tuple(REVERSED)
        assert open_release(second, OPTIONS).name == "colours"
        assert not Path(first.path).exists()
    assert not list(temporary.iterdir())


def test_a_file_that_is_being_written_is_no_release(model, monkeypatch, temporary):
    def copied(source, target):
        with model.open("ab") as file:
            file.write(b"more")
        return [Path(shutil.copy(source, target))]

    monkeypatch.setattr(module, "copy_model", copied)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    with Releases(model) as releases, pytest.raises(ModelFileError, match=r"colours.onnx is being written: try again"):
        releases.read()


def test_errors_name_the_file_and_not_its_copy(model, temporary):
    model.write_bytes(b"no model")
    with Releases(model) as releases:
        release = releases.read()
        assert release is not None
        with pytest.raises(ModelFileError, match=f"{model} is not a model") as caught:
            open_release(release, OPTIONS)
    assert PREFIX not in str(caught.value)


def test_the_copies_of_a_service_that_was_killed_are_removed(model, temporary):
    with Releases(model) as living:
        killed, begins = temporary / f"{PREFIX}killed", temporary / f"{PREFIX}begins"
        for folder in (killed, begins):
            (folder / "1").mkdir(parents=True)
        (killed / "lock").write_text("process 1 on elsewhere")
        with Releases(model) as new:
            assert set(temporary.iterdir()) == {living.folder, new.folder, begins}


class Files:
    """Releases without files: what they read next, and the stamps that are seen."""

    def __init__(self):
        self.current, self.next, self.stamped, self.seen, self.kept = (
            module.Release("a", "1"),
            None,
            "first",
            "first",
            [],
        )

    def stamps(self):
        return self.stamped

    def read(self):
        self.seen = self.stamped
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def keep(self, release):
        self.current = release
        self.kept.append(release)


@pytest.fixture
def swaps(monkeypatch):
    """A swap without files or processes: ``steps`` taken, ``lines`` told, and ``problems`` of preparing."""
    files, steps, lines, problems = Files(), [], [], []

    def ask(step, release):
        steps.append((step, release.version))
        return problems if step == "prepare" else []

    clock = itertools.count()  # a second goes by whenever it is asked
    monkeypatch.setattr("topk_export.serve.swaps.time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = Swaps(files, ask, lines.append, watch=True)
    made.files, made.steps, made.lines, made.problems = files, steps, lines, problems
    return made


def test_watched_files_are_swapped_once_they_rest(swaps):
    swaps.files.next = module.Release("b", "2", 2)
    swaps.look()
    assert not swaps.steps
    for stamps in ("half", "more", None, "whole"):
        swaps.files.stamped = stamps
        swaps.look()
        assert not swaps.steps
    swaps.look()
    assert swaps.steps == [("prepare", 2), ("hold", 2), ("switch", 2)]
    assert swaps.lines == ["serving version 2, SHA-256 2"]
    swaps.look()
    assert len(swaps.steps) == 3


def test_what_cannot_be_served_is_told_once_and_the_old_release_goes_on(swaps):
    swaps.files.next, swaps.files.stamped = module.Release("b", "2", 2), "broken"
    swaps.problems.append("no model")
    for _ in range(4):
        swaps.look()
    assert swaps.steps == [("prepare", 2), ("drop", 2)]
    assert swaps.files.current.version == 1
    swaps.files.next = ModelFileError("it is gone")
    swaps.swap()
    swaps.files.next = None
    swaps.swap()
    assert swaps.lines == [
        "error: no model; version 1 goes on",
        "error: it is gone; version 1 goes on",
        "the model's content is the same; version 1 goes on",
    ]


def colour_of(port: int, colour: str) -> tuple[str, str, str]:
    """The best class of an answer, and the version and the digest that it says it is of."""
    status, answer, headers = request(port, "POST", "/predict", png(colour), IMAGE)
    assert status == 200, answer
    return answer["top"][0]["name"], headers["x-model-version"], headers["x-model-sha256"]


@contextmanager
def asking(port: int):
    """Clients that ask all the time; gives the answers that they had. None that is asked for after a new one is old."""
    ended, answers, times = threading.Event(), [], []

    def client():
        while not ended.is_set():
            start = time.perf_counter()
            answers.append(colour_of(port, "red"))
            times.append((start, time.perf_counter(), answers[-1][1]))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            yield answers
        finally:
            ended.set()
        for each in clients:
            each.result()
    first_new = min((end for _, end, version in times if version == "2"), default=float("inf"))
    assert {version for start, _, version in times if start > first_new} <= {"2"}


def test_a_swap_loses_no_request_and_mixes_no_answers(model, other, predictor, temporary):
    with Releases(model) as releases:
        first = releases.read()
        releases.keep(first)
        with served_by(open_release(first, OPTIONS), Plan(OPTIONS), first) as (port, service):
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            old, new = digest_of(model), digest_of(other)
            ask = service.take  # a step of a swap
            with asking(port) as answers:
                wait_until(lambda: len(answers) > 8)
                overwrite(model, other.read_bytes())
                second = releases.read()
                assert ask("prepare", second) == []
                assert request(port, "GET", "/model")[1]["version"] == 1
                assert ask("hold", second) == []
                assert ask("switch", second) == []
                assert colour_of(port, "red") == (REVERSED[list(COLOURS).index("red")], "2", new)
                wait_until(lambda: sum(answer[1] == "2" for answer in answers) > 8)
            assert set(answers) == {("red", "1", old), (REVERSED[list(COLOURS).index("red")], "2", new)}
            _, about, headers = request(port, "GET", "/model")
            assert (about["version"], about["sha256"], about["class_names"]) == (2, new, REVERSED)
            assert (headers["x-model-version"], headers["x-model-sha256"]) == ("2", new)
            assert about["software"]["onnxruntime"]
            text = request(port, "GET", "/metrics")[1]
            assert f'topk_model_workers{{sha256="{new}",version="2"}} 1.0' in text
            assert f'topk_model_workers{{sha256="{old}",version="1"}} 0.0' in text
            assert request(port, "GET", "/v2/models/colours")[1]["versions"] == ["2"]
            assert request(port, "GET", "/v2/models/colours/versions/1")[0] == 404
            stats = request(port, "GET", "/v2/models/colours/stats")[1]["model_stats"][0]
            assert (stats["version"], stats["inference_stats"]["fail"]["count"]) == ("2", 0)
            assert stats["inference_stats"]["success"]["count"] == sum(answer[1] == "2" for answer in answers) + 1


def test_a_request_that_was_begun_ends_with_its_model_and_a_held_one_gets_the_new(model, other, temporary):
    with Releases(model) as releases, ThreadPoolExecutor(2) as pool:
        first = releases.read()
        releases.keep(first)
        held = Held(open_release(first, OPTIONS))
        with served_by(held, Plan(OPTIONS, Limits(queue=2)), first) as (port, service):
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            held.hold = True
            begun = pool.submit(colour_of, port, "red")
            wait_until(lambda: held.runs == 2)
            overwrite(model, other.read_bytes())
            second = releases.read()
            assert service.take("prepare", second) == []
            assert service.take("hold", second) == []
            later = pool.submit(colour_of, port, "red")
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 503)  # it has its place
            assert not later.done()
            assert service.take("switch", second) == []
            assert later.result()[1] == "2"
            assert not begun.done()
            held.gate.set()
            assert begun.result()[:2] == ("red", "1")


def test_a_release_that_does_not_run_is_dropped(model, edited, temporary):
    with Releases(model) as releases:
        first = releases.read()
        releases.keep(first)
        with served_by(open_release(first, OPTIONS), Plan(OPTIONS), first) as (port, service):
            wait_until(lambda: request(port, "GET", "/readyz")[0] == 200)
            for content, problem in (
                (b"no model", "is not a model that onnxruntime can load"),
                (edited(outputs=("indices",)).read_bytes(), "exported without logits and marginals"),
            ):
                overwrite(model, content)
                (found,) = service.take("prepare", releases.read())
                assert problem in found
                assert service.take("drop", first) == []
                assert colour_of(port, "red")[:2] == ("red", "1")


@pytest.mark.slow
def test_workers_serve_one_content_and_swap_it_at_once(model, other, tmp_path):
    """The file is overwritten, and a worker that is started again has no other content; a signal swaps it in both."""
    log, old, new = tmp_path / "log", digest_of(model), digest_of(other)
    with Service(model, log, "--workers", "2") as running:
        assert colour_of(running.port, "red") == ("red", "1", old)
        overwrite(model, other.read_bytes())

        def workers_of(sha256: str, version: int) -> bool:
            text = request(running.port, "GET", "/metrics")[1]
            return f'topk_model_workers{{sha256="{sha256}",version="{version}"}} 2.0' in text

        def processes() -> set[int]:
            found = set()
            for child in psutil.Process(running.process.pid).children():
                with suppress(psutil.Error):  # it has ended
                    found |= {child.pid} if "spawn_main" in " ".join(child.cmdline()) else set()
            return found

        wait_until(lambda: workers_of(old, 1))
        before = processes()
        oldest = max(psutil.Process(pid).create_time() for pid in before)
        wait_until(lambda: time.time() > oldest + Workers.patience + 1)  # one that dies sooner stops the service
        psutil.Process(min(before)).kill()
        wait_until(lambda: len(processes() - before) == 1 and attempt(lambda: workers_of(old, 1)))
        assert {colour_of(running.port, "red") for _ in range(30)} == {("red", "1", old)}
        with asking(running.port) as answers:
            running.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "serving version 2" in running.log)
            assert {colour_of(running.port, "red")[2] for _ in range(30)} == {new}
        assert {answer[2] for answer in answers} <= {old, new}
        assert workers_of(new, 2)
        overwrite(model, b"no model")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: re.search("error: .*is not a model.*; version 2 goes on", running.log))
        assert {colour_of(running.port, "red")[2] for _ in range(10)} == {new}
        assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.mark.slow
def test_a_watched_file_is_swapped_and_sigterm_leaves_no_copy(model, other, tmp_path, temporary, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Service(model, tmp_path / "log", "--watch") as running:
        assert len(list(temporary.glob(f"{PREFIX}*"))) == 1
        with asking(running.port) as answers:
            wait_until(lambda: answers)
            overwrite(model, other.read_bytes())
            wait_until(lambda: answers[-1][1] == "2")
        assert {answer[1] for answer in answers} == {"1", "2"}
        assert running.stop() in (0, -15)
    assert not list(temporary.glob(f"{PREFIX}*"))
