"""Training runs as studies share them: one run of ``timm train``, measured on a test split besides.

A configuration is the run's flags by their Python names, so that equal runs of different studies are one run of the
cache. The validation split chooses (the epoch, the trial of a grid); the test split is only reported.
"""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data import resolve_data_config
from torch import nn

from topk_registry.metrics import GradientSparsity, TopKAccuracy
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.engine.begin import begin
from topk_registry.train.engine.evaluate import Evaluator
from topk_registry.train.engine.run import run_epochs
from topk_registry.train.engine.signals import StopRequest
from topk_registry.train.engine.state import Row
from topk_registry.train.errors import Interrupted, TrainError
from topk_registry.train.report.console import Report
from topk_registry.train.setup.build import Run, build, create_evaluator
from topk_registry.train.setup.compute import Compute
from topk_registry.train.setup.datasets import Data, open_split
from topk_registry.train.setup.preflight import check
from topk_studies.engine.study import Configuration, ConfigurationError, Options, Progress

RUNS = "train"
VERSION = 1
RUN = "run"
NEUTRAL = {"label_noise": 0.0, "subset": 1.0}  # left out: studies of noise and of little data share what is neither


def configure(options: Options, base: Mapping[str, Any], test_split: str = "test", **flags: Any) -> Configuration:
    """The configuration of one run: the study's flags, over those of its budget, under those of the command line."""
    merged = {**base, **flags, **options.flags}
    merged["loss_opt"] = {**flags.get("loss_opt", {}), **options.flags.get("loss_opt", {})}
    said = {name: value for name, value in merged.items() if value not in (None, {}, "", NEUTRAL.get(name))}
    return {"flags": said, "test_split": test_split, "device": options.device}


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
    """What repeats the run outside the studies."""
    return shlex.join(["timm", "train", *arguments(configuration)])


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """Train, and measure each epoch on both splits; goes on from ``work`` where an interrupt left something there."""
    return {"history": [_measured(row) for row in train(configuration, work, progress).progress.history]}


def train(configuration: Configuration, work: Path, progress: Progress) -> Run:
    """The trained run.

    Raises:
        ConfigurationError: it cannot begin, or broke off.
        KeyboardInterrupt: a signal came; ``work`` holds what to go on from.
    """
    try:
        args = parse_args([*arguments(configuration), "--output", str(work), "--experiment", RUN, "--resume", "auto"])
    except SystemExit as error:
        raise ConfigurationError(f"timm train refuses {shlex.join(arguments(configuration))}") from error
    written = dict(vars(args))
    try:
        check(args)
        trained = build(args, Compute.set_up(args))
        trained.report = _Silent(trained, progress)
        if trained.evaluator is not None:
            trained.evaluator = BothSplits(trained, configuration["test_split"])
        begin(trained, written)
        with StopRequest() as stop:
            run_epochs(trained, stop)
    except Interrupted as error:
        raise KeyboardInterrupt from error
    except TrainError as error:
        raise ConfigurationError(str(error)) from error
    return trained


def evaluator_of(trained: Run, split: str) -> Evaluator:
    """What measures a run's model on another split."""
    data = Data(None, open_split(trained.args, split, training=False), counts=trained.data.counts)
    return create_evaluator(trained.args, data, data_config(trained), trained.task.criterion, trained.compute)


def data_config(trained: Run) -> dict[str, Any]:
    """timm's data configuration of a run."""
    return resolve_data_config(vars(trained.args), model=trained.model, verbose=False)


class BothSplits(Evaluator):
    """Measures the validation split, and the test split under names that begin with ``test_``.

    Of the training batches since it last measured it tells the accuracy (``train_top5``), as the weights then were, and
    the share of the loss's gradient, with respect to the logits, that was not zero (``nonzero``).
    """

    def __init__(self, trained: Run, split: str) -> None:
        assert trained.evaluator is not None
        vars(self).update(vars(trained.evaluator))
        self._test = evaluator_of(trained, split)
        self._begin()
        trained.task.criterion.register_forward_pre_hook(self._watch)

    def _begin(self) -> None:
        self._sparsity = GradientSparsity()
        self._seen = TopKAccuracy(self.sizes, num_classes=self.num_classes, device=self.compute.device)

    def __call__(self, model: nn.Module, criterion: object = None) -> dict[str, float] | None:
        validation = super().__call__(model, criterion)
        self._test.stop = self.stop
        test = None if validation is None else self._test(model, criterion)
        if validation is None or test is None:
            return None
        training = self._sparsity.compute() | {
            f"train_{name}": 100 * value for name, value in self._seen.compute().items() if "macro" not in name
        }
        self._begin()
        return validation | {f"test_{name}": value for name, value in test.items()} | training

    def _watch(self, criterion: nn.Module, inputs: tuple[Any, ...]) -> None:
        logits, target = inputs
        if logits.requires_grad:  # not those of an evaluation
            self._sparsity.watch(logits)
            if target.ndim == 1:
                self._seen.update(logits.float(), target)


class _Silent(Report):
    """Tells the runner of the studies how far a run is, and writes nothing."""

    def __init__(self, trained: Run, progress: Progress) -> None:
        super().__init__(title="", metric=trained.args.eval_metric, epochs=trained.num_epochs, primary=False)
        self.progress = progress

    def steps(self, batches: Any, *, epoch: int, first: int, total: int) -> Any:
        for i, batch in enumerate(batches, first):
            self.progress((epoch + i / max(1, total)) / self.epochs, f"epoch {epoch + 1}/{self.epochs}")
            yield batch

    def write(self, history: list[Row]) -> None:
        pass


def _measured(row: Row) -> dict[str, float]:
    """A row of the summary with shorter names and digits; what is not finite is left out."""
    short = {name.removeprefix("eval_"): value for name, value in row.items()}
    return {name: float(f"{value:.6g}") for name, value in short.items() if math.isfinite(value)}
