"""Loggers of a run, by entry point: what they are told, and what happens where one fails.

A logger is an entry point of the group ``topk_registry.loggers`` whose factory takes ``run`` (a :class:`LoggedRun`) and
options by keyword, and returns a :class:`Logger`. Only the first process has loggers. ``loggers.yaml`` in the run's
folder remembers the logger's own name of the run, and the epochs it knows: a run that goes on in its folder goes on
there too, and epochs that were saved but not logged are logged then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import yaml

from topk_registry.registry.errors import MissingPackageError, PluginError
from topk_registry.registry.options import check_options
from topk_registry.train.errors import Interrupted, TrainError
from topk_studies.old_trainer import registries
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.report.console import write_text

FILE = "loggers.yaml"
INSTALL = "pip install 'topk-registry[log]'"
Row = Mapping[str, float]


@dataclass(frozen=True)
class LoggedRun:
    """Facts of the run that a logger logs.

    Args:
        name: of the run, which is its folder's.
        folder: where the run writes; a logger may keep files there.
        settings: names and values of all settings, and the record of the loss.
        update: updates of the weights that were done before; 0 in a new run.
        resumed_id: the ``run_id`` of the logger that logged the first part; None in a new run, and where it had none.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    update: int = 0
    resumed_id: str | None = None


class Logger(Protocol):
    """Receives the measurements of a run."""

    @property
    def run_id(self) -> str | None:
        """The logger's own name of the run, given back to the factory when the run goes on; None: it has none."""
        ...

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        """Log values by name, after this many updates of the weights.

        Every ``--log-interval`` these are ``running_loss`` and ``lr``; after an epoch its row of the summary:
        ``epoch``, ``train_loss``, ``lr``, ``eval_top1`` and so on.
        """
        ...

    def close(self, status: str) -> None:
        """End: ``"finished"``, ``"stopped"`` by a signal, or ``"failed"``."""
        ...


class Loggers:
    """The loggers of a run; one that fails is left out from there on, and said.

    Args:
        folder: of the run.
        say: prints a line.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        self._folder, self._say = folder, say
        self._loggers: dict[str, Logger] = {}
        self._known: dict[str, dict[str, Any]] = {}  # by logger: id, epochs

    def open(
        self, config: TrainConfig, run: LoggedRun, history: Sequence[Row], updates_per_epoch: int, *, goes_on: bool
    ) -> None:
        """Build the loggers that the configuration names, and give them the epochs that they have not seen.

        Args:
            config: the run's.
            run: what the loggers are told.
            history: the rows of the epochs that are done.
            updates_per_epoch: which places them.
            goes_on: whether the folder's earlier part is gone on with.

        Raises:
            TrainError: one cannot be built.
        """
        self._known = _read(run.folder / FILE) if goes_on else {}
        self._updates_per_epoch = updates_per_epoch
        done = int(history[-1]["epoch"]) if history else 0
        for name, options in chosen(config).items():
            known = self._known.setdefault(name, {"id": None, "epochs": 0})
            # what came after an older checkpoint than the last is trained and logged again
            known["epochs"] = min(known["epochs"], done)
            told = LoggedRun(run.name, run.folder, run.settings, run.update, known["id"])
            try:
                self._loggers[name] = registries.loggers.builder(name)(run=told, **options)
            except Exception as error:  # a server that does not answer, a key that is wrong
                raise TrainError(f"{registries.loggers.describe(name)} cannot start: {_reason(error)}") from error
            known["id"] = self._loggers[name].run_id
        for row in history:
            self.epoch(row)
        self._remember()

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        for name in list(self._loggers):
            self._tell(name, lambda logger: logger.log(values, update=update))

    def epoch(self, row: Row) -> None:
        """Log the row of an epoch, where it was not."""
        number = int(row["epoch"])
        for name in list(self._loggers):
            if self._known[name]["epochs"] < number and self._tell(
                name, lambda logger: logger.log(row, update=number * self._updates_per_epoch)
            ):
                self._known[name]["epochs"] = number
        self._remember()

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
        status = "finished" if error is None else "stopped" if stopped else "failed"
        for name in list(self._loggers):
            self._tell(name, lambda logger: logger.close(status))

    def _tell(self, name: str, what: Callable[[Logger], None]) -> bool:
        try:
            what(self._loggers[name])
        except Exception as error:  # a server that went away costs the log, not the training
            self._say(f"          logger {name!r} failed and is left out from here: {_reason(error)}")
            del self._loggers[name]
            return False
        return True

    def _remember(self) -> None:
        if self._folder is not None and self._known:
            write_text(self._folder / FILE, yaml.safe_dump(self._known))


def chosen(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The options of each logger that the configuration names.

    Raises:
        TrainError: options of a logger that is not named.
    """
    loggers: dict[str, dict[str, Any]] = {name: {} for name in config.logger}
    if config.log_wandb:
        given = {"project": config.wandb_project, "tags": config.wandb_tags, "resume_id": config.wandb_resume_id}
        loggers["wandb"] = {name: value for name, value in given.items() if value}
    for key, value in config.logger_opt.items():
        name, dot, option = key.partition(".")
        if not dot or name not in loggers:
            known = ", ".join(loggers) or "none"
            raise TrainError(f"--logger-opt takes LOGGER.OPTION=VALUE for a chosen logger ({known}), got {key!r}")
        loggers[name][option] = value
    return loggers


