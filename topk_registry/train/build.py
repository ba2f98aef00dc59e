"""Builds everything that a run is made of, from its flags."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from timm import utils
from timm.data import resolve_data_config
from timm.layers import convert_splitbn_model, convert_sync_batchnorm, set_fast_norm
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import distributed as dist
from torch import nn

from topk_registry.classifier import normalize_classifier, num_classes_of
from topk_registry.train import models  # noqa: F401  registers the built-in network
from topk_registry.train.criterion import Context, create_criterion, loss_record, needs_class_counts, try_criterion
from topk_registry.train.datasets import PREFIX, Data, name_of, open_data
from topk_registry.train.errors import TrainError
from topk_registry.train.evaluate import Crops, Evaluator, metric_sizes, temperature_of
from topk_registry.train.loaders import TrainLoader, create_eval_loader, create_train_loader
from topk_registry.train.report import Report
from topk_registry.train.state import Checkpoints, Progress, RegistryTask, snapshot

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class Run:
    """What a run is made of. ``checkpoints`` is there on the first process alone, and not in a dry run."""

    args: Namespace
    data: Data
    task: RegistryTask
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: utils.NativeScaler | None
    loader: TrainLoader
    evaluator: Evaluator | None
    device: torch.device
    dtype: torch.dtype
    autocast: Autocast
    loss: dict[str, Any]
    num_epochs: int
    updates_per_epoch: int
    progress: Progress
    report: Report
    folder: Path | None = None
    checkpoints: Checkpoints | None = None

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
    def metric(self) -> str:
        """The name of the metric that picks checkpoints, as the summary's columns have it."""
        return f"eval_{self.args.eval_metric}" if self.evaluator is not None else "train_loss"

    @property
    def decreasing(self) -> bool:
        return self.metric.endswith("loss")

    def snapshot(self) -> None:
        """Bring the state that a checkpoint saves up to date; every process must call it."""
        snapshot(self.task, self.progress, self.scheduler, self.loss)

    def save_now(self) -> None:
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.now(max(0, self.progress.epoch - 1), self.progress.step)

    def save_recovery(self) -> None:
        self.snapshot()
        if self.checkpoints is not None:
            self.checkpoints.recovery(self.progress.epoch, self.progress.step)


def set_up_device(args: Namespace) -> torch.device:
    """The device of this process, its process group if it is one of several, and PyTorch's switches."""
    for module in args.device_modules or ():
        import_module(module)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        args.device = "cpu"
    device = utils.init_distributed_device(args)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if args.fast_norm:
        set_fast_norm()
    utils.random_seed(args.seed, args.rank)
    return device


def precision(args: Namespace, device: torch.device) -> tuple[torch.dtype, Autocast, utils.NativeScaler | None]:
    """The model's own precision, the context of a forward pass, and the scaler that float16 needs."""
    dtype = getattr(torch, args.model_dtype or "float32")
    if not args.amp:
        return dtype, nullcontext, None
    low = getattr(torch, args.amp_dtype)
    scaler = utils.NativeScaler(device=device.type) if device.type == "cuda" and low is torch.float16 else None
    return dtype, partial(torch.autocast, device_type=device.type, dtype=low), scaler


def build(args: Namespace, device: torch.device) -> Run:
    """All but the run's folder, which a dry run does without."""
    dtype, autocast, scaler = precision(args, device)
    channels = channels_of(args)
    data = open_data(args, channels=channels, needs_counts=needs_class_counts(args.loss))
    model = build_model(args, data, channels)
    n = args.num_classes
    config = resolve_data_config(vars(args), model=model, verbose=False)
    _fit_counts(data, n)
    context = Context.of(args, n, data.counts)
    try_criterion(args.loss, args.loss_opt, context, splits=args.aug_splits)
    loader = create_train_loader(args, data.train, config, num_classes=n, device=device, dtype=dtype)
    criterion = create_criterion(args.loss, args.loss_opt, context)
    task = RegistryTask(place_model(args, model, device, dtype), criterion, device=device, dtype=dtype, verbose=False)
    _set_learning_rate(args)
    optimizer = create_optimizer_v2(task.get_trainable_module(), **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    _train_loss_parameters(task, optimizer)
    updates = -(-len(loader) // args.grad_accum_steps)
    has_validation = data.validation is not None
    decreasing = not has_validation or args.eval_metric == "loss"
    scheduler, epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args, decreasing_metric=decreasing), updates_per_epoch=updates
    )
    evaluator = None
    if has_validation:
        evaluator = create_evaluator(
            args, data, config, criterion=criterion, device=device, dtype=dtype, autocast=autocast
        )
    report = Report(
        None,
        title=f"{args.loss} on {name_of(args)}, {args.model}",
        metric=args.eval_metric if has_validation else "train loss",
        epochs=epochs,
        primary=utils.is_primary(args),
    )
    return Run(
        args, data, task, optimizer, scheduler, scaler, loader, evaluator, device, dtype, autocast,
        loss_record(args.loss, args.loss_opt), epochs, updates, Progress(steps_per_epoch=len(loader)), report,
    )  # fmt: skip


