"""Functions that build the loss of a run and test the loss on one batch before training."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from topk_registry import BatchLoss, ClassificationLoss, LabelMixture, SoftmaxLoss, mean_over_ranks, registry
from topk_registry.cli import reason_of
from topk_registry.errors import TrainError
from topk_registry.ops.distributed import number_of_ranks
from topk_registry.registry import timm_losses
from topk_registry.registry.signatures import accepted_context, accepts, check_options, recorded_defaults
from topk_registry.train.config import CROSS_ENTROPY, WEIGHT_METHODS, TrainConfig

OURS_AND_TIMMS = ("topk-registry:*", "timm:*")
SMOOTHING = ("smoothing", "label_smoothing")  # losses use one of these names for the label-smoothing option
WEIGHT = ("weight", "class_weight")  # losses use one of these names for the class-weight option


@dataclass(frozen=True)
class Facts:
    """Values of a run. If the constructor of a loss has a parameter of one of these names, the loss gets the value.

    Args:
        num_classes: number of classes n.
        smoothing: label smoothing. With mixup, the value is 0, because the targets of mixup are already smoothed.
        soft_targets: whether mixup or CutMix is used.
        total_epochs: number of epochs.
        class_counts: number of training images per class [n].
        num_samples: number of training images.
        class_weight: weights of the classes [n].
        multilabel: whether an image may have several labels, so that targets are k-hot vectors.
        splits: number of augmented copies of each image, see ``--aug-splits``. 0: images have no copies.
    """

    num_classes: int
    smoothing: float = 0.0
    soft_targets: bool = False
    total_epochs: int = 1
    class_counts: Sequence[float] | None = None
    num_samples: int | None = None
    class_weight: Sequence[float] | None = None
    multilabel: bool = False
    splits: int = 0


class FunctionLoss(nn.Module):
    def __init__(self, function: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, target: Any) -> Tensor:
        return self.function(logits, target)


@dataclass(frozen=True)
class LossSpec:
    """The name and the options of a training loss, with the function or class that builds the loss.

    Args:
        name, options: name and options that the user chose.
        distribution, version: name and version of the installed Python package that defines the loss.
        factory: function or class that builds the loss.
    """

    name: str
    options: dict[str, Any]
    distribution: str
    version: str
    factory: Callable[..., Any]

    @classmethod
    def resolve(cls, name: str, options: Mapping[str, Any], multilabel: bool = False, saved: Any = None) -> "LossSpec":
        """Find a loss by name, and import its plug-in. With ``multilabel``, the loss must accept k-hot targets.

        If no loss has the name, the error names the distribution of the loss in ``saved``, the settings of a run.
        """
        record = (saved or {}).get("loss_record") or {}
        if record.get("name") == name and record["distribution"] and not registry.is_loss(name):
            name = f"{record['distribution']}:{name}"
        info = registry.loss_info(name)
        if multilabel and not registry.takes_k_hot(name):
            known = [other for other in registry.list_losses(OURS_AND_TIMMS) if registry.takes_k_hot(other)]
            needed = "does not declare takes_k_hot = True, which --task multilabel needs"
            raise TrainError(f"loss {name!r} {needed}; there are {', '.join(known)}")
        factory = registry.get_loss_builder(name)
        if multilabel and info.distribution == "timm":
            factory = timm_losses.builder(name.rpartition(":")[2], several=True)
        return cls(name, dict(options), info.distribution, info.version, factory)

    @property
    def record(self) -> dict[str, Any]:
        """Name, options, package and version of the loss, and the defaults of all other options, for ``args.yaml``."""
        about = {"name": self.name, "options": self.options, "distribution": self.distribution}
        return {**about, "version": self.version, "defaults": recorded_defaults(self.factory, self.options)}

    @property
    def needs_class_counts(self) -> bool:
        return accepts(self.factory, "class_counts") and "class_counts" not in self.options

    def describe(self) -> str:
        """Return one line of text with the name, the options that are set, and the defaults of other options."""
        owner = f"({self.distribution} {self.version})" if self.distribution else ""
        given = [f"{name}={value}" for name, value in self.options.items()]
        usual = [f"{name}={value}" for name, value in self.record["defaults"].items() if value is not None]
        return " ".join(filter(None, [self.name, *given, f"(default: {', '.join(usual)})" if usual else "", owner]))

    @property
    def k(self) -> int | None:
        """The k of the loss, or None. If the loss has several k, the largest."""
        k = {**self.record["defaults"], **self.options}.get("k")
        sizes = [size for size in (k if isinstance(k, (list, tuple)) else [k]) if isinstance(size, int)]
        return max(sizes, default=None)

    def metric(self, num_classes: int) -> tuple[str, str]:
        """Return the default of ``--eval-metric`` for this loss and the reason for it."""
        if self.k is not None and 0 < self.k < num_classes:
            return f"top{self.k}", f"k={self.k} of the loss"
        return "top1", "the loss has no k" if self.k is None else f"k={self.k} of the loss is not below {num_classes}"

    def why_smoothing(self, config: TrainConfig) -> str:
        """Return the reason for the label smoothing of a run, as an addition to a line of text."""
        if config.smoothing and not (config.mixes or any(accepts(self.factory, name) for name in SMOOTHING)):
            return f", without effect: loss {self.name!r} has no label smoothing"
        other = self.name not in CROSS_ENTROPY and not (config.smoothing or config.asks("smoothing"))
        return ": timm's default of 0.1 applies to cross-entropy only" if other else ""

    def note_on_k(self, num_classes: int) -> str:
        """Return a note if k is so large that even k random classes mostly contain the label. Else return ""."""
        k = self.k
        if k is None or not num_classes // 2 < k <= num_classes:
            return ""
        return f"k={k} of {num_classes} classes: {k} random classes contain the label in {100 * k / num_classes:.0f} %"

    def build(self, facts: Facts) -> nn.Module:
        """Build the loss from options and values of the run. Raise a TrainError if the loss cannot be built."""
        about = f"loss {self.name!r} with {self.options or 'its default options'}"
        arguments = {**self._arguments(facts), **self.options}
        try:
            check_options(f"loss {self.name!r}", self.factory, arguments)
            self._check_together(facts)
            loss = self.factory(**arguments)
        except TrainError:
            raise
        except Exception as error:
            raise TrainError(f"{about}: {reason_of(error)}") from error
        if not callable(loss) or isinstance(loss, type):
            raise TrainError(f"{about}: the factory returned {loss!r}, expected a callable (logits, target)")
        if not isinstance(loss, nn.Module):
            return FunctionLoss(cast("Callable[[Tensor, Any], Tensor]", loss))
        if "_parameters" not in vars(loss):
            raise TrainError(f"{about}: {type(loss).__name__}.__init__ must call super().__init__()")
        return loss

    def _check_together(self, facts: Facts) -> None:
        for name, value in self.options.items():
            if name in SMOOTHING and facts.smoothing and not facts.multilabel:
                flags = f"--smoothing {facts.smoothing:g} and --loss-opt {name}={value}"
                raise TrainError(f"{flags} both smooth labels: leave one out (--smoothing 0)")
            if name in WEIGHT and facts.class_weight is not None:
                raise TrainError(f"--class-weight and --loss-opt {name} both weigh classes: leave one out")
        if self.distribution == "timm" and accepts(self.factory, "jsd_splits"):
            if facts.splits < 2:
                raise TrainError(f"loss {self.name!r} compares augmented copies of each image: pass --aug-splits 3")
            if (given := self.options.get("jsd_splits", facts.splits)) != facts.splits:
                flags = f"--loss-opt jsd_splits={given} contradicts --aug-splits {facts.splits}"
                raise TrainError(f"{flags}: leave jsd_splits out")

    def _arguments(self, facts: Facts) -> dict[str, Any]:
        known = {name: getattr(facts, name) for name in ("num_classes", "smoothing", "soft_targets", "total_epochs")}
        if facts.class_counts is not None:
            known["class_counts"] = list(facts.class_counts)
        if not accepts(self.factory, "smoothing"):
            known["label_smoothing"] = facts.smoothing
        if self.distribution == "timm":
            known |= {"jsd_splits": facts.splits, **({"num_samples": facts.num_samples} if facts.num_samples else {})}
        if facts.class_weight is not None:
            name = next((name for name in WEIGHT if accepts(self.factory, name)), None)
            if name is None:
                raise TrainError(f"loss {self.name!r} takes no class weights, so --class-weight has no effect")
            known[name] = torch.tensor(facts.class_weight)
        given = accepted_context(self.factory, known)
        return {name: value for name, value in given.items() if name not in self.options}


def build_loss(spec: LossSpec, facts: Facts) -> nn.Module:
    """Return the loss of a run. timm's ``ce`` takes no class weights, so with class weights ``ce`` is another class."""
    if facts.class_weight is not None and spec.name == "ce" and not facts.multilabel:
        if spec.options:
            raise TrainError(f"loss 'ce' takes no options together with --class-weight, got {', '.join(spec.options)}")
        return WeightedCrossEntropy(weight=facts.class_weight, label_smoothing=facts.smoothing)
    return spec.build(facts)


