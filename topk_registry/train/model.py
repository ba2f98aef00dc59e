"""Functions that build the model, the optimizer and the learning-rate schedule of a run."""

import os
import re
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from timm import utils
from timm.data import resolve_data_config
from timm.data.loader import adapt_to_chs
from timm.layers import convert_sync_batchnorm
from timm.models import create_model, is_model, list_models, load_checkpoint, load_state_dict
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import distributed as dist
from torch import nn

from topk_registry.errors import TrainError
from topk_registry.nn import convnet  # noqa: F401  registers the built-in networks
from topk_registry.nn.classifier import normalize_classifier
from topk_registry.registry.source import closest
from topk_registry.train.config import TrainConfig

LR_BASE_SIZE = 256  # batch size for which --lr-base is the learning rate
ARRAYS = (".npz", ".npy")
WEIGHTS_ONLY = (".safetensors", *ARRAYS)  # files that timm reads without torch.load
PREPROCESSING = ("input_size", "crop_pct", "mean", "std", "interpolation")


@dataclass(frozen=True)
class Compute:
    """Device, precision and processes of a run.

    Args:
        device: device of this process.
        amp: dtype of autocast, or None without mixed precision.
        scaler: object that scales the loss for float16, or None.
        rank, world_size: index of this process, and number of processes.
        control: process group on the CPU, in which all processes agree whether to stop. None for one process.
    """

    device: torch.device
    amp: torch.dtype | None = None
    scaler: utils.NativeScaler | None = None
    rank: int = 0
    world_size: int = 1
    control: Any = None

    @classmethod
    def set_up(cls, config: TrainConfig) -> "Compute":
        """Select device and precision from the settings, and join the process group if there are several processes."""
        place = utils.distributed.init_distributed_device_so(device_of(config.device))
        device = torch.device(place["device"])
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.benchmark = True
        usual = "bfloat16" if device.type == "cpu" else "float16"
        amp = getattr(torch, config.amp_dtype or usual) if config.amp else None
        scaler = utils.NativeScaler(device=device.type) if amp == torch.float16 and device.type == "cuda" else None
        rank, world = int(place["global_rank"]), int(place["world_size"])
        return cls(device, amp, scaler, rank, world, dist.new_group(backend="gloo") if world > 1 else None)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.amp is None else torch.autocast(self.device.type, self.amp)

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    @property
    def primary(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0


def device_of(name: str) -> str:
    """Return ``name``. For "auto", return "cuda" or "cpu". If torch has no device ``name``, raise a TrainError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainError(f"--device {name}: expected auto, cpu, cuda or another device of torch") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count <= (device.index or 0):
        raise TrainError(f"--device {name}: there are {count} CUDA devices; --device auto falls back to the CPU")
    return name


def check_model(name: str) -> None:
    """Raise a TrainError if timm has no model of this name. The message suggests similar names."""
    if ":" in name or is_model(name.split("/", 1)[-1].split(".")[0]):
        return
    known = list_models()
    family = [other for other in known if other.startswith(name)][:5]
    suggestion = f"; did you mean {', '.join(family)}?" if family else closest(name, known)
    raise TrainError(f"timm has no model {name!r}{suggestion}")


def build_model(config: TrainConfig, num_classes: int | None) -> nn.Module:
    """Build the model, or raise a TrainError. If ``num_classes`` is None, the number of outputs is timm's default."""
    check_model(config.model)
    for path in filter(None, (config.initial_checkpoint, config.pretrained_path)):
        read_checkpoint(path)
    overlay = {"file": config.pretrained_path, "num_classes": -1} if config.pretrained_path else None
    try:
        model = create_model(
            config.model,
            pretrained=config.pretrained or bool(config.pretrained_path),
            in_chans=config.channels,
            num_classes=num_classes,
            drop_rate=config.drop,
            drop_path_rate=config.drop_path,
            checkpoint_path=config.initial_checkpoint,
            pretrained_cfg_overlay=overlay,
            **_sized(config),
            **config.model_kwargs,
        )
    except (TypeError, ValueError, RuntimeError, OSError, AssertionError) as error:
        path, lines = config.initial_checkpoint, f"{error}".strip().splitlines()
        if path and any("size mismatch" in line for line in lines):
            raise TrainError(
                f"--initial-checkpoint {path} does not fit {config.model!r} with {num_classes} classes: "
                f"{lines[-1].strip()}; --pretrained-path {path} loads the weights of all layers but the classifier"
            ) from error
        raise TrainError(f"cannot create model {config.model!r}: {error}") from error
    if config.pretrained_path and Path(config.pretrained_path).suffix not in ARRAYS:
        _check_loaded(model, config.pretrained_path)
    if config.normalize_classifier is not None:
        normalize_classifier(model, scale=config.normalize_classifier, learn_scale=config.learn_scale)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)  # pyright: ignore[reportCallIssue]
    return model


