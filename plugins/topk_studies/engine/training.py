"""Training runs as studies share them: one run of ``timm train``, measured on a test split besides.

A configuration is the run's flags by their Python names, so that equal runs of different studies are one run of the
cache. The validation split chooses (the epoch, the trial of a grid); the test split is only reported.
"""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.conformal.thresholds import fewest
from topk_registry.data.labels import kept_labels_of
from topk_registry.metrics import MarginalCalibration, TopKAccuracy
from topk_registry.ops.ksubset import topk_marginals
from topk_registry.registry.options import takes
from topk_registry.train.errors import Interrupted, TrainError
from topk_studies.engine.memory import keep_samples, kept_batches
from topk_studies.engine.study import Configuration, ConfigurationError, Options, Progress
from topk_studies.old_trainer import Run, TrainConfig, Trainer
from topk_studies.old_trainer.engine.build import create_evaluator
from topk_studies.old_trainer.engine.sets import SetEvaluation, logits_of
from topk_studies.old_trainer.engine.state import Checkpoints
from topk_studies.old_trainer.report.progress import Row
from topk_studies.old_trainer.setup.datasets import Data, open_split
from topk_studies.old_trainer.setup.loaders import end_workers
from topk_studies.sparsity import GradientSparsity

RUNS = "train"
VERSION = 1
RUN = "run"
MISSED = 0.1  # the share of labels that prediction sets may miss
KEPT = 16  # batches whose scores are counted together
BETWEEN_CHECKPOINTS = 20.0  # seconds, what a run that is killed may lose
NEUTRAL = {"label_noise": 0.0, "subset": 1.0}  # left out: studies of noise and of little data share what is neither


def configure(options: Options, base: Mapping[str, Any], test_split: str = "test", **flags: Any) -> Configuration:
    """The configuration of one run: the study's flags, over those of its budget, under those of the command line.

    Another network than the budget's is built without the options of the budget's.
    """
    if options.flags.get("model", base.get("model")) != base.get("model"):
        base = {name: value for name, value in base.items() if name != "model_kwargs"}
    merged = {**base, **flags, **options.flags}
    given = taken(merged.get("loss", ""), options.flags.get("loss_opt", {}))
    merged["loss_opt"] = {**flags.get("loss_opt", {}), **given}
    said = {name: value for name, value in merged.items() if value not in (None, {}, "", NEUTRAL.get(name))}
    return {"flags": said, "test_split": test_split, "device": options.device}


