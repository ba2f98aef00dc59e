"""Replace the loss of timm's or torchvision's training script, and check that the script trains with the new loss.

A script may construct its loss in a place that this module does not know. Then the script would train with its own loss
without an error. Therefore the registered loss records its backward passes. If an optimizer step happens without such a
backward pass, the run ends with an error.
"""

import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from topk_registry.data.labels import class_counts, class_names_of, labels_of
from topk_registry.errors import TrainError
from topk_registry.train.config import WEIGHT_METHODS
from topk_registry.train.loss import Facts, LossSpec, build_loss, class_weights, over_ranks, set_epoch, try_loss

CRITERION = ("loss_fn", "criterion")
LOADER = ("data_loader", "loader")
MIXING = ("mixup", "cutmix", "cutmix_minmax", "mixup_alpha", "cutmix_alpha")


class Patch:
    """The registered loss for one run of a script. The loss is built when the model and the data are known.

    Args:
        name: name of the loss.
        options: options of the loss.
        class_weight: ``inv_freq``, ``effective_num``, a file, or numbers joined by commas. Empty: no class weights.
    """

    def __init__(self, name: str, options: Mapping[str, Any], class_weight: str = "") -> None:
        self.spec = LossSpec.resolve(name, options)
        self.class_weight = class_weight
        self.args = Namespace()
        self.train_data: Any = None
        self.loss: nn.Module | None = None
        self.trained = False  # whether a backward pass reached the loss after the last optimizer step

    def note_arguments(self, args: Any) -> None:
        """Store the parsed arguments of the script, and add the name and the options of the loss as ``loss_record``.

        timm writes the arguments to ``args.yaml`` and to checkpoints, so these files record the loss.
        """
        self.args = args
        args.loss_record = self.spec.record

    def criterion(self, model: nn.Module | None, device: torch.device | str | None) -> nn.Module:
        """Return the registered loss on the device. The first call builds the loss and tests it on one batch."""
        if self.loss is None:
            facts = self._facts(model)
            loss = build_loss(self.spec, facts)
            try_loss(self.spec, loss, facts)
            if os.environ.get("RANK", "0") == "0":
                print(f"training with {self.spec.describe()}", file=sys.stderr)
            # over_ranks expects averaged gradients, and the scripts of timm and torchvision average them over ranks
            self.loss = over_ranks(loss)
            self.loss.register_forward_hook(self._watch)
        return self.loss.to(device)

    def check_steps(self) -> Any:
        """Context manager that raises ``TrainError`` at an optimizer step without a backward pass of this loss."""
        return register_optimizer_step_pre_hook(self._check)

    def _watch(self, loss: nn.Module, inputs: Any, value: Tensor) -> None:
        if value.requires_grad:
            value.register_hook(lambda gradient: setattr(self, "trained", True))

    def _check(self, *step: Any) -> None:
        if not self.trained:
            raise TrainError(
                f"the script took an optimizer step without a gradient of loss {self.spec.name!r}: it trains with "
                "another loss"
            )
        self.trained = False

    def _facts(self, model: nn.Module | None) -> Facts:
        args = self.args
        soft = any(getattr(args, name, None) for name in MIXING)
        # timm's mixup returns smoothed targets, so the loss must not smooth them again. torchvision's mixup does not.
        smoothing = getattr(args, "label_smoothing", 0.0) or (0.0 if soft else getattr(args, "smoothing", 0.0))
        inner = getattr(model, "module", model)  # DistributedDataParallel
        known = len(class_names_of(self.train_data) or ())
        given = getattr(args, "num_classes", None)
        n = int(given or getattr(inner, "num_classes", None) or known)
        if not n:
            raise TrainError("the number of classes is unknown: pass the script's --num-classes")
        if known and (n < known or (n > known and not given)):
            raise TrainError(f"the model has {n} outputs and the data {known} classes: pass --num-classes {known}")
        counts = None
        if self.spec.needs_class_counts or self.class_weight in WEIGHT_METHODS:
            if self.train_data is None:
                raise TrainError("class counts are needed, and the script's training data cannot be found")
            counts = class_counts(labels_of(self.train_data), n)
        return Facts(
            num_classes=n,
            smoothing=smoothing,
            soft_targets=soft,
            total_epochs=getattr(args, "epochs", 1),
            class_counts=counts,
            class_weight=class_weights(self.class_weight, counts, n) if self.class_weight else None,
            splits=getattr(args, "aug_splits", 0),
        )


def install(module: Any, patch: Patch) -> None:
    """Patch a loaded script so that it trains with the loss of ``patch``.

    If the script uses timm's tasks, which combine model and loss, replace the loss of each task. Otherwise, replace the
    loss argument of the script's function ``train_one_epoch``.
    """
    tasks = [name for name, value in vars(module).items() if _is_task(value)]
    for name in tasks:
        setattr(module, name, _patched_task(getattr(module, name), patch))
    if not hasattr(module, "train_one_epoch"):
        raise TrainError("expected timm's or torchvision's training script: it has no train_one_epoch")
    module.train_one_epoch = _patched_epoch(module.train_one_epoch, patch, swap=not tasks)
    if hasattr(module, "create_dataset"):
        module.create_dataset = _patched_data(module.create_dataset, patch)


def _is_task(value: object) -> bool:
    bases = {base.__name__ for base in getattr(value, "__mro__", ())}
    return "TrainingTask" in bases and "criterion" in inspect.signature(value).parameters  # pyright: ignore


def _patched_task(base: type, patch: Patch) -> type:
    signature = inspect.signature(base)

    class RegisteredTask(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.arguments.pop("criterion_kwargs", None)
            model = bound.arguments.get("model", bound.arguments.get("student_model"))
            bound.arguments["criterion"] = patch.criterion(model, bound.arguments.get("device"))
            super().__init__(*bound.args, **bound.kwargs)

    RegisteredTask.__name__ = RegisteredTask.__qualname__ = base.__name__
    return RegisteredTask


def _patched_epoch(train_one_epoch: Callable[..., Any], patch: Patch, *, swap: bool) -> Callable[..., Any]:
    signature = inspect.signature(train_one_epoch)
    name = next((name for name in CRITERION if name in signature.parameters), "")
    if swap and not name:
        raise TrainError(f"train_one_epoch has no parameter {' or '.join(CRITERION)}")

    @wraps(train_one_epoch)
    def with_loss(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        if swap:
            loader = next((values[each] for each in LOADER if each in values), None)
            patch.train_data = getattr(loader, "dataset", None) if patch.train_data is None else patch.train_data
            model = values.get("model")
            device = values.get("device") or (next(model.parameters()).device if model is not None else None)
            values[name] = patch.criterion(model, device)
        if "epoch" in values and patch.loss is not None:
            set_epoch(patch.loss, values["epoch"])
        return train_one_epoch(*bound.args, **bound.kwargs)

    return with_loss


def _patched_data(create_dataset: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @wraps(create_dataset)
    def noting(*args: Any, **kwargs: Any) -> Any:
        dataset = create_dataset(*args, **kwargs)
        if kwargs.get("is_training"):
            patch.train_data = dataset
        return dataset

    return noting
