"""The optimizer of a run and the schedule of its learning rate: timm's, by name."""

from typing import Any

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import nn

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.setup.parts import Parts


def settle_rate(config: TrainConfig, parts: Parts, world_size: int) -> TrainConfig:
    """The configuration with its learning rate: a caller's optimizer's, the given one, or timm's rule for the batch."""
    if parts.optimizer is not None:
        return config.replace(lr=float(parts.optimizer.param_groups[0]["lr"]), opt=type(parts.optimizer).__name__)
    if config.lr:
        return config
    ratio = config.batch_size * world_size * config.grad_accum_steps / config.lr_base_size
    scale = config.lr_base_scale or ("sqrt" if any(o in config.opt.lower() for o in ("ada", "lamb")) else "linear")
    return config.replace(lr=config.lr_base * (ratio**0.5 if scale == "sqrt" else ratio))


def create_optimizer(config: TrainConfig, model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """timm's optimizer of the model, and of the loss where it learns."""
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=config), **config.opt_kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create optimizer {config.opt!r}: {error}") from error
    learned = [parameter for parameter in criterion.parameters() if parameter.requires_grad]
    if learned:  # a loss that learns (a scale, centres) is trained with the model, without weight decay
        optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
    return optimizer


def create_schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, batches: int, *, decreasing: bool
) -> tuple[Any, int]:
    """timm's schedule, and its number of epochs."""
    settings: dict[str, Any] = scheduler_kwargs(config, decreasing_metric=decreasing)
    try:
        return create_scheduler_v2(optimizer, **settings, updates_per_epoch=-(-batches // config.grad_accum_steps))
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create schedule {config.sched!r}: {error}") from error