def taken(loss: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that a loss takes: those of the command line are meant for every loss that knows them."""
    return {name: value for name, value in options.items() if takes(registry.get_loss_builder(loss), name)}


def arguments(configuration: Configuration) -> list[str]:
    """The configuration as the arguments of ``timm train``."""
    words = []
    for name, value in configuration["flags"].items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, Mapping):
            words += [flag, *(f"{key}={item}" for key, item in value.items())]
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return [*words, "--device", configuration["device"]]


def command(configuration: Configuration) -> str:
    """Return the command that repeats the run outside the studies."""
    return shlex.join(["timm", "train", *arguments(configuration)])


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """Train, and measure each epoch on both splits; goes on from ``work`` where an interrupt left something there."""
    watch = _Watch(configuration["test_split"], progress, sets=configuration.get("sets", False))
    trained = _watched(configuration, work, watch, weights=False)
    return {"history": [_measured(row) for row in trained.progress.history], "data": watch.data()}


def train(configuration: Configuration, work: Path, progress: Progress) -> Run:
    """The trained run, with the weights of its best epoch.

    Args:
        configuration: what to run.
        work: where it writes, and what it goes on from.
        progress: told how far it is.

    Raises:
        ConfigurationError: it cannot begin, or broke off.
        KeyboardInterrupt: a signal came; ``work`` holds what to go on from.
    """
    return _watched(configuration, work, _Watch(configuration["test_split"], progress), weights=True)


def _watched(configuration: Configuration, work: Path, watch: "_Watch", *, weights: bool) -> Run:
    """Train; without ``weights`` they are saved only to go on from."""
    where = {"output": str(work), "experiment": RUN, "resume": "auto", "device": configuration["device"]}
    try:
        config = TrainConfig.from_dict({**configuration["flags"], **where})
        trainer = Trainer(config, on_step=watch.step, on_evaluate=watch.evaluate, quiet=True)
        watch.follow(trainer.run)
        try:
            started = trainer.start()
            if not weights and started.checkpoints is not None:
                started.checkpoints = _Seldom(started, started.checkpoints)
            trainer.fit()
        finally:
            watch.end()
    except Interrupted as error:
        raise KeyboardInterrupt from error
    except TrainError as error:
        raise ConfigurationError(str(error)) from error
    return trainer.run


def data_config(trained: Run) -> dict[str, Any]:
    """timm's data configuration of a run."""
    return resolve_data_config(trained.config.to_dict(), model=trained.model, verbose=False)


class _Seldom(Checkpoints):
    """Checkpoints to go on from alone: writing one takes longer than an epoch of a small network.

    Args:
        run: whose they are.
        checkpoints: the run's own.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        super().__init__(checkpoints.saver)
        self._run, self._saved = run, time.monotonic()

    def epoch(self, epoch: int, metric: float | None) -> None:
        if self._run.stopped() or time.monotonic() - self._saved > BETWEEN_CHECKPOINTS:
            super().epoch(epoch, metric)
            self._saved = time.monotonic()


class _Watch:
    """Hooks of a run: they tell how far it is, and measure what the studies report besides.

    Each evaluation gains the test split under names that begin with ``test_``, and two measurements of the training
    batches since the last: the accuracy (``train_top5``), as the weights then were, and the share of the loss's
    gradient with respect to the logits that was not zero (``nonzero``). Of the test split it also measures the
    calibration error of the marginals (``test_calibration_top5``), the mean size of prediction sets that hold the label
    nine times in ten (``test_set_mean_size``) and, where the posterior is known, the excess risk
    (``test_excess_top5``).

    Args:
        split: the test split.
        progress: told how far the run is.
        sets: measure prediction sets on the validation split, too (``set_mean_size``), so that they can choose.
    """

    def __init__(self, split: str, progress: Progress, *, sets: bool = False) -> None:
        self.split, self.progress, self.sets = split, progress, sets

    def follow(self, run: Run) -> None:
        self.device, self.num_classes = run.compute.device, run.config.num_classes
        if run.evaluator is not None:
            data = Data(None, open_split(run.config, self.split, training=False), counts=run.data.counts)
            timms = data_config(run)
            self.test = create_evaluator(run.config, data, timms, run.task.criterion, run.compute)
            for evaluator in (self.test, run.evaluator):
                evaluator.loader = kept_batches(run, evaluator.loader, timms["input_size"])
            keep_samples(run, timms["input_size"])
            self.test.stop = lambda: run.stopped()
            self.sizes, self.seed, self.several = run.evaluator.sizes, run.config.seed, run.config.task == "multilabel"
            known = self.test.loader.dataset
            self.excess = [ExcessRisk(known, self.sizes)] if hasattr(known, "bayes_error") else []
            self.validation = run.evaluator.loader.dataset
            self._begin(run)
            run.task.criterion.register_forward_pre_hook(self._see)

    def data(self) -> dict[str, Any]:
        """Sizes of the data, and the accuracy on the test split of always naming its most frequent classes."""
        if not hasattr(self, "test"):
            return {}
        splits = {"validation": self.validation, "test": self.test.loader.dataset}
        images = {name: len(split) for name, split in splits.items() if hasattr(split, "__len__")}
        labels = None if self.several else kept_labels_of(splits["test"])
        if labels is None:
            return {"classes": self.num_classes, "images": images}
        counts = np.sort(np.bincount(labels))[::-1]
        guess = {f"top{k}": float(100 * counts[:k].sum() / counts.sum()) for k in self.sizes}
        return {"classes": self.num_classes, "images": images, "guess": guess}

    def end(self) -> None:
        """End the workers of the test split's loader."""
        if hasattr(self, "test"):
            end_workers(self.test.loader)

    def step(self, run: Run, loss: float) -> None:
        done = run.progress.epoch + run.progress.step / max(1, run.progress.steps_per_epoch)
        self.progress(done / run.num_epochs, f"epoch {run.progress.epoch + 1}/{run.num_epochs}")

    def evaluate(self, run: Run, model: nn.Module, metrics: Mapping[str, float]) -> dict[str, float]:
        self.test.observers = self._observers()
        test = self.test(model, run.task.criterion)
        if test is None:  # stopped: the epoch is measured again when the run goes on
            return {}
        for observer in self.test.observers:
            test |= observer.results()
        self._count()
        training = {f"train_{k}": 100 * value for k, value in self._seen.compute().items() if "macro" not in k}
        training |= self._sparsity.compute()
        for observer in run.evaluator.observers if run.evaluator is not None else ():
            training |= observer.results()
        self._begin(run)
        return {f"test_{name}": value for name, value in test.items()} | training

    def _observers(self) -> list[Any]:
        """Return the measures on the test split besides accuracy; all of them are of one label an image."""
        if self.several:
            return []
        calibrations = [Calibration(k) for k in self.sizes if 1 < k < self.test.num_classes]
        observers: list[Any] = [*calibrations, *self.excess]
        if len(self.test.loader.dataset) // 2 >= fewest(MISSED):
            observers.append(self._set_evaluation())
        return observers

    def _set_evaluation(self) -> SetEvaluation:
        return SetEvaluation("lac", MISSED, {}, seed=self.seed)

    def _begin(self, run: Run) -> None:
        """Begin to measure the next epoch."""
        if self.sets and run.evaluator is not None:
            run.evaluator.observers = [self._set_evaluation()]
        self._sparsity = GradientSparsity()
        self._seen = TopKAccuracy(self.sizes, num_classes=self.num_classes, device=self.device)
        self._uncounted: list[tuple[Tensor, Tensor]] = []

    def _see(self, criterion: nn.Module, inputs: tuple[Any, ...]) -> None:
        logits, target = inputs
        if logits.requires_grad:  # not those of an evaluation
            self._sparsity.watch(logits)
            if target.ndim == 1:
                self._uncounted.append((logits.detach().float(), target))
            if len(self._uncounted) == KEPT:
                self._count()

    def _count(self) -> None:
        """Count the accuracy of the batches since the last time."""
        if self._uncounted:
            logits, target = map(torch.cat, zip(*self._uncounted, strict=True))
            self._uncounted.clear()
            self._seen.update(logits, target)


class Calibration:
    """Calibration error of the top-k marginals of a model's probabilities."""

    def __init__(self, k: int) -> None:
        self._metric = MarginalCalibration(k)

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        self._metric.update(topk_marginals(logits_of(probabilities), self._metric.k), target)

    def results(self) -> dict[str, float]:
        return {f"calibration_top{self._metric.k}": self._metric.compute(sync=False)["calibration_error"]}


class ExcessRisk:
    """Error of a model's guesses above the least possible, in points, on data whose posterior is known.

    Args:
        data: offers ``error(guesses)`` and ``bayes_error(k)``.
        sizes: the k of top-k.
    """

    def __init__(self, data: Any, sizes: Sequence[int]) -> None:
        self._data, self._sizes = data, [k for k in sizes if k < len(data.classes)]
        self._least = {k: data.bayes_error(k) for k in self._sizes}
        self._guesses: list[Tensor] = []

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        self._guesses.append(probabilities.topk(max(self._sizes)).indices.cpu())

    def results(self) -> dict[str, float]:
        guesses = torch.cat(self._guesses).numpy()
        self._guesses.clear()
        return {f"excess_top{k}": 100 * (self._data.error(guesses[:, :k]) - self._least[k]) for k in self._sizes}


def _measured(row: Row) -> dict[str, float]:
    """A row of the summary with shorter names and digits; what is not finite is left out."""
    short = {name.removeprefix("eval_"): value for name, value in row.items()}
    return {name: float(f"{value:.6g}") for name, value in short.items() if math.isfinite(value)}
