"""Loss classes. Each file of this package has the losses of one paper or of one family of losses.

Import a loss from the package, not from the file:

    from topk_plugins import SmoothTopKSVM

Python imports the file of a class when the class is first used. ``topk_registry.create_loss`` finds the same losses by
name, because the package declares them as entry points.
"""

from typing import TYPE_CHECKING

from topk_registry.lazy import lazy_names

if TYPE_CHECKING:
    from topk_plugins.conformal import ConformalTraining, LowVarianceConformalTraining
    from topk_plugins.differentiable_topk import DifferentiableTopK
    from topk_plugins.encouraging import Encouraging, Mirror
    from topk_plugins.imbalance import LDAM, BalancedSoftmax, Focal, LogitAdjustment
    from topk_plugins.ksubset import KSubsetNLL
    from topk_plugins.noise_robust import ALDRKL, LDRKL, EpsilonSoftmax, GeneralisedCrossEntropy
    from topk_plugins.noised_topk import NoisedTopK, NoisedTopKImbalanced
    from topk_plugins.sigmoid import SigmoidMAE, SigmoidMSE
    from topk_plugins.smooth_topk import SmoothTopKSVM, TopKNLL
    from topk_plugins.soft_topk import LapSum, SoftTopK
    from topk_plugins.sparse_topk import SparseTopK
    from topk_plugins.spherical import LogSphericalSoftmax, LogTaylorSoftmax, SphericalBound
    from topk_plugins.topk_hinge import TopKHinge, TopKHingeCalibrated, TopKHingeConvex, TopKSVM

_FILES = {
    "conformal": ("ConformalTraining", "LowVarianceConformalTraining"),
    "differentiable_topk": ("DifferentiableTopK",),
    "encouraging": ("Encouraging", "Mirror"),
    "imbalance": ("BalancedSoftmax", "Focal", "LDAM", "LogitAdjustment"),
    "ksubset": ("KSubsetNLL",),
    "noise_robust": ("ALDRKL", "EpsilonSoftmax", "GeneralisedCrossEntropy", "LDRKL"),
    "noised_topk": ("NoisedTopK", "NoisedTopKImbalanced"),
    "sigmoid": ("SigmoidMAE", "SigmoidMSE"),
    "smooth_topk": ("SmoothTopKSVM", "TopKNLL"),
    "soft_topk": ("LapSum", "SoftTopK"),
    "sparse_topk": ("SparseTopK",),
    "spherical": ("LogSphericalSoftmax", "LogTaylorSoftmax", "SphericalBound"),
    "topk_hinge": ("TopKHinge", "TopKHingeCalibrated", "TopKHingeConvex", "TopKSVM"),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}

__all__ = [
    "ALDRKL", "LDAM", "LDRKL", "BalancedSoftmax", "ConformalTraining", "DifferentiableTopK", "Encouraging",
    "EpsilonSoftmax", "Focal", "GeneralisedCrossEntropy", "KSubsetNLL", "LapSum", "LogSphericalSoftmax",
    "LogTaylorSoftmax", "LogitAdjustment", "LowVarianceConformalTraining", "Mirror", "NoisedTopK",
    "NoisedTopKImbalanced", "SigmoidMAE", "SigmoidMSE", "SmoothTopKSVM", "SoftTopK", "SparseTopK", "SphericalBound",
    "TopKHinge", "TopKHingeCalibrated", "TopKHingeConvex", "TopKNLL", "TopKSVM",
]  # fmt: skip


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
