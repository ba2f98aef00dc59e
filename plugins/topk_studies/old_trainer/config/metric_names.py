"""Names of the metrics that ``--eval-metric`` takes."""

import re

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.tasks import CLASSIFICATION, MULTILABEL

METRIC = re.compile(r"(?:(macro|many|medium|few)[-_])?top([1-9]\d*)|nll|loss")
MULTILABEL_METRIC = re.compile(r"map|(?:micro|macro|sample)_f1|exact_match|top([1-9]\d*)_recall|bce")
# where a smaller value is a better one
LOSSES = ("nll", "bce")


def parse_metric(name: str, task: str = CLASSIFICATION) -> str:
    """The column name of a metric as users write it: ``macro-top5`` is ``macro_top5``, timm's ``loss`` is ``nll``."""
    if task == MULTILABEL:
        column = "bce" if name == "loss" else name.replace("-", "_").lower()
        if not MULTILABEL_METRIC.fullmatch(column):
            raise TrainError(f"with --task multilabel --eval-metric must be map, micro-f1, macro-f1, sample-f1, "
                             f"exact-match, bce, or topK-recall for a number K, got {name!r}")  # fmt: skip
        return column
    if not METRIC.fullmatch(name):
        raise TrainError(f"--eval-metric must be nll, topK, macro-topK, many-topK, medium-topK or few-topK for a "
                         f"number K, got {name!r}")  # fmt: skip
    return "nll" if name == "loss" else name.replace("-", "_")


def metric_sizes(name: str) -> list[int]:
    """The k to evaluate: 1, 5, and the metric's own."""
    match = re.search(r"top(\d+)", name)
    return sorted({1, 5, *([int(match[1])] if match else [])})
