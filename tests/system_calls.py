"""Record the calls of the operating system that make a file durable, and what the file held at that time."""

import builtins
import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A call on a file or a folder. ``state`` identifies the file, and what was written to it."""

    name: str  # open, fsync, replace, link or unlink
    path: str
    target: str = ""
    state: tuple[int, int, int] = (0, 0, 0)  # inode, size and time of the last write
    folder: bool = False


def state_of(path: str | int) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


class Calls(list[Call]):
    """The calls since the construction, in order."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        for name, record in {
            "fsync": self._sync,
            "replace": self._move,
            "rename": self._move,
            "link": self._move,
        }.items():
            monkeypatch.setattr(os, name, self._before(name, record, getattr(os, name)))
        monkeypatch.setattr(os, "unlink", self._before("unlink", self._gone, os.unlink))
        for module in (builtins, io):  # pathlib takes that of io
            monkeypatch.setattr(module, "open", self._opened(module.open))

    def _before(self, name, record, call):
        def recorded(*args, **options):
            record(name, *args)
            return call(*args, **options)

        return recorded

    def _opened(self, call):
        def recorded(file, mode="r", *args, **options):
            if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax"):
                self.append(Call("open", os.fspath(file)))
            return call(file, mode, *args, **options)

        return recorded

    def _sync(self, name, handle):
        number = handle if isinstance(handle, int) else handle.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        self.append(Call(name, path, state=state_of(number), folder=stat.S_ISDIR(os.stat(number).st_mode)))

    def _move(self, name, source, target):
        self.append(
            Call("replace" if name == "rename" else name, os.fspath(source), os.fspath(target), state_of(source))
        )

    def _gone(self, name, path, **_):
        self.append(Call(name, os.fspath(path)))

    def moves_to(self, pattern: str) -> list[int]:
        """Return the positions of the calls that put a file in place whose name matches ``pattern``."""
        return [i for i, call in enumerate(self) if call.name == "replace" and Path(call.target).match(pattern)]

    def check_synced(self, at: int) -> None:
        """Fail unless the file of a move had reached the disk whole, and was not opened under its final name."""
        move = self[at]
        synced = [i for i, call in enumerate(self[:at]) if call.name == "fsync" and call.state == move.state]
        assert synced, f"{move.path} was not synced after its last write, and before the move to {move.target}"
        assert all(call.path != move.target for call in self if call.name == "open"), (
            f"{move.target} was written in place"
        )

    def check_written(self, path: str | Path) -> None:
        """Fail unless a file was put in place once, whole, and durably."""
        (at,) = self.moves_to(str(path))
        self.check_synced(at)
        self.check_folder_synced(at)

    def check_folder_synced(self, at: int) -> None:
        """Fail unless the folder of a move was synced after the move."""
        folder = os.path.dirname(os.path.realpath(self[at].target))
        after = [call for call in self[at:] if call.name == "fsync" and call.folder and call.path == folder]
        assert after, f"{folder} was not synced after the move to {self[at].target}"
