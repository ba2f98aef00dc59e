"""The trainer behind ``timm train`` and ``timm validate``, built on public functions of timm.

    from topk_registry.train import Trainer, TrainConfig

    result = Trainer(TrainConfig(loss="smooth_topk_svm", epochs=2)).fit()

``config`` converts flags into one frozen TrainConfig. ``data``, ``model`` and ``loss`` build the parts of a run, and
``trainer`` combines these parts. ``loop`` trains an epoch, ``evaluation`` computes metrics, ``checkpoint`` saves and
resumes, and ``report`` prints. ``scripts`` runs training scripts of timm and torchvision with a registered loss.
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

# imported on first use: --help and a misspelled loss need neither torch nor timm
_MODULES = {
    "Run": "loop",
    "TrainConfig": "config",
    "TrainError": "errors",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "evaluate": "evaluation",
}

__all__ = ["Run", "TrainConfig", "TrainError", "TrainResult", "Trainer", "evaluate"]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            hint = closest(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}; it has {', '.join(__all__)}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
