"""What is exported: a module, a model's name, a checkpoint, or the folder of a training run.

A checkpoint says which model it holds where timm wrote it (``arch`` and ``args`` inside, ``args.yaml`` beside it);
otherwise the caller names the model. Checkpoints are read with ``weights_only``: no code of theirs runs.
"""

import argparse
import hashlib
import json
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topk_export.errors import ExportError
from topk_export.preprocess import COLORS, Preprocess

CHECKPOINTS = ("model_best.pth.tar", "last.pth.tar")
SUFFIXES = (".pth", ".pt", ".tar", ".safetensors", ".bin", ".ckpt")
K = 5


@dataclass
class Source:
    """A model and what is known of it."""

    model: nn.Module
    name: str
    preprocess: Preprocess
    class_names: tuple[str, ...] | None = None
    k: int | None = None
    temperature: float | None = None
    loss: str | None = None
    sha256: str | None = None
    licence: str | None = None


def load_source(
    what: nn.Module | str | Path,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    use_ema: bool = True,
    data_config: Mapping[str, Any] | None = None,
) -> Source:
    """Find and build the model to export.

    Args:
        what: a module; a timm or torchvision model name; a checkpoint; or a training run's output folder.
        model: which model a bare checkpoint holds.
        num_classes: how many classes, where the checkpoint's own record does not say.
        pretrained: load the weights published for a model name.
        use_ema: prefer a checkpoint's averaged weights.
        data_config: timm's keys (input_size, mean, std, interpolation, crop_pct, crop_mode) that override the model's.
    """
    if isinstance(what, nn.Module):
        name = getattr(what, "pretrained_cfg", {}).get("architecture") or type(what).__name__
        return Source(what, name, _preprocess(what, name, {}, data_config), licence=_licence(what))
    path = Path(what)
    if path.is_dir():
        return _from_folder(path, model, num_classes, use_ema, data_config)
    if path.is_file():
        return _from_checkpoint(path, {}, model, num_classes, use_ema, data_config)
    if path.suffix in SUFFIXES:
        raise ExportError(f"{what} does not exist")
    built = build(str(what), num_classes=num_classes, pretrained=pretrained)
    source = Source(built, str(what), _preprocess(built, str(what), {}, data_config), licence=_licence(built))
    source.class_names = _published_names(built, str(what)) if pretrained else None
    return source


