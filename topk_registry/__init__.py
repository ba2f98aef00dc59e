"""Top-k losses by name, and exact top-k probabilities.

Public names are resolved on first use, so that ``import topk_registry`` and listing losses cost neither torch nor any
plug-in's import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topk_registry.distributions import GumbelTopK, KSubset
    from topk_registry.losses.base import ClassificationLoss, TopKLoss
    from topk_registry.losses.ranks import mean_over_ranks
    from topk_registry.nn.classifier import CosineClassifier, normalize_classifier
    from topk_registry.nn.head import TopKClassifier, TopKHead, TopKOutput, fit_temperature
    from topk_registry.nn.linear import LinearSmoothTopK, linear_smooth_topk
    from topk_registry.nn.perturbed import PerturbedTopK
    from topk_registry.nn.spherical import SphericalLinear, SphericalSGD
    from topk_registry.ops.backend import backend
    from topk_registry.ops.hinge import soft_hinge
    from topk_registry.ops.ksubset import (
        smooth_topk_hinge,
        topk_label_margins,
        topk_log_odds,
        topk_marginals,
        topk_margins,
    )
    from topk_registry.ops.ksubset.row_loss import smooth_topk_loss
    from topk_registry.ops.lapsum.api import lapsum_loss
    from topk_registry.ops.perturbed import perturbed_topk
    from topk_registry.ops.perturbed.row_loss import perturbed_hinge_loss
    from topk_registry.ops.ranking.api import ranking_loss
    from topk_registry.ops.robust.api import aldr_loss
    from topk_registry.ops.rows.api import RowLoss, row_losses
    from topk_registry.ops.rows.curve import Curve
    from topk_registry.ops.selection.api import topk_hinge_loss
    from topk_registry.ops.sigmoid.api import sigmoid_loss
    from topk_registry.ops.softmax.api import softmax_loss
    from topk_registry.ops.softmax.ldr import ldr_loss
    from topk_registry.ops.sparse.api import sparse_topk_loss
    from topk_registry.ops.squares.api import quadratic_bound_loss, squares_loss
    from topk_registry.ops.squares.definition import quadratic_bound_of_sums
    from topk_registry.ops.targets.label_mixture import LabelMixture
    from topk_registry.registry.api import (
        create_loss,
        get_loss_builder,
        is_loss,
        list_losses,
        loss_info,
        refresh_plugins,
        register_loss,
    )
    from topk_registry.registry.errors import (
        AmbiguousPluginError,
        BrokenPluginError,
        DisabledPluginError,
        NameTakenError,
        PluginError,
        UnknownPluginError,
    )
    from topk_registry.registry.options import accepted_context
    from topk_registry.registry.registry import LossInfo

_HOMES = {
    "AmbiguousPluginError": "registry.errors",
    "BrokenPluginError": "registry.errors",
    "ClassificationLoss": "losses.base",
    "CosineClassifier": "nn.classifier",
    "Curve": "ops.rows.curve",
    "DisabledPluginError": "registry.errors",
    "GumbelTopK": "distributions",
    "KSubset": "distributions",
    "LabelMixture": "ops.targets.label_mixture",
    "LinearSmoothTopK": "nn.linear",
    "LossInfo": "registry.registry",
    "NameTakenError": "registry.errors",
    "PerturbedTopK": "nn.perturbed",
    "PluginError": "registry.errors",
    "RowLoss": "ops.rows.api",
    "SphericalLinear": "nn.spherical",
    "SphericalSGD": "nn.spherical",
    "TopKClassifier": "nn.head",
    "TopKHead": "nn.head",
    "TopKLoss": "losses.base",
    "TopKOutput": "nn.head",
    "UnknownPluginError": "registry.errors",
    "accepted_context": "registry.options",
    "aldr_loss": "ops.robust.api",
    "backend": "ops.backend",
    "create_loss": "registry.api",
    "fit_temperature": "nn.head",
    "get_loss_builder": "registry.api",
    "is_loss": "registry.api",
    "lapsum_loss": "ops.lapsum.api",
    "ldr_loss": "ops.softmax.ldr",
    "linear_smooth_topk": "nn.linear",
    "list_losses": "registry.api",
    "loss_info": "registry.api",
    "mean_over_ranks": "losses.ranks",
    "normalize_classifier": "nn.classifier",
    "perturbed_hinge_loss": "ops.perturbed.row_loss",
    "perturbed_topk": "ops.perturbed",
    "quadratic_bound_loss": "ops.squares.api",
    "quadratic_bound_of_sums": "ops.squares.definition",
    "ranking_loss": "ops.ranking.api",
    "refresh_plugins": "registry.api",
    "register_loss": "registry.api",
    "row_losses": "ops.rows.api",
    "sigmoid_loss": "ops.sigmoid.api",
    "smooth_topk_hinge": "ops.ksubset",
    "smooth_topk_loss": "ops.ksubset.row_loss",
    "soft_hinge": "ops.hinge",
    "softmax_loss": "ops.softmax.api",
    "sparse_topk_loss": "ops.sparse.api",
    "squares_loss": "ops.squares.api",
    "topk_hinge_loss": "ops.selection.api",
    "topk_label_margins": "ops.ksubset",
    "topk_log_odds": "ops.ksubset",
    "topk_marginals": "ops.ksubset",
    "topk_margins": "ops.ksubset",
}

__all__ = [
    "AmbiguousPluginError",
    "BrokenPluginError",
    "ClassificationLoss",
    "CosineClassifier",
    "Curve",
    "DisabledPluginError",
    "GumbelTopK",
    "KSubset",
    "LabelMixture",
    "LinearSmoothTopK",
    "LossInfo",
    "NameTakenError",
    "PerturbedTopK",
    "PluginError",
    "RowLoss",
    "SphericalLinear",
    "SphericalSGD",
    "TopKClassifier",
    "TopKHead",
    "TopKLoss",
    "TopKOutput",
    "UnknownPluginError",
    "accepted_context",
    "aldr_loss",
    "backend",
    "create_loss",
    "fit_temperature",
    "get_loss_builder",
    "is_loss",
    "lapsum_loss",
    "ldr_loss",
    "linear_smooth_topk",
    "list_losses",
    "loss_info",
    "mean_over_ranks",
    "normalize_classifier",
    "perturbed_hinge_loss",
    "perturbed_topk",
    "quadratic_bound_loss",
    "quadratic_bound_of_sums",
    "ranking_loss",
    "refresh_plugins",
    "register_loss",
    "row_losses",
    "sigmoid_loss",
    "smooth_topk_hinge",
    "smooth_topk_loss",
    "soft_hinge",
    "softmax_loss",
    "sparse_topk_loss",
    "squares_loss",
    "topk_hinge_loss",
    "topk_label_margins",
    "topk_log_odds",
    "topk_marginals",
    "topk_margins",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"topk_registry.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'topk_registry' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
