"""The trainer behind ``timm train`` and ``timm validate``, on timm's public functions.

    from topk_registry.train import Trainer, TrainConfig

    result = Trainer(TrainConfig(loss="smooth_topk_svm", epochs=2)).fit()

``config`` turns flags into one frozen TrainConfig. ``setup`` turns that into the parts of a run. ``engine`` puts the
parts together and trains: Trainer, epochs, evaluation, checkpoints, signals. ``report`` prints and draws. ``scripts``
runs timm's and torchvision's own training scripts with a registered loss. ``validate`` evaluates a checkpoint.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topk_registry.registry.source import closest

if TYPE_CHECKING:
    from topk_registry.train.config.config import TrainConfig
    from topk_registry.train.engine.run import Hooks, Run
    from topk_registry.train.engine.trainer import Trainer, TrainResult
    from topk_registry.train.errors import TrainError
    from topk_registry.train.report.loggers import LoggedRun, Logger, check_logger
    from topk_registry.train.setup.loss import LossSpec

# resolved on first use: --help and a misspelt loss need neither torch nor timm
_HOMES = {
    "Hooks": "engine.run",
    "LoggedRun": "report.loggers",
    "Logger": "report.loggers",
    "LossSpec": "setup.loss",
    "Run": "engine.run",
    "TrainConfig": "config.config",
    "TrainError": "errors",
    "TrainResult": "engine.trainer",
    "Trainer": "engine.trainer",
    "check_logger": "report.loggers",
}

__all__ = [
    "Hooks",
    "LoggedRun",
    "Logger",
    "LossSpec",
    "Run",
    "TrainConfig",
    "TrainError",
    "TrainResult",
    "Trainer",
    "check_logger",
]


if not TYPE_CHECKING:  # which would take any name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            hint = closest(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}; it has {', '.join(__all__)}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
