"""Rewards for well-classified examples (Zhao et al. 2022, *Well-classified Examples are Underestimated in
Classification with Deep Neural Networks*, AAAI).

Cross-entropy's gradient fades as p goes to 1, so the examples a network already gets right stop shaping it. These
losses add a bonus that grows with p: the mirror image of the loss, log(1 - p) for cross-entropy (so that, without
truncation, the sum is minus the log-odds, whose gradient never fades) and the reversed power for squared error.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from topk_registry import ClassificationLoss
from topk_registry.options import choice, integer, number
from topk_registry.rows import Curve, RowLoss, sigmoid_rows, softmax_rows

FLOOR = math.log(1e-5)  # the published clamp: log(1 - p) is read as log(max(1 - p, 1e-5))
SCHEDULES = ("constant", "linear", "cosine", "exponential")
SCHEDULED = ("bonus", "log_end")
BASES = {"mse": 2, "mae": 1}
LINKS = ("sigmoid", "softmax")


def _floored(log_p, log_not, p, not_p, own, numbers):
    bonus = max(log_not, -11.512925464970229)  # FLOOR
    slope = -p if log_not >= -11.512925464970229 else 0.0 * p
    rewarded = log_not < numbers[3]
    bonus = bonus - numbers[4] if rewarded else 0.0 * p
    return numbers[0] * bonus - log_p, (numbers[0] * slope if rewarded else 0.0 * p) - not_p


def _bent(log_p, log_not, p, not_p, own, numbers):
    tangent = not_p < numbers[1]
    bonus = numbers[2] - 1.0 + not_p / numbers[1] if tangent else log_not
    slope = -p * not_p / numbers[1] if tangent else -p
    rewarded = log_not < numbers[3]
    bonus = bonus - numbers[4] if rewarded else 0.0 * p
    return numbers[0] * bonus - log_p, (numbers[0] * slope if rewarded else 0.0 * p) - not_p


def _mirrored_squares(log_p, log_not, p, not_p, own, numbers):
    n, rho, squared = numbers[0], numbers[1], numbers[3] > 1.5
    slope = p * not_p * n
    off, off_slope = (p * p * n, 2.0 * slope * p) if squared else (p * n, slope)
    on, on_slope = (not_p * not_p * n, -2.0 * slope * not_p) if squared else (not_p * n, -slope)
    on, on_slope = on - rho * p * p * n, on_slope - 2.0 * rho * slope * p
    return on, on_slope, off - rho * not_p * not_p * n, off_slope + 2.0 * rho * slope * not_p


def _mirrored(log_p, log_not, p, not_p, own, numbers):
    n, rho, gamma, squared = numbers[0], numbers[1], numbers[2], numbers[3] > 1.5
    slope = p * not_p * n
    off, off_slope = (p * p * n, 2.0 * slope * p) if squared else (p * n, slope)
    on, on_slope = (not_p * not_p * n, -2.0 * slope * not_p) if squared else (not_p * n, -slope)
    right, wrong = math.exp(gamma * log_p) * n * rho, math.exp(gamma * log_not) * n * rho
    return on - right, on_slope - gamma * right * not_p, off - wrong, off_slope + gamma * wrong * p


class Encouraging(ClassificationLoss):
    """Cross-entropy with a bonus for likely labels.

        L(s, y) = -log p_y + rho * (b(max(p_y, bonus_start)) - b(bonus_start)),    p = softmax(s),
        b(p) = log(max(1 - p, 1e-5))                  for p <= LE,
        b(p) = log(1 - LE) - (p - LE) / (1 - LE)      above: its tangent, whose gradient stays bounded

    The paper's bonuses: *normal*, ``log_end=1``; *conservative*, ``log_end`` of 0.75 or 0.5, for optimisers that large
    gradients upset; *aggressive*, ``log_end=1, bonus_start=0.5``, which rewards only labels above one half (its
    experiments on long-tailed data).

    Use when:
        Labels are clean and the network should go on learning from samples that it has right already.

    Avoid when:
        Labels are noisy, as it rewards certainty about wrong labels too, or probabilities must be calibrated.

    Args:
        log_end: LE, in [0, 1]. 1: no tangent.
        bonus_start: labels below this p get no bonus, in [0, 1).
        rho: the weight of the bonus. 0 is cross-entropy.
        schedule: how ``scheduled`` grows with t = epoch / total_epochs: ``"constant"``; ``"linear"``, t; ``"cosine"``,
            (1 - cos(pi t)) / 2; ``"exponential"``, exp(rate (t - 1)), or 1 - exp(rate t) for a negative rate.
        scheduled: what the schedule multiplies, rho (``"bonus"``) or LE (``"log_end"``).
        rate: of the exponential schedule.
        start_epoch: the first epoch with a bonus (deferred encouraging).
        total_epochs: the length of the training; only a schedule needs it.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    A schedule and ``start_epoch`` need ``set_epoch`` in every epoch, as the trainer calls it; before, it is epoch 0.

    Example:
        >>> Encouraging(log_end=1.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))  # minus the log-odds
        tensor(-2.)

    Reference:
        Zhao, Yang, Ren, Li, Wu, Sun. Well-classified Examples are Underestimated in Classification with Deep Neural
        Networks. AAAI 2022. The schedules are those of the authors' published training code.
    """

    option_ranges: ClassVar = {
        "log_end": "[0, 1]",
        "bonus_start": "[0, 1)",
        "rho": "[0, inf)",
        "schedule": SCHEDULES,
        "scheduled": SCHEDULED,
        "start_epoch": "[0, inf)",
    }
    tuning_grid: ClassVar = {"log_end": (0.5, 0.75, 1.0)}

    epoch: Tensor

    def __init__(
        self,
        *,
        log_end: float = 0.75,
        bonus_start: float = 0.0,
        rho: float = 1.0,
        schedule: str = "constant",
        scheduled: str = "bonus",
        rate: float = 5.0,
        start_epoch: int = 0,
        total_epochs: int | None = None,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.log_end = number(log_end, "log_end", at_least=0, at_most=1)
        self.bonus_start = number(bonus_start, "bonus_start", at_least=0, at_most=1 - 1e-5)
        self.rho, self.rate = number(rho, "rho", at_least=0), number(rate, "rate")
        self.schedule = choice(schedule, "schedule", SCHEDULES)
        self.scheduled = choice(scheduled, "scheduled", SCHEDULED)
        self.start_epoch = integer(start_epoch, "start_epoch", at_least=0)
        self.total_epochs = None if total_epochs is None else integer(total_epochs, "total_epochs", at_least=0)
        if schedule != "constant" and not total_epochs:
            raise ValueError(f"schedule = {schedule!r} needs total_epochs, got {total_epochs!r}")
        # a tensor, so that a compiled loss follows the epoch without being compiled again
        self.register_buffer("epoch", torch.zeros((), dtype=torch.float64), persistent=False)

    @property
    def first_change(self) -> int | None:
        return (self.start_epoch or (None if self.schedule == "constant" else 1)) if self.rho else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the schedule, counted from 0."""
        super().set_epoch(epoch)
        self.epoch.fill_(epoch)

    def _shares(self) -> tuple[Tensor, Tensor]:
        """The shares of the bonus and of LE in this epoch."""
        share, one = self._share(), torch.ones_like(self.epoch)
        bonus, log_end = (share, one) if self.scheduled == "bonus" else (one, share)
        return torch.where(self.epoch >= self.start_epoch, bonus, 0.0), log_end

    def _share(self) -> Tensor:
        if self.schedule == "constant":
            return torch.ones_like(self.epoch)
        assert self.total_epochs
        t = (self.epoch / self.total_epochs).clamp(max=1)
        if self.schedule == "linear":
            return t
        if self.schedule == "cosine":
            return (1 - (math.pi * t).cos()) / 2
        assert self.schedule == "exponential"
        return (self.rate * (t - 1)).exp() if self.rate > 0 else -(self.rate * t).expm1()

    takes_half = True

    def row_loss(self, logits: Tensor) -> RowLoss:
        scheduled = self.schedule != "constant" or self.start_epoch > 0
        # plain numbers would make torch compile again for every epoch, and a look at the epoch would stall a GPU
        if torch.compiler.is_compiling() or (scheduled and not self.epoch.is_cpu):
            return softmax_rows(Curve(self._loss))
        curve = _floored if self._is_floored else _bent
        bonus, log_end = (float(share) for share in self._shares()) if scheduled else (1.0, 1.0)
        not_end = max(1 - self.log_end * log_end, 1e-5)
        start = math.log1p(-self.bonus_start) if self.bonus_start else math.inf
        before = 0.0
        if self.bonus_start:
            tangent = math.log(not_end) - 1 + math.exp(start) / not_end
            before = max(start, FLOOR) if self._is_floored else tangent if math.exp(start) < not_end else start
        numbers = (self.rho * bonus, not_end, math.log(not_end), start, before)
        return softmax_rows(Curve(self._loss, curve, numbers))

    @property
    def _is_floored(self) -> bool:
        return self.log_end == 1 and self.scheduled == "bonus"

    def _loss(self, log_p: Tensor, log_not: Tensor, own: None) -> Tensor:
        bonus_share, log_end_share = (share.to(log_p) for share in self._shares())
        not_end = 1 - self.log_end * log_end_share
        bonus = self._bonus(log_not, not_end)
        if self.bonus_start:
            start = log_not.new_tensor(-self.bonus_start).log1p()
            bonus = torch.where(log_not < start, bonus - self._bonus(start, not_end), 0.0)
        return -log_p + self.rho * bonus_share * bonus

    def _bonus(self, log_not: Tensor, not_end: Tensor) -> Tensor:
        if self._is_floored:
            return log_not.clamp(min=FLOOR)
        # as a schedule brings LE to 1 the tangent would become steeper than the floored logarithm
        not_end = not_end.clamp(min=1e-5)
        # (p - LE) / (1 - LE) in terms of 1 - p: autograd would take the slope of p from a p rounded to 1
        not_p = log_not.exp()
        tangent = not_end.log() - 1 + not_p / not_end
        return torch.where(not_p < not_end, tangent, log_not)

    def extra_repr(self) -> str:
        options = f"log_end={self.log_end:g}, bonus_start={self.bonus_start:g}, rho={self.rho:g}"
        return f"{options}, schedule={self.schedule!r}, {super().extra_repr()}"


