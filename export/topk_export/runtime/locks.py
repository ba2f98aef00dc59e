"""Locks of the system on files: they end with their process, however that ends."""

import os
import socket

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None


class HeldError(OSError):
    """Another process holds the lock; the message names it."""


def lock(name: str) -> int | None:
    """Lock a file, made where it is missing, and return its descriptor; None where the file system has no locks.

    The file holds the name of its owner. Its owner may remove it while it is locked.

    Raises:
        HeldError: another process has locked it.
    """
    if fcntl is None:
        return None
    while True:
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(name)):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BlockingIOError as error:
            owner = os.read(file, 1000).decode(errors="replace") or "another process"
            os.close(file)
            raise HeldError(owner) from error
        except FileNotFoundError:  # its owner removed it at its end, between the two calls above
            pass
        except OSError:
            os.close(file)
            os.unlink(name)
            return None
        os.close(file)
