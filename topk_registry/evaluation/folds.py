"""Scores of a training split from models that were not trained on the images they score.

The split is divided into folds. For each fold the run of a checkpoint is trained again on the others, by its own
settings, and scores the fold. Each training is a run of ``timm train`` in a folder of its own: an interrupted one goes
on at its last checkpoint, a finished one is not repeated.
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from topk_registry.data.corrections import digest_of
from topk_registry.data.labels import Labels, is_indexed, labels_of
from topk_registry.data.names import class_words, sample_names
from topk_registry.data.recipes import Indices, Selection
from topk_registry.evaluation.images import Images
from topk_registry.evaluation.models import CHECKPOINTS, Checkpoint, Running, find_file, refuse_several_labels
from topk_registry.evaluation.predictions import Predictions, predict
from topk_registry.train.config.config import TrainConfig
from topk_registry.train.engine.resume import FREE
from topk_registry.train.engine.run import Run
from topk_registry.train.engine.trainer import Trainer
from topk_registry.train.errors import TrainError
from topk_registry.train.report.console import csv_text, write_text
from topk_registry.train.setup.datasets import Data, corrections_of, open_data
from topk_registry.train.setup.models import channels_of

LAST, HELD, FINISHED = "last.pth.tar", "held_out.csv", "finished"
# of a fold's run: nothing is evaluated or logged on the way, and every image of the training split has its turn
FOLD: dict[str, Any] = {
    "val_split": "",
    "val_fold": 0,
    "early_stop": 0,
    "eval_metric": "top1",
    "checkpoint_hist": 1,
    "start_epoch": None,
    "no_resume_opt": False,
    "dry_run": False,
    "logger": [],
    "logger_opt": {},
    "log_wandb": False,
    "wandb_tags": [],
    "wandb_resume_id": "",
}


@dataclass(frozen=True)
class Folds:
    """A training split in parts.

    Args:
        config: the settings of the run that is repeated.
        data: the split as that run trained on it, with its labels.
        number: the fold of each image [N], from 0.
        folder: holds a run a fold, and their scores.
    """

    config: TrainConfig
    data: Data
    number: Indices
    folder: Path

    @property
    def count(self) -> int:
        return int(self.number.max()) + 1

    @property
    def labels(self) -> Labels:
        return labels_of(self.data.train)

    @property
    def notes(self) -> list[str]:
        """Sentences on what makes the scores less than out of sample."""
        counts, notes = np.bincount(self.labels), []
        if weights := self.config.initial_checkpoint or self.config.pretrained_path:
            notes.append(f"every fold begins with the weights of {weights}, which must not know these labels")
        if single := int((counts == 1).sum()):
            notes.append(f"{single} classes have one image, which no fold can judge: it is called suspicious")
        return notes

    def together(self, groups: Iterable[Sequence[int]]) -> "Folds":
        """The same folds with the images of each group in one: a model that saw the copy would know the label."""
        number = self.number.copy()
        for members in groups:
            number[list(members)] = number[members[0]]
        return replace(self, number=number)

    def images(self, indices: Indices | None = None) -> Images:
        """The images of the split, or some of them."""
        dataset = self.data.train if indices is None else Selection(self.data.train, indices, self.labels)
        config = self.config.replace(val_split=self.config.train_split)
        return Images(config, Data(None, dataset, self.data.class_names, self.data.counts))

    def predictions(self, running: Running, *, on_epoch: Callable[[int, int], object] | None = None) -> Predictions:
        """Train on all folds but one, score that one, and put the parts together.

        Args:
            running: how models are run.
            on_epoch: called after each epoch of training with the numbers of the fold and of the epoch, from 0.

        Raises:
            Interrupted: by a signal; the same call goes on where it stopped.
        """
        logits, labels, classes = None, self.labels, ()
        for fold in np.unique(self.number).tolist():
            held = np.flatnonzero(self.number == fold)
            checkpoint = self._trained(fold, held, on_epoch)
            name = f"scores of fold {fold + 1} of {self.count}"
            part = predict(Checkpoint(checkpoint, running), self.images(held), name=name, folder=self.folder / "scores")
            if logits is None:
                logits, classes = np.empty((len(labels), part.logits.shape[1]), np.float32), part.class_names
            logits[held] = part.logits
        assert logits is not None
        return Predictions(f"{self.count} folds", logits, labels, classes, self.images())

    def _trained(self, fold: int, held: Indices, on_epoch: Callable[[int, int], object] | None) -> Path:
        """The checkpoint of the run without a fold; trained if it is not there."""
        folder = self.folder / f"fold-{fold + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        self._hold_out(folder / HELD, held)
        config = self.config.replace(
            exclude=str(folder / HELD), output=str(self.folder), experiment=folder.name, resume="auto"
        )
        key = _key(config)
        if not (_text(folder / FINISHED) == key and (folder / LAST).is_file()):
            _train(config, f"training without fold {fold + 1} of {self.count}", fold, on_epoch)
            write_text(folder / FINISHED, key)
        return folder / LAST

    def _hold_out(self, file: Path, held: Indices) -> None:
        """Write the rows that keep a fold, and what the run left out before, out of training.

        Labels are those in use, under a name that ``--exclude`` does not read: relabelled ones are not the data's. They
        tell the trainings on other labels apart.
        """
        names = sample_names(self.data.train, self.config.data_dir)
        words, labels = class_words(self.data.class_names, int(self.labels.max()) + 1), self.labels
        rows = [(names[i], words[labels[i]]) for i in held.tolist()]
        before = corrections_of(self.config).get("exclude")
        rows += [(row.image, row.label) for row in before.rows] if before else []
        write_text(file, csv_text([{"image": image, "trained_label": label} for image, label in rows]))


def open_folds(
    checkpoint: str | Path, count: int, *, folder: str | Path | None = None, settings: Mapping[str, Any] | None = None
) -> Folds:
    """Divide the training split of a run, so that each class is spread over the folds.

    Args:
        checkpoint: of the run, or its folder.
        count: folds, at least 2.
        folder: of the folds' runs; by default ``folds-COUNT`` beside the checkpoint.
        settings: other settings than those of the run, by name.

    Raises:
        TrainError: the file is no checkpoint of ``timm train``, or its data cannot be divided.
    """
    path = find_file(checkpoint)
    refuse_several_labels(path)
    return folds_of(recipe_of(path).replace(**(settings or {})), count, folder or path.parent / f"folds-{count}")


def folds_of(config: TrainConfig, count: int, folder: str | Path) -> Folds:
    """Divide the training split that settings name; see :func:`open_folds`."""
    config = config.replace(**FOLD)
    data = open_data(config, channels=channels_of(config))
    if not is_indexed(data.train):
        raise TrainError(f"--dataset {config.dataset} is a stream: --folds needs samples that can be picked")
    labels = labels_of(data.train)
    if not 2 <= count <= len(labels):
        raise TrainError(f"--folds must be between 2 and the number of images, {len(labels)}, got {count}")
    return Folds(config, data, fold_numbers(labels, count, seed=config.seed), Path(folder))


def fold_numbers(labels: Labels, count: int, *, seed: int) -> Indices:
    """The fold of each sample [N], from 0: those of a class take turns in random order.

    Example:
        >>> fold_numbers(np.array([0, 0, 0, 1, 1, 1]), 3, seed=0)
        array([0, 1, 2, 0, 2, 1])
    """
    order = np.random.default_rng([seed, 17]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    numbers = np.empty(len(labels), np.int64)
    numbers[order] = np.arange(len(labels)) % count
    return numbers


def recipe_of(checkpoint: Path) -> TrainConfig:
    """All settings of the run that wrote a checkpoint.

    Raises:
        TrainError: it holds none.
    """
    from timm.utils.checkpoint_saver import load_checkpoint_metadata

    if not checkpoint.name.endswith(CHECKPOINTS):
        raise TrainError(f"--folds trains again, and needs a checkpoint of timm train, got {checkpoint}")
    try:
        content = load_checkpoint_metadata(str(checkpoint))
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise TrainError(f"cannot read {checkpoint}: {error}") from error
    saved = content.get("args") if isinstance(content, dict) else None
    if not isinstance(saved, (Namespace, dict)):
        raise TrainError(f"{checkpoint} holds no settings of timm train, which --folds trains again by")
    config = TrainConfig.from_dict(saved if isinstance(saved, dict) else vars(saved))
    if config.class_parallel:
        raise TrainError(f"{checkpoint} was trained with --class-parallel, which --folds cannot repeat in one process")
    return config


def _train(config: TrainConfig, title: str, fold: int, on_epoch: Callable[[int, int], object] | None) -> None:
    with tqdm(desc=title, unit=" epochs", disable=None) as bar:

        def tell(_: Run, row: Mapping[str, float]) -> None:
            bar.set_postfix_str(f"loss {row['train_loss']:.3f}", refresh=False)
            bar.update()
            if on_epoch is not None:
                on_epoch(fold, int(row["epoch"]) - 1)

        trainer = Trainer(config, quiet=True, on_epoch=tell)
        run = trainer.start()
        bar.total = run.num_epochs
        bar.update(run.progress.epoch)
        trainer.fit()


def _key(config: TrainConfig) -> str:
    """What tells the run of a fold: the settings that decide what it learns, and the content of its files."""
    settings = {name: value for name, value in config.to_dict().items() if name not in (*FREE, "exclude", "relabel")}
    files = [digest_of(file) for file in (config.exclude, config.relabel, config.superclasses, config.class_map)]
    text = json.dumps([settings, config.epochs, files], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
