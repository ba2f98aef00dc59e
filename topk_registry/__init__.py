"""Losses for image classifiers by name, and top-k marginals of a classifier.

    import torch
    import topk_registry as tr

    logits, target = torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))
    loss = tr.create_loss("smooth_topk_svm", k=5)  # takes what nn.CrossEntropyLoss takes
    loss(logits, target).backward()
    tr.TopKHead.of_loss(loss)(logits).marginals  # [8, 100], each row sums to 5
    tr.topk_marginals(logits, k=5)  # as a function

Losses by name
    list_losses, create_loss, loss_info, is_loss, get_loss_builder, register_loss, refresh_plugins, LossInfo
Base classes for new losses
    ClassificationLoss, SoftmaxLoss, TopKLoss, BatchLoss; CommonOptions: type of the options of every loss
    accepted_context: values of a trainer that a loss takes; mean_over_ranks: mean over the rows of all ranks
Models
    TopKHead, TopKOutput: top-k marginals of a model
    topk_marginals, topk_log_odds: marginals as functions of logits
    LinearSmoothTopK, PerturbedTopK, SphericalLinear: layers for many classes; SphericalSGD: optimizer
    CosineClassifier, normalize_classifier: classifiers over unit-norm features
Targets and distributions
    LabelMixture, KSubset
Settings
    use_backend: select the kernels; PluginError: base class of the registry's errors

Namespaces, imported on first use:
    topk_registry.functional     functions of tensors: topk_marginals, smooth_topk_loss, perturbed_topk ...
    topk_registry.options        checks of the options of losses
    topk_registry.errors         errors to catch
    topk_registry.data           data sets by name, label noise, long tails, folders
    topk_registry.metrics        top-k accuracy, calibration, mAP and F1
    topk_registry.conformal      prediction sets with guaranteed coverage
    topk_registry.distributions  distributions over sets of k classes
    topk_registry.testing        the conformance kit for losses
    topk_registry.train          the trainer behind ``timm train``

The losses are classes of the package ``topk_plugins``. ``tr.list_losses()`` returns the names of all installed losses.
"""

import re
from importlib import import_module
from pathlib import Path

_NAMES = re.findall(r"^from \.(\S*) import (.+)$", Path(__file__).with_suffix(".pyi").read_text(), re.MULTILINE)
_HOMES = {name: module for module, names in _NAMES for name in re.findall(r"(\w+) as", names)}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        module = import_module(f"topk_registry.{_HOMES[name] or name}")
        return getattr(module, name) if _HOMES[name] else module
    if name == "__version__":
        return _version()
    from topk_registry.registry.source import closest

    raise AttributeError(f"module 'topk_registry' has no attribute {name!r}{closest(name, __dir__())}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])


def _version() -> str:
    from topk_registry.registry.discovery import installed_version

    if installed := installed_version("topk-registry"):
        return installed
    project = Path(__file__).parents[1] / "pyproject.toml"  # for a checkout that is not installed
    stated = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.is_file() else None
    return stated[1] if stated else "unknown"
