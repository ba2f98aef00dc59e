"""Models from checkpoints of ``topk-registry train``, or of the training scripts of timm and torchvision.

If a checkpoint contains averaged weights (EMA), the model gets the averaged weights, unless ``ema`` is False. A
checkpoint cannot run code, because ``torch.load`` reads the file with ``weights_only=True``.
"""

import argparse
import contextlib
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from topk_export.errors import ExportError, first_line
from topk_export.runtime.weights import digest_of
from topk_registry.nn.classifier import find_classifier, normalize_classifier, num_classes_of

CHECKPOINTS = ("model_best.pth.tar", "last.pth.tar")  # in the folder of a run; the first that exists is read
SUFFIXES = (".pth", ".pt", ".tar", ".safetensors", ".bin", ".ckpt")
EMA_KEYS = ("state_dict_ema", "model_ema")


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a checkpoint, the name of its model, and the arguments of the training run."""

    path: Path
    state: dict[str, Any]  # the weights by name, as for load_state_dict
    ema: bool  # whether ``state`` contains averaged weights (EMA)
    arch: str | None  # name of the model in the entry ``arch`` of the file; None: there is no such entry
    args: dict[str, Any]  # arguments of the training run; empty if the arguments are unknown
    sha256: str  # of the checkpoint file

    @property
    def model_name(self) -> str | None:
        """Name of the model in the form that :func:`build` accepts. None: the checkpoint does not record a name."""
        name = self.args.get("model") or self.arch
        # timm and torchvision have models of the same name. Only torchvision's training script writes val_crop_size
        return f"torchvision:{name}" if name and "val_crop_size" in self.args else name


def read_checkpoint(path: str | Path, *, ema: bool = True) -> Checkpoint:
    """Read a checkpoint file, or the best checkpoint in the folder of a training run.

    Args:
        path: a checkpoint file or a folder. In a folder, this function reads ``model_best.pth.tar``, or
            ``last.pth.tar`` if the best checkpoint does not exist.
        ema: if the checkpoint contains averaged weights, use the averaged weights.

    Raises:
        ExportError: the folder has no checkpoint, or the file is not a checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in CHECKPOINTS if (path / name).is_file()), None)
        if found is None:
            raise ExportError(f"{path} has no checkpoint (expected {' or '.join(CHECKPOINTS)})")
        path = found
    content = _load(path)
    arch = content.get("arch")
    averaged = next((content[key] for key in EMA_KEYS if ema and isinstance(content.get(key), dict)), None)
    nested = (averaged, content.get("state_dict"), content.get("model"))
    weights = next((state for state in nested if isinstance(state, dict)), content)
    return Checkpoint(
        path,
        _cleaned(weights),
        averaged is not None,
        arch if isinstance(arch, str) else None,
        _args_of(content) or _read_args(path.parent),
        digest_of(path),
    )


def rebuild(
    checkpoint: Checkpoint,
    name: str,
    *,
    num_classes: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    size: tuple[int, int] | None = None,
) -> nn.Module:
    """Build the model ``name``, and load the weights of the checkpoint into the model.

    :func:`~topk_export.source.load_source` describes ``num_classes`` and ``model_kwargs``. ``size`` is the height and
    width of the images. Default: the size for which timm or torchvision builds the model.

    Raises:
        ExportError: the model cannot be built, or the weights do not fit the model.
    """
    args = checkpoint.args
    options = {**_model_options(args), **(model_kwargs or {})}
    classes = num_classes or args.get("num_classes") or None
    model = build(name, size, num_classes=classes, options=options)
    if classes is None and (count := _classes_in(checkpoint, model)):
        model = build(name, size, num_classes=count, options=options)
    if args.get("normalize_classifier") is not None:
        normalize_classifier(model, scale=args["normalize_classifier"], learn_scale=bool(args.get("learn_scale")))
    _fill(model, checkpoint, name)
    return model


