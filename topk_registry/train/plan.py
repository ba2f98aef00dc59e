"""The plan that a run prints before the first epoch: everything that decides its result, in at most 14 lines."""

from typing import Any

import torch

from topk_registry.train.config import OWN_BATCHES, TrainConfig
from topk_registry.train.report import label
from topk_registry.train.run import Run

TIMM_EPOCHS = 300
# time of a loss with PyTorch operations, divided by its time with numba kernels, from docs/results/kernels.json
SPEEDUPS = {"smooth_topk_svm": 50, "topk_nll": 40, "noised_topk": 9, "noised_topk_imbalanced": 8}


def plan(run: Run, reason: str, kernels: str) -> str:
    """Return the plan of a run as text.

    Args:
        run: the run.
        reason: why the metric selects checkpoints.
        kernels: why the loss has no compiled kernels; empty if it has compiled kernels.
    """
    config, compute, opened = run.config, run.compute, run.data
    parameters = sum(parameter.numel() for parameter in run.model.parameters()) / 1e6
    precision = str(compute.amp or torch.float32).removeprefix("torch.")
    processes = f", {compute.world_size} processes" if compute.distributed else ""
    batch = config.batch_size * compute.world_size * config.grad_accum_steps
    mean, std = (", ".join(f"{value:.3g}" for value in values or ()) for values in (config.mean, config.std))
    weights = run.task.loss_record["class_weight"]
    weighted = f", class weights from {min(weights):.4g} to {max(weights):.4g}" if weights else ""
    if kernels.startswith("numba is not installed") and (speedup := SPEEDUPS.get(run.spec.name)):
        kernels = f"PyTorch; `pip install numba` makes the loss about {speedup} times faster"
    lines = [
        f"loss      {run.spec.describe()}{weighted}",
        *([f"kernels   {kernels}"] if kernels else []),
        f"data      {config.data_name}: {_size(opened.train)} to train, {_size(opened.validation)} to evaluate, "
        f"{config.num_classes} classes",
        f"images    {config.prepared}, mean {mean}, std {std}",
        f"augment   {_augmentation(config)}",
        f"smoothing {config.smoothing:g}{run.spec.why_smoothing(config)}",
        f"model     {config.model}, {parameters:.2f} M parameters, {precision} on {compute.device}{processes}",
        f"optimizer {config.opt}, lr {config.lr:g} {config.sched}, warm-up {config.warmup_epochs}, batch {batch}, "
        f"{run.num_epochs} epochs of {run.updates_per_epoch} updates",
        f"best      by {label(run.metric)}: {reason}",
        f"run       seed {config.seed}, {config.workers} workers, writes {'nothing' if config.dry_run else run.folder}",
        *(f"          {note}" for note in _notes(run) if note),
    ]
    return "\n".join(lines)


def _augmentation(config: TrainConfig) -> str:
    if config.dataset == OWN_BATCHES:
        return "as your loader does"
    parts = ["none (--no-aug)"]
    if not config.no_aug:
        low, high = config.scale[0], config.scale[-1]
        flips = [f"{name} {p:g}" for name, p in (("flip", config.hflip), ("vertical flip", config.vflip)) if p]
        jitter = [f"color jitter {config.color_jitter:g}"] if config.color_jitter and not config.aa else []
        interpolation = config.train_interpolation or "evaluation's"
        parts = [f"random crop {low:g} to {high:g}", *flips, *jitter, f"{interpolation} interpolation"]
        parts += [f"--aa {config.aa}"] if config.aa else []
        parts += [f"random erasing {config.reprob:g}"] if config.reprob else []
    mixes = [f"{name} {value:g}" for name, value in (("mixup", config.mixup), ("cutmix", config.cutmix)) if value]
    parts += [f"{', '.join(mixes)}, with probability {config.mixup_prob:g}"] if mixes else ["no mixup"]
    return ", ".join(parts)


def _notes(run: Run) -> list[str]:
    config = run.config
    notes = [run.spec.note_on_k(config.num_classes or 0)]
    if run.compute.amp and run.compute.device.type == "cpu":
        precision = str(run.compute.amp).removeprefix("torch.")
        notes.append(f"warning: --amp is slower than float32 on a CPU without instructions for {precision}")
    starts_trained = config.pretrained or config.pretrained_path or config.initial_checkpoint
    if starts_trained and config.opt == "sgd" and config.epochs == TIMM_EPOCHS:
        notes.append(
            f"{TIMM_EPOCHS} epochs of SGD are timm's defaults for training from scratch: for pretrained weights, use "
            "--config finetune"
        )
    updates, averaged = run.num_epochs * run.updates_per_epoch, 1 / max(1 - config.model_ema_decay, 1e-9)
    if config.model_ema and not config.model_ema_warmup and updates < averaged:
        notes.append(
            f"warning: {updates} updates are few for --model-ema-decay {config.model_ema_decay:g}, which averages over "
            f"{averaged:.0f}: lower the decay or use --model-ema-warmup"
        )
    return notes


def _size(dataset: Any) -> str:
    try:
        return "none" if dataset is None else f"{len(dataset)}"
    except TypeError:
        return "a stream"
