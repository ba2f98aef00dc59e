"""The training loss by name: looked up once, built with the facts of the run, and recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.nn.classifier import CosineClassifier
from topk_registry.registry import timm_losses
from topk_registry.registry.options import accepted_context, accepts, recorded_defaults
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.tasks import CLASSIFICATION, MULTILABEL
from topk_studies.old_trainer.registries import defaults_since_changed

SMOOTHING = ("smoothing", "label_smoothing")  # options of losses that smooth labels
WEIGHT = ("weight", "class_weight")  # options of losses that weigh classes
POSITIVE_WEIGHT = "pos_weight"  # option of binary losses that weigh the term of the label


@dataclass(frozen=True)
class Context:
    """Facts of a run that a loss receives by naming them in its signature; ``several`` says that targets are k-hot."""

    num_classes: int
    smoothing: float
    soft_targets: bool
    total_epochs: int
    class_counts: Sequence[float] | None = None
    class_weight: tuple[float, ...] | None = None
    pos_weight: tuple[float, ...] | None = None
    num_samples: int | None = None
    several: bool = False

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        num_classes: int,
        class_counts: Sequence[float] | None = None,
        class_weight: tuple[float, ...] | None = None,
        pos_weight: tuple[float, ...] | None = None,
        num_samples: int | None = None,
    ) -> "Context":
        soft = uses_soft_targets(config)
        return cls(
            num_classes=num_classes,
            smoothing=0.0 if soft else config.smoothing,  # mixup's targets are smoothed already
            soft_targets=soft,
            total_epochs=config.epochs,
            class_counts=class_counts,
            class_weight=class_weight,
            pos_weight=pos_weight,
            num_samples=num_samples,
            several=config.task == MULTILABEL,
        )


def uses_soft_targets(config: TrainConfig) -> bool:
    """Whether mixup or cutmix makes the targets distributions."""
    return bool(config.mixup > 0 or config.cutmix > 0 or config.cutmix_minmax)


class FunctionLoss(nn.Module):
    """A loss that is a plain function, as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.function(logits, target)


