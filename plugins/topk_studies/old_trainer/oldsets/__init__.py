"""Prediction sets with guaranteed coverage (split conformal prediction), for torch tensors and numpy arrays alike.

Sets of several labels miss at most a wanted share of them on average (conformal risk control).

The scores and thresholds are written once, against the Python array API, so that a set computed in the trainer, in a
notebook and from an exported file is the same set. Nothing here imports torch unless it is given tensors.
"""

from topk_studies.old_trainer.oldsets.coverage import binomial_interval, coverage_interval, coverage_law
from topk_studies.old_trainer.oldsets.label_summary import LabelCounts, false_negative_rates
from topk_studies.old_trainer.oldsets.label_thresholds import ClassThresholds, best_f1
from topk_studies.old_trainer.oldsets.martingale import ExchangeabilityTest
from topk_studies.old_trainer.oldsets.risk import LabelSets, false_negative_control, risk_control
from topk_studies.old_trainer.oldsets.rules import RULES
from topk_studies.old_trainer.oldsets.scores import (
    SCORES,
    Score,
    create_score,
    inputs_of,
    log_odds,
    probabilities,
    register_score,
    score_names,
)
from topk_studies.old_trainer.oldsets.sets import PredictionSets, calibrate
from topk_studies.old_trainer.oldsets.summary import SetCounts
from topk_studies.old_trainer.oldsets.thresholds import (
    Thresholds,
    average_size,
    clustered,
    interpolated,
    marginal,
    per_class,
    per_group,
    per_node,
    rc3p,
)
from topk_studies.old_trainer.oldsets.tree import Tree
from topk_studies.old_trainer.oldsets.tuning import fit_softmax_temperature, tune

__all__ = [
    "RULES",
    "SCORES",
    "ClassThresholds",
    "ExchangeabilityTest",
    "LabelCounts",
    "LabelSets",
    "PredictionSets",
    "Score",
    "SetCounts",
    "Thresholds",
    "Tree",
    "average_size",
    "best_f1",
    "binomial_interval",
    "calibrate",
    "clustered",
    "coverage_interval",
    "coverage_law",
    "create_score",
    "false_negative_control",
    "false_negative_rates",
    "fit_softmax_temperature",
    "inputs_of",
    "interpolated",
    "log_odds",
    "marginal",
    "per_class",
    "per_group",
    "per_node",
    "probabilities",
    "rc3p",
    "register_score",
    "risk_control",
    "score_names",
    "tune",
]