class WeightedCrossEntropy(SoftmaxLoss):
    """``torch.nn.CrossEntropyLoss`` with class weights, as a loss whose mean can cover the rows of all processes."""

    def curve(self, nll: Tensor) -> Tensor:
        return nll


def over_ranks(criterion: nn.Module) -> nn.Module:
    """Return the loss. If it depends on the whole batch or has class weights, it uses the batches of all processes."""
    if number_of_ranks() == 1:
        return criterion
    if isinstance(criterion, BatchLoss):
        return criterion.over_ranks()
    if (
        isinstance(criterion, ClassificationLoss)
        and criterion.class_weight is not None
        and criterion.reduction == "mean"
    ):
        return mean_over_ranks(criterion)
    return criterion


def set_epoch(criterion: object, epoch: int) -> None:
    if callable(tell := getattr(criterion, "set_epoch", None)):
        tell(epoch)


def try_loss(spec: LossSpec, criterion: nn.Module, facts: Facts, device: torch.device | None = None) -> None:
    """Raise a TrainError unless the loss has a finite value and gradient on one small batch of random logits.

    A copy of ``criterion`` is tested, on the CPU if ``device`` is None.
    """
    rows, n = 2 * max(1, facts.splits), facts.num_classes
    labels = torch.arange(rows) % n
    one_hot = nn.functional.one_hot(labels, n).float()
    target, kind, other = labels, "class indices", one_hot
    if facts.multilabel or facts.soft_targets:
        target, kind, other = one_hot, "k-hot targets", labels
    if facts.soft_targets:
        target, kind = 0.5 * one_hot + 0.5 * one_hot.flip(0), "soft targets (mixup or cutmix)"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        logits = torch.randn(rows, n).to(device)
        target, other = target.to(device), other.to(device)
        if (error := _error_on(criterion, logits, target)) is not None:  # is the kind of target the reason?
            reason = f" does not train on {kind}" if _error_on(criterion, logits, other) is None else ""
            raise TrainError(f"loss {spec.name!r}{reason}: {reason_of(error)}") from error


