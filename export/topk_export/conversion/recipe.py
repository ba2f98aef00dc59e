"""A model's image transform and class names, as far as timm or torchvision record them."""

import json
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from topk_export.errors import ExportError
from topk_export.runtime.preprocess import COLORS, UNKNOWN, Preprocess

KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "resize_size")


def check_data_config(given: Mapping[str, Any]) -> None:
    """Raise ValueError where a caller's transform has keys that nobody reads."""
    for key in given:
        if key not in KEYS:
            close = get_close_matches(key, KEYS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"data_config has no key {key!r}{hint}; it takes {', '.join(KEYS)}")


def preprocess_of(
    model: nn.Module, name: str, args: Mapping[str, Any], override: Mapping[str, Any] | None
) -> Preprocess:
    """Return the model's evaluation transform, overridden by the training run's arguments, then by the caller.

    Raises:
        ExportError: nothing says how large the images are, or only one of mean and standard deviation is told.
    """
    from timm.data.config import resolve_data_config

    given = {**args, **(override or {})}
    own = built_for(model)
    if own is not None and not given.keys() & {"input_size", "img_size", "val_crop_size"}:
        given["input_size"] = (getattr(model, "pretrained_cfg", {}).get("input_size", (3,))[0], *own)
    if (getattr(model, "pretrained_cfg", None) or {}).get("mean"):
        config = {"resize_size": given.get("resize_size"), **resolve_data_config(given, model=model)}
    else:
        config = _with_changes(_torchvision_config(name), given)
    if not config["input_size"]:
        raise ExportError(
            f"nothing says how images become the input of {name}: give data_config={{'input_size': (C, H, W), 'mean': "
            "..., 'std': ...} (on the command line --input-size, --mean and --std), of a timm model inside it "
            "timm.data.resolve_model_data_config(model)"
        )
    channels = int(config["input_size"][0])
    mean, std = (_by_channel(config[key], channels) for key in ("mean", "std"))
    if bool(mean) != bool(std):
        raise ExportError(f"mean and std belong together: data_config gives {name} one of them")
    if not mean:
        warnings.warn(
            f"nothing says the mean and the standard deviation of the images of {name}: the file says 'unknown', and "
            "takes arrays alone. Give data_config 'mean' and 'std' (on the command line --mean and --std)",
            stacklevel=2,
        )
    return Preprocess(
        input_size=tuple(map(int, config["input_size"])),
        mean=mean,
        std=std,
        interpolation=config["interpolation"],
        crop_pct=float(config["crop_pct"]),
        crop_mode=config.get("crop_mode") or "center",
        resize_size=config.get("resize_size"),
        color=COLORS.get(channels, "") if mean else UNKNOWN,
    )


def _by_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value a channel; one value alone is that of all, as in timm."""
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


def _with_changes(config: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Override a configuration by given keys, in timm's names or in those of torchvision's training script."""
    changed = {key: given[key] for key in (*config, "crop_mode") if given.get(key)}
    if crop := given.get("val_crop_size"):
        changed["input_size"] = (config["input_size"][0], crop, crop)
    if resize := given.get("val_resize_size"):
        changed["resize_size"] = (resize, resize)
    elif changed.keys() & {"input_size", "crop_pct"}:
        changed.setdefault("resize_size", None)
    return {**config, **changed}


def built_for(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that a model is built for, by its patch embedding; None if it takes any."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None and type(model).__module__.startswith("torchvision."):
        size = getattr(model, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def torchvision_name(model: nn.Module) -> str | None:
    """Return ``torchvision:NAME`` for a module of torchvision, found by the shapes of its weights; else None."""
    import torch
    import torchvision

    if not type(model).__module__.startswith("torchvision.models."):
        return None
    shapes = _shapes(model)
    for name in torchvision.models.list_models(module=torchvision.models):
        builder = torchvision.models.get_model_builder(name)
        if builder.__module__ != type(model).__module__:
            continue
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are not initialised
            if _shapes(builder()) == shapes:
                return f"torchvision:{name}"
    return None


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of all weights but the classifier's."""
    every = [tuple(value.shape) for value in model.state_dict().values()]
    return every[: -2 if len(every) > 2 else None]


def _torchvision_config(name: str) -> dict[str, Any]:
    """Return the evaluation preset of torchvision's default weights; of any other model, no size, mean and std."""
    weights = _torchvision_weights(name)
    if weights is None:
        unknown = dict.fromkeys(("input_size", "mean", "std"), ())
        return {**unknown, "interpolation": "bilinear", "crop_pct": 0.875, "resize_size": None}
    preset = weights.transforms()
    crop, resize = preset.crop_size[0], preset.resize_size[0]
    return {
        "input_size": (3, crop, crop),
        "mean": preset.mean,
        "std": preset.std,
        "interpolation": preset.interpolation.value,
        "crop_pct": crop / resize,
        "resize_size": (resize, resize),
    }


def _torchvision_weights(name: str) -> Any:
    """Return torchvision's default weights of a model name, or None."""
    import torchvision

    plain = name.removeprefix("torchvision:")
    if plain not in torchvision.models.list_models(module=torchvision.models):
        return None
    return getattr(torchvision.models.get_model_weights(plain), "DEFAULT", None)


def published_names(model: nn.Module, name: str) -> tuple[str, ...] | None:
    """Return the class names of published weights; None if neither timm nor torchvision has them."""
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if not hasattr(model, "pretrained_cfg"):
        weights = _torchvision_weights(name)
        return None if weights is None else tuple(weights.meta["categories"])
    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i) for i in range(info.num_classes()))


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Read class names from a text file, one on each line, or a JSON file, a list or a map from index to name."""
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
        raise ExportError(f"expected {n} class names, one for each class of the model, got {len(names)}")
    return tuple(names)
