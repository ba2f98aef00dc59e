"""The sampler of a run: how often each training image comes, from the flags and the training labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from topk_registry.data.labels import is_indexed, labels_of
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.sampling import sampler_of
from topk_studies.old_trainer.data.sampling import Draw, expected_copies


def create_draw(config: TrainConfig, dataset: Any) -> Draw | None:
    """The draw of an epoch's images; None where each comes once.

    Raises:
        DataError: the samples cannot be picked, or have no class each.
    """
    law = sampler_of(config.sampler, config.retrain_head)
    if law == "instance":
        return None
    if not is_indexed(dataset):
        check_indexed(config, config.dataset)
    labels = labels_of(dataset)
    if labels.ndim != 1:
        raise DataError(f"--sampler {law} needs one class for each image, got labels {list(labels.shape)}")
    copies = expected_copies(labels, law, beta=config.sampler_beta, threshold=config.sampler_threshold)
    return Draw(labels, copies)


def check_indexed(config: TrainConfig, name: str) -> None:
    """Raise a DataError where a sampler is asked for; ``name`` is data whose images cannot be picked by it."""
    law = sampler_of(config.sampler, config.retrain_head)
    if law != "instance":
        given = "" if config.sampler else " (--retrain-head brings it: --sampler instance goes without)"
        raise DataError(
            f"--sampler {law} needs data whose images can be picked, and {name} yields them in its own order{given}"
        )


def told_draw(config: TrainConfig, draw: Draw | None, class_names: Sequence[str] | None) -> list[str]:
    """A sentence on the sampler, for the plan of a run: the length of an epoch, and how often images come."""
    if draw is None:
        return []
    counts = np.bincount(draw.labels)
    copies = dict(zip(draw.labels.tolist(), draw.copies.tolist(), strict=True))  # the same for all images of a class
    names = class_names or []

    def shown(c: int) -> str:
        return f"{copies[c]:.3g} times (class {names[c] if c < len(names) else c}, {counts[c]} of them)"

    least, most = min(copies, key=copies.__getitem__), max(copies, key=copies.__getitem__)
    law = sampler_of(config.sampler, config.retrain_head)
    return [
        f"--sampler {law}: {len(draw)} images an epoch, of {len(draw.labels)}; an image comes from {shown(least)} to "
        f"{shown(most)}"
    ]