def build(
    name: str, *, num_classes: int | None = None, pretrained: bool = False, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """A timm model, or else torchvision's of that name (``torchvision:NAME`` skips timm)."""
    import timm
    import torchvision

    plain = name.removeprefix("torchvision:").removeprefix("torchvision.").removeprefix("timm:")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    foreign = name.startswith("torchvision")
    if not foreign and (timm.is_model(plain) or ":" in plain):
        return timm.create_model(plain, pretrained=pretrained, **classes, **(options or {}))
    if plain in torchvision.models.list_models(module=torchvision.models):
        quiet = {"init_weights": False} if plain in ("googlenet", "inception_v3") and not pretrained else {}
        weights = "DEFAULT" if pretrained else None
        return torchvision.models.get_model(plain, weights=weights, **classes, **quiet, **(options or {}))
    close = timm.list_models(f"*{plain}*")[:5] or timm.list_models(f"{plain[:4]}*")[:5]
    raise ExportError(
        f"{name!r} is no file or folder, and neither timm nor torchvision has a model of that name"
        + (f"; timm has {', '.join(close)}" if close else "")
    )


def _from_folder(
    folder: Path, model: str | None, num_classes: int | None, use_ema: bool, data_config: Mapping[str, Any] | None
) -> Source:
    checkpoint = next((folder / name for name in CHECKPOINTS if (folder / name).is_file()), None)
    if checkpoint is None:
        raise ExportError(f"{folder} holds no checkpoint (expected {' or '.join(CHECKPOINTS)})")
    return _from_checkpoint(checkpoint, _read_args(folder), model, num_classes, use_ema, data_config)


def _read_args(folder: Path) -> dict[str, Any]:
    import yaml

    path = folder / "args.yaml"
    if not path.is_file():
        return {}
    try:
        args = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(args, dict):
        raise ExportError(f"{path} does not hold a training run's arguments")
    return args


def _from_checkpoint(
    path: Path,
    args: dict[str, Any],
    model: str | None,
    num_classes: int | None,
    use_ema: bool,
    data_config: Mapping[str, Any] | None,
) -> Source:
    content = _load(path)
    args = args or _embedded_args(content) or _read_args(path.parent)
    name = model or args.get("model") or (content.get("arch") if isinstance(content.get("arch"), str) else None)
    if name is None:
        raise ExportError(f"{path} does not say which model it holds: name it (model=..., on the command line --model)")
    classes = num_classes or args.get("num_classes") or None
    state = _state_dict(content, use_ema)
    built = build(name, num_classes=classes, options=_model_options(args))
    _fill(built, state, path, name)
    source = Source(built, name, _preprocess(built, name, args, data_config), sha256=_sha256(path))
    source.k, source.temperature = _k_and_temperature(args)
    source.loss = args.get("loss") if isinstance(args.get("loss"), str) else None
    names = args.get("class_names")
    source.class_names = tuple(map(str, names)) if isinstance(names, list | tuple) else None
    return source


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's train.py keeps its arguments as one
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ExportError(
            f"{path} is corrupt, or holds more than weights (it is read with weights_only): {error}"
        ) from error
    except Exception as error:  # zip, pickle and safetensors errors share no base class
        raise ExportError(f"{path} is corrupt or no checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} holds a {type(content).__name__}, expected a dictionary of weights")
    return content


def _embedded_args(content: Mapping[str, Any]) -> dict[str, Any]:
    args = content.get("args")
    if isinstance(args, argparse.Namespace):
        return vars(args)
    return dict(args) if isinstance(args, Mapping) else {}


def _state_dict(content: dict[str, Any], use_ema: bool) -> dict[str, Any]:
    from timm.models import clean_state_dict

    keys = ("state_dict_ema", "model_ema") if use_ema else ()
    for key in (*keys, "state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            return clean_state_dict(dict(content[key]))
    return clean_state_dict(content)


def _model_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a training run that change the architecture."""
    options = dict(args.get("model_kwargs") or {})
    if args.get("in_chans"):
        options["in_chans"] = args["in_chans"]
    if args.get("gp"):
        options["global_pool"] = args["gp"]
    return options


def _fill(model: nn.Module, state: Mapping[str, Any], path: Path, name: str) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        own = model.state_dict()
        missing, extra = [key for key in own if key not in state], [key for key in state if key not in own]
        shapes = [
            f"{key} is {list(state[key].shape)}, expected {list(own[key].shape)}"
            for key in own
            if key in state and getattr(state[key], "shape", None) is not None and state[key].shape != own[key].shape
        ]
        details = "; ".join(
            f"{what}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
            for what, keys in (("missing", missing), ("unknown", extra), ("of another shape", shapes))
            if keys
        )
        raise ExportError(f"{path} is not a checkpoint of {name}: {details or error}") from error


def _k_and_temperature(args: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """A loss with k and tau scores classes by s / (k tau): that is the temperature of its marginals."""
    options = args.get("loss_opt") or args.get("loss_options") or {}
    k, tau = (options.get(key, args.get(key)) for key in ("k", "tau"))
    if k is None:
        return None, None
    return int(k), float(k) * float(tau) if tau is not None else None


def _preprocess(model: nn.Module, name: str, args: Mapping[str, Any], override: Mapping[str, Any] | None) -> Preprocess:
    from timm.data.config import resolve_data_config

    given = {**args, **(override or {})}
    config = (
        resolve_data_config(given, model=model if hasattr(model, "pretrained_cfg") else None, pretrained_cfg=None)
        if given or hasattr(model, "pretrained_cfg")
        else _torchvision_config(name)
    )
    channels = int(config["input_size"][0])
    return Preprocess(
        input_size=tuple(map(int, config["input_size"])),
        mean=tuple(map(float, config["mean"])),
        std=tuple(map(float, config["std"])),
        interpolation=config["interpolation"],
        crop_pct=float(config["crop_pct"]),
        crop_mode=config.get("crop_mode") or "center",
        resize_size=config.get("resize_size"),
        color=COLORS.get(channels, ""),
    )


def _torchvision_config(name: str) -> dict[str, Any]:
    """The evaluation preset of torchvision's default weights, else its usual one."""
    import torchvision
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    plain = name.removeprefix("torchvision:").removeprefix("torchvision.").lower()
    crop, resize, interpolation = 224, 256, "bilinear"
    mean, std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if plain in torchvision.models.list_models(module=torchvision.models):
        preset = torchvision.models.get_model_weights(plain).DEFAULT.transforms()
        crop, resize, interpolation = preset.crop_size[0], preset.resize_size[0], preset.interpolation.value
        mean, std = preset.mean, preset.std
    return {
        "input_size": (3, crop, crop),
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
        "crop_pct": crop / resize,
        "resize_size": (resize, resize),
    }


def _published_names(model: nn.Module, name: str) -> tuple[str, ...] | None:
    """The class names of published weights, where timm or torchvision ship them."""
    import torchvision
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if not hasattr(model, "pretrained_cfg"):
        plain = name.removeprefix("torchvision:").removeprefix("torchvision.")
        return tuple(torchvision.models.get_model_weights(plain).DEFAULT.meta["categories"])
    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Class names from a text file (one a line) or a JSON file (a list, or index to name)."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ExportError(f"class names cannot be read from {path}: {error}") from error
    if isinstance(content, Mapping):
        return tuple(str(content[key]) for key in sorted(content, key=int))
    return tuple(map(str, content))


def check_class_names(names: Sequence[str] | None, n: int) -> tuple[str, ...]:
    if names is None:
        return tuple(str(i) for i in range(n))
    if len(names) != n:
        raise ExportError(f"{len(names)} class names for a model of {n} classes")
    return tuple(names)


def _licence(model: nn.Module) -> str | None:
    return (getattr(model, "pretrained_cfg", None) or {}).get("license")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


logging.getLogger("timm").setLevel(logging.WARNING)
