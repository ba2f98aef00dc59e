"""The plan of a calibration, and the purpose of each sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from topk_registry.folders.trees import ClassTree
from topk_registry.oldsets import RULES, Tree, create_score
from topk_registry.oldsets.rules import check_rule, check_size
from topk_registry.oldsets.scores import score_kind
from topk_registry.oldsets.thresholds import check_alpha
from topk_registry.oldsets.tuning import is_tuned

MAX_SIZE = 256  # beyond it ranking costs more than the top-k head does at 21,841 classes, and nobody reads the set


@dataclass(frozen=True)
class Plan:
    """Score, rule and level of a calibration, and the shares of its samples.

    Args:
        score: a name of :data:`topk_registry.oldsets.SCORES`.
        alpha: the share of labels that may be missed.
        rule: one threshold for all classes, or another rule of :data:`topk_registry.oldsets.RULES`.
        options: of the score; what is not given is tuned, where the score has something to tune.
        rule_options: of the rule.
        temperature: divides the logits; None fits it by the likelihood of the labels.
        report, tune: the share of samples that report, and of the others that tune where something is tuned.
        max_size: the most classes that a ranked set looks at.
        class_weights: how much each class matters to ``pas`` [n].
        allow_empty: let sets be empty.
        seed: of the split.
        tree: of the classes, for score ``tree`` and rule ``per_node``.
    """

    score: str = "lac"
    alpha: float = 0.1
    rule: str = "marginal"
    options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = 1.0
    report: float = 0.5
    tune: float = 0.2
    max_size: int = MAX_SIZE
    class_weights: tuple[float, ...] | None = None
    allow_empty: bool = False
    seed: int = 0
    tree: ClassTree | None = None

    @property
    def tunes(self) -> bool:
        """True where anything is chosen by data."""
        learned = bool(score_kind(self.score).learned)
        return self.temperature is None or learned or is_tuned(self.score, dict(self.options))

    @property
    def score_options(self) -> dict[str, Any]:
        """The options of the score, class weights among them."""
        return {**self.options, **({} if self.class_weights is None else {"weights": self.class_weights})}

    @property
    def all_rule_options(self) -> dict[str, Any]:
        """The options of the rule, the tree among them where it takes one."""
        takes = self.tree is not None and "parents" in (RULES[self.rule].options if self.rule in RULES else ())
        return {**self.rule_options, **({"parents": self.tree.parents} if takes and self.tree else {})}


def split(count: int, plan: Plan) -> dict[str, np.ndarray]:
    """Draw the samples that report, tune and calibrate."""
    if not 0 < plan.report < 1 or not 0 <= plan.tune < 1:
        raise ValueError(f"shares of samples must be between 0 and 1, got report {plan.report} and tune {plan.tune}")
    order = np.random.default_rng(plan.seed).permutation(count)
    reports = round(plan.report * count)
    tunes = round(plan.tune * (count - reports)) if plan.tunes else 0
    parts = np.split(order, [reports, reports + tunes])
    return dict(zip(("report", "tune", "calibrate"), map(np.sort, parts), strict=True))


def check(plan: Plan, parts: Mapping[str, np.ndarray], n: int, *, groups: bool = False) -> None:
    """Refuse, before any image is read, what cannot work.

    Args:
        plan: to check.
        parts: as :func:`split` draws them.
        n: number of classes.
        groups: the samples have groups.
    """
    check_alpha(plan.alpha)
    _check_tree(plan, n)
    if groups and plan.rule != "marginal":
        raise ValueError(f"thresholds are by group or by rule {plan.rule}: groups take rule marginal")
    check_rule(plan.rule, plan.all_rule_options)
    if RULES[plan.rule].covers:
        check_size(len(parts["calibrate"]), plan.alpha)
    if plan.tunes and not len(parts["tune"]):
        raise ValueError(f"score {plan.score} is tuned on samples of its own, and tune = {plan.tune:g} leaves none")
    if plan.class_weights is not None and len(plan.class_weights) != n:
        raise ValueError(f"expected a class weight for each of the file's {n} classes, got {len(plan.class_weights)}")
    learned = dict.fromkeys(score_kind(plan.score).learned, (1 / n,) * n)  # by class, from samples to come
    create_score(plan.score, **learned, **plan.score_options)
    if plan.max_size < 1:
        raise ValueError(f"max_size must be at least 1, got {plan.max_size}")
    if plan.temperature is not None and not 0 < plan.temperature < np.inf:
        raise ValueError(f"the temperature must be above 0 and finite, got {plan.temperature!r}")


def _check_tree(plan: Plan, n: int) -> None:
    """Raise unless the tree is there where it is needed, of the file's classes, and used."""
    by_tree = score_kind(plan.score) is Tree
    takes = by_tree or plan.rule == "per_node"
    if takes and plan.tree is None:
        raise ValueError(
            f"{'score tree' if by_tree else 'rule per-node'} needs the tree of the classes: pass --tree FILE"
        )
    if plan.tree is not None and not takes:
        raise ValueError(f"a tree is for score tree or rule per-node, got score {plan.score} and rule {plan.rule}")
    if plan.tree is not None and plan.tree.num_classes != n:
        raise ValueError(f"the tree has {plan.tree.num_classes} classes, the file {n}")
    if by_tree and plan.rule not in ("marginal", "average_size"):
        raise ValueError(
            f"sets that are nodes have one threshold, or one a group: score tree takes no rule {plan.rule}"
        )