def _error_on(criterion: nn.Module, logits: Tensor, target: Any) -> Exception | None:
    """Return the error of one forward and backward pass, or None."""
    logits = logits.clone().requires_grad_()
    try:
        loss = copy.deepcopy(criterion).to(logits.device)
        set_epoch(loss, 0)
        value = loss(logits, target)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"expected one floating-point number, got {got} (is its reduction 'none'?)")
        value.backward()
        if not (torch.isfinite(value) and logits.grad is not None and torch.isfinite(logits.grad).all()):
            raise ValueError("expected a finite value and a finite gradient")
    except Exception as error:
        return error
    return None


def takes_mixtures(criterion: nn.Module, facts: Facts) -> bool:
    """Return whether the loss accepts :class:`LabelMixture` targets, which are faster than distributions [B, n]."""
    if facts.multilabel or not (facts.soft_targets and isinstance(criterion, ClassificationLoss)):
        return False
    label = torch.arange(2) % facts.num_classes
    target = LabelMixture.mixed(label, label.flip(0), 0.5).smooth(0.1)
    # a third-party loss may override forward and reject a LabelMixture
    return _error_on(criterion, torch.eye(2, facts.num_classes), target) is None


def class_weights(how: str, counts: Sequence[float] | None, num_classes: int) -> list[float]:
    """Return one weight per class, or raise a TrainError.

    ``how`` is a file with weights, numbers joined by commas, ``inv_freq`` or ``effective_num``. The methods
    ``inv_freq`` and ``effective_num`` compute weights with mean 1 from ``counts`` [n], the training images per class.
    """
    from timm.loss import resolve_class_weights

    if how in WEIGHT_METHODS and counts is None:
        raise TrainError(f"--class-weight {how} needs class counts, which are unknown for this data set: pass numbers")
    stats = None if counts is None else (torch.tensor(counts, dtype=torch.float64), int(sum(counts)))
    try:
        weights = resolve_class_weights(how, "class_weight", class_stats=stats)
    except (OSError, ValueError, TypeError, json.JSONDecodeError) as error:
        known = f"{', '.join(WEIGHT_METHODS)}, a file, or numbers joined by commas"
        hint = f"{error}" if Path(how).is_file() else f"expected {known}"
        raise TrainError(f"--class-weight {how[:60]}: {hint}") from error
    values = torch.as_tensor(weights, dtype=torch.float64).reshape(-1)
    if len(values) != num_classes or not bool((torch.isfinite(values) & (values >= 0)).all()) or not values.any():
        raise TrainError(f"--class-weight: expected {num_classes} non-negative numbers, one per class, got {how[:60]}")
    return values.tolist()
