"""The trainer behind the commands ``timm train`` and ``timm validate``, built on public functions of timm.

    from topk_registry.train import Trainer, TrainConfig

    result = Trainer(TrainConfig(loss="smooth_topk_svm", epochs=2)).fit()

The module ``config`` converts flags into one frozen TrainConfig. ``run`` defines the parts and the state of a
run. ``data``, ``model`` and ``loss`` build the data loaders, the model and the loss. ``trainer`` builds a run, and
``loop`` trains all epochs. ``evaluation`` computes metrics, ``checkpoint`` saves and resumes runs, and ``report``
prints and writes results. ``scripts`` runs training scripts of timm and torchvision with a registered loss.
"""

from typing import TYPE_CHECKING

from topk_registry.errors import TrainError
from topk_registry.lazy import lazy_names

if TYPE_CHECKING:
    from topk_registry.train.config import TrainConfig
    from topk_registry.train.evaluation import evaluate
    from topk_registry.train.run import Run
    from topk_registry.train.trainer import Trainer, TrainResult

# These modules are imported on first use, so that --help does not wait for the import of torch and timm.
_MODULES = {
    "Run": "run",
    "TrainConfig": "config",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "evaluate": "evaluation",
}

__all__ = ["Run", "TrainConfig", "TrainError", "TrainResult", "Trainer", "evaluate"]


if not TYPE_CHECKING:  # if a type checker saw __getattr__, it would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
