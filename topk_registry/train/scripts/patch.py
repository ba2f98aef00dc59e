"""Put a registered loss into somebody else's training script, and check that the script trains with it.

A script that is given the loss at the wrong place trains its own loss without a word. So the loss watches itself: every
step of every optimizer must come after a backward pass through it, or training stops there.
"""

import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from topk_registry.data.labels import class_counts, class_names_of, labels_of
from topk_registry.losses.base import ClassificationLoss
from topk_registry.losses.batch import BatchLoss
from topk_registry.losses.ranks import mean_over_ranks, number_of_ranks, weighs_rows
from topk_registry.train.errors import TrainError
from topk_registry.train.setup.class_weights import ClassWeights, same_in_all, stats_of, told
from topk_registry.train.setup.loss import Context, LossSpec, tell_epoch
from topk_registry.train.setup.rehearsal import Rehearsal

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
    """The registered loss of one script's run, made when the script has told its classes and its data.

    Args:
        name, options: the loss.
        class_weight, loss_pos_weight, class_stats, loss_weight_power, loss_weight_beta, loss_weight_max: as the flags
            of ``timm train``.

    Raises:
        TrainError: the loss takes no such weights.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        class_weight: str = "",
        loss_pos_weight: str = "",
        class_stats: str = "",
        loss_weight_power: float = 1.0,
        loss_weight_beta: float = 0.999,
        loss_weight_max: float | None = None,
    ) -> None:
        self.spec = LossSpec.resolve(name, options)
        self.spec.check_weights(class_weight)
        self.spec.check_positive_weights(loss_pos_weight)
        settings = (loss_weight_power, loss_weight_beta, loss_weight_max)
        asked = {"class_weight": class_weight, "loss_pos_weight": loss_pos_weight}
        self.weights = [ClassWeights(given, *settings, setting) for setting, given in asked.items() if given]
        self.stats = class_stats
        self.record = self.spec.record  # the class weights are added when the data has told its counts
        self.args = Namespace()
        self.num_classes: int | None = None  # as given: timm's script fills in its model's later
        self.train_data: Any = None
        self.loss: WatchedLoss | None = None

    def criterion(self, model: nn.Module | None, device: torch.device | str | None) -> WatchedLoss:
        """Return the loss on the device, to take the place of the script's own."""
        if self.loss is None:
            context = self._context(model)
            rehearsal = Rehearsal(
                self.spec, context, splits=getattr(self.args, "aug_splits", 0), seed=getattr(self.args, "seed", 0) or 0
            )
            if hasattr(self.args, "epochs"):
                rehearsal.check_schedule(context.total_epochs)
            if self.spec.wants_cosine(model) and os.environ.get("RANK", "0") == "0":
                told = (
                    f"loss {self.spec.name!r} knows class frequencies; its paper's recipe may want a cosine classifier"
                )
                print(f"{told}: topk_registry.normalize_classifier(model) in the script", file=sys.stderr)
            loss = rehearsal.criterion
            if weighs_rows(loss) and number_of_ranks() > 1:  # both scripts average gradients over the processes
                loss = mean_over_ranks(cast(ClassificationLoss, loss))
            if isinstance(loss, BatchLoss) and number_of_ranks() > 1:
                loss.over_ranks()
            self.loss = WatchedLoss(loss)
        return self.loss.to(device)

    def set_epoch(self, epoch: int) -> None:
        tell_epoch(self.loss.loss if self.loss else None, epoch)

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

    def _context(self, model: nn.Module | None) -> Context:
        args = self.args
        soft = any(getattr(args, name, None) for name in MIXING)
        smoothing = getattr(args, "smoothing", None) or getattr(args, "label_smoothing", None) or 0.0
        self.spec.check_smoothing(smoothing, "--smoothing" if hasattr(args, "smoothing") else "--label-smoothing")
        known = len(class_names_of(self.train_data) or ())
        n = self.num_classes or _outputs(model) or known
        if not n:
            raise TrainError("the script does not tell its number of classes: pass its --num-classes")
        if known and (n < known or (n > known and not self.num_classes)):
            raise TrainError(
                f"the script's model predicts {n} classes, and its data has {known}: --num-classes {known}"
            )
        counts, samples = self._counts(n)
        weights = {each.kind: self._weight(each, counts, n, samples) for each in self.weights}
        return Context(
            num_classes=n,
            smoothing=0.0 if soft else smoothing,
            soft_targets=soft,
            total_epochs=getattr(args, "epochs", 1),
            class_counts=counts,
            class_weight=weights.get("class_weight"),
            pos_weight=weights.get("pos_weight"),
            num_samples=samples,
        )

    def _counts(self, n: int) -> tuple[Sequence[float] | None, int | None]:
        """The class counts and the number of samples, as far as the loss or its weights need them."""
        if self.stats:
            return stats_of(self.stats, n)
        users = [each.flag for each in self.weights if each.needs_counts]
        users += [f"loss {self.spec.name!r}"] * self.spec.needs_class_counts
        if not users:
            return None, None
        if self.train_data is None:
            raise TrainError(f"{users[0]} needs the class counts, and the script does not show its data")
        return class_counts(labels_of(self.train_data), n), None

    def _weight(
        self, asked: ClassWeights, counts: Sequence[float] | None, n: int, samples: int | None
    ) -> tuple[float, ...]:
        """The weights, recorded and said."""
        weights = same_in_all(asked.values(counts, n, samples))
        self.record[asked.kind] = list(weights)
        if os.environ.get("RANK", "0") == "0":
            print(told(weights, asked, class_names_of(self.train_data)), file=sys.stderr)
        return weights


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
