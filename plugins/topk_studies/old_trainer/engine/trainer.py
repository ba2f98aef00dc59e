"""Train from a configuration: one entrance for the command line, the studies and notebooks."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from topk_registry.ops.backend import preferred, use_backend
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.train.errors import Interrupted, TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.tasks import MULTILABEL
from topk_studies.old_trainer.engine.begin import begin
from topk_studies.old_trainer.engine.build import build, distribute
from topk_studies.old_trainer.engine.epochs import how_to_resume, run_epochs
from topk_studies.old_trainer.engine.resume import check_folder
from topk_studies.old_trainer.engine.run import Hooks, Run
from topk_studies.old_trainer.engine.signals import StopRequest
from topk_studies.old_trainer.report.progress import Row
from topk_studies.old_trainer.setup.datasets import name_of
from topk_studies.old_trainer.setup.loaders import end_workers
from topk_studies.old_trainer.setup.loss import tell_epoch
from topk_studies.old_trainer.setup.parts import Parts


@dataclass(frozen=True)
class TrainResult:
    """Metrics, history, folder and model of a finished run.

    Args:
        metrics: the summary's row of the best epoch, by ``eval_metric``: ``train_loss``, ``eval_top1``, ...
        history: one row an epoch.
        folder: checkpoints, ``summary.csv``, ``args.yaml``, ``classes.txt`` and ``curves.svg``.
        model: the trained model, with the weights of the last epoch.
    """

    metrics: Row
    history: list[Row]
    folder: Path | None
    model: nn.Module


class Trainer:
    """Train a classifier as a configuration says.

    Args:
        config: the settings; by default a job on a built-in data set.
        model: your own model, instead of timm's by name.
        train_loader, eval_loader: your own batches (images, labels), instead of a data set by name. A run on your own
            training loader goes on after an interrupt at the same batch, but its order is the loader's own.
        optimizer: your own, over the parameters of ``model``.
        on_step, on_epoch, on_evaluate: see :class:`Hooks`.
        quiet: print nothing and draw no curves.
        compiles: whether the run may wait for kernels to be compiled; else torch operations serve where one is missing.

    Example:
        >>> from topk_studies.old_trainer import Trainer, TrainConfig
        >>> result = Trainer(TrainConfig(loss="focal", epochs=2)).fit()  # doctest: +SKIP
        >>> result.metrics["eval_top5"], result.folder  # doctest: +SKIP
    """

    def __init__(
        self,
        config: TrainConfig | None = None,
        *,
        model: nn.Module | None = None,
        train_loader: Iterable[Any] | None = None,
        eval_loader: Iterable[Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        quiet: bool = False,
        compiles: bool = True,
        **hooks: Any,
    ) -> None:
        self.config = config if config is not None else TrainConfig()
        if model is not None:
            self.config = self.config.replace(model=type(model).__name__)
        if optimizer is not None and model is None:
            raise TrainError("an optimizer needs the model whose parameters it has: pass model, too")
        if eval_loader is not None and train_loader is None:
            raise TrainError("an eval_loader needs a train_loader")
        self.parts = Parts(model, train_loader, eval_loader, optimizer)
        self.hooks, self.quiet, self.compiles = Hooks(**hooks), quiet, compiles
        self._run: Run | None = None
        self._began = False
        self._clock: float | None = None  # time.perf_counter() when the command began; None: when the run is built

    @property
    def run(self) -> Run:
        """Parts and state of the run; built when it is first asked for.

        Raises:
            TrainError: the configuration cannot work.
        """
        if self._run is None:
            self._run = build(
                self.config, self.parts, self.hooks, quiet=self.quiet, began=self._clock, compiles=self.compiles
            )
            say_plan(self._run)
        return self._run

    def start(self) -> Run:
        """Resume if the configuration says so, and open the run's folder; :meth:`fit` does it where it was not done.

        Raises:
            TrainError: there is nothing to resume from, or the folder cannot be made or holds another run.
        """
        if not self._began:
            check_folder(self.config)  # before data is read
            begin(self.run)
            self._began = True
        return self.run

    def fit(self) -> TrainResult:
        """Train to the last epoch, or as ``early_stop`` says.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the run is saved, and the message says how to go on.
            TrainError: the run cannot begin or go on.
        """
        run = self.start()
        try:
            with StopRequest() as stop, run.loggers, use_backend(run.task.backend):
                run_epochs(run, stop)
        finally:
            end_workers(run.loader.loader)
            if run.evaluator is not None:
                end_workers(run.evaluator.loader)
        run.report.finish(run.progress)
        return TrainResult(run.report.best(run.progress), run.progress.history, run.folder, run.model)

    def dry_run(self) -> None:
        """Run one batch forward and backward; nothing is written."""
        run = self.run
        distribute(run)
        tell_epoch(run.task.criterion, 0)
        images, target = next(iter(run.loader.pass_of(0)))
        run.model.train(not run.config.retrain_head)
        with run.compute.autocast(), use_backend(run.task.backend):
            result = run.task(images.to(run.compute.device, run.compute.dtype), target.to(run.compute.device))
        result["loss"].backward()
        if isinstance(target, LabelMixture):
            kind = f"mixed labels {list(target.labels.shape)}"
        else:
            dense = "k-hot targets" if run.config.task == MULTILABEL else "soft targets"
            kind = f"{dense if target.is_floating_point() else 'labels'} {list(target.shape)}"
        loss = result["loss"].item()
        run.report.say(f"dry run   images {list(images.shape)}, {kind}: loss {loss:.4f}, gradients made")


def train(config: TrainConfig, *, began: float | None = None) -> int:
    """Run ``timm train``; the exit status is 0, 1 for a run that broke off, 2 for one that could not begin.

    ``began`` is the reading of ``time.perf_counter`` when the command was given.
    """
    trainer = Trainer(config, compiles=preferred() != "auto")  # who chose a backend gets it
    trainer._clock = began
    try:
        return _train(trainer)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(trainer: Trainer) -> int:
    try:
        if trainer.config.dry_run:
            trainer.dry_run()
            return 0
        run = trainer.start()
    except TrainError as error:
        return _fail(f"{error}", 2)
    except KeyboardInterrupt:
        return _fail("stopped before training began", 130)
    try:
        trainer.fit()
    except Interrupted as error:
        return _fail(f"{error}" if run.compute.primary else "", 128 + error.signum)
    except TrainError as error:
        return _fail("\n".join(filter(None, [f"{error}", how_to_resume(run, "Go on")])), 1)
    return 0


def _fail(message: str, status: int) -> int:
    if message:
        print(f"timm train: {message}", file=sys.stderr)
    return status


def say_plan(run: Run) -> None:
    """Print what will be trained, on what, and how."""
    config, data = run.config, run.data
    options = [f"{name}={value}" for name, value in run.loss.options.items()]
    owner = f"({run.loss.distribution} {run.loss.version})" if run.loss.distribution else ""
    parameters = sum(p.numel() for p in run.model.parameters()) / 1e6
    precision = f" in {run.compute.amp}" if run.compute.amp else ""
    processes = f", {run.compute.world_size} processes" if run.compute.distributed else ""
    batch = config.batch_size * run.compute.world_size * config.grad_accum_steps
    sizes = f"{_size(data.train)} to train, {_size(data.validation)} to evaluate, {config.num_classes} classes"
    lines = [
        " ".join(filter(None, ["loss     ", config.loss, *options, owner])),
        f"data      {name_of(config)}: {sizes}",
        *(f"          {note}" for note in [*data.notes, *run.notes, *run.compute.notes]),
        f"model     {config.model}, {parameters:.2f} M parameters, on {run.compute.device}{precision}{processes}",
        f"optimizer {config.opt}, lr {config.lr:g} {config.sched}, batch {batch}, {run.num_epochs} epochs of "
        f"{run.updates_per_epoch} updates",
    ]
    run.report.say("\n".join(lines))


def _size(dataset: object) -> str:
    try:
        return f"{getattr(dataset, 'num_samples', 0) or len(dataset)}"  # pyright: ignore[reportArgumentType]
    except TypeError:
        return "none" if dataset is None else "a stream"