@dataclass(frozen=True)
class LossSpec:
    """A training loss by name, looked up once.

    Args:
        name: a registered name, or one of timm's own.
        options: its options.
        distribution: the installed distribution that it comes from, empty for one registered in this process.
        version: the version of that distribution.
        factory: the registered class or function.
        kept: defaults that the run began with and that the loss has no longer.
    """

    name: str
    options: dict[str, Any]
    distribution: str
    version: str
    factory: Callable[..., Any]
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def resolve(
        cls,
        name: str,
        options: Mapping[str, Any],
        record: Mapping[str, Any] | None = None,
        *,
        task: str = CLASSIFICATION,
    ) -> "LossSpec":
        """Look the name up; imports the loss's plug-in.

        Args:
            name: a registered name, or one of timm's own.
            options: its options.
            record: what the run that goes on, or is evaluated, wrote of its loss (``record``); of another loss it
                says nothing. Defaults that have changed since are as they were.
            task: what the targets are.

        Raises:
            TrainError: the loss does not take the targets of the task.
        """
        info = registry.loss_info(name)
        if task == MULTILABEL and not registry.takes_k_hot(name):
            raise TrainError(_no_k_hot(name))
        factory = registry.get_loss_builder(name)
        if task == MULTILABEL and info.status == "timm":
            factory = timm_losses.builder(name.rpartition(":")[2], several=True)
        of_this = record if record is None or record.get("name", name) == name else None
        changed = defaults_since_changed(factory, of_this)
        kept = {option: value for option, value in changed.items() if option not in options}
        return cls(name, dict(options), info.distribution, info.version, factory, kept)

    @property
    def record(self) -> dict[str, Any]:
        """Name, options, distribution, version and the other options' defaults as plain types, for args.yaml and
        checkpoints."""
        written = {name: value for name, value in vars(self).items() if name not in ("factory", "kept")}
        return {**written, "defaults": {**recorded_defaults(self.factory, self.options), **self.kept}}

    @property
    def needs_class_counts(self) -> bool:
        return accepts(self.factory, "class_counts")

    @property
    def takes_smoothing(self) -> bool:
        return any(accepts(self.factory, name) for name in SMOOTHING)

    def wants_cosine(self, model: nn.Module | None) -> bool:
        """Whether the loss's paper may want a cosine classifier, which the model, as far as it is known, has not."""
        cosine = model is not None and any(isinstance(module, CosineClassifier) for module in model.modules())
        return self.needs_class_counts and not cosine

    @property
    def own_smoothing(self) -> float | None:
        """The share that the loss smooths labels by, as its options say; None where they do not."""
        return next((self.options[name] for name in SMOOTHING if name in self.options), None)

    def check_smoothing(self, smoothing: float, flag: str = "--smoothing") -> None:
        """Raise a TrainError where both the trainer and an option of the loss say how labels are smoothed."""
        name = next((name for name in SMOOTHING if name in self.options), None)
        if name is not None and smoothing:
            own = self.options[name]
            raise TrainError(
                f"{flag} {smoothing:g} and --loss-opt {name}={own} both say how labels are smoothed: leave one out, "
                f"with {flag} {own} alone or {flag} 0 beside the option"
            )

    def check_weights(self, given: str) -> None:
        """Raise a TrainError where class weights are given and the loss takes none, or an option gives it its own."""
        if not given:
            return
        own = next((name for name in WEIGHT if name in self.options), None)
        if own is not None:
            raise TrainError(
                f"--class-weight {given} and --loss-opt {own}={self.options[own]} both say how classes are weighted: "
                "leave one out"
            )
        if not self._weight:
            raise TrainError(
                f"loss {self.name!r} takes no class weights, so --class-weight {given} is refused: losses with an "
                "option `weight` take them (--loss topk_nll --loss-opt k=1 is cross-entropy), and timm's bce"
            )

    def check_positive_weights(self, given: str) -> None:
        """Raise a TrainError where positive weights are given and the loss takes none, or has its own by an option."""
        if not given:
            return
        if POSITIVE_WEIGHT in self.options:
            raise TrainError(
                f"--loss-pos-weight {given} and --loss-opt pos_weight={self.options[POSITIVE_WEIGHT]} both say how "
                "positive terms are weighted: leave one out"
            )
        if not accepts(self.factory, POSITIVE_WEIGHT):
            raise TrainError(
                f"loss {self.name!r} has no positive term to weigh, so --loss-pos-weight {given} is refused: binary "
                "losses with an option `pos_weight` take it, such as timm's bce"
            )

    @property
    def _weight(self) -> str:
        """The option by which the loss takes class weights; empty where it takes none."""
        return next((name for name in WEIGHT if accepts(self.factory, name)), "")

    def facts(self, context: Context) -> dict[str, Any]:
        """The facts of the run that the loss names and its options leave open."""
        known = {key: value for key, value in vars(context).items() if value is not None}
        weight, positive = known.pop("class_weight", None), known.pop("pos_weight", None)
        samples = known.pop("num_samples", None)
        del known["several"]
        facts = accepted_context(self.factory, known)
        if accepts(self.factory, "label_smoothing") and not accepts(self.factory, "smoothing"):
            facts["label_smoothing"] = context.smoothing
        # of timm's "db" alone: other losses count draws by that name
        if samples is not None and self.distribution == "timm" and accepts(self.factory, "num_samples"):
            facts["num_samples"] = samples
        if weight is not None and self._weight:
            facts[self._weight] = weight
        if positive is not None and accepts(self.factory, POSITIVE_WEIGHT):
            facts[POSITIVE_WEIGHT] = positive
        return {name: value for name, value in facts.items() if name not in self.options}

    def build(self, context: Context) -> nn.Module:
        """Return the loss with its options and the facts that it names."""
        facts = self.facts(context)
        for name, weight in ((self._weight, context.class_weight), (POSITIVE_WEIGHT, context.pos_weight)):
            if weight is not None and name in facts:
                facts[name] = torch.tensor(weight)
        try:
            loss = registry.build_loss(self.name, self.factory, **{**self.kept, **facts, **self.options})
        except (TypeError, ValueError) as error:
            raise TrainError(f"{self}: {error}") from error
        return loss if isinstance(loss, nn.Module) else FunctionLoss(loss)

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"loss {self.name!r} with {options or 'its default options'}"


def _no_k_hot(name: str) -> str:
    known = [other for other in registry.list_losses() if registry.takes_k_hot(other)]
    return (
        f"loss {name!r} does not say that it takes k-hot targets, which --task multilabel trains on; there are "
        f"{', '.join(known)}. A loss of your own says so by its attribute takes_k_hot = True"
    )


def tell_epoch(loss: object, epoch: int) -> None:
    """Tell a loss that asks for it which epoch begins, counted from 0."""
    set_epoch = getattr(loss, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
