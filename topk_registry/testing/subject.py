"""The loss under test, with the logits and the targets that all checks use."""

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.losses.batch import BatchLoss
from topk_registry.ops.masses import LabelMixture, Target
from topk_registry.registry import get_loss_builder
from topk_registry.registry.signatures import CONTEXT, accepted_context, parameters, unbound
from topk_registry.testing.expect import NotApplicableError, expect, expect_close

Loss = Callable[[Tensor, Any], Tensor]  # (logits, target)

BATCH = 4
EPOCHS = 10
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SEED = 20_180_221
DRAWS = 64  # number of seeds over which a random loss is averaged


@dataclass(frozen=True)
class Subject:
    """The loss that the checks test.

    Args:
        factory: class or function that takes keyword arguments and returns a callable ``(logits [B, n], target)``.
        name: name of the loss in reports.
        options: keyword arguments with which every check builds the loss.
        num_classes: number of classes n. For a top-k loss, choose n > 2k + 1: for smaller n, losses use other formulas.
    """

    factory: Callable[..., Loss]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_classes: int = 16

    @classmethod
    def of(cls, loss: object, options: Mapping[str, Any] | None = None, num_classes: int = 16) -> "Subject":
        """Prepare a loss for the checks: a registered name, factory, module or function ``(logits, target)``."""
        if isinstance(loss, str):
            return cls(get_loss_builder(loss), loss, options or {}, num_classes)
        name = getattr(loss, "__name__", None) or type(loss).__name__
        return cls(_as_factory(loss), name, options or {}, num_classes)

    def place(self, error: BaseException | None = None) -> str:
        """Return ``file:line`` where the factory is defined, or an empty string if the file is unknown.

        If ``error`` was raised in this file, the line is the line that raised the error.
        """
        source = getattr(self.factory, "source", None) or inspect.unwrap(unbound(self.factory))
        try:
            file, line = inspect.getsourcefile(source) or "", inspect.getsourcelines(source)[1]
        except (OSError, TypeError):
            return ""
        frames = traceback.walk_tb(None if error is None else error.__traceback__)
        for frame, at in frames:
            line = at if frame.f_code.co_filename == file else line
        return f"{file}:{line}"

    def build(self, **options: Any) -> Loss:
        """Build a new loss. The argument ``options`` takes priority over the options of the subject."""
        loss = self.factory(**{**accepted_context(self.factory, self._context()), **self.options, **options})
        if isinstance(loss, nn.Module) and "_parameters" not in vars(loss):
            raise TypeError(f"{type(loss).__name__}.__init__ must call super().__init__()")
        if callable(set_epoch := getattr(loss, "set_epoch", None)):  # as a trainer does before the first epoch
            set_epoch(0)
        return loss

    def takes(self, option: str) -> bool:
        return option in parameters(self.factory)[0]

    def require(self, *options: str) -> None:
        missing = [option for option in options if not self.takes(option)]
        if missing:
            raise NotApplicableError(f"takes no option {', '.join(missing)}")

    def _context(self) -> dict[str, Any]:
        counts = [max(1, 500 // (c + 1)) for c in range(self.num_classes)]
        plain = {"smoothing": 0.0, "soft_targets": False}
        return {"num_classes": self.num_classes, "class_counts": counts, "total_epochs": EPOCHS, **plain}

    def needs_rows(self) -> None:
        """Skip the check that calls this method if the loss is a BatchLoss, whose rows depend on each other."""
        if isinstance(self.build(), BatchLoss):
            raise NotApplicableError("is defined on a whole batch")

    @functools.cached_property
    def estimates_gradient(self) -> bool:
        """Whether the loss declares that its gradient is a random estimate."""
        return bool(getattr(self.build(), "estimates_gradient", False))

    def needs_own_gradient(self) -> None:
        if self.estimates_gradient:
            raise NotApplicableError("declares that its gradient is an estimate")

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether two calls with the same inputs give different values."""
        loss, logits, labels = self.example()
        seed(SEED)
        return not torch.equal(loss(logits, labels), loss(logits, labels))

    def logits(self, batch: int = BATCH, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random logits [batch, n], which are the same in each call."""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(batch, self.num_classes, generator=generator, dtype=torch.float64).to(dtype)

    def labels(self, batch: int = BATCH) -> Tensor:
        """Return labels [batch]. If batch is at most n, all labels differ."""
        order = torch.randperm(max(self.num_classes, batch), generator=torch.Generator().manual_seed(SEED))
        return order[:batch] % self.num_classes

    def example(self, dtype: torch.dtype = torch.float32) -> tuple[Loss, Tensor, Tensor]:
        """Return a new loss, logits and labels."""
        return self.build(), self.logits(dtype=dtype), self.labels()

    def distributions(self) -> Tensor:
        return self.logits(dtype=torch.float64).roll(1, dims=-1).softmax(-1).float()

    def one_hot(self, labels: Tensor) -> Tensor:
        return nn.functional.one_hot(labels, self.num_classes).float()

    def targets(self, loss: Loss) -> Iterator[tuple[str, Target]]:
        """Yield (name, target) for each kind of target that the loss accepts."""
        labels, logits = self.labels(), self.logits()
        other = torch.cat([labels[:1], labels[1:].roll(1, 0)])  # row 0 mixes a label with itself
        yield "labels", labels
        others = {
            "one-hot targets": self.one_hot(labels),
            "distributions": self.distributions(),
            "a LabelMixture": LabelMixture.mixed(labels, other, 0.7),
            "a smoothed LabelMixture": LabelMixture.mixed(labels, other, 0.7).smooth(0.1),
        }
        for kind, target in others.items():
            try:
                evaluate(loss, logits, target)
            except Exception:  # the check takes_distributions fails if the loss rejects distributions
                continue
            yield kind, target

    def class_weight(self) -> Tensor:
        return torch.linspace(0.5, 2.0, self.num_classes)

    def expect_same_value(self, left: Callable[[], Tensor], right: Callable[[], Tensor], what: str) -> None:
        """Raise CheckFailedError unless two calls return the same loss. For random losses, compare means over seeds."""
        if not self.is_random:
            expect_close(_seeded(left, SEED), _seeded(right, SEED), what, floor=1.0)
            return
        lefts = torch.stack([_seeded(left, SEED + i) for i in range(DRAWS)])
        rights = torch.stack([_seeded(right, SEED + DRAWS + i) for i in range(DRAWS)])
        apart = (lefts.mean(0) - rights.mean(0)).abs()
        allowed = 6 * ((lefts.var(0) + rights.var(0)) / DRAWS).sqrt() + 1e-6
        message = f"expected {what} to have the same mean over {DRAWS} seeds, got a difference of {apart.max():.3g}"
        expect((apart <= allowed).all(), f"{message} (six standard errors: {allowed.min():.3g})")


def seed(number: int) -> None:
    """Set the seed on the CPU and all GPUs. ``torch.manual_seed`` is slower, as each call stores a stack trace."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def evaluate(loss: Loss, logits: Tensor, target: Target) -> Tensor:
    """Return ``loss(logits, target)`` after setting a fixed seed, so that repeated calls give the same value."""
    seed(SEED)
    return loss(logits, target)


def value_and_gradient(loss: Loss, logits: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Return the loss ``value``, and the gradient of ``value.sum()`` with respect to the logits."""
    leaf = logits.detach().clone().requires_grad_()
    value = evaluate(loss, leaf, target)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _as_factory(loss: Any) -> Callable[..., Loss]:
    if isinstance(loss, nn.Module):

        def of_object() -> Loss:
            return copy.deepcopy(loss)

        of_object.source = type(loss)  # pyright: ignore[reportFunctionMemberAccess]  # for Subject.place
        return of_object
    needed = [] if isinstance(loss, type) else inspect.signature(loss).parameters.values()
    if len([p for p in needed if p.default is p.empty and p.kind in _BY_PLACE and p.name not in CONTEXT]) < 2:
        return loss

    @functools.wraps(loss, updated=())  # a function (logits, target)
    def factory(**options: Any) -> Loss:
        return functools.partial(loss, **options) if options else loss

    return factory


def _seeded(call: Callable[[], Tensor], number: int) -> Tensor:
    seed(number)
    return call().detach()
