"""Build losses for image classifiers by name, and compute top-k marginals of a classifier.

The top-k marginal of a class is the probability that the class belongs to a random set of k classes. The probability of
a set is proportional to exp(sum of its logits). For k = 1, the marginals are the softmax of the logits.

    import torch
    import topk_registry as tr

    logits, target = torch.randn(8, 100, requires_grad=True), torch.randint(100, (8,))
    loss = tr.create_loss("smooth_topk_svm", k=5)  # the loss accepts the inputs of nn.CrossEntropyLoss
    loss(logits, target).backward()
    tr.TopKHead.of_loss(loss)(logits).marginals  # [8, 100]; each row sums to 5
    tr.topk_marginals(logits, k=5)  # marginals from a function, with temperature 1

Find and build losses by name
    list_losses, create_loss, loss_info, is_loss, get_loss_builder, register_loss, refresh_plugins, LossInfo
Write a new loss
    ClassificationLoss, SoftmaxLoss, TopKLoss, BatchLoss: base classes
    CommonOptions: type of the keyword arguments that every loss accepts
    accepted_context: select the values of a training run, such as ``class_counts``, that a loss accepts
Train on several processes
    mean_over_ranks: make a loss return the mean over the rows of all processes
Build models
    TopKHead: module that computes top-k marginals from logits; TopKOutput: what TopKHead returns
    topk_marginals, topk_log_odds: functions that compute top-k marginals, or their log odds, from logits
    LinearSmoothTopK, SphericalLinear: layers for many classes; SphericalSGD: optimizer for SphericalLinear
    PerturbedTopK: module that computes a smoothed k-th largest logit
    CosineClassifier, normalize_classifier: classifiers that score classes by the cosine of features and weights
Describe targets and distributions
    LabelMixture: target that gives each sample a few labels with weights, as mixup does
    Masses: a target as one factor per sample and class, for losses that define ``losses_of``
    KSubset: the probability distribution over sets of k classes
Control the package
    use_backend: compute the losses with PyTorch, numba or Triton; PluginError: base class of the errors about plug-ins

Namespaces, each of which is imported on first use:
    topk_registry.functional     functions of tensors, such as topk_marginals and smooth_topk_loss
    topk_registry.checks         functions that check the options of a loss
    topk_registry.errors         exceptions to catch
    topk_registry.data           data sets by name, label noise, long tails, folders
    topk_registry.metrics        top-k accuracy, calibration, mAP and F1
    topk_registry.conformal      prediction sets that contain the true class with a chosen probability
    topk_registry.distributions  distributions over sets of k classes
    topk_registry.testing        checks that a new loss works with any trainer
    topk_registry.train          the trainer that the command ``timm train`` uses

The losses are classes of the package ``topk_plugins``. ``tr.list_losses()`` returns the names of all installed losses.
"""

import re
from pathlib import Path

from topk_registry.lazy import lazy_names

_NAMES = re.findall(r"^from \.(\S*) import (.+)$", Path(__file__).with_suffix(".pyi").read_text(), re.MULTILINE)
_HOMES = {name: module for module, names in _NAMES for name in re.findall(r"(\w+) as", names)}


_get, _names = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> object:
    return _version() if name == "__version__" else _get(name)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]


def _version() -> str:
    from topk_registry.registry.discovery import installed_version

    if installed := installed_version("topk-registry"):
        return installed
    project = Path(__file__).parents[1] / "pyproject.toml"  # for a checkout that is not installed
    stated = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.is_file() else None
    return stated[1] if stated else "unknown"
