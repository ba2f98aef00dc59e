"""The model of a run: timm's, by name, with the classifier that the flags ask for."""

from typing import Any

import torch
from timm.layers import convert_splitbn_model, convert_sync_batchnorm
from timm.models import create_model, resolve_model_input_args
from torch import nn

from topk_registry.nn import convnet  # noqa: F401  registers the built-in networks
from topk_registry.nn.classifier import normalize_classifier
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.setup.compute import Compute


def channels_of(config: TrainConfig) -> int:
    """Channels of the images."""
    return config.in_chans or (config.input_size[0] if config.input_size else 3)


def build_model(config: TrainConfig, num_classes: int | None) -> nn.Module:
    """The model with ``num_classes`` outputs, or with as many as timm gives it."""
    model = _create(config, num_classes)
    if config.normalize_classifier is not None:
        normalize_classifier(model, scale=config.normalize_classifier, learn_scale=config.learn_scale)
    _initialise_head(config, model)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


def place_model(config: TrainConfig, model: nn.Module, compute: Compute) -> nn.Module:
    """The model on its device, in its precision and layout, with the batch norm that the flags ask for."""
    if config.split_bn:
        model = convert_splitbn_model(model, max(config.aug_splits, 2))
    model.to(device=compute.device, dtype=compute.dtype)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if compute.distributed and config.sync_bn:
        model = convert_sync_batchnorm(model)
    return model


def _create(config: TrainConfig, num_classes: int | None) -> Any:
    path = config.pretrained_path
    overlay = ({"file": path, "num_classes": -1} if path else {}) | config.pretrained_cfg_overlay
    entries = {"pretrained_cfg_overlay": overlay} if overlay else {}
    try:
        settings = resolve_model_input_args(  # some networks are built for one size of images
            config.model,
            config.to_dict(),
            pretrained=config.pretrained or bool(config.pretrained_path),
            in_chans=channels_of(config),
            num_classes=num_classes,
            drop_rate=config.drop,
            drop_path_rate=config.drop_path if config.drop_path is not None else config.drop_connect,
            drop_block_rate=config.drop_block,
            global_pool=config.gp,
            bn_momentum=config.bn_momentum,
            bn_eps=config.bn_eps,
            checkpoint_path=config.initial_checkpoint,
            **entries,
            **config.model_kwargs,
        )
        return create_model(**settings)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise TrainError(f"cannot create model {config.model!r}: {error}") from error


def _initialise_head(config: TrainConfig, model: Any) -> None:
    with torch.no_grad():
        if config.head_init_scale is not None:
            for parameter in model.get_classifier().parameters():
                parameter.mul_(config.head_init_scale)
        if config.head_init_bias is not None:
            nn.init.constant_(model.get_classifier().bias, config.head_init_bias)
