"""Builds everything that a run is made of, from its flags."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm import utils
from timm.data import resolve_data_config
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import distributed as dist
from torch import nn

from topk_registry.train.engine.evaluate import Crops, Evaluator, metric_sizes, temperature_of
from topk_registry.train.engine.state import Checkpoints, Progress, RegistryTask, snapshot
from topk_registry.train.errors import TrainError
from topk_registry.train.report.console import Report
from topk_registry.train.setup.compute import Compute
from topk_registry.train.setup.criterion import (
    Context,
    create_criterion,
    loss_record,
    needs_class_counts,
    try_criterion,
)
from topk_registry.train.setup.datasets import PREFIX, Data, name_of, open_data
from topk_registry.train.setup.loaders import TrainLoader, create_eval_loader, create_train_loader
from topk_registry.train.setup.models import build_model, channels_of, place_model

SHOTS = ("many", "medium", "few")


@dataclass
class Run:
    """What a run is made of. ``checkpoints`` is there on the first process alone, and not in a dry run."""

    args: Namespace
    compute: Compute
    data: Data
    loader: TrainLoader
    task: RegistryTask
    optimizer: torch.optim.Optimizer
    scheduler: Any
    num_epochs: int
    evaluator: Evaluator | None
    progress: Progress
    report: Report
    folder: Path | None = None
    checkpoints: Checkpoints | None = None

    @property
    def loss(self) -> dict[str, Any]:
        """The record of the loss: name, options, distribution and version."""
        return self.task.loss

    @property
    def model(self) -> nn.Module:
        """What is trained, in the wrapper that exchanges gradients if there is one."""
        model = self.task.get_trainable_module()
        assert model is not None
        return model

    @property
    def lr(self) -> float:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    @property
    def updates_per_epoch(self) -> int:
        return _updates(self.args, self.loader)

    @property
    def metric(self) -> str:
        """The name of the metric that picks checkpoints, as the summary's columns have it."""
        return f"eval_{self.args.eval_metric}" if self.evaluator is not None else "train_loss"

    @property
    def decreasing(self) -> bool:
        return self.metric.endswith("loss")

    def snapshot(self) -> None:
        """Bring the state that a checkpoint saves up to date; every process must call it."""
        snapshot(self.task, self.progress, self.scheduler)

    def save_now(self) -> None:
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.now(max(0, self.progress.epoch - 1), self.progress.step)

    def save_recovery(self) -> None:
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.recovery(self.progress.epoch, self.progress.step)


def build(args: Namespace, compute: Compute) -> Run:
    """All but the run's folder, which a dry run does without."""
    data = open_data(args, channels=channels_of(args), needs_counts=needs_class_counts(args.loss))
    model = build_model(args, classes_of(args, data))
    config = resolve_data_config(vars(args), model=model, verbose=False)
    criterion = _criterion(args, data)
    loader = create_train_loader(args, data.train, config, compute)
    model = place_model(args, model, compute)
    loss = loss_record(args.loss, args.loss_opt)
    task = RegistryTask(model, criterion, loss=loss, device=compute.device, dtype=compute.dtype, verbose=False)
    optimizer = _optimizer(args, model, criterion)
    evaluated = data.validation is not None
    scheduler, epochs = _schedule(args, optimizer, loader, decreasing=not evaluated or args.eval_metric == "loss")
    return Run(
        args=args,
        compute=compute,
        data=data,
        loader=loader,
        task=task,
        optimizer=optimizer,
        scheduler=scheduler,
        num_epochs=epochs,
        evaluator=create_evaluator(args, data, config, criterion, compute) if evaluated else None,
        progress=Progress(steps_per_epoch=len(loader)),
        report=Report(
            title=f"{args.loss} on {name_of(args)}, {args.model}",
            metric=args.eval_metric if evaluated else "train loss",
            epochs=epochs,
            primary=utils.is_primary(args),
        ),
    )


def classes_of(args: Namespace, data: Data) -> int | None:
    """The flag's number of classes, else a registered data set's; None leaves the model's, as timm does."""
    return args.num_classes or (data.num_classes if args.dataset.startswith(PREFIX) else None)


