"""The model of a run: timm's, by name, with the classifier that the flags ask for."""

from argparse import Namespace
from typing import Any

import torch
from timm.layers import convert_splitbn_model, convert_sync_batchnorm
from timm.models import create_model
from torch import nn

from topk_registry.nn.classifier import normalize_classifier, num_classes_of
from topk_registry.train.errors import TrainError
from topk_registry.train.setup import convnet  # noqa: F401  registers the built-in network
from topk_registry.train.setup.compute import Compute


def channels_of(args: Namespace) -> int:
    return args.in_chans or (args.input_size[0] if args.input_size else 3)


def build_model(args: Namespace, num_classes: int | None) -> nn.Module:
    """The model, of ``num_classes`` or of timm's own number; settles ``args.num_classes``."""
    model = _create(args, num_classes)
    args.num_classes = num_classes or num_classes_of(model)
    if args.normalize_classifier is not None:
        normalize_classifier(model, scale=args.normalize_classifier, learn_scale=args.learn_scale)
    _initialise_head(args, model)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


def place_model(args: Namespace, model: nn.Module, compute: Compute) -> nn.Module:
    """The model on its device, in its precision and layout, with the batch norm that the flags ask for."""
    if args.split_bn:
        model = convert_splitbn_model(model, max(args.aug_splits, 2))
    model.to(device=compute.device, dtype=compute.dtype)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if args.distributed and args.sync_bn:
        args.dist_bn = ""
        model = convert_sync_batchnorm(model)
    return model


def _create(args: Namespace, num_classes: int | None) -> Any:
    file = {"pretrained_cfg_overlay": {"file": args.pretrained_path, "num_classes": -1}} if args.pretrained_path else {}
    try:
        return create_model(
            args.model,
            pretrained=args.pretrained or bool(args.pretrained_path),
            in_chans=channels_of(args),
            num_classes=num_classes,
            drop_rate=args.drop,
            drop_path_rate=args.drop_path if args.drop_path is not None else args.drop_connect,
            drop_block_rate=args.drop_block,
            global_pool=args.gp,
            bn_momentum=args.bn_momentum,
            bn_eps=args.bn_eps,
            checkpoint_path=args.initial_checkpoint,
            **file,
            **args.model_kwargs,
        )
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise TrainError(f"cannot create model {args.model!r}: {error}") from error


def _initialise_head(args: Namespace, model: Any) -> None:
    with torch.no_grad():
        if args.head_init_scale is not None:
            for parameter in model.get_classifier().parameters():
                parameter.mul_(args.head_init_scale)
        if args.head_init_bias is not None:
            nn.init.constant_(model.get_classifier().bias, args.head_init_bias)