def build(
    name: str,
    size: tuple[int, int] | None = None,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a timm or torchvision model by name.

    Args:
        name: name of the model. If both libraries have a model of this name, the function builds the timm model.
            ``torchvision:NAME`` selects the torchvision model.
        size: height and width of the images. If the model accepts any size, ``size`` has no effect. Default: the size
            for which the library builds the model.
        num_classes: number of classes. Default: the default of the library.
        pretrained: load the published weights.
        options: further keyword arguments for the library's function that builds the model.

    Raises:
        ExportError: neither library has the model, or the library raises an error.
    """
    model = _create(name, num_classes, pretrained, options or {})
    own = built_for(model)
    if size is None or own is None or own == size:
        return model
    option = {"img_size": size} if hasattr(model, "pretrained_cfg") else {"image_size": size[0]}
    return _create(name, num_classes, pretrained, {**(options or {}), **option})


def _create(name: str, num_classes: int | None, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    import timm
    import torchvision

    import topk_registry.nn.convnet  # noqa: F401  registers the trainer's built-in network with timm

    plain = name.removeprefix("torchvision:").removeprefix("timm:")
    classes = {} if num_classes is None else {"num_classes": num_classes}
    try:
        if not name.startswith("torchvision:") and (timm.is_model(plain) or ":" in plain):
            return timm.create_model(plain, pretrained=pretrained, **classes, **options)
        if plain in torchvision.models.list_models(module=torchvision.models):
            # without this option, these two models warn about slow initialization
            quiet = {"init_weights": False} if plain in ("googlenet", "inception_v3") and not pretrained else {}
            weights = "DEFAULT" if pretrained else None
            return torchvision.models.get_model(plain, weights=weights, **classes, **quiet, **options)
    except Exception as error:  # errors of constructors and downloads have no common base class
        raise ExportError(f"{name} cannot be built: {first_line(error)}") from error
    close = timm.list_models(f"*{plain}*")[:5] or timm.list_models(f"{plain[:4]}*")[:5]
    raise ExportError(
        f"{name!r} is neither a file or folder nor a model of timm or torchvision"
        + (f"; timm has {', '.join(close)}" if close else "")
    )


def built_for(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that the images of a model must have. None: the model accepts any size."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None and type(model).__module__.startswith("torchvision."):
        size = getattr(model, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def loss_of(args: Mapping[str, Any], n: int) -> nn.Module | None:
    """Build the loss of a training run with the arguments ``args``, for ``n`` classes.

    If ``args`` names no loss or a loss of timm, which predicts by softmax, return None. If the loss cannot be built,
    for example because a plug-in is not installed, warn and return None.
    """
    from topk_registry import accepted_context, create_loss, get_loss_builder, is_loss, loss_info

    name = args.get("loss")
    if not isinstance(name, str) or (is_loss(name) and loss_info(name).distribution == "timm"):
        return None
    # class_counts is a placeholder: predictions and their temperature do not depend on class counts
    context = {"num_classes": n, "class_counts": [1] * n}
    try:
        options = {**accepted_context(get_loss_builder(name), context), **(args.get("loss_opt") or {})}
        return create_loss(name, **options)
    except Exception as error:  # the plug-in of the loss may be missing, or its options may have changed
        distribution = (args.get("loss_record") or {}).get("distribution")
        loss = f"{name!r} of {distribution}" if distribution else repr(name)
        what = f"the loss {loss} cannot be built, so k, temperature and the probabilities are the defaults"
        warnings.warn(f"{what}: {error}", stacklevel=2)
        return None


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        # timm's train.py stores its arguments as an argparse.Namespace, which weights_only must allow
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickle protocols; real problems are errors
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        why = f"a {found[1]}, which runs code when it is loaded; save state_dict() instead" if found else "no weights"
        raise ExportError(f"{path} contains {why} (checkpoints are read with weights_only)") from error
    except Exception as error:  # the errors of zip, pickle and safetensors share no base class
        raise ExportError(f"{path} is corrupt or not a checkpoint: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} contains a {type(content).__name__}, expected a dictionary of weights")
    return content


def _args_of(content: Mapping[str, Any]) -> dict[str, Any]:
    args = content.get("args")
    if isinstance(args, argparse.Namespace):
        return vars(args)
    return dict(args) if isinstance(args, Mapping) else {}


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
        raise ExportError(f"{path} does not contain the arguments of a training run")
    return args


def _cleaned(weights: dict[str, Any]) -> dict[str, Any]:
    """Remove name prefixes that DDP, ``torch.compile`` and averaging add, and entries that only training uses."""
    from timm.models import clean_state_dict

    return {k: v for k, v in clean_state_dict(weights).items() if k != "n_averaged" and ".aux_bn." not in k}


def _classes_in(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    with contextlib.suppress(ValueError):
        name, _ = find_classifier(model)[0]
        weight = checkpoint.state.get(f"{name}.weight")
        if isinstance(weight, Tensor) and weight.ndim and len(weight) != num_classes_of(model):
            return len(weight)
    return None


def _model_options(args: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(args.get("model_kwargs") or {})
    if channels := args.get("in_chans") or (args.get("input_size") or (None,))[0]:
        options["in_chans"] = channels
    for key, name in (("gp", "global_pool"), ("bn_eps", "bn_eps")):
        if args.get(key):
            options[name] = args[key]
    return options


def _fill(model: nn.Module, checkpoint: Checkpoint, name: str) -> None:
    try:
        model.load_state_dict(checkpoint.state)
    except (RuntimeError, TypeError, AttributeError) as error:
        # PyTorch names the missing and unknown weights, and the weights of another shape
        details = shorten(str(error), 600, placeholder=" ...")
        raise ExportError(f"{checkpoint.path} is not a checkpoint of {name}: {details}") from error
