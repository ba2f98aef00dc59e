"""The training loss by name: looked up once, built with the facts of the run, and recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.nn.classifier import CosineClassifier
from topk_registry.registry.options import accepted_context, accepts
from topk_registry.train.config.config import TrainConfig
from topk_registry.train.errors import TrainError

SMOOTHING = ("smoothing", "label_smoothing")  # options of losses that smooth labels
WEIGHT = ("weight", "class_weight")  # options of losses that weigh classes


@dataclass(frozen=True)
class Context:
    """Facts of a run that a loss receives by naming them in its signature."""

    num_classes: int
    smoothing: float
    soft_targets: bool
    total_epochs: int
    class_counts: Sequence[int] | None = None
    class_weight: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        num_classes: int,
        class_counts: Sequence[int] | None = None,
        class_weight: tuple[float, ...] | None = None,
    ) -> "Context":
        soft = uses_soft_targets(config)
        # mixup's targets are smoothed already
        return cls(num_classes, 0.0 if soft else config.smoothing, soft, config.epochs, class_counts, class_weight)


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
    """

    name: str
    options: dict[str, Any]
    distribution: str
    version: str
    factory: Callable[..., Any]

    @classmethod
    def resolve(cls, name: str, options: Mapping[str, Any]) -> "LossSpec":
        """Look the name up; imports the loss's plug-in."""
        info = registry.loss_info(name)
        return cls(name, dict(options), info.distribution, info.version, registry.get_loss_builder(name))

    @property
    def record(self) -> dict[str, Any]:
        """Name, options, distribution and version as plain types, for args.yaml and checkpoints."""
        return {name: value for name, value in vars(self).items() if name != "factory"}

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

    @property
    def _weight(self) -> str:
        """The option by which the loss takes class weights; empty where it takes none."""
        return next((name for name in WEIGHT if accepts(self.factory, name)), "")

    def facts(self, context: Context) -> dict[str, Any]:
        """The facts of the run that the loss names and its options leave open."""
        known = {key: value for key, value in vars(context).items() if value is not None}
        weight = known.pop("class_weight", None)
        facts = accepted_context(self.factory, known)
        if accepts(self.factory, "label_smoothing") and not accepts(self.factory, "smoothing"):
            facts["label_smoothing"] = context.smoothing
        if weight is not None and self._weight:
            facts[self._weight] = weight
        return {name: value for name, value in facts.items() if name not in self.options}

    def build(self, context: Context) -> nn.Module:
        """Return the loss with its options and the facts that it names."""
        facts = self.facts(context)
        if context.class_weight is not None and self._weight in facts:
            facts[self._weight] = torch.tensor(context.class_weight)
        try:
            loss = registry.build_loss(self.name, self.factory, **facts, **self.options)
        except (TypeError, ValueError) as error:
            raise TrainError(f"{self}: {error}") from error
        return loss if isinstance(loss, nn.Module) else FunctionLoss(loss)

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"loss {self.name!r} with {options or 'its default options'}"


def tell_epoch(loss: object, epoch: int) -> None:
    """Tell a loss that asks for it which epoch begins, counted from 0."""
    set_epoch = getattr(loss, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
