"""Exceptions of the package. Commands print only the messages of these exceptions, without a traceback."""


class PluginError(Exception):
    """Base class of all exceptions about plug-ins."""


class UnknownPluginError(PluginError, LookupError):
    """No plug-in has the requested name."""


class AmbiguousPluginError(PluginError, LookupError):
    """Several distributions have a plug-in with the requested name. ``distribution:name`` selects one of them."""


class DisabledPluginError(PluginError, LookupError):
    """The environment variable ``TOPK_REGISTRY_PLUGINS`` or ``TOPK_REGISTRY_DISABLE`` disables the plug-in."""


class NameTakenError(PluginError, ValueError):
    """The name of a new plug-in already belongs to another plug-in."""


class BrokenPluginError(PluginError, RuntimeError):
    """The plug-in cannot be imported, is neither a class nor a function, or creates no callable loss."""


class FolderError(ValueError):
    """A root folder has no valid class folders, or its class folders do not fit the classes of a model."""


class UnreadableImageError(OSError):
    """An image file cannot be decoded."""


class WrongLabelsError(ValueError):
    """The labels contradict the predictions of a model, as if class folders had wrong names."""


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
    """A signal, such as SIGINT from Ctrl-C, stopped the run.

    ``signum`` is the number of the signal. ``kept`` says what the run has saved.
    """

    def __init__(self, signum: int, kept: str) -> None:
        super().__init__(f"stopped by signal {signum}: {kept}")
        self.signum = signum
