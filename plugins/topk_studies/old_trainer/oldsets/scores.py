"""Nonconformity scores: how badly each class fits a row.

:data:`SCORES` is the one list of ours: commands, help, plans, graphs and tests read their names there. Installed
distributions add theirs by entry points of the group ``topk_registry.scores``; :func:`score_names` has them all.

A prediction set holds the classes whose score is at most a threshold. r is the rank of a class by falling probability,
1 for the best; among equal probabilities the lower index comes first. U is uniform on [0, 1], or 0, which gives sets
that are the same on every call and a little larger.

    lac        1 - p_y                                                   Sadinle et al. 2019
    aps        p_(1) + ... + p_(r) - U p_(r)                             Romano et al. 2020
    raps       aps + lambda max(0, r - k_reg)                            Angelopoulos et al. 2021
    saps       U p_(1) for r = 1, else p_(1) + (r - 1 - U) weight        Huang et al. 2024
    topk       r - U                                                     Angelopoulos et al. 2021
    log_odds   minus the log-odds of y being in a random k-set           ours
    pas        -weight_y p_y / prior_y                                   Ding, Fermanian, Salmon 2025
    tree       minus the probability outside the last nodes without y    after Mortier et al. 2025; in tree.py
"""

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array

from topk_registry.registry.errors import BrokenPluginError
from topk_studies.old_trainer import registries

Array = Any  # numpy.ndarray or torch.Tensor


def probabilities(logits: Array, temperature: float = 1.0) -> Array:
    """Softmax of logits / temperature over the last axis, in at least single precision."""
    xp = array_namespace(logits)
    z = logits if logits.dtype in (xp.float32, xp.float64) else xp.astype(logits, xp.float32)
    z = (z - xp.max(z, axis=-1, keepdims=True)) / temperature
    e = xp.exp(z)
    return e / xp.sum(e, axis=-1, keepdims=True)


def log_odds(marginals: Array) -> Array:
    """log(pi / (1 - pi)) of top-k marginals, in double precision; infinite at 0 and 1."""
    xp = array_namespace(marginals)
    pi = xp.astype(marginals, xp.float64)
    if is_torch_array(pi):
        return xp.log(pi) - xp.log1p(-pi)
    with np.errstate(divide="ignore"):
        return xp.log(pi) - xp.log1p(-pi)


def ranking(values: Array) -> Array:
    """The classes of each row by falling value [B, n]; the lower index comes first among equal ones."""
    xp = array_namespace(values)
    return xp.argsort(values, axis=-1, descending=True, stable=True)


def ranks(values: Array) -> Array:
    """The rank of each class in its row [B, n], from 1."""
    xp = array_namespace(values)
    return xp.argsort(ranking(values), axis=-1, stable=True) + 1


SCORES: dict[str, type["Score"]] = {}
Kind = TypeVar("Kind", bound="type[Score]")


def register_score(kind: Kind) -> Kind:
    """Put a subclass of :class:`Score` into :data:`SCORES`, under its ``name``."""
    known = SCORES.setdefault(kind.name, kind)
    if known is not kind:
        raise ValueError(f"score {kind.name!r} is {known.__module__}.{known.__qualname__} already: take another name")
    return kind


def spelled(names: Iterable[str]) -> tuple[str, ...]:
    """Names of scores or rules as commands write them: with hyphens."""
    return tuple(name.replace("_", "-") for name in names)