class Mirror(ClassificationLoss):
    """Squared (or absolute) error of class probabilities, less its mirror image.

        L(s, y) = 1/n sum_c [ y_c (1 - p_c)^a + (1 - y_c) p_c^a ] - rho/n sum_c [ y_c p_c^g + (1 - y_c) (1 - p_c)^g ]

    with y one-hot; a = 2 for ``base="mse"``, 1 for ``"mae"``. The squared error is flat in p where p = y, and its
    mirror image steepest. With a = g = 2 and rho = 1 the sum is the absolute error, 2 abs(p - y) - 1 a class.

    Use when:
        You repeat the paper's study of squared and absolute errors.

    Avoid when:
        You look for accuracy: with many classes errors of single probabilities learn slowly. Take ``encouraging``.

    Args:
        base: ``"mse"`` or ``"mae"``.
        gamma: g, the power of the bonus; the authors' experiments take 2.
        rho: the weight of the bonus; theirs is 1. 0 leaves the plain error.
        link: p from the scores, ``"sigmoid"`` of each or their ``"softmax"``.
        weight, reduction, label_smoothing, ignore_index: as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> Mirror()(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))  # p = 1/2: error and bonus cancel
        tensor(0.)

    Reference:
        Zhao, Yang, Ren, Li, Wu, Sun. Well-classified Examples are Underestimated in Classification with Deep Neural
        Networks. AAAI 2022.
    """

    option_ranges: ClassVar = {"base": tuple(BASES), "gamma": "(0, inf)", "rho": "[0, inf)", "link": LINKS}
    tuning_grid: ClassVar = {"link": ("sigmoid", "softmax")}

    def __init__(
        self,
        *,
        base: str = "mse",
        gamma: float = 2.0,
        rho: float = 1.0,
        link: str = "sigmoid",
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(weight=weight, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.base, self.link = choice(base, "base", tuple(BASES)), choice(link, "link", LINKS)
        self.gamma, self.rho = number(gamma, "gamma", above=0), number(rho, "rho", at_least=0)

    takes_half = True

    @property
    def power(self) -> int:
        """The power a of the error."""
        return BASES[self.base]

    def row_loss(self, logits: Tensor) -> RowLoss:
        plain = self.gamma == 2 or self.rho == 0
        numbers = (1 / logits.shape[1], self.rho, self.gamma, float(self.power))
        mirrored = _mirrored_squares if plain else _mirrored
        curve = Curve(self._both, mirrored, numbers, others=True, logarithms=not plain)
        return softmax_rows(curve) if self.link == "softmax" else sigmoid_rows(curve)

    def _both(self, log_p: Tensor, log_not: Tensor, own: None) -> tuple[Tensor, Tensor]:
        n = log_p.shape[-1]
        return self._terms(log_p, log_not) / n, self._terms(log_not, log_p) / n

    def _terms(self, log_right: Tensor, log_wrong: Tensor) -> Tensor:
        """wrong^a - rho right^g; of a class at y_c = 1 right is p and wrong 1 - p, at y_c = 0 the other way round."""
        return (self.power * log_wrong).exp() - self.rho * (self.gamma * log_right).exp()

    def extra_repr(self) -> str:
        options = f"base={self.base!r}, gamma={self.gamma:g}, rho={self.rho:g}, link={self.link!r}"
        return f"{options}, {super().extra_repr()}"
