"""Losses for image classifiers by name, and exact probabilities of being in the top-k set.

    import torch
    import topk_registry as tr

    logits, target = torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))
    loss = tr.create_loss("smooth_topk_svm", k=5)  # takes what nn.CrossEntropyLoss takes
    loss(logits, target).backward()
    tr.TopKHead.of_loss(loss)(logits).marginals  # [8, 100], each row sums to 5
    tr.functional.topk_marginals(logits, k=5)  # the same without a module

Losses by name
    list_losses, create_loss, loss_info, is_loss, get_loss_builder, register_loss, refresh_plugins, LossInfo
Losses of your own
    ClassificationLoss, TopKLoss, BatchLoss: the base classes
    accepted_context: what a trainer may tell a loss; mean_over_ranks: the mean over the rows of all ranks
Models
    TopKHead, TopKClassifier, TopKOutput, fit_temperature: probabilities behind a model
    LinearSmoothTopK, PerturbedTopK, SphericalLinear: layers for many classes; SphericalSGD: its optimizer
    CosineClassifier, normalize_classifier: classifiers over unit-norm features
Targets and distributions
    LabelMixture, KSubset
Settings
    use_backend: which kernels compute; PluginError: base of the registry's errors

Namespaces, imported on first use:
    topk_registry.functional     functions of tensors: topk_marginals, smooth_topk_loss, perturbed_topk ...
    topk_registry.options        checks of the options that losses are given
    topk_registry.errors         every error that callers may want to catch
    topk_registry.analysis       comparisons and reports of classifiers
    topk_registry.metrics        top-k accuracy, calibration, coverage
    topk_registry.conformal      prediction sets with guaranteed coverage
    topk_registry.distributions  distributions over sets of k classes
    topk_registry.testing        the conformance kit for losses
    topk_registry.train          the trainer behind ``timm train``

The losses themselves are classes of ``topk_plugins``; ``tr.list_losses()`` names them and those of other packages.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

# Editors and type checkers read these imports. At run time each name is imported on first use, and there is no
# __all__: with one, help() would print every class of the package in full.
if TYPE_CHECKING:
    from topk_registry.distributions import KSubset as KSubset
    from topk_registry.losses.base import ClassificationLoss as ClassificationLoss
    from topk_registry.losses.base import CommonOptions as CommonOptions
    from topk_registry.losses.base import SoftmaxLoss as SoftmaxLoss
    from topk_registry.losses.base import TopKLoss as TopKLoss
    from topk_registry.losses.batch import BatchLoss as BatchLoss
    from topk_registry.losses.ranks import mean_over_ranks as mean_over_ranks
    from topk_registry.nn.classifier import CosineClassifier as CosineClassifier
    from topk_registry.nn.classifier import normalize_classifier as normalize_classifier
    from topk_registry.nn.head import TopKClassifier as TopKClassifier
    from topk_registry.nn.head import TopKHead as TopKHead
    from topk_registry.nn.head import TopKOutput as TopKOutput
    from topk_registry.nn.head import fit_temperature as fit_temperature
    from topk_registry.nn.linear import LinearSmoothTopK as LinearSmoothTopK
    from topk_registry.nn.perturbed import PerturbedTopK as PerturbedTopK
    from topk_registry.nn.spherical import SphericalLinear as SphericalLinear
    from topk_registry.nn.spherical import SphericalSGD as SphericalSGD
    from topk_registry.ops.backend import use_backend as use_backend
    from topk_registry.ops.targets.label_mixture import LabelMixture as LabelMixture
    from topk_registry.registry.api import create_loss as create_loss
    from topk_registry.registry.api import get_loss_builder as get_loss_builder
    from topk_registry.registry.api import is_loss as is_loss
    from topk_registry.registry.api import list_losses as list_losses
    from topk_registry.registry.api import loss_info as loss_info
    from topk_registry.registry.api import refresh_plugins as refresh_plugins
    from topk_registry.registry.api import register_loss as register_loss
    from topk_registry.registry.errors import PluginError as PluginError
    from topk_registry.registry.options import accepted_context as accepted_context
    from topk_registry.registry.registry import LossInfo as LossInfo

    from . import analysis as analysis
    from . import conformal as conformal
    from . import distributions as distributions
    from . import errors as errors
    from . import functional as functional
    from . import metrics as metrics
    from . import options as options
    from . import testing as testing
    from . import train as train

    __version__: str
else:
    _NAMESPACES = (
        "analysis",
        "conformal",
        "distributions",
        "errors",
        "functional",
        "metrics",
        "options",
        "testing",
        "train",
    )

    _HOMES = {
        "BatchLoss": "losses.batch",
        "ClassificationLoss": "losses.base",
        "CommonOptions": "losses.base",
        "SoftmaxLoss": "losses.base",
        "CosineClassifier": "nn.classifier",
        "KSubset": "distributions",
        "LabelMixture": "ops.targets.label_mixture",
        "LinearSmoothTopK": "nn.linear",
        "LossInfo": "registry.registry",
        "PerturbedTopK": "nn.perturbed",
        "PluginError": "registry.errors",
        "SphericalLinear": "nn.spherical",
        "SphericalSGD": "nn.spherical",
        "TopKClassifier": "nn.head",
        "TopKHead": "nn.head",
        "TopKLoss": "losses.base",
        "TopKOutput": "nn.head",
        "accepted_context": "registry.options",
        "create_loss": "registry.api",
        "fit_temperature": "nn.head",
        "get_loss_builder": "registry.api",
        "is_loss": "registry.api",
        "list_losses": "registry.api",
        "loss_info": "registry.api",
        "mean_over_ranks": "losses.ranks",
        "normalize_classifier": "nn.classifier",
        "refresh_plugins": "registry.api",
        "register_loss": "registry.api",
        "use_backend": "ops.backend",
    }

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"topk_registry.{_HOMES[name]}"), name)
        if name in _NAMESPACES:
            return import_module(f"topk_registry.{name}")
        if name == "__version__":
            return _version()
        raise AttributeError(
            f"module 'topk_registry' has no attribute {name!r}{_hint(name)}; it has {', '.join(__dir__())}"
        )

    def __dir__() -> list[str]:
        return sorted((*_HOMES, *_NAMESPACES, "__version__"))

    def _hint(name: str) -> str:
        from topk_registry.registry.source import closest

        return closest(name, __dir__())

    def _version() -> str:
        from topk_registry.registry.discovery import installed_version

        project = Path(__file__).parents[1] / "pyproject.toml"  # of a checkout that is not installed
        if installed := installed_version("topk-registry"):
            return installed
        stated = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.is_file() else None
        return stated[1] if stated else "unknown"
