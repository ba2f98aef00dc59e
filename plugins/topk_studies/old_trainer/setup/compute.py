"""Device, precision and processes of a run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from timm import utils
from timm.layers import set_fast_norm

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig


def check_backend(name: str) -> None:
    """Raise unless ``torch.compile`` has a backend of this name."""
    if name not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise TrainError(f"--torchcompile {name}: torch has no such backend; there are {known}")


@dataclass(frozen=True)
class Compute:
    """Device, precision and processes of a run.

    Args:
        device: where the model is.
        dtype: the model's own precision.
        autocast: the context of a forward pass.
        scaler: of the loss, where float16 needs one.
        amp: the lower precision of autocast by name, empty without.
        rank: number of this process.
        world_size: number of processes.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: utils.NativeScaler | None = None
    amp: str = ""
    rank: int = 0
    world_size: int = 1

    @classmethod
    def set_up(cls, config: TrainConfig) -> "Compute":
        """Take the configured device and precision; joins the process group and seeds the random streams."""
        for module in config.device_modules or ():
            import_module(module)
        try:
            asked = torch.device(config.device)
        except RuntimeError:
            raise TrainError(f"--device {config.device}: torch knows no such device, such as cpu, cuda") from None
        if asked.type == "cuda" and asked.index is not None and asked.index >= torch.cuda.device_count():
            raise TrainError(f"--device {config.device}: there are {torch.cuda.device_count()} CUDA devices")
        wanted = "cpu" if config.device.startswith("cuda") and not torch.cuda.is_available() else config.device
        place: dict[str, Any] = utils.distributed.init_distributed_device_so(wanted)
        device = torch.device(place["device"])
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        if config.fast_norm:
            set_fast_norm()
        utils.random_seed(config.seed, place["global_rank"])
        common: dict[str, Any] = {"dtype": getattr(torch, config.model_dtype or "float32")}
        common |= {"rank": place["global_rank"], "world_size": place["world_size"]}
        if not config.amp:
            return cls(device, **common)
        amp = config.amp_dtype or ("bfloat16" if device.type == "cpu" else "float16")
        autocast = partial(torch.autocast, device_type=device.type, dtype=getattr(torch, amp))
        scaled = device.type == "cuda" and amp == "float16"
        return cls(
            device,
            autocast=autocast,
            scaler=utils.NativeScaler(device=device.type) if scaled else None,
            amp=amp,
            **common,
        )

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    @property
    def primary(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def notes(self) -> list[str]:
        """Sentences for the plan of the run."""
        if self.amp == "float16" and self.device.type == "cpu":
            return ["float16 is slow on a CPU and its loss is not scaled: without --amp-dtype, --amp takes bfloat16"]
        return []
