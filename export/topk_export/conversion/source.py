"""Sources of an export: a module, a model's name, a checkpoint, or the folder of a training run.

A checkpoint says which model it holds where timm's, torchvision's or our scripts wrote it (``arch`` and ``args``
inside, ``args.yaml`` beside it); otherwise the caller names the model.
"""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from topk_export.conversion.checkpoint import Checkpoint, fill, read
from topk_export.conversion.recipe import (
    built_for,
    check_data_config,
    preprocess_of,
    published_names,
    read_class_names,
    torchvision_name,
)
from topk_export.errors import ExportError
from topk_export.runtime.preprocess import Preprocess
from topk_registry import accepted_context, create_loss, get_loss_builder, normalize_classifier
from topk_registry.nn.classifier import find_classifier, num_classes_of
from topk_registry.registry.options import defaults_since_changed

CHECKPOINTS = ("model_best.pth.tar", "last.pth.tar")
CLASSES = "classes.txt"  # one name a line, beside the checkpoints of a run whose data set tells them
SUFFIXES = (".pth", ".pt", ".tar", ".safetensors", ".bin", ".ckpt")
K = 5
CLASSIFICATION, MULTILABEL = "classification", "multilabel"  # tasks of timm train


@dataclass
class Source:
    """A model, with the facts about it that its checkpoint or its library records."""

    model: nn.Module
    name: str
    preprocess: Preprocess
    class_names: tuple[str, ...] | None = None
    k: int | None = None
    temperature: float | None = None
    loss: str | None = None
    task: str = CLASSIFICATION
    sha256: str | None = None
    licence: str | None = None


def load_source(
    what: nn.Module | str | Path,
    *,
    model: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    use_ema: bool = True,
    data_config: Mapping[str, Any] | None = None,
) -> Source:
    """Find and build the model to export.

    Args:
        what: a module; a timm or torchvision model name; a checkpoint; or a training run's output folder.
        model: which model a bare checkpoint holds.
        model_kwargs: further arguments of the model's factory.
        num_classes: number of classes, for a checkpoint that does not record it.
        pretrained: load the weights published for a model name.
        use_ema: prefer a checkpoint's averaged weights.
        data_config: timm's keys (input_size, mean, std, interpolation, crop_pct, crop_mode), and resize_size, that
            override the model's. A module of one's own needs input_size, and mean and std to take images.
    """
    check_data_config(data_config or {})
    if isinstance(what, nn.Module):
        name = getattr(what, "pretrained_cfg", {}).get("architecture") or torchvision_name(what) or type(what).__name__
        return Source(what, name, preprocess_of(what, name, {}, data_config), licence=_licence(what))
    path = Path(what)
    if path.is_dir():
        path = _newest(path)
    if path.is_file():
        return _from_checkpoint(read(path, use_ema=use_ema), model, num_classes, model_kwargs or {}, data_config)
    if path.suffix in SUFFIXES:
        raise ExportError(f"{what} does not exist")
    name = str(what)
    built = build_sized(
        name, _wanted_size(data_config or {}), num_classes=num_classes, pretrained=pretrained, options=model_kwargs
    )
    source = Source(built, name, preprocess_of(built, name, {}, data_config), licence=_licence(built))
    source.class_names = published_names(built, name) if pretrained else None
    return source


