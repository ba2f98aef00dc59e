"""Where and how precisely a run computes."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from timm import utils
from timm.layers import set_fast_norm


@dataclass(frozen=True)
class Compute:
    """The device, the model's own precision, the context of a forward pass, and the scaler that float16 needs."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: utils.NativeScaler | None = None
    amp: str = ""

    @property
    def notes(self) -> list[str]:
        """What a user should know of this choice."""
        if self.amp == "float16" and self.device.type == "cpu":
            return ["float16 is slow on a CPU and its loss is not scaled: without --amp-dtype, --amp takes bfloat16"]
        return []

    @classmethod
    def set_up(cls, args: Namespace) -> "Compute":
        """The flags' device and precision; joins the process group and seeds the random streams."""
        for module in args.device_modules or ():
            import_module(module)
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            args.device = "cpu"
        device = utils.init_distributed_device(args)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        if args.fast_norm:
            set_fast_norm()
        utils.random_seed(args.seed, args.rank)
        dtype = getattr(torch, args.model_dtype or "float32")
        if not args.amp:
            return cls(device, dtype)
        low = getattr(torch, args.amp_dtype or ("bfloat16" if device.type == "cpu" else "float16"))
        scaler = utils.NativeScaler(device=device.type) if device.type == "cuda" and low is torch.float16 else None
        autocast = partial(torch.autocast, device_type=device.type, dtype=low)
        return cls(device, dtype, autocast, scaler, str(low).removeprefix("torch."))
