"""The trainer behind ``timm train`` and ``timm validate``, on timm's public functions.

    from topk_registry.train import Trainer, TrainConfig

    result = Trainer(TrainConfig(loss="smooth_topk_svm", epochs=2)).fit()

``config`` turns flags into one frozen TrainConfig; ``data``, ``model`` and ``loss`` build the parts of a run;
``trainer`` puts them together; ``loop`` trains an epoch, ``evaluation`` measures, ``checkpoint`` saves and resumes,
``report`` prints. ``scripts`` runs timm's and torchvision's own training scripts with a registered loss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from topk_registry.registry.source import closest

if TYPE_CHECKING:
    from topk_registry.train.config import TrainConfig
    from topk_registry.train.errors import TrainError
    from topk_registry.train.evaluation import evaluate
    from topk_registry.train.loop import Run
    from topk_registry.train.trainer import Trainer, TrainResult

# resolved on first use: --help and a misspelt loss need neither torch nor timm
_MODULES = {
    "Run": "loop",
    "TrainConfig": "config",
    "TrainError": "errors",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "evaluate": "evaluation",
}

__all__ = ["Run", "TrainConfig", "TrainError", "TrainResult", "Trainer", "evaluate"]


if not TYPE_CHECKING:  # which would take any name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            hint = closest(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}; it has {', '.join(__all__)}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
