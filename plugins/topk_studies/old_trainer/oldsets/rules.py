"""Rules: how thresholds are found from calibration samples, and the promise of sets that have them.

:data:`RULES` is the one list of them: commands, help, plans, metadata and tests read names and promises there. A rule
is a function of the samples, which compute scores and ranks when it asks for them (:class:`CalibrationRows`): of arrays
in :mod:`topk_studies.old_trainer.oldsets.sets`, by the nodes of an exported graph in ``topk_export``.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from topk_studies.old_trainer.oldsets import thresholds
from topk_studies.old_trainer.oldsets.scores import Score
from topk_studies.old_trainer.oldsets.thresholds import Thresholds, check_alpha, fewest


class CalibrationRows(Protocol):
    """Calibration samples, seen by a rule. Scores are counted: minus infinity for classes that a set always has."""

    @property
    def score(self) -> Score: ...

    @property
    def labels(self) -> np.ndarray: ...  # [N]

    @property
    def n(self) -> int: ...

    @property
    def allow_empty(self) -> bool: ...

    def label_scores(self) -> np.ndarray:
        """The score of each label [N]."""
        ...

    def label_ranks(self) -> np.ndarray:
        """The rank of each label [N], from 1."""
        ...

    def all_scores(self) -> np.ndarray:
        """The scores of all classes that can be in a set [N, n], or of the best ones [N, M]."""
        ...


@dataclass(frozen=True)
class Rule:
    """A rule of thresholds.

    Args:
        find: takes samples and alpha, and the rule's options by keyword.
        promise: of its sets, in words, with ``{coverage}`` for 1 - alpha and ``{least}`` for 1 - 2 alpha.
        limits_ranks: its thresholds bound ranks, so that every score is looked at along the ranking.
        covers: it promises a coverage, for which there may be too few samples.
    """

    find: Callable[..., Thresholds]
    promise: str
    limits_ranks: bool = False
    covers: bool = True

    @property
    def options(self) -> dict[str, bool]:
        """The options by name, and whether they must be given."""
        given = list(inspect.signature(self.find).parameters.values())[2:]
        return {p.name: p.default is p.empty for p in given}


def find_thresholds(samples: CalibrationRows, alpha: float, rule: str, **options: Any) -> Thresholds:
    """The thresholds of a rule."""
    check_rule(rule, options)
    if RULES[rule].covers:
        check_size(len(samples.labels), alpha)
    return RULES[rule].find(samples, alpha, **options)


def check_rule(rule: str, options: Mapping[str, Any]) -> None:
    """Raise unless there is such a rule, and it takes these options."""
    if rule not in RULES:
        raise ValueError(f"no rule is called {rule!r}; there are {', '.join(RULES)}")
    known = RULES[rule].options
    needed = {name for name, must in known.items() if must}
    if set(options) - set(known) or needed - set(options):
        takes, got = ", ".join(known) or "no options", ", ".join(sorted(options)) or "none"
        raise ValueError(f"rule {rule} takes {takes}, got {got}")


def check_size(count: int, alpha: float) -> None:
    """Raise unless this many calibration samples give a finite threshold."""
    check_alpha(alpha)
    if count < fewest(alpha):
        raise ValueError(
            f"{count} calibration samples are too few for alpha = {alpha:g}: it takes {fewest(alpha)}, or alpha of at "
            f"least {math.ceil(1e4 / (count + 1)) / 1e4:g}"
        )


def _marginal(samples: CalibrationRows, alpha: float) -> Thresholds:
    return Thresholds(thresholds.marginal(samples.label_scores(), alpha))


def _per_class(samples: CalibrationRows, alpha: float) -> Thresholds:
    return Thresholds(thresholds.per_class(samples.label_scores(), samples.labels, samples.n, alpha))


def _per_node(samples: CalibrationRows, alpha: float, *, parents: Sequence[int]) -> Thresholds:
    own = thresholds.per_node(samples.label_scores(), samples.labels, samples.n, alpha, parents=parents)
    return Thresholds(own)


def _interpolated(
    samples: CalibrationRows, alpha: float, *, share: float = 0.5, largest: float | None = None
) -> Thresholds:
    bound = samples.score.largest(samples.n) if largest is None else largest
    return Thresholds(
        thresholds.interpolated(samples.label_scores(), samples.labels, samples.n, alpha, share=share, largest=bound)
    )


def _clustered(samples: CalibrationRows, alpha: float, *, clusters: int | None = None, seed: int = 0) -> Thresholds:
    return Thresholds(
        thresholds.clustered(samples.label_scores(), samples.labels, samples.n, alpha, clusters=clusters, seed=seed)
    )


def _rc3p(samples: CalibrationRows, alpha: float) -> Thresholds:
    return thresholds.rc3p(samples.label_scores(), samples.label_ranks(), samples.labels, samples.n, alpha)


def _average_size(samples: CalibrationRows, alpha: float, *, size: float) -> Thresholds:
    if size < 1 and not samples.allow_empty:
        raise ValueError(f"the mean size of sets that may not be empty is at least 1, got {size!r}: let them be empty")
    return Thresholds(thresholds.average_size(samples.all_scores(), size))


RULES = {
    "marginal": Rule(_marginal, "the label is in the set with probability at least {coverage:g}"),
    "per_class": Rule(_per_class, "within each class the label is in the set with probability at least {coverage:g}"),
    "per_node": Rule(
        _per_node,
        "within each class with enough calibration samples the label is in the set with probability at least "
        "{coverage:g}; a rarer class has the threshold of the node around it, and nothing is promised for it alone",
    ),
    "interpolated": Rule(_interpolated, "the label is in the set with probability at least {least:g}"),
    "clustered": Rule(
        _clustered,
        "the label is in the set with probability near {coverage:g}, class by class as far as clusters hold classes of "
        "like scores",
    ),
    "rc3p": Rule(
        _rc3p,
        "within each class the label is in the set with probability near {coverage:g}; top-k rates are estimates",
        limits_ranks=True,
    ),
    "average_size": Rule(
        _average_size,
        "none on coverage: the mean size of the sets is that wanted, on the calibration samples",
        covers=False,
    ),
}
