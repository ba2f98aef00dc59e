"""Helpers around a served model: the command in a process of its own, and requests to it."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from topk_export import Predictor
from topk_export.serve.limits import Access, Limits
from topk_export.serve.releases import Release
from topk_export.serve.server import Plan, make_server, problems_of
from topk_export.serve.swaps import Step

PATIENCE = 60  # seconds that a loaded machine may take for what an idle one does at once


class Service:
    """``topk-registry serve`` on a free port of this machine, ended by SIGTERM."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "topk_registry", "serve", str(model), "--port", "0", "--threads", "1", *flags]
        self._log, self._file = log, log.open("w")
        environment = {**os.environ, "PYTHONWARNINGS": "error"}
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> "Service":
        try:
            self.port = int(self._wait_for(lambda: re.search(r"http://127\.0\.0\.1:(\d+)/", self.log))[1])
            self.url = f"http://127.0.0.1:{self.port}/"
            self._wait_for(lambda: request(self.port, "GET", "/readyz")[0] == 200)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> int:
        """Send SIGTERM, and give the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._file.close()

    def _wait_for(self, condition: Any) -> Any:
        end = time.monotonic() + 3 * PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log
            if found := attempt(condition):
                return found
            time.sleep(0.05)
        raise AssertionError(f"the service did not start:\n{self.log}")


def attempt(condition: Any) -> Any:
    """What the condition tells; None where its connection was closed."""
    try:
        return condition()
    except ConnectionError:
        return None


def request(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Status, content (parsed where it is JSON) and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
        sent = {key.lower(): value for key, value in response.getheaders()}
        is_json = sent.get("content-type", "").startswith("application/json")
        return response.status, json.loads(content) if is_json else content.decode(errors="replace"), sent
    finally:
        connection.close()


def predict(port: int, image: bytes, *, query: str = "", kind: str = "image/png") -> tuple[int, Any]:
    return request(port, "POST", f"/predict{query}", image, {"Content-Type": kind})[:2]


def batches(port: int) -> tuple[float, float]:
    """How many batches have run, and how many inputs were in them."""
    text = request(port, "GET", "/metrics")[1]
    count, total = (re.search(rf"^topk_batch_size_{what} (\S+)", text, re.MULTILINE) for what in ("count", "sum"))
    assert count
    assert total
    return float(count[1]), float(total[1])


def form(image: bytes, field: str = "image") -> tuple[bytes, dict[str, str]]:
    """A multipart body with one file, and its headers."""
    head = (
        f'--line\r\nContent-Disposition: form-data; name="{field}"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    )
    return head.encode() + image + b"\r\n--line--\r\n", {"Content-Type": "multipart/form-data; boundary=line"}


@contextlib.contextmanager
def served(predictor: Predictor, access: Access | None = None, log: str | None = None, **limits: Any) -> Iterator[int]:
    """An application in this process; gives its port."""
    with served_by(predictor, Plan({}, Limits(**limits), access or Access(), log=log)) as (port, _):
        yield port


class Steps:
    """Takes the steps of a swap in an application of this process."""

    def __init__(self, service: Any, plan: Plan) -> None:
        self._service, self._plan = service, plan

    def take(self, step: Step, release: Release) -> list[str]:
        """Return what went wrong."""
        return problems_of(self._service, self._plan, step, release)


@contextlib.contextmanager
def served_by(predictor: Predictor, plan: Plan, release: Release | None = None) -> Iterator[tuple[int, Steps]]:
    """An application in this process; gives its port, and the steps of a swap."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = make_server(predictor, plan, release=release)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1], Steps(server.config.app.state.service, plan)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def wait_until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Held:
    """A predictor whose runs, from the second on, wait for the gate; or fail."""

    def __init__(self, predictor: Predictor, error: Exception | None = None) -> None:
        self._inner, self.error = predictor, error
        self.gate, self.runs, self.hold = threading.Event(), 0, False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def run(self, x):
        self.runs += 1
        if self.error is not None:
            raise self.error
        if self.hold:
            assert self.gate.wait(PATIENCE)
        return self._inner.run(x)