def build(
    name: str, *, num_classes: int | None = None, pretrained: bool = False, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build timm's model of a name, or else torchvision's (``torchvision:NAME`` skips timm)."""
    import timm
    import torchvision

    from topk_registry.nn import convnet  # noqa: F401  registers the trainer's own model, which its runs may name

    plain = name.removeprefix("torchvision:").removeprefix("timm:")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    foreign = name.startswith("torchvision:")
    if not foreign and (timm.is_model(plain) or ":" in plain):
        return timm.create_model(plain, pretrained=pretrained, **classes, **(options or {}))
    if plain in torchvision.models.list_models(module=torchvision.models):
        # without it these two warn that they start slowly
        quiet = {"init_weights": False} if plain in ("googlenet", "inception_v3") and not pretrained else {}
        weights = "DEFAULT" if pretrained else None
        return torchvision.models.get_model(plain, weights=weights, **classes, **quiet, **(options or {}))
    close = timm.list_models(f"*{plain}*")[:5] or timm.list_models(f"{plain[:4]}*")[:5]
    raise ExportError(
        f"{name!r} is no file or folder, and neither timm nor torchvision has a model of that name"
        + (f"; timm has {', '.join(close)}" if close else "")
    )


def build_sized(name: str, size: tuple[int, int] | None, **arguments: Any) -> nn.Module:
    """Build a model for images of a height and width; only models made for one size are given theirs."""
    built = build(name, **arguments)
    own = built_for(built)
    if size is None or own is None or own == size:
        return built
    option = {"img_size": size} if hasattr(built, "pretrained_cfg") else {"image_size": size[0]}
    return build(name, **{**arguments, "options": {**(arguments.get("options") or {}), **option}})


def _wanted_size(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width that a caller or a training run asks for, in timm's words or torchvision's."""
    if size := given.get("input_size"):
        return int(size[-2]), int(size[-1])
    side = given.get("img_size") or given.get("val_crop_size")
    return (int(side), int(side)) if side else None


def _newest(folder: Path) -> Path:
    for name in CHECKPOINTS:
        if (folder / name).is_file():
            return folder / name
    raise ExportError(f"{folder} holds no checkpoint (expected {' or '.join(CHECKPOINTS)})")


def _from_checkpoint(
    checkpoint: Checkpoint,
    model: str | None,
    num_classes: int | None,
    model_kwargs: Mapping[str, Any],
    data_config: Mapping[str, Any] | None,
) -> Source:
    args = checkpoint.args
    name = model or _recorded_name(checkpoint)
    if name is None:
        raise ExportError(
            f"{checkpoint.path} does not say which model it holds: name it (model=..., on the command line --model)"
        )
    built = _rebuild(checkpoint, name, num_classes, model_kwargs, _wanted_size({**args, **(data_config or {})}))
    fill(built, checkpoint, name)
    source = Source(built, name, preprocess_of(built, name, args, data_config), sha256=checkpoint.sha256)
    n = _classes_of(built)
    names = checkpoint.path.parent / CLASSES
    if names.is_file() and len(class_names := read_class_names(names)) <= n:  # a run may have more outputs than classes
        source.class_names = (*class_names, *map(str, range(len(class_names), n)))
    source.task = args.get("task") or CLASSIFICATION
    loss = args.get("loss")
    if isinstance(loss, str):
        source.loss = loss
        if source.task != MULTILABEL:  # whose head has neither
            source.k, source.temperature = _k_and_temperature(loss, args, n)
    return source


def _classes_of(model: nn.Module) -> int:
    """Return the number of classes of a library's model, which says it or has a head of a known name."""
    told = getattr(model, "num_classes", None)
    return told if isinstance(told, int) and told > 0 else num_classes_of(model)


def _recorded_name(checkpoint: Checkpoint) -> str | None:
    name = checkpoint.args.get("model") or checkpoint.arch
    # torchvision's training script shares model names with timm; only its arguments have this one
    return f"torchvision:{name}" if name and "val_crop_size" in checkpoint.args else name


def _rebuild(
    checkpoint: Checkpoint,
    name: str,
    num_classes: int | None,
    model_kwargs: Mapping[str, Any],
    size: tuple[int, int] | None,
) -> nn.Module:
    """Build the model as it was trained; if its number of classes is not recorded, read it from the weights."""
    args = checkpoint.args
    options = {**_model_options(args), **model_kwargs}
    classes = num_classes or args.get("num_classes") or None
    built = build_sized(name, size, num_classes=classes, options=options)
    if classes is None and (count := _classes_in(checkpoint, built)):
        built = build_sized(name, size, num_classes=count, options=options)
    if args.get("normalize_classifier") is not None:
        normalize_classifier(built, scale=args["normalize_classifier"], learn_scale=bool(args.get("learn_scale")))
    return built


def _classes_in(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    """Return the number of classes of the checkpoint's classifier; None if it is the model's, or is not found."""
    with contextlib.suppress(ValueError):
        name, _ = find_classifier(model)[0]
        weight = checkpoint.state.get(f"{name}.weight")
        if isinstance(weight, Tensor) and weight.ndim and len(weight) != num_classes_of(model):
            return len(weight)
    return None


def _model_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model options among the arguments of a training run."""
    options = dict(args.get("model_kwargs") or {})
    if channels := args.get("in_chans") or (args.get("input_size") or (None,))[0]:
        options["in_chans"] = channels
    for key, name in (("gp", "global_pool"), ("bn_eps", "bn_eps")):
        if args.get(key):
            options[name] = args[key]
    return options


def _k_and_temperature(loss: str, args: Mapping[str, Any], n: int) -> tuple[int | None, float | None]:
    """Return k and the temperature of the marginals that the loss trains: the one it declares, else k tau."""
    context = {"num_classes": n, "class_counts": [1] * n}  # any counts will do: only k and the temperature are read
    try:
        builder = get_loss_builder(loss)
        before = defaults_since_changed(builder, args.get("loss_record") or {})
        made = create_loss(loss, **{**before, **accepted_context(builder, context), **(args.get("loss_opt") or {})})
    except Exception as error:  # its plug-in may be missing here, or no longer take these options
        warnings.warn(f"k and the temperature of loss {loss!r} are not known here: {error}", stacklevel=2)
        return None, args.get("marginal_temperature")
    k, tau = getattr(made, "k", None), getattr(made, "tau", None)
    temperature = args.get("marginal_temperature") or getattr(made, "temperature", None)
    if temperature is None and k is not None and tau is not None:
        temperature = k * tau
    return k, temperature


def _licence(model: nn.Module) -> str | None:
    return (getattr(model, "pretrained_cfg", None) or {}).get("license")
