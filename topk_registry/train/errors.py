"""Errors that end a run with a message and no traceback."""


class TrainError(Exception):
    """A run cannot start or continue, for a reason that the user can fix."""


class ConfigError(TrainError, ValueError):
    """Settings are unknown, have the wrong type, or exclude each other."""


class DataError(TrainError):
    """The data cannot be read."""


class SaveError(TrainError):
    """A checkpoint or a report cannot be written."""


class NonFiniteLossError(TrainError):
    """The training loss became NaN or infinite."""


class Interrupted(TrainError):  # noqa: N818
    """A signal asked the run to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