def check_loggers(config: TrainConfig) -> None:
    """Refuse loggers that do not exist or whose package is missing, and options that they do not take.

    Raises:
        TrainError: says which and why.
    """
    if config.wandb_resume_id and not config.resume:
        raise TrainError("--wandb-resume-id goes on with a logged run: it needs --resume")
    for name, options in chosen(config).items():
        try:
            check_options(f"logger {name!r}", registries.loggers.builder(name), ["run", *options])
        except (PluginError, TypeError) as error:
            raise TrainError(_reason(error) if isinstance(error, TypeError) else f"{error}") from error


def check_logger(factory: Callable[..., Logger], folder: Path, **options: Any) -> None:
    """Try a logger as a run does: it is told of two epochs, ends, and goes on in a second process for a third.

    Args:
        factory: of the logger.
        folder: an empty folder, which stands for the run's.
        options: of the logger.

    Raises:
        AssertionError: says what the logger did that would end its log, or the run.
    """
    row = {"epoch": 1.0, "train_loss": 2.5, "lr": 0.1, "eval_top1": 12.5}
    resumed = None
    for done, status in ((0, "stopped"), (2, "finished")):
        run = LoggedRun(folder.name, folder, MappingProxyType({"epochs": 3, "loss": "ce"}), 10 * done, resumed)
        built = factory(run=run, **options)
        lacking = [name for name in ("run_id", "log", "close") if not hasattr(built, name)]
        if lacking:
            raise AssertionError(f"expected a logger with run_id, log and close, got one without {', '.join(lacking)}")
        if not (built.run_id is None or isinstance(built.run_id, str)):
            raise AssertionError(f"expected run_id to be text or None, got {built.run_id!r}")
        if resumed is not None and built.run_id != resumed:
            raise AssertionError(f"expected a run that goes on to keep its run_id {resumed!r}, got {built.run_id!r}")
        resumed = built.run_id
        for epoch in range(done + 1, 3 + done // 2):
            built.log({"running_loss": 2.0, "lr": 0.1}, update=10 * epoch - 5)
            built.log({**row, "epoch": float(epoch)}, update=10 * epoch)
        built.close(status)


def require(package: str) -> None:
    """Refuse, at the cost of a look at the path, a logger whose package is missing: importing it may take seconds.

    Raises:
        MissingPackageError: says what to install.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # a mere folder of this name, such as the one that wandb writes into
        raise MissingPackageError(f"{package} is not installed: {INSTALL}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        raise TrainError(f"cannot read {path}, which tells the loggers where to go on: {error}") from error
