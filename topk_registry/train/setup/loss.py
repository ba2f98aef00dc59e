"""The training loss by name: built with what the run knows, tried on targets of the run's kind, and recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.losses.base import ClassificationLoss
from topk_registry.nn.classifier import CosineClassifier
from topk_registry.ops.backend import backend
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.registry.options import accepted_context, accepts, defaults
from topk_registry.train.config.config import TrainConfig
from topk_registry.train.errors import TrainError

SMOOTHING = ("smoothing", "label_smoothing")  # options of losses that smooth labels


@dataclass(frozen=True)
class Context:
    """Facts of a run that a loss receives by naming them in its signature."""

    num_classes: int
    smoothing: float
    soft_targets: bool
    total_epochs: int
    class_counts: Sequence[int] | None = None

    @classmethod
    def of(cls, config: TrainConfig, num_classes: int, class_counts: Sequence[int] | None = None) -> "Context":
        soft = uses_soft_targets(config)
        # mixup's targets are smoothed already
        return cls(num_classes, 0.0 if soft else config.smoothing, soft, config.epochs, class_counts)


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
    """A training loss by name, resolved once: it is tried, built and recorded from here.

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

    def build(self, context: Context) -> nn.Module:
        """The loss with its options and the facts that it names; ``label_smoothing`` stands for ``smoothing``."""
        known = {key: value for key, value in vars(context).items() if value is not None}
        given = {**accepted_context(self.factory, known), **self.options}
        if accepts(self.factory, "label_smoothing") and not accepts(self.factory, "smoothing"):
            given.setdefault("label_smoothing", context.smoothing)
        try:
            loss = registry.create_loss(self.name, **given)
        except (TypeError, ValueError) as error:
            raise TrainError(f"{self}: {error}") from error
        if not callable(loss):
            raise TrainError(f"loss {self.name!r} must be callable on (logits, target), got {type(loss).__name__}")
        return loss if isinstance(loss, nn.Module) else FunctionLoss(loss)

    def rehearse(self, context: Context, *, splits: int = 0) -> None:
        """Run the loss, forward and backward, on random scores and on targets of the kind that the run will produce.

        Raises:
            TrainError: it fails on them, or returns anything but one finite number with a gradient.
        """
        context = self._with_counts(context)
        criterion = _begun(self.build(context))
        kind = "mixed targets (mixup or cutmix)" if context.soft_targets else "class indices"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits, target = _example(context, 2 * max(1, splits))
            try:
                value = criterion(logits, target)
                check_value(value)
                value.backward()
            except Exception as error:
                raise TrainError(f"{self} does not train on {kind}: {error}") from error
        if logits.grad is None or not bool(torch.isfinite(logits.grad).all()):
            raise TrainError(f"{self} has no finite gradient on {kind}")

    def takes_mixtures(self, context: Context, *, linear: bool = False) -> bool:
        """Whether the run's mixed targets can reach the loss as labels with shares, not as distributions.

        Args:
            linear: whether the loss is asked for by its method ``of_linear``.
        """
        if not context.soft_targets:
            return False
        loss: Any = _begun(self.build(context))
        if not issubclass(type(loss), ClassificationLoss):
            return False
        n = context.num_classes
        label = torch.arange(2) % n
        target = LabelMixture.mixed(label, label.flip(0), 0.5, 0.1)
        try:  # a third party's loss may have a forward of its own that knows nothing of them
            with torch.random.fork_rng(devices=[]):
                x = torch.randn(2, 1 if linear else n, requires_grad=True)
                check_value(loss.of_linear(x, torch.randn(n, 1), None, target) if linear else loss(x, target))
        except Exception:
            return False
        return True

    def check_schedule(self, context: Context, epochs: int) -> None:
        """Raise a TrainError where the run ends before the loss's schedule begins."""
        loss = self.build(self._with_counts(context))
        first = loss.first_change if isinstance(loss, ClassificationLoss) else None
        if first is not None and first >= epochs:
            raise TrainError(f"{self} first changes in epoch {first}, counted from 0, and the run has {epochs} epochs")

    def idle_options(self, context: Context, epochs: int) -> list[str]:
        """The given options without which the loss and its gradient are the same, at random scores, in every epoch."""
        usual, context = defaults(self.factory), self._with_counts(context)
        given = [name for name in self.options if name in usual and name != "ignore_index"]
        return [name for name in given if self.options[name] != usual[name] and self._is_idle(name, context, epochs)]

    def _is_idle(self, option: str, context: Context, epochs: int) -> bool:
        rest = {name: value for name, value in self.options.items() if name != option}
        times = sorted({0, epochs // 2, max(0, epochs - 1)})
        try:
            with backend("torch"):  # whose first call compiles nothing
                return all(_same_loss(self, replace(self, options=rest), context, epoch) for epoch in times)
        except Exception:  # the loss cannot do without the option
            return False

    def _with_counts(self, context: Context) -> Context:
        """Facts with made-up counts in the place of the data's, until it is read."""
        if context.class_counts is None and self.needs_class_counts:
            return replace(context, class_counts=[10 + c % 91 for c in range(context.num_classes)])
        return context

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"loss {self.name!r} with {options or 'its default options'}"


def tell_epoch(loss: object, epoch: int) -> None:
    """Tell a loss that asks for it which epoch begins, counted from 0."""
    set_epoch = getattr(loss, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def _begun(loss: nn.Module) -> nn.Module:
    """A loss for a trial; one with a schedule is told that it is epoch 0, so that it does not warn."""
    if getattr(loss, "first_change", None) is not None:
        tell_epoch(loss, 0)
    return loss


def _example(context: Context, rows: int) -> tuple[Tensor, Tensor]:
    """Random scores, and targets of the kind that the run will produce."""
    logits = torch.randn(rows, context.num_classes, requires_grad=True)
    target = torch.arange(rows) % context.num_classes
    if context.soft_targets:
        one_hot = nn.functional.one_hot(target, context.num_classes).float()
        target = 0.5 * one_hot + 0.5 * one_hot.flip(0)
    return logits, target


def _same_loss(one: LossSpec, other: LossSpec, context: Context, epoch: int) -> bool:
    """Whether two losses and their gradients are the same at scores of unsure, right and wrong rows."""
    found = []
    for spec in (one, other):
        loss = spec.build(context)
        tell_epoch(loss, epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits, target = _example(context, 12)
            sure = 6.0 * nn.functional.one_hot(torch.arange(12) % context.num_classes, context.num_classes)
            value = loss(logits + sure * torch.arange(-1.0, 2.0).repeat(4)[:, None], target)
            found.append((value.detach(), *torch.autograd.grad(value, logits)))
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def check_value(value: object) -> None:
    """Raise unless a loss is one finite number with a gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected one floating-point number, got {got} (is its reduction 'none'?)")
    if not bool(torch.isfinite(value)):
        raise ValueError(f"expected a finite number, got {value.item()}")
    if not value.requires_grad:
        raise ValueError("its value has no gradient with respect to the logits")
