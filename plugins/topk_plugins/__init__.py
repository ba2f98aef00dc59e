"""The project's own losses, a paper a file, found through entry points.

    from topk_plugins import SmoothTopKSVM

Each class is imported on first use.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topk_plugins.conformal import ConformalTraining, LowVarianceConformalTraining
    from topk_plugins.encouraging import Encouraging, Mirror
    from topk_plugins.epsilon import EpsilonSoftmax
    from topk_plugins.garcin import NoisedTopK, NoisedTopKImbalanced
    from topk_plugins.gupta import SoftTopK
    from topk_plugins.hinge import TopKHinge, TopKHingeCalibrated, TopKHingeConvex, TopKSVM
    from topk_plugins.imbalance import LDAM, Focal
    from topk_plugins.ksubset import KSubsetNLL
    from topk_plugins.lapsum import LapSum
    from topk_plugins.ldr import ALDRKL, LDRKL
    from topk_plugins.petersen import DifferentiableTopK
    from topk_plugins.priors import BalancedSoftmax, LogitAdjustment
    from topk_plugins.robust import GeneralisedCrossEntropy
    from topk_plugins.sander import SparseTopK
    from topk_plugins.sigmoid import SigmoidMAE, SigmoidMSE
    from topk_plugins.smooth_topk import SmoothTopKSVM, TopKNLL
    from topk_plugins.spherical import LogSphericalSoftmax, LogTaylorSoftmax, SphericalBound

_HOMES = {
    "ALDRKL": "ldr",
    "BalancedSoftmax": "priors",
    "ConformalTraining": "conformal",
    "DifferentiableTopK": "petersen",
    "Encouraging": "encouraging",
    "EpsilonSoftmax": "epsilon",
    "Focal": "imbalance",
    "GeneralisedCrossEntropy": "robust",
    "KSubsetNLL": "ksubset",
    "LDAM": "imbalance",
    "LDRKL": "ldr",
    "LapSum": "lapsum",
    "LogSphericalSoftmax": "spherical",
    "LogTaylorSoftmax": "spherical",
    "LogitAdjustment": "priors",
    "LowVarianceConformalTraining": "conformal",
    "Mirror": "encouraging",
    "NoisedTopK": "garcin",
    "NoisedTopKImbalanced": "garcin",
    "SigmoidMAE": "sigmoid",
    "SigmoidMSE": "sigmoid",
    "SmoothTopKSVM": "berrada",
    "SoftTopK": "gupta",
    "SparseTopK": "sander",
    "SphericalBound": "spherical",
    "TopKHinge": "hinge",
    "TopKHingeCalibrated": "hinge",
    "TopKHingeConvex": "hinge",
    "TopKNLL": "berrada",
    "TopKSVM": "hinge",
}

__all__ = [
    "ALDRKL",
    "LDAM",
    "LDRKL",
    "BalancedSoftmax",
    "ConformalTraining",
    "DifferentiableTopK",
    "Encouraging",
    "EpsilonSoftmax",
    "Focal",
    "GeneralisedCrossEntropy",
    "KSubsetNLL",
    "LapSum",
    "LogSphericalSoftmax",
    "LogTaylorSoftmax",
    "LogitAdjustment",
    "LowVarianceConformalTraining",
    "Mirror",
    "NoisedTopK",
    "NoisedTopKImbalanced",
    "SigmoidMAE",
    "SigmoidMSE",
    "SmoothTopKSVM",
    "SoftTopK",
    "SparseTopK",
    "SphericalBound",
    "TopKHinge",
    "TopKHingeCalibrated",
    "TopKHingeConvex",
    "TopKNLL",
    "TopKSVM",
]


if not TYPE_CHECKING:  # which would take any name for one that exists

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"topk_plugins.{_HOMES[name]}"), name)
        close = get_close_matches(name, __all__, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise AttributeError(f"module 'topk_plugins' has no attribute {name!r}; {hint}it has {', '.join(__all__)}")

    def __dir__() -> list[str]:
        return __all__
