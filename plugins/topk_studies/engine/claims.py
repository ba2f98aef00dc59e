"""Claims: which process does a run now, on any machine that sees the folder, and whether it still lives.

The claims on a run are numbered files of its work folder, ``claim.0``, ``claim.1``, and so on. Creating the next number
is the only step that must be atomic (O_EXCL, also on NFS); the process that creates it owns the run. A number is
created only after the one before it was released or its owner was found dead, and no number is used twice while a run
is unfinished, so a late reader cannot take a run over twice.

An owner rewrites its own file every few seconds. No clocks are compared: an observer calls an owner dead if its file
has not changed for ``LEASE`` seconds of the observer's own clock, or at once if the owner ran on this machine and its
process is gone. An owner that was only suspended may still finish its run; its record is then as good as any other.
"""

import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

BEAT = 5.0  # seconds between two signs of life
SOON = 0.5  # seconds between two when a run reports progress
LEASE = 60.0  # seconds: the longest that NFS caches a file's attributes by default, and many beats


class Claim:
    """A run that this process owns; as a context manager it shows signs of life, and releases the run at its end.

    Use :func:`acquire` to get one.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self._path = folder / f"claim.{number}"
        self._token = uuid.uuid4().hex
        owner = {"place": place(), "host": socket.gethostname(), "pid": os.getpid()}
        self._state: dict[str, Any] = {"token": self._token, **owner, "beat": 0}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last = 0.0
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._write()

    def __enter__(self) -> "Claim":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._state["released"] = True
        self._write()

    def tell(self, share: float, words: str) -> None:
        """Note how far the run is, for whoever waits for it."""
        self._state["progress"] = [share, words]
        if time.monotonic() - self._last > SOON:
            self._write()

    def forget(self) -> None:
        """Remove the work folder of a finished run, and every claim in it at once."""
        self._ended.set()
        self._thread.join()
        aside = self.folder.with_name(f"{self.folder.name}.{uuid.uuid4().hex}.done")
        try:
            self.folder.rename(aside)
        except FileNotFoundError:
            return  # another process finished the run too
        shutil.rmtree(aside, ignore_errors=True)

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT):
            self._write()

    def _write(self) -> None:
        """Write the claim anew, unless the run was finished elsewhere and the file is gone or another's."""
        with self._lock:
            self._last = time.monotonic()
            self._state["beat"] += 1
            half = self._path.with_name(f"{self._path.name}.{self._token}.tmp")
            try:
                now = self._path.read_text(encoding="utf-8")
                if now and self._token not in now:
                    raise FileNotFoundError
                half.write_text(json.dumps(self._state), encoding="utf-8")
                half.replace(self._path)
            except FileNotFoundError:
                self._ended.set()


def acquire(folder: Path, number: int) -> Claim | None:
    """Create claim ``number`` in a run's work folder; None if another process was first.

    Args:
        folder: the run's work folder.
        number: the number that :meth:`Watch.look` found to be free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)  # which raises FileExistsError where it goes away at that moment
        os.close(os.open(folder / f"claim.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except (FileExistsError, FileNotFoundError):  # taken, or finished and cleared away since
        return None
    return Claim(folder, number)


@dataclass(frozen=True)
class State:
    """The claim on a run: the next free ``number``, or None while ``owner`` (a host and a process) has it."""

    number: int | None
    owner: str = ""
    progress: tuple[float, str] | None = None


class Watch:
    """Looks at claims, and remembers when each last changed."""

    def __init__(self, lease: float | None = None) -> None:
        self.lease = LEASE if lease is None else lease
        self._seen: dict[Path, tuple[str, float]] = {}

    def look(self, folder: Path) -> State:
        """Who has the run of this work folder, if anybody has."""
        number = max(_numbers(folder, "claim"), default=-1)
        if number < 0:
            return State(0)
        path = folder / f"claim.{number}"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return State(0)  # cleared away between the two looks
        now = time.monotonic()
        before, since = self._seen.get(path, (None, now))
        if before != text:
            since = now
        self._seen[path] = text, since
        claim = _parsed(text)
        if claim.get("released") or now - since >= self.lease or _is_gone(claim):
            return State(number + 1)
        share, words = claim.get("progress", (0.0, ""))
        return State(None, f"process {claim.get('pid', '?')} on {claim.get('host', '?')}", (share, words))


def own_folder(claim_folder: Path, number: int) -> Path:
    """The folder that the owner with this number works in, with what the last owner left there.

    It has a name of its own: an owner that wakes up after its run was taken over finds its folder gone, and cannot
    write into that of its successor.
    """
    mine = claim_folder / f"run.{number}"
    for earlier in sorted(_numbers(claim_folder, "run"), reverse=True):
        try:
            (claim_folder / f"run.{earlier}").rename(mine)
            return mine
        except FileNotFoundError:
            continue
    mine.mkdir(parents=True, exist_ok=True)
    return mine


@lru_cache(maxsize=1)
def place() -> str:
    """This machine since it was started: processes of one place see each other's process numbers."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # elsewhere than on Linux the host's name has to do; the lease finds what that misses
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _numbers(folder: Path, name: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    ends = (each.removeprefix(f"{name}.") for each in names if each.startswith(f"{name}."))
    return [int(end) for end in ends if end.isdigit()]


def _parsed(text: str) -> Mapping[str, Any]:
    """A claim's content; empty while it is being created."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _is_gone(claim: Mapping[str, Any]) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    if claim.get("place") != place() or os.name != "posix":
        return False
    try:
        os.kill(claim["pid"], 0)
        state = Path(f"/proc/{claim['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except (OSError, IndexError):
        return False  # it is another user's, or there is no /proc
    return state in "ZX"  # killed, and not yet waited for
