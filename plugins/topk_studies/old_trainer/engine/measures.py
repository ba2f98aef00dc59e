"""Further measurements of an evaluation: progress, ImageNet's real labels, precision and recall."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from timm.data import RealLabelsImagenet
from torch import Tensor

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.engine.sets import LabelSetEvaluation, SetEvaluation
from topk_studies.old_trainer.folders.agreement import agreement
from topk_studies.old_trainer.folders.groups import read_groups
from topk_studies.old_trainer.folders.trees import read_tree
from topk_studies.old_trainer.setup.pictures import path_of


class Observer(Protocol):
    """Sees the probabilities [B, n] and labels [B] of each batch of an evaluation."""

    def update(self, probabilities: Tensor, target: Tensor) -> None: ...

    def results(self) -> dict[str, float]: ...


class Progress:
    """A line of progress every ``every`` batches."""

    def __init__(self, every: int, total: int) -> None:
        self.every, self.total, self.batches, self.seen, self.began = every, total, 0, 0, time.perf_counter()

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        self.batches, self.seen = self.batches + 1, self.seen + len(target)
        if self.batches % self.every == 0:
            rate = self.seen / (time.perf_counter() - self.began)
            print(f"{self.seen}/{self.total} images, {rate:.0f} img/s", file=sys.stderr, flush=True)

    def results(self) -> dict[str, float]:
        return {}


class RealLabels:
    """Accuracy on ImageNet's real labels (Beyer et al. 2020), in the place of top-1 and top-5."""

    def __init__(self, filenames: list[str], file: str) -> None:
        try:
            self.labels = RealLabelsImagenet(filenames, real_json=file)
        except (OSError, json.JSONDecodeError, AssertionError) as error:
            raise TrainError(f"--real-labels {file} does not fit the {len(filenames)} images: {error}") from error

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        try:
            self.labels.add_result(probabilities)
        except KeyError as error:
            raise TrainError(f"--real-labels: {error} is no file of ImageNet's validation split") from error

    def results(self) -> dict[str, float]:
        accuracy: Any = self.labels.get_accuracy()
        return {f"top{k}": accuracy[k] for k in (1, 5)}


class LabelCheck:
    """Say on stderr where labels look as if they stood for other classes.

    Args:
        classes: the names of the classes.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = classes
        self.best: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        self.best.append(probabilities.argmax(1).cpu())
        self.labels.append(target.cpu())

    def results(self) -> dict[str, float]:
        accuracy = agreement(torch.cat(self.best).numpy(), torch.cat(self.labels).numpy(), self.classes)
        if accuracy.suspicion:
            print(f"timm validate: {accuracy.suspicion}. Are these the model's classes?", file=sys.stderr)
        return {}


class Precision:
    """Precision, recall and F1 of the best class, by scikit-learn."""

    def __init__(self, average: str) -> None:
        self.average = average
        self.predicted: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        self.predicted.append(probabilities.argmax(1).cpu())
        self.labels.append(target.cpu())

    def results(self) -> dict[str, float]:
        from sklearn.metrics import precision_recall_fscore_support

        labels, predicted = torch.cat(self.labels).numpy(), torch.cat(self.predicted).numpy()
        measure: Any = precision_recall_fscore_support
        values = measure(labels, predicted, average=self.average, zero_division=0)
        names = ("precision", "recall", "f1_score")
        return {f"{self.average}_{name}": 100 * float(value) for name, value in zip(names, values, strict=False)}


def create(
    args: Namespace,
    dataset: Any,
    *,
    seed: int,
    class_counts: Sequence[int] | None,
    several: bool = False,
    names: Sequence[str] = (),
    folder: Path | None = None,
) -> list[Observer]:
    """The measurements that the flags of ``timm validate`` ask for, of images with one label or several.

    Args:
        args: the flags.
        dataset: that is evaluated.
        seed: of the samples that calibrate sets.
        class_counts: training samples of each class.
        several: images have several labels.
        names: of the classes.
        folder: of the images, where they are files; tables of groups name paths below it.
    """
    total = len(dataset) if hasattr(dataset, "__len__") else 0
    observers: list[Observer] = [Progress(args.log_freq, total)]
    if args.real_labels:
        if not hasattr(dataset, "filenames"):
            raise TrainError("--real-labels needs a data set of files")
        observers.append(RealLabels(dataset.filenames(basename=True), args.real_labels))
    if args.sets and several:
        if args.sets_opt:
            raise TrainError(f"--sets-opt is of scores, and --task multilabel has none: got {', '.join(args.sets_opt)}")
        observers.append(LabelSetEvaluation(args.sets, args.alpha, seed=seed))
    elif score := args.sets or ("tree" if args.tree else ""):
        options, groups = _set_options(args, score, names), _groups(args, dataset, folder)
        observers.append(SetEvaluation(score, args.alpha, options, seed=seed, class_counts=class_counts, groups=groups))
    elif args.max_nodes is not None or args.groups:
        raise TrainError("--max-nodes and --groups are of prediction sets: name their score by --sets")
    if args.metrics_avg:
        try:
            import sklearn  # noqa: F401
        except ImportError as error:
            raise TrainError("--metrics-avg needs scikit-learn: pip install scikit-learn") from error
        observers.append(Precision(args.metrics_avg))
    return observers


def _set_options(args: Namespace, score: str, names: Sequence[str]) -> dict[str, Any]:
    """The options of the sets' score, the tree of the classes among them."""
    options = dict(args.sets_opt or {})
    if score != "tree":
        for flag in ("tree", "max_nodes"):
            if getattr(args, flag):
                raise TrainError(f"--{flag.replace('_', '-')} is of score tree, got --sets {score}")
        return options
    if args.max_nodes is not None:
        options["nodes"] = args.max_nodes
    if args.tree:
        try:
            options["parents"] = read_tree(args.tree, names).parents
        except (OSError, ValueError) as error:
            raise TrainError(f"--tree: {error}") from error
    elif "parents" not in options:
        raise TrainError("score tree needs the tree of the classes: pass --tree FILE")
    return options


def _groups(args: Namespace, dataset: Any, folder: Path | None) -> tuple[str, ...] | None:
    """The group of each sample, of a table; None where there is none."""
    if not args.groups:
        if args.group_column:
            raise TrainError("--group-column is a column of --groups FILE, which is not given")
        return None
    if not hasattr(dataset, "__len__"):
        raise TrainError("--groups tells the group of each sample, and the samples of a stream have no order")
    try:
        table = read_groups(args.groups, column=args.group_column or "group")
        if folder is None:
            return table.in_order(len(dataset))
        return table.below([path_of(dataset, i) for i in range(len(dataset))], folder)
    except (OSError, ValueError) as error:
        raise TrainError(f"--groups: {error}") from error


def valid_labels(file: str) -> Tensor | None:
    """The classes that an evaluation keeps, from a file with one index a line."""
    if not file:
        return None
    try:
        return torch.tensor([int(line) for line in Path(file).read_text(encoding="utf-8").split()])
    except (OSError, ValueError) as error:
        raise TrainError(f"--valid-labels {file}: {error}") from error
