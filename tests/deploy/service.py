"""A served model: in a thread of this process, or as the command in a process of its own; and requests to it."""

import contextlib
import http.client
import json
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

from topk_export.serve.reading import Limits
from topk_export.serve.server import make_server

PATIENCE = 60  # seconds that a loaded machine may take for what an idle one does at once
LOCAL = ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def served(predictor: Any, **limits: Any) -> Iterator[int]:
    """Serve in this process; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = make_server(predictor, Limits(**limits), LOCAL)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


class Process:
    """``topk-registry serve`` on a free port."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "topk_registry", "serve", str(model), "--port", "0", "--threads", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> "Process":
        assert self.process.stdout is not None
        lines, found = [], None
        while found is None:  # libraries of a device may print warnings first
            lines.append(self.process.stdout.readline())
            assert lines[-1], "".join(lines)
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", lines[-1])
        self.port = int(found[1])
        wait_until(lambda: answered(self.port))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def memory(self) -> int:
        """The peak of the resident memory so far, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", text)[1])  # type: ignore[index]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def answered(port: int) -> bool:
    try:
        return request(port, "GET", "/healthz")[0] == 200
    except OSError:
        return False


def request(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Status, content (parsed if it is JSON) and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers or {})
        return read(connection.getresponse())
    finally:
        connection.close()


def read(response: http.client.HTTPResponse) -> tuple[int, Any, dict[str, str]]:
    content = response.read()
    sent = {key.lower(): value for key, value in response.getheaders()}
    is_json = sent.get("content-type", "").startswith("application/json")
    return response.status, json.loads(content) if is_json and content else content.decode(errors="replace"), sent


def predict(port: int, body: bytes, query: str = "", kind: str = "image/png") -> tuple[int, Any]:
    return request(port, "POST", f"/predict{query}", body, {"Content-Type": kind})[:2]


def form(images: list[bytes], filename: str = "a.png", **fields: str) -> tuple[bytes, str]:
    """A multipart body with files and fields, and its content type."""
    parts = [(f'name="image"; filename="{filename}"\r\nContent-Type: image/png', image) for image in images]
    parts += [(f'name="{name}"', value.encode()) for name, value in fields.items()]
    body = b"".join(
        b"--line\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return body + b"--line--\r\n", "multipart/form-data; boundary=line"