@dataclass(frozen=True)
class Score:
    """A score of every class of a row, from the row's probabilities (or log-odds) [B, n].

    ``ranked``: the score of a row grows with the rank, so that a set is the first classes of the ranking.
    ``learned``: the options that calibration takes from labels, on samples of their own.
    """

    name: ClassVar[str]
    ranked: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ()

    def inputs(self, logits: Array, temperature: float, marginals: Array | None) -> Array:
        """The values [B, n] that the score takes: probabilities."""
        return probabilities(logits, temperature)

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        """The scores [B, n]; ``u`` is a number or [B, 1]."""
        raise NotImplementedError

    def of_labels(self, values: Array, labels: Array, u: Array | float = 0.0) -> Array:
        """The score of each row's own label [B]."""
        xp = array_namespace(values)
        return xp.take_along_axis(self(values, u), xp.astype(labels, xp.int64)[:, None], axis=-1)[:, 0]

    def largest(self, n: int) -> float:
        """A bound that no score of n classes exceeds; infinite where there is none."""
        raise NotImplementedError

    def largest_rank(self, threshold: float, n: int) -> int:
        """The rank that no class of a set exceeds, at this threshold and without U."""
        if math.isinf(threshold):
            return 1 if self.ranked and threshold < 0 else n
        return max(1, min(n, self._largest_rank(threshold, n)))

    def _largest_rank(self, threshold: float, n: int) -> int:
        """The same at a finite threshold, in any range; a score that does not bound ranks gives n."""
        return n

    def numbers(self) -> dict[str, float]:
        """The options that are numbers."""
        return {name: value for name, value in self.options().items() if isinstance(value, int | float)}

    def options(self) -> dict[str, Any]:
        """The options that the score was built with, as JSON can hold them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@register_score
@dataclass(frozen=True)
class Lac(Score):
    """1 - p_y: the smallest sets on average; rows of doubt may get none."""

    name: ClassVar[str] = "lac"

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        return 1 - values

    def largest(self, n: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Ranked(Score):
    """A score that follows the ranking; subclasses give it for sorted probabilities."""

    ranked: ClassVar[bool] = True

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        xp = array_namespace(values)
        order = ranking(values)
        scores = self.ordered(xp.take_along_axis(values, order, axis=-1), u)
        return xp.take_along_axis(scores, xp.argsort(order, axis=-1, stable=True), axis=-1)

    def ordered(self, p: Array, u: Array | float) -> Array:
        """The scores of probabilities that fall along the row [B, n]."""
        raise NotImplementedError


def _ranks_like(p: Array) -> Array:
    xp = array_namespace(p)
    return xp.arange(1, p.shape[-1] + 1, dtype=p.dtype, device=device(p))


@register_score
@dataclass(frozen=True)
class Aps(Ranked):
    """Cumulated probability: sets that grow on hard rows. Long tails of small probabilities make them large."""

    name: ClassVar[str] = "aps"

    def ordered(self, p: Array, u: Array | float) -> Array:
        return array_namespace(p).cumulative_sum(p, axis=-1) - u * p

    def largest(self, n: int) -> float:
        return 1.0


@register_score
@dataclass(frozen=True)
class Raps(Aps):
    """APS with a penalty on ranks beyond ``k_reg``, which keeps sets short.

    Args:
        penalty: lambda, at least 0.
        k_reg: the rank up to which there is no penalty.
    """

    name: ClassVar[str] = "raps"
    penalty: float = 0.01
    k_reg: int = 5

    def __post_init__(self) -> None:
        check_option(self.penalty >= 0 and math.isfinite(self.penalty), "penalty must be at least 0", self.penalty)
        check_option(self.k_reg >= 0 and int(self.k_reg) == self.k_reg, "k_reg must be an integer from 0", self.k_reg)

    def ordered(self, p: Array, u: Array | float) -> Array:
        xp = array_namespace(p)
        beyond = xp.clip(_ranks_like(p) - self.k_reg, min=0)
        return super().ordered(p, u) + self.penalty * beyond

    def largest(self, n: int) -> float:
        return 1.0 + self.penalty * max(0, n - self.k_reg)

    def _largest_rank(self, threshold: float, n: int) -> int:
        return self.k_reg + math.floor(threshold / self.penalty + 1e-6) if self.penalty else n


@register_score
@dataclass(frozen=True)
class Saps(Ranked):
    """The largest probability and the rank alone: the other probabilities are taken to be noise.

    Args:
        weight: the cost of one rank, above 0.
    """

    name: ClassVar[str] = "saps"
    weight: float = 0.2

    def __post_init__(self) -> None:
        check_option(0 < self.weight < math.inf, "weight must be above 0", self.weight)

    def ordered(self, p: Array, u: Array | float) -> Array:
        xp = array_namespace(p)
        first, r = p[..., :1], _ranks_like(p)
        return xp.where(r == 1, u * first, first + (r - 1 - u) * self.weight)

    def largest(self, n: int) -> float:
        return 1.0 + (n - 1) * self.weight

    def _largest_rank(self, threshold: float, n: int) -> int:
        return 1 + math.floor(threshold / self.weight + 1e-6)


@register_score
@dataclass(frozen=True)
class Rank(Ranked):
    """The rank: the same number of classes for every row, the smallest k that covers often enough."""

    name: ClassVar[str] = "topk"

    def ordered(self, p: Array, u: Array | float) -> Array:
        return 0 * p + _ranks_like(p) - u

    def largest(self, n: int) -> float:
        return float(n)

    def _largest_rank(self, threshold: float, n: int) -> int:
        return math.floor(threshold)


@register_score
@dataclass(frozen=True)
class LogOdds(Score):
    """Minus the log-odds of a class being in the top-k set.

    It stands between ``lac`` and ``topk``: at k = 1 the sets are those of ``lac``; the larger k, the more a class is
    compared with its rivals for the last places alone, and the less sizes differ from row to row. It suits labels that
    are one of k right answers. Where one label is right and the softmax is calibrated, ``lac`` is the one to beat.

    Args:
        k: size of the set.
    """

    name: ClassVar[str] = "log_odds"
    k: int = 5

    def inputs(self, logits: Array, temperature: float, marginals: Array | None) -> Array:
        """Log-odds: of the marginals, or of the logits where these are tensors."""
        if marginals is not None:
            if temperature != 1.0:
                raise ValueError(f"marginals have a temperature already, got temperature={temperature} besides")
            return log_odds(marginals)
        if not is_torch_array(logits):
            raise TypeError("log-odds of numpy arrays come from an exported file's marginals: pass marginals=")
        from topk_registry.ops.ksubset import topk_log_odds

        return topk_log_odds(logits / temperature, self.k)

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        return -values

    def largest(self, n: int) -> float:
        return math.inf


@register_score
@dataclass(frozen=True)
class Pas(Score):
    """Minus the probability over the class's prior: spends the set on rare classes, for macro coverage.

    Args:
        prior: the share of each class in training [n].
        weights: how much each class matters [n]; None: all the same.
    """

    name: ClassVar[str] = "pas"
    learned: ClassVar[tuple[str, ...]] = ("prior",)
    prior: tuple[float, ...] = ()
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_option(len(self.prior) > 1 and min(self.prior) > 0, "prior must be positive, one a class", self.prior)
        if self.weights is not None:
            fits = len(self.weights) == len(self.prior) and min(self.weights) > 0
            check_option(fits, f"weights must be positive, one for each of {len(self.prior)} classes", self.weights)

    @property
    def scale(self) -> np.ndarray:
        """-weight / prior of each class [n]."""
        weights = np.ones(len(self.prior)) if self.weights is None else np.asarray(self.weights)
        return -weights / np.asarray(self.prior)

    def __call__(self, values: Array, u: Array | float = 0.0) -> Array:
        if values.shape[-1] != len(self.prior):
            raise ValueError(f"the prior has {len(self.prior)} classes, the rows have {values.shape[-1]}")
        xp = array_namespace(values)
        return values * xp.asarray(self.scale, dtype=values.dtype, device=device(values))

    def largest(self, n: int) -> float:
        return 0.0


def create_score(name: str | Score, **options: Any) -> Score:
    """A score by its name: ``create_score("raps", penalty=0.01, k_reg=5)``."""
    if isinstance(name, Score):
        if options:
            raise ValueError(f"{name} has its options already, got {', '.join(sorted(options))} besides")
        return name
    kind = score_kind(name)
    known = list(inspect.signature(kind).parameters)
    if unknown := set(options) - set(known):
        raise ValueError(
            f"score {kind.name} takes {', '.join(known) or 'no options'}, got {', '.join(sorted(unknown))}"
        )
    return kind(**options)


def score_names() -> tuple[str, ...]:
    """The names of all scores, ours and those of entry points ``topk_registry.scores``; none of these is imported."""
    return (*SCORES, *(name for name in registries.scores.names() if name not in SCORES))


def score_kind(name: str) -> type[Score]:
    """The class of a score, by its name with underscores or hyphens; a plug-in's is imported.

    A name of :data:`SCORES` stays that of its score, whatever is installed; ``distribution:name`` picks another.
    """
    owner, colon, bare = name.rpartition(":")
    bare = bare.replace("-", "_")
    if not owner and bare in SCORES:
        return SCORES[bare]
    asked = f"{owner}{colon}{bare}"
    if asked not in registries.scores:
        raise ValueError(f"no score is called {name!r}; there are {', '.join(score_names())}")
    kind = registries.scores.builder(asked)
    if not (isinstance(kind, type) and issubclass(kind, Score) and getattr(kind, "name", "") == bare):
        raise BrokenPluginError(
            f"{registries.scores.describe(asked)} is broken: expected a subclass of Score whose name is {bare!r}, "
            f"got {kind!r}"
        )
    return kind


def inputs_of(score: Score, logits: Array, *, temperature: float = 1.0, marginals: Array | None = None) -> Array:
    """The values [B, n] that a score takes: probabilities, or log-odds.

    Log-odds are computed from the logits where these are tensors; from an exported file they come as its marginals.
    """
    return score.inputs(logits, temperature, marginals)


def as_numpy(values: Array) -> np.ndarray:
    """A tensor or sequence on the CPU as a numpy array."""
    if not is_torch_array(values):
        return np.asarray(values)
    values = values.detach().cpu()
    return values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()  # numpy has none


def check_option(right: bool, wanted: str, got: float | Sequence[float]) -> None:
    """Raise unless an option of a score is right."""
    if not right:
        raise ValueError(f"{wanted}, got {got!r}")
