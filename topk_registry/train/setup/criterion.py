"""The training loss by name: built with what the run knows, tried on the targets the run will produce, and recorded."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.registry.options import accepted_context, accepts
from topk_registry.train.errors import TrainError


@dataclass(frozen=True)
class Context:
    """What a loss may ask the trainer for, by naming it."""

    num_classes: int
    smoothing: float
    soft_targets: bool
    total_epochs: int
    class_counts: Sequence[int] | None = None

    @classmethod
    def of(cls, args: Namespace, num_classes: int, class_counts: Sequence[int] | None = None) -> "Context":
        soft = uses_soft_targets(args)
        # mixup's targets are smoothed already
        return cls(num_classes, 0.0 if soft else args.smoothing, soft, args.epochs, class_counts)


def uses_soft_targets(args: Namespace) -> bool:
    return bool(args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax)


class FunctionLoss(nn.Module):
    """A loss that is a plain function, as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.function(logits, target)


def needs_class_counts(name: str) -> bool:
    return accepts(registry.get_loss_builder(name), "class_counts")


def takes_smoothing(name: str) -> bool:
    builder = registry.get_loss_builder(name)
    return accepts(builder, "smoothing") or accepts(builder, "label_smoothing")


def create_criterion(name: str, options: dict[str, Any], context: Context) -> nn.Module:
    """The loss, given its options and what it names of the context; ``label_smoothing`` stands for ``smoothing``."""
    builder = registry.get_loss_builder(name)
    known = {key: value for key, value in vars(context).items() if value is not None}
    given = {**accepted_context(builder, known), **options}
    if accepts(builder, "label_smoothing") and not accepts(builder, "smoothing"):
        given.setdefault("label_smoothing", context.smoothing)
    try:
        loss = registry.create_loss(name, **given)
    except (TypeError, ValueError) as error:
        raise TrainError(f"loss {name!r} with {_spelt(options)}: {error}") from error
    if not callable(loss):
        raise TrainError(f"loss {name!r} must be callable on (logits, target), got {type(loss).__name__}")
    return loss if isinstance(loss, nn.Module) else FunctionLoss(loss)


def try_criterion(name: str, options: dict[str, Any], context: Context, *, splits: int = 0) -> None:
    """Run the loss, forward and backward, on random scores and on targets of the kind this run will produce.

    Raises:
        TrainError: it fails on them, or returns anything but one finite number with a gradient.
    """
    if context.class_counts is None and needs_class_counts(name):
        counts = [100] * context.num_classes  # stands in until the data is read
        context = Context(**{**vars(context), "class_counts": counts})
    criterion = create_criterion(name, options, context)
    kind = "mixed targets (mixup or cutmix)" if context.soft_targets else "class indices"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        logits = torch.randn(2 * max(1, splits), context.num_classes, requires_grad=True)
        target = torch.arange(len(logits)) % context.num_classes
        if context.soft_targets:
            target = 0.5 * (one_hot := nn.functional.one_hot(target, context.num_classes).float()) + 0.5 * one_hot.flip(
                0
            )
        try:
            value = criterion(logits, target)
            _check_value(value)
            value.backward()
        except Exception as error:
            raise TrainError(f"loss {name!r} with {_spelt(options)} does not train on {kind}: {error}") from error
    if logits.grad is None or not bool(torch.isfinite(logits.grad).all()):
        raise TrainError(f"loss {name!r} with {_spelt(options)} has no finite gradient on {kind}")


def loss_record(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a run writes down of its loss, as plain types."""
    info = registry.loss_info(name)
    return {"name": name, "options": dict(options), "distribution": info.distribution, "version": info.version}


def _check_value(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected one floating-point number, got {got} (is its reduction 'none'?)")
    if not bool(torch.isfinite(value)):
        raise ValueError(f"expected a finite number, got {value.item()}")
    if not value.requires_grad:
        raise ValueError("its value has no gradient with respect to the logits")


def _spelt(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items()) or "its default options"
