"""Weights into a model for evaluation, and the model compiled as the flags of ``timm validate`` say."""

from argparse import Namespace
from typing import Any

import torch
from timm.models import load_checkpoint
from timm.utils import reparameterize_model
from timm.utils.jit import set_jit_fuser
from torch import nn

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.setup.compute import Compute, check_backend


def load(model: nn.Module, args: Namespace) -> nn.Module:
    """The model with the checkpoint's weights, its branches fused where that is asked for."""
    if args.checkpoint:
        try:
            load_checkpoint(model, args.checkpoint, use_ema=args.use_ema)
        except (OSError, RuntimeError, KeyError) as error:
            raise TrainError(f"cannot load {args.checkpoint} into {type(model).__name__}: {error}") from error
    return reparameterize_model(model) if args.reparam else model


def optimised(model: nn.Module, args: Namespace, compute: Compute) -> Any:
    """The model scripted, compiled, and spread over GPUs."""
    if args.fuser:
        set_jit_fuser(args.fuser)
    model.eval()
    optimised: Any = model
    if args.torchscript:
        optimised = torch.jit.script(model)
    elif getattr(args, "torchcompile", None):
        check_backend(args.torchcompile)
        optimised = torch.compile(model, backend=args.torchcompile, mode=getattr(args, "torchcompile_mode", None))
    elif args.aot_autograd:
        from functorch.compile import memory_efficient_fusion

        optimised = memory_efficient_fusion(model)
    if args.num_gpu > 1:
        if compute.device.type != "cuda" or torch.cuda.device_count() < args.num_gpu:
            raise TrainError(f"--num-gpu {args.num_gpu}: there are {torch.cuda.device_count()} GPUs")
        optimised = nn.DataParallel(optimised, device_ids=list(range(args.num_gpu)))
    return optimised