def create_evaluator(
    args: Namespace,
    data: Data,
    config: dict[str, Any],
    criterion: object,
    compute: Compute,
    *,
    sizes: Sequence[int] = (),
) -> Evaluator:
    """What measures a model on the data's evaluation split; ``sizes`` are further k of top-k."""
    crops = Crops(config, args.multi_crop) if args.multi_crop else None
    return Evaluator(
        create_eval_loader(args, data.validation, config, compute, transform=crops),
        compute,
        num_classes=args.num_classes,
        sizes=sorted({*metric_sizes(args.eval_metric), *sizes}),
        counts=data.counts if _has_shots(data.counts, args.eval_metric) else None,
        channels_last=args.channels_last,
        crops=args.multi_crop,
        tta=args.tta,
        temperature=temperature_of(args, criterion),
    )


def distribute(run: Run) -> None:
    """Compile, then wrap for several processes; after a checkpoint's weights are in."""
    args, task = run.args, run.task
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        if task.has_ema():
            task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    if args.distributed:
        _share_loss_parameters(run)
        ids = None if run.compute.device.type == "cpu" else [run.compute.device]
        task.prepare_distributed(device_ids=ids, broadcast_buffers=not args.no_ddp_bb)


def _criterion(args: Namespace, data: Data) -> nn.Module:
    _fit_counts(data, args.num_classes)
    _check_metric(args.eval_metric, data.counts)
    context = Context.of(args, args.num_classes, data.counts)
    try_criterion(args.loss, args.loss_opt, context, splits=args.aug_splits)  # now that classes and counts are known
    return create_criterion(args.loss, args.loss_opt, context)


def _fit_counts(data: Data, n: int) -> None:
    if data.counts is None:
        return
    present = sum(1 for count in data.counts if count)
    if len(data.counts) > n:
        raise TrainError(f"the data has {len(data.counts)} classes, the model predicts {n}: see --num-classes")
    if present < n:
        data.notes.append(f"the model predicts {n} classes, {present} of which are in the data: see --num-classes")
    data.counts += [0] * (n - len(data.counts))


def _optimizer(args: Namespace, model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    if not args.lr:
        ratio = args.batch_size * args.world_size * args.grad_accum_steps / args.lr_base_size
        scale = args.lr_base_scale or ("sqrt" if any(o in args.opt.lower() for o in ("ada", "lamb")) else "linear")
        args.lr = args.lr_base * (ratio**0.5 if scale == "sqrt" else ratio)
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create optimizer {args.opt!r}: {error}") from error
    learned = [parameter for parameter in criterion.parameters() if parameter.requires_grad]
    if learned:  # a loss that learns (a scale, centres) is trained with the model, without weight decay
        optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
    return optimizer


def _share_loss_parameters(run: Run) -> None:
    """Keep a learning loss the same in every process: DDP looks after the model's parameters alone."""
    for parameter in run.task.criterion.parameters():
        dist.broadcast(parameter.data, src=0)
        if parameter.requires_grad:
            parameter.register_hook(_mean_over_ranks)


def _mean_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient / dist.get_world_size()
    dist.all_reduce(gradient)
    return gradient


def _schedule(
    args: Namespace, optimizer: torch.optim.Optimizer, loader: TrainLoader, *, decreasing: bool
) -> tuple[Any, int]:
    settings: dict[str, Any] = scheduler_kwargs(args, decreasing_metric=decreasing)
    try:
        return create_scheduler_v2(optimizer, **settings, updates_per_epoch=_updates(args, loader))
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create schedule {args.sched!r}: {error}") from error


def _updates(args: Namespace, loader: TrainLoader) -> int:
    return -(-len(loader) // args.grad_accum_steps)


def _has_shots(counts: list[int] | None, metric: str) -> bool:
    """Whether classes are frequent and rare enough to be told apart, or a metric asks for it."""
    if counts is None:
        return False
    return len({_shots(count) for count in counts}) > 1 or metric.partition("_")[0] in SHOTS


def _shots(count: int) -> str:
    return SHOTS[0] if count > 100 else SHOTS[1] if count >= 20 else SHOTS[2]


def _check_metric(metric: str, counts: list[int] | None) -> None:
    group = metric.partition("_")[0]
    if group in SHOTS and group not in map(_shots, counts or []):
        known = "the class counts of this data are not known" if counts is None else f"no class is {group}-shot"
        raise TrainError(f"--eval-metric {metric}: {known} (many: above 100 training images, few: below 20)")
