"""Try the loss of a run before it trains: on random scores, and on targets of the kind that the run will produce."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.losses.base import ClassificationLoss
from topk_registry.ops.backend import NotCompiledError, use_backend, without_compiling
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.registry.options import defaults
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.setup.batches import seeded
from topk_studies.old_trainer.setup.loss import Context, LossSpec, tell_epoch


class Rehearsal:
    """The loss of a run, built and run once, forward and backward.

    It runs in a copy, so that training begins with the loss as it was built. A loss that draws its start draws it from
    the seed, in every process alike.

    Args:
        spec: the loss.
        context: facts of the run. Class counts that are not known yet are made up.
        splits: augmentation splits of a batch.
        seed: of the run.
        criterion: the loss, where it is built already.
        compiles: whether kernels may be compiled for it. Else torch operations serve where one is not there, and
            ``backend`` says so.

    Raises:
        TrainError: the loss fails, or returns anything but one finite number with a gradient.
    """

    def __init__(
        self,
        spec: LossSpec,
        context: Context,
        *,
        splits: int = 0,
        seed: int = 0,
        criterion: nn.Module | None = None,
        compiles: bool = True,
    ) -> None:
        self.spec, self.context, self.splits, self.seed = spec, _with_counts(spec, context), splits, seed
        self.criterion = self._built(spec) if criterion is None else criterion
        self.compiles, self.backend = compiles, "auto"
        try:
            with nullcontext() if compiles else without_compiling():
                self._rehearse()
        except NotCompiledError:
            self.backend = "torch"
            with use_backend("torch"):
                self._rehearse()

    def settled(self, context: Context) -> "Rehearsal":
        """Return a rehearsal with the facts that are known by now: this one where they change nothing.

        Raises:
            TrainError: the loss fails with them.
        """
        same = self.spec.facts(context) == self.spec.facts(self.context)
        if same and context.num_classes == self.context.num_classes:
            return self
        criterion = self.criterion if same else None
        given = {"splits": self.splits, "seed": self.seed, "compiles": self.compiles}
        return Rehearsal(self.spec, context, criterion=criterion, **given)

    def trial(self) -> Any:
        """Return a copy of the loss as it was built, in epoch 0 where it has a schedule."""
        try:
            loss = copy.deepcopy(self.criterion)
        except Exception:  # it holds something that cannot be copied, such as a lock
            loss = self._built(self.spec)
        if getattr(loss, "first_change", None) is not None:  # else it warns that nobody tells it the epoch
            tell_epoch(loss, 0)
        return loss

    def check_schedule(self, epochs: int) -> None:
        """Raise a TrainError where the run ends before the loss's schedule begins."""
        first = self.criterion.first_change if isinstance(self.criterion, ClassificationLoss) else None
        if first is not None and first >= epochs:
            raise TrainError(
                f"{self.spec} first changes in epoch {first}, counted from 0, and the run has {epochs} epochs"
            )

    def takes_mixtures(self, *, linear: bool = False) -> bool:
        """Whether mixed targets can reach the loss as labels with shares, instead of as distributions.

        Args:
            linear: whether the run calls the loss's method ``of_linear``.
        """
        if self.context.several or not (self.context.soft_targets and isinstance(self.criterion, ClassificationLoss)):
            return False
        loss, n = self.trial(), self.context.num_classes
        label = torch.arange(2) % n
        target = LabelMixture.mixed(label, label.flip(0), 0.5, 0.1)
        try:  # a third party's loss may have a forward of its own that does not know them
            with torch.random.fork_rng(devices=[]), use_backend("torch"):  # whose first call compiles nothing
                x = torch.randn(2, 1 if linear else n, requires_grad=True)
                check_value(loss.of_linear(x, torch.randn(n, 1), None, target) if linear else loss(x, target))
        except Exception:
            return False
        return True

    def idle_options(self, epochs: int) -> list[str]:
        """Return the given options without which the loss and its gradient are the same in every epoch."""
        usual, options = defaults(self.spec.factory), self.spec.options
        given = [name for name in options if name in usual and name != "ignore_index" and options[name] != usual[name]]
        times = sorted({0, epochs // 2, max(0, epochs - 1)})
        with use_backend("torch"):  # whose first call compiles nothing
            own = self._course(self.trial(), times) if given else []
            return [name for name in given if self._is_idle(name, own, times)]

    def _is_idle(self, option: str, own: Sequence[Tensor], times: Sequence[int]) -> bool:
        rest = {name: value for name, value in self.spec.options.items() if name != option}
        try:
            without = self._course(self._built(replace(self.spec, options=rest)), times)
        except Exception:  # the loss cannot do without the option
            return False
        return all(torch.equal(*pair) for pair in zip(own, without, strict=True))

    def _built(self, spec: LossSpec) -> nn.Module:
        with seeded(self.seed):
            return spec.build(self.context)

    def _rehearse(self) -> None:
        kind = "k-hot targets" if self.context.several else "class indices"
        kind = "mixed targets (mixup or cutmix)" if self.context.soft_targets else kind
        criterion = self.trial()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits, target = self._example(2 * max(1, self.splits))
            try:
                value = criterion(logits, target)
                check_value(value)
                value.backward()
            except NotCompiledError:
                raise
            except Exception as error:
                raise TrainError(f"{self.spec} does not train on {kind}: {error}") from error
        if logits.grad is None or not bool(torch.isfinite(logits.grad).all()):
            raise TrainError(f"{self.spec} has no finite gradient on {kind}")

    def _example(self, rows: int) -> tuple[Tensor, Tensor]:
        """Random scores, and targets of the kind that the run will produce."""
        n = self.context.num_classes
        logits = torch.randn(rows, n, requires_grad=True)
        target = torch.arange(rows) % n
        one_hot = nn.functional.one_hot(target, n).float()
        if self.context.several:  # rows of one label and of two; the first has none
            one_hot = one_hot.maximum(one_hot.roll(1, 1) * (torch.arange(rows) % 2)[:, None])
            one_hot[0] = 0.0
        if self.context.soft_targets:
            return logits, 0.5 * one_hot + 0.5 * one_hot.flip(0)
        return logits, one_hot if self.context.several else target

    def _course(self, loss: nn.Module, times: Sequence[int]) -> list[Tensor]:
        """The loss and its gradient in each of these epochs, at scores of unsure, right and wrong rows."""
        course, n = [], self.context.num_classes
        for epoch in times:
            tell_epoch(loss, epoch)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                logits, target = self._example(12)
                sure = 6.0 * nn.functional.one_hot(torch.arange(12) % n, n)
                value = loss(logits + sure * torch.arange(-1.0, 2.0).repeat(4)[:, None], target)
                course += [value.detach(), *torch.autograd.grad(value, logits)]
        return course


def check_value(value: object) -> None:
    """Raise unless a loss is one finite number with a gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected one floating-point number, got {got} (is its reduction 'none'?)")
    if not bool(torch.isfinite(value)):
        raise ValueError(f"expected a finite number, got {value.item()}")
    if not value.requires_grad:
        raise ValueError("its value has no gradient with respect to the logits")


def _with_counts(spec: LossSpec, context: Context) -> Context:
    """Facts with made-up class counts, where the loss needs counts and the data is not read yet."""
    if context.class_counts is None and spec.needs_class_counts:
        return replace(context, class_counts=[10 + c % 91 for c in range(context.num_classes)], num_samples=1000)
    return context
