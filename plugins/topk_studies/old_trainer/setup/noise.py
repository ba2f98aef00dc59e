"""Wrong labels for training: drawn by ``--label-noise``, or taken from ``--label-file``."""

import numpy as np

from topk_registry.data.labels import Labels, superclasses_of
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.data.label_files import labels_from_file
from topk_studies.old_trainer.data.noise import (
    annotated_labels,
    confused_labels,
    small_images,
    uniform_labels,
    weaker_model,
)
from topk_studies.old_trainer.data.recipes import Indices, noisy_labels


def check_noise(config: TrainConfig) -> None:
    """Refuse settings of label noise that are wrong, or do not belong together."""
    if not 0.0 <= config.label_noise <= 1.0:
        raise DataError(f"--label-noise must be in [0, 1], got {config.label_noise}")
    if config.label_noise and config.label_file:
        raise DataError("--label-noise and --label-file both make labels wrong: give one of them")
    if config.label_noise_kind != "family" and not config.label_noise:
        raise DataError(f"--label-noise-kind {config.label_noise_kind} needs --label-noise")
    if config.label_column and not config.label_file:
        raise DataError(f"--label-column {config.label_column} needs --label-file")


def noisy_of(
    config: TrainConfig, train: object, labels: Labels, indices: Indices, num_classes: int
) -> tuple[Labels | None, list[str]]:
    """The labels to train on [N], None where they are the data's own, and what to say of them.

    Args:
        config: the run's settings.
        train: the training split.
        labels: its labels [N].
        indices: the samples in use.
        num_classes: n.
    """
    if config.label_file:
        try:
            noisy = labels_from_file(config.label_file, config.label_column, labels, num_classes)
        except ValueError as error:
            raise DataError(f"{error}") from error
        said = f"labels of {config.label_file}"
    elif config.label_noise:
        noisy = _drawn(config, train, labels, indices, num_classes)
        kind = "" if config.label_noise_kind == "family" else f" ({config.label_noise_kind})"
        said = f"label noise {config.label_noise:g}{kind}"
    else:
        return None, []
    changed = int((noisy[indices] != labels[indices]).sum())
    return noisy, [f"{said}: {changed} of {len(indices)} training labels differ"]


def _drawn(config: TrainConfig, train: object, labels: Labels, indices: Indices, num_classes: int) -> Labels:
    share, seed, kind = config.label_noise, config.seed, config.label_noise_kind
    if kind == "family":
        return noisy_labels(labels, superclasses_of(train, config.superclasses), share, seed=seed)
    used = labels[indices]  # the share is of the samples in use, exactly
    if kind == "uniform":
        wrong = uniform_labels(used, num_classes, share, seed=seed)
    elif kind == "annotators":
        wrong = annotated_labels(used, superclasses_of(train, config.superclasses), share, seed=seed)
    else:
        log_p = weaker_model(small_images(train, indices), used, num_classes, seed=seed)
        wrong = confused_labels(used, log_p, share, seed=seed)
    noisy = np.array(labels)
    noisy[indices] = wrong
    return noisy