def _check_loaded(model: nn.Module, path: str) -> None:
    """Raise a TrainError if the model has no weight of a file, because timm only warns about weights of other names.

    timm may rename and reshape weights. Therefore a weight counts if its absolute values have the sum of a stored one.
    """
    stored = {_total(weight) for weight in load_state_dict(path).values() if isinstance(weight, torch.Tensor)}
    if not any(weight.ndim > 1 and _total(weight) in stored for weight in model.parameters()):
        raise TrainError(f"--pretrained-path {path}: the model has no weight of this file; expected timm's names")


def _total(weight: torch.Tensor) -> str:
    return f"{weight.detach().double().abs().sum():.9g}"


def _sized(config: TrainConfig) -> dict[str, Any]:
    from timm.models import get_pretrained_cfg

    if ":" in config.model or "img_size" in config.model_kwargs:
        return {}
    size = tuple(config.input_size[1:]) if config.input_size else config.img_size
    fixed = getattr(get_pretrained_cfg(config.model, allow_unregistered=True), "fixed_input_size", False)
    return {"img_size": size} if size and fixed else {}


def place_model(config: TrainConfig, model: nn.Module, compute: Compute) -> nn.Module:
    """Move the model to its device and memory layout. If ``sync_bn`` is set, use synchronized batch norm."""
    model.to(device=compute.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return convert_sync_batchnorm(model) if compute.distributed and config.sync_bn else model


def preprocessing_of(config: TrainConfig, model: nn.Module) -> dict[str, Any]:
    """Return the preprocessing of evaluation: input size, crop, channel means, standard deviations, interpolation."""
    try:
        resolved = resolve_data_config(config.to_dict(), model=model, verbose=False)
    except AssertionError as error:
        raise TrainError("--mean and --std take one number, or one number per channel") from error
    for name in ("mean", "std"):  # timm's default has 3 values; a model with 1 channel needs 1
        resolved[name] = adapt_to_chs(resolved[name], resolved["input_size"][0])
    return {name: list(v) if isinstance(v := resolved[name], tuple) else v for name in PREPROCESSING}


def resolve_learning_rate(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return the configuration. If ``lr`` is None, compute ``lr`` from ``lr_base`` and the global batch size."""
    if config.lr is not None:
        return config
    ratio = config.batch_size * world_size * config.grad_accum_steps / LR_BASE_SIZE
    root = any(name in config.opt.lower() for name in ("ada", "lamb"))
    return config.replace(lr=config.lr_base * (ratio**0.5 if root else ratio))


def create_optimizer(config: TrainConfig, model: nn.Module, criterion: nn.Module) -> torch.optim.Optimizer:
    """Return timm's optimizer for the model. Parameters of the loss are included, without weight decay."""
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=config), **config.opt_kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create optimizer {config.opt!r}: {error}") from error
    if learned := [parameter for parameter in criterion.parameters() if parameter.requires_grad]:
        optimizer.add_param_group({"params": learned, "weight_decay": 0.0})
    return optimizer


def create_schedule(config: TrainConfig, optimizer: torch.optim.Optimizer, updates: int) -> Any:
    """Return timm's learning-rate schedule, and the number of epochs including warmup and cooldown.

    ``updates`` is the number of updates per epoch.
    """
    settings: dict[str, Any] = scheduler_kwargs(config)
    try:
        return create_scheduler_v2(optimizer, **settings, updates_per_epoch=updates)
    except (TypeError, ValueError, AssertionError) as error:
        raise TrainError(f"cannot create schedule {config.sched!r}: {error}") from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint, or raise a TrainError. A file that has only weights gives {}."""
    if not os.path.isfile(path):
        raise TrainError(f"{path}: there is no such file")
    if Path(path).suffix in WEIGHTS_ONLY:
        return {}
    try:
        with torch.serialization.safe_globals([Namespace]):  # timm's class for the settings of a run
            content = torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path))
        weights = content.get("state_dict", content.get("model", content)) if isinstance(content, dict) else content
        if isinstance(weights, dict):
            return content
        problem = f"it contains a {type(weights).__name__} instead of weights"
    except Exception as error:  # torch.load raises errors of many classes if another program wrote the file
        unsafe = re.search(r"Unsupported global: GLOBAL (\S+)", f"{error}")
        reason = f"{type(error).__name__}: {error}".split(". ")[0]
        problem = f"it contains a {unsafe[1]}, which can run code" if unsafe else f"torch.load fails with {reason}"
    raise TrainError(f"{path} is not a checkpoint: {problem if os.path.getsize(path) else 'it is empty'}")


def load_weights(model: nn.Module, path: str, ema: bool = True) -> None:
    """Load a checkpoint into a model, or raise a TrainError. With ``ema``, use the EMA weights if there are any."""
    try:
        load_checkpoint(model, path, use_ema=ema)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise TrainError(f"cannot load {path} into {type(model).__name__}: {error}") from error
