"""Invented records of studies."""

import random

from topk_studies.engine.store import canonical, unique
from topk_studies.engine.study import Record

from .conftest import trained

METRICS = ("top1", "top5", "macro_top1", "macro_top5", "many_top5", "medium_top5", "few_top5")
OF_SETS = ("set_mean_size", "set_coverage")  # measures of prediction sets
OF_SEVERAL = ("map", "macro_f1", "micro_f1", "top5_recall")  # metrics of several labels an image


def invented(configuration) -> Record:
    """A record of plausible numbers that depend on the configuration alone."""
    words = canonical(configuration)
    draw, several, sets = (random.Random(kind + words) for kind in ("", "several ", "sets "))
    rows = [
        {
            **{name: draw.uniform(10, 90) for metric in METRICS for name in (metric, f"test_{metric}")},
            **{name: several.uniform(10, 90) for metric in OF_SEVERAL for name in (metric, f"test_{metric}")},
            **{name: sets.uniform(1, 90) for metric in OF_SETS for name in (metric, f"test_{metric}")},
            "train_loss": 1.0,
            "nonzero": draw.random(),
            "train_top1": 50.0,
            "train_top5": 60.0,
        }
        for _ in range(3)
    ]
    record = trained(configuration, rows)
    if "crops" in configuration:
        from topk_studies.experiments.multi_crop import WAYS

        ways = {way: {"top1": draw.uniform(10, 90), "top5": draw.uniform(10, 90)} for way in WAYS}
        record = Record(**{**vars(record), "kind": "multi-crop", "result": {"temperature": 0.5, "ways": ways}})
    return record


def finished(study, options) -> list[Record]:
    """All records that a study comes to want, invented."""
    known: dict[str, Record] = {}
    while True:
        wanted = unique(study.configurations(options, list(known.values())))
        new = [configuration for configuration in wanted if canonical(configuration) not in known]
        if not new:
            return [known[canonical(configuration)] for configuration in wanted]
        known |= {canonical(configuration): invented(configuration) for configuration in new}
