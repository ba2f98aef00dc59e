"""Calls that executors' processes make."""

from topk_registry.executors.local import SPAWN


def lock() -> str:
    """Hold a semaphore for as long as the process lives, as progress bars and loaders do."""
    global held
    held = SPAWN.Lock()
    return "locked"
