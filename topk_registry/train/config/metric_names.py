"""Names of the metrics that ``--eval-metric`` takes."""

import re

from topk_registry.train.errors import TrainError

METRIC = re.compile(r"(?:(macro|many|medium|few)[-_])?top(\d+)|nll|loss")


def parse_metric(name: str) -> str:
    """The column name of a metric as users write it: ``macro-top5`` is ``macro_top5``, timm's ``loss`` is ``nll``."""
    if not METRIC.fullmatch(name):
        raise TrainError(f"--eval-metric must be nll, topK, macro-topK, many-topK, medium-topK or few-topK for a "
                         f"number K, got {name!r}")  # fmt: skip
    return "nll" if name == "loss" else name.replace("-", "_")


def metric_sizes(name: str) -> list[int]:
    """The k to evaluate: 1, 5, and the metric's own."""
    match = METRIC.fullmatch(name)
    own = [int(match[2])] if match and match[2] else []
    return sorted({1, 5, *own})
