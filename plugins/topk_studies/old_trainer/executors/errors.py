"""Errors of executors."""


class WorkerDiedError(RuntimeError):
    """A worker process ended in the middle of a call."""