def channels_of(args: Namespace) -> int:
    return args.in_chans or (args.input_size[0] if args.input_size else 3)


def build_model(args: Namespace, data: Data, channels: int) -> nn.Module:
    """The model by its timm name, with the classifier the flags ask for; settles ``args.num_classes``."""
    if args.num_classes is None and args.dataset.startswith(PREFIX):
        args.num_classes = data.num_classes
    overlay = {"pretrained_cfg_overlay": {"file": args.pretrained_path, "num_classes": -1}}
    try:
        model = create_model(
            args.model,
            pretrained=args.pretrained or bool(args.pretrained_path),
            in_chans=channels,
            num_classes=args.num_classes,
            drop_rate=args.drop,
            drop_path_rate=args.drop_path if args.drop_path is not None else args.drop_connect,
            drop_block_rate=args.drop_block,
            global_pool=args.gp,
            bn_momentum=args.bn_momentum,
            bn_eps=args.bn_eps,
            checkpoint_path=args.initial_checkpoint,
            **(overlay if args.pretrained_path else {}),
            **args.model_kwargs,
        )
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise TrainError(f"cannot create model {args.model!r}: {error}") from error
    args.num_classes = args.num_classes or num_classes_of(model)
    if args.normalize_classifier is not None:
        normalize_classifier(model, scale=args.normalize_classifier, learn_scale=args.learn_scale)
    with torch.no_grad():
        if args.head_init_scale is not None:
            for parameter in model.get_classifier().parameters():
                parameter.mul_(args.head_init_scale)
        if args.head_init_bias is not None:
            nn.init.constant_(model.get_classifier().bias, args.head_init_bias)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


def distribute(run: Run) -> None:
    """Compile, then wrap for several processes; after a checkpoint's weights are in."""
    args, task = run.args, run.task
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        if task.has_ema():
            task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    if args.distributed:
        ids = None if run.device.type == "cpu" else [run.device]
        task.prepare_distributed(device_ids=ids, broadcast_buffers=not args.no_ddp_bb)


def place_model(args: Namespace, model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    if args.split_bn:
        model = convert_splitbn_model(model, max(args.aug_splits, 2))
    model.to(device=device, dtype=dtype)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if args.distributed and args.sync_bn:
        args.dist_bn = ""
        model = convert_sync_batchnorm(model)
    return model


def _set_learning_rate(args: Namespace) -> None:
    if args.lr:
        return
    ratio = args.batch_size * args.world_size * args.grad_accum_steps / args.lr_base_size
    scale = args.lr_base_scale or ("sqrt" if any(o in args.opt.lower() for o in ("ada", "lamb")) else "linear")
    args.lr = args.lr_base * (ratio**0.5 if scale == "sqrt" else ratio)


def _train_loss_parameters(task: RegistryTask, optimizer: torch.optim.Optimizer) -> None:
    """A loss that learns (a scale, centres) is trained with the model, without weight decay."""
    learned = [parameter for parameter in task.criterion.parameters() if parameter.requires_grad]
    if not learned:
        return
    optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
    if dist.is_initialized():  # DDP looks after the model's parameters alone
        for parameter in learned:
            dist.broadcast(parameter.data, src=0)
            parameter.register_hook(_mean_over_ranks)


def _mean_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient / dist.get_world_size()
    dist.all_reduce(gradient)
    return gradient


def _fit_counts(data: Data, n: int) -> None:
    if data.counts is None:
        return
    present = sum(1 for count in data.counts if count)
    if len(data.counts) > n:
        raise TrainError(f"the data has {len(data.counts)} classes, the model predicts {n}: see --num-classes")
    if present < n:
        data.notes.append(f"the model predicts {n} classes, {present} of which are in the data: see --num-classes")
    data.counts += [0] * (n - len(data.counts))


def create_evaluator(
    args: Namespace,
    data: Data,
    config: dict[str, Any],
    *,
    criterion: object,
    device: torch.device,
    dtype: torch.dtype,
    autocast: Autocast,
    sizes: Sequence[int] = (),
) -> Evaluator:
    """What measures a model on the data's evaluation split; ``sizes`` are further k of top-k."""
    crops = Crops(config, args.multi_crop) if args.multi_crop else None
    loader = create_eval_loader(args, data.validation, config, device=device, dtype=dtype, transform=crops)
    return Evaluator(
        loader,
        num_classes=args.num_classes,
        sizes=sorted({*metric_sizes(args.eval_metric), *sizes}),
        counts=data.counts if _has_shots(data.counts, args.eval_metric) else None,
        device=device,
        dtype=dtype,
        autocast=autocast,
        channels_last=args.channels_last,
        crops=args.multi_crop,
        tta=args.tta,
        temperature=temperature_of(args, criterion),
    )


def _has_shots(counts: list[int] | None, metric: str) -> bool:
    """Whether classes are frequent and rare enough to be told apart, or a metric asks for it."""
    if counts is None:
        return False
    groups = {(count > 100) + (count >= 20) for count in counts}
    return len(groups) > 1 or metric.startswith(("many", "medium", "few"))
