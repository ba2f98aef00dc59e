"""Put a registered loss into somebody else's training script, and check that the script trains with it.

A script that is given the loss at the wrong place trains its own loss without a word. So the loss watches itself: every
step of every optimizer must come after a backward pass through it, or training stops there.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from topk_registry.data.labels import class_counts, class_names_of, labels_of
from topk_registry.train.config import WEIGHT_METHODS
from topk_registry.train.errors import TrainError
from topk_registry.train.loss import Facts, LossSpec, build_loss, class_weights, over_ranks, set_epoch, try_loss

CRITERION = ("loss_fn", "criterion")
LOADER = ("data_loader", "loader")
MIXING = ("mixup", "cutmix", "cutmix_minmax", "mixup_alpha", "cutmix_alpha")


class WrongSeamError(TrainError):
    """The script trained with something other than the registered loss."""


class WatchedLoss(nn.Module):
    """A loss that notes whether a backward pass went through it."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self.trained = False

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        value = self.loss(logits, target)
        if value.requires_grad:
            value.register_hook(self._note)
        return value

    def _note(self, gradient: Tensor) -> None:
        self.trained = True


class Seam:
    """The registered loss of one script's run, built when the script has shown its classes and its data.

    Args:
        name, options: the loss.
        class_weight: as in ``timm train``.
    """

    def __init__(self, name: str, options: dict[str, Any], class_weight: str = "") -> None:
        self.spec, self.class_weight = LossSpec.resolve(name, options), class_weight
        self.record = self.spec.record
        self.args = Namespace()
        self.num_classes: int | None = None  # as given: timm's script fills in its model's later
        self.train_data: Any = None
        self.loss: WatchedLoss | None = None

    def criterion(self, model: nn.Module | None, device: torch.device | str | None) -> WatchedLoss:
        """Return the loss on the device, to take the place of the script's own."""
        if self.loss is None:
            facts = self._facts(model)
            loss = build_loss(self.spec, facts)
            try_loss(self.spec, loss, facts, getattr(self.args, "aug_splits", 0))
            self.loss = WatchedLoss(over_ranks(loss))
        return self.loss.to(device)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.loss.loss if self.loss else None, epoch)

    @contextmanager
    def tripwire(self) -> Iterator[None]:
        """Stop at the first optimizer step that this loss had no part in."""
        handle = register_optimizer_step_pre_hook(self._check)
        try:
            yield
        finally:
            handle.remove()

    def _check(self, *step: Any) -> None:
        if self.loss is None or not self.loss.trained:
            raise WrongSeamError(
                f"the script took a step that loss {self.spec.name!r} had no part in: it trains another loss, at a "
                "place this adapter does not know"
            )
        self.loss.trained = False

    def _facts(self, model: nn.Module | None) -> Facts:
        args = self.args
        soft = any(getattr(args, name, None) for name in MIXING)
        smoothing = getattr(args, "smoothing", None) or getattr(args, "label_smoothing", None) or 0.0
        known = len(class_names_of(self.train_data) or ())
        n = self.num_classes or _outputs(model) or known
        if not n:
            raise TrainError("the script does not tell its number of classes: pass its --num-classes")
        if known and (n < known or (n > known and not self.num_classes)):
            raise TrainError(
                f"the script's model predicts {n} classes, and its data has {known}: --num-classes {known}"
            )
        counts = weights = None
        if self.spec.needs_class_counts or self.class_weight in WEIGHT_METHODS:
            if self.train_data is None:
                raise TrainError(f"loss {self.spec.name!r} needs class counts, and the script does not show its data")
            counts = class_counts(labels_of(self.train_data), n)
        if self.class_weight:
            weights = self.record["class_weight"] = class_weights(self.class_weight, counts, n)
        return Facts(
            n,
            smoothing=0.0 if soft else smoothing,
            soft_targets=soft,
            total_epochs=getattr(args, "epochs", 1),
            class_counts=counts if self.spec.needs_class_counts else None,
            class_weight=weights,
        )


def enter(module: Any, seam: Seam) -> None:
    """Put the seam into a loaded script: into its tasks if it has timm's, else into its ``train_one_epoch``."""
    tasks = [name for name, value in vars(module).items() if _is_task(value)]
    for name in tasks:
        setattr(module, name, _task_with(getattr(module, name), seam))
    if not hasattr(module, "train_one_epoch"):
        raise WrongSeamError(
            f"{module.__file__} has no train_one_epoch: is it timm's or torchvision's training script?"
        )
    module.train_one_epoch = _epoch_with(module.train_one_epoch, seam, swap=not tasks)
    if hasattr(module, "create_dataset"):
        module.create_dataset = _noting_data(module.create_dataset, seam)


def _is_task(value: object) -> bool:
    bases = {base.__name__ for base in getattr(value, "__mro__", ())}
    return "TrainingTask" in bases and "criterion" in inspect.signature(value).parameters  # pyright: ignore


def _task_with(base: type, seam: Seam) -> type:
    signature = inspect.signature(base)

    class RegisteredTask(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.arguments.pop("criterion_kwargs", None)
            model = given.arguments.get("model", given.arguments.get("student_model"))
            given.arguments["criterion"] = seam.criterion(model, given.arguments.get("device"))
            super().__init__(*given.args, **given.kwargs)

    RegisteredTask.__name__ = RegisteredTask.__qualname__ = base.__name__
    return RegisteredTask


def _epoch_with(train_one_epoch: Callable[..., Any], seam: Seam, *, swap: bool) -> Callable[..., Any]:
    signature = inspect.signature(train_one_epoch)
    name = next((name for name in CRITERION if name in signature.parameters), None)
    if swap and name is None:
        raise WrongSeamError(f"train_one_epoch{signature} takes no {' or '.join(CRITERION)}")

    @wraps(train_one_epoch)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        values = given.arguments
        if swap:
            loader = next((values[name] for name in LOADER if name in values), None)
            seam.train_data = getattr(loader, "dataset", None) if seam.train_data is None else seam.train_data
            model = values.get("model")
            device = values.get("device") or (next(model.parameters()).device if model is not None else None)
            values[name or ""] = seam.criterion(model, device)
        if "epoch" in values:
            seam.set_epoch(values["epoch"])
        return train_one_epoch(*given.args, **given.kwargs)

    return with_loss


def _noting_data(create_dataset: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
    @wraps(create_dataset)
    def noting(*args: Any, **kwargs: Any) -> Any:
        dataset = create_dataset(*args, **kwargs)
        if kwargs.get("is_training"):
            seam.train_data = dataset
        return dataset

    return noting


def _outputs(model: nn.Module | None) -> int:
    model = getattr(model, "module", model)  # DistributedDataParallel
    return int(getattr(model, "num_classes", None) or 0)
