"""Exceptions of training. The commands print only the messages of these exceptions, without a traceback."""


class TrainError(Exception):
    """A run cannot start or continue. The message states a cause that the user can fix."""


class ConfigError(TrainError, ValueError):
    """A setting is unknown or has an invalid value, or two settings exclude each other."""


class DataError(TrainError):
    """The data cannot be opened or read."""


class SaveError(TrainError):
    """A checkpoint or a report cannot be written."""


class NonFiniteLossError(TrainError):
    """The training loss became NaN or infinite."""


class Interrupted(TrainError):  # noqa: N818
    """A signal, such as SIGINT from Ctrl-C, stopped the run. ``signum`` is the number of the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
