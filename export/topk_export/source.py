"""The model to export, with its image preprocessing and its class names.

The model can come from a PyTorch module, from a checkpoint or a training run, or from the name of a timm or torchvision
model.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topk_export.checkpoint import SUFFIXES, build, built_for, loss_of, read_checkpoint, rebuild
from topk_export.classes import distinct, read_class_names
from topk_export.errors import ExportError
from topk_export.runtime.metadata import CLASSIFICATION, MULTILABEL
from topk_export.runtime.preprocess import COLORS, UNKNOWN, Preprocess
from topk_registry import ClassificationLoss
from topk_registry.data.held_out import record_of
from topk_registry.nn.classifier import num_classes_of
from topk_registry.registry.source import closest

CLASSES = "classes.txt"  # file with one class name per line, in the folder of a training run
DATA_KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "resize_size", "exif")


@dataclass
class Source:
    """A model to export, with facts such as the preprocessing, the class names and the training loss."""

    model: nn.Module
    name: str  # name of the model, such as resnet50
    preprocess: Preprocess
    # in the fields below except predictive_logits, None means unknown
    class_names: tuple[str, ...] | None = None
    k: int | None = None  # the option k of the training loss; None also if the loss has no such option
    temperature: float | None = None  # of the top-k marginals in the training run
    loss: str | None = None  # name of the training loss
    task: str = CLASSIFICATION  # or MULTILABEL
    weights: str = "model"  # or "ema" for weights that training averaged, or "random" for untrained weights
    sha256: str | None = None  # of the checkpoint file; None also if there is no checkpoint
    license: str | None = None  # license of the published weights
    trained_on: Mapping[str, Any] | None = None  # data of the training run, and which images it held out
    # elementwise function from the outputs of the model to logits; the softmax of these logits gives the probabilities
    # that the training loss predicts. None: the outputs of the model are the logits
    predictive_logits: Callable[[Tensor], Tensor] | None = None


def load_source(
    what: nn.Module | str | Path,
    *,
    model: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    random_weights: bool = False,
    ema: bool = True,
    data_config: Mapping[str, Any] | None = None,
) -> Source:
    """Load the model to export, with its image preprocessing and its class names.

    Args:
        what: a PyTorch module, a checkpoint file, the folder of a training run, or the name of a timm or torchvision
            model.
        model: name of the model in the checkpoint. Default: the name that the checkpoint records.
        model_kwargs: keyword arguments for the function that builds the model. Each argument replaces the argument of
            the same name that the checkpoint records.
        num_classes: number of classes. Default: the number that the checkpoint records, else the number of outputs of
            the classifier in the checkpoint.
        pretrained: if ``what`` is the name of a model, load the published weights.
        random_weights: if ``what`` is the name of a model, use random weights, for example to test a deployment. For
            the name of a model, ``pretrained`` or ``random_weights`` must be True.
        ema: if the checkpoint contains averaged weights (EMA), use the averaged weights.
        data_config: preprocessing of evaluation images. The keys are timm's ``input_size``, ``mean``, ``std``,
            ``interpolation``, ``crop_pct`` and ``crop_mode``, and also ``resize_size`` and ``exif``. Default for each
            key: the value that training recorded, else the value of timm or torchvision for this model. If neither
            library knows the model, ``input_size`` is required. Without ``mean`` and ``std``, the exported file
            accepts only arrays, not images.

    Returns:
        A :class:`Source`, which :func:`~topk_export.export_onnx` accepts as its first argument.

    Raises:
        ExportError: the model cannot be found or built, or the size of its input images is unknown.
        ValueError: ``data_config`` has an unknown key.
    """
    _check_data_config(data_config or {})
    if isinstance(what, nn.Module):
        name = getattr(what, "pretrained_cfg", {}).get("architecture") or type(what).__name__
        source = Source(what, name, preprocess_of(what, name, {}, data_config), license=_license(what))
    elif Path(what).exists():
        source = _from_checkpoint(Path(what), model, num_classes, model_kwargs, ema, data_config)
    else:
        source = _from_name(str(what), num_classes, pretrained, random_weights, model_kwargs, data_config)
    if source.predictive_logits is not None:
        source.model = PredictiveLogits(source.model, source.predictive_logits)
    return source


class PredictiveLogits(nn.Module):
    """Wrapper of a model for the case that the training loss does not predict the softmax of the model's outputs.

    The output is ``predictive_logits(model(x))``, see :meth:`topk_registry.ClassificationLoss.predictive_logits`.
    """

    def __init__(self, model: nn.Module, predictive_logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.predictive_logits = model, predictive_logits

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.model(x)
        return self.predictive_logits(outputs.to(torch.promote_types(outputs.dtype, torch.float32)))


def _from_checkpoint(
    path: Path,
    name: str | None,
    num_classes: int | None,
    model_kwargs: Mapping[str, Any] | None,
    ema: bool,
    data_config: Mapping[str, Any] | None,
) -> Source:
    checkpoint = read_checkpoint(path, ema=ema)
    args = checkpoint.args
    if args:  # training evaluates with center crops, even if the model's published configuration has another crop mode
        args = {**args, "crop_mode": args.get("crop_mode") or "center"}
    name = name or checkpoint.model_name
    if name is None:
        raise ExportError(f"{checkpoint.path} does not record the name of its model: give model=NAME (--model NAME)")
    size = _requested_size({**args, **(data_config or {})})
    built = rebuild(checkpoint, name, num_classes=num_classes, model_kwargs=model_kwargs, size=size)
    source = Source(built, name, preprocess_of(built, name, args, data_config), sha256=checkpoint.sha256)
    source.weights = "ema" if checkpoint.ema else "model"
    n = getattr(built, "num_classes", None) or num_classes_of(built)
    file = checkpoint.path.parent / CLASSES
    names = tuple(args.get("class_names") or (read_class_names(file) if file.is_file() else ()))
    if 0 < len(names) <= n:  # a model may have more outputs than the run has class names
        source.class_names = (*names, *map(str, range(len(names), n)))
    source.task = args.get("task") or CLASSIFICATION
    source.loss = args.get("loss")
    source.trained_on = record_of(args)
    loss = None if source.task == MULTILABEL else loss_of(args, n)
    k = getattr(loss, "k", None)
    source.k = int(k) if k is not None and k == int(k) else None  # some losses accept a k that is not an integer
    source.temperature = args.get("marginal_temperature") or getattr(loss, "marginal_temperature", None)
    if getattr(type(loss), "predictive_logits", None) is not ClassificationLoss.predictive_logits:  # not the identity
        source.predictive_logits = getattr(loss, "predictive_logits", None)
    return source


def _from_name(
    name: str,
    num_classes: int | None,
    pretrained: bool,
    random_weights: bool,
    model_kwargs: Mapping[str, Any] | None,
    data_config: Mapping[str, Any] | None,
) -> Source:
    if Path(name).suffix in SUFFIXES:
        raise ExportError(f"{name} does not exist")
    size = _requested_size(data_config or {})
    built = build(name, size, num_classes=num_classes, pretrained=pretrained, options=model_kwargs)
    if not pretrained and not random_weights:
        raise ExportError(
            f"{name} is the name of a model, and a new model has random weights: give a checkpoint, load the published "
            "weights (pretrained=True, --pretrained), or allow random weights (random_weights=True, --random-weights)"
        )
    source = Source(built, name, preprocess_of(built, name, {}, data_config), license=_license(built))
    source.class_names = _published_names(built, name) if pretrained else None
    source.weights = "model" if pretrained else "random"
    return source


def _requested_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    if size := config.get("input_size"):
        return int(size[-2]), int(size[-1])
    side = config.get("img_size") or config.get("val_crop_size")
    return (int(side), int(side)) if side else None


def _check_data_config(config: Mapping[str, Any]) -> None:
    for key in config:
        if key not in DATA_KEYS:
            keys = ", ".join(DATA_KEYS)
            raise ValueError(f"data_config has no key {key!r}{closest(key, DATA_KEYS)} (it takes {keys})")


def preprocess_of(
    model: nn.Module, name: str, args: Mapping[str, Any], override: Mapping[str, Any] | None
) -> Preprocess:
    """Return the preprocessing of evaluation images for a model.

    The defaults come from timm or torchvision. Values in ``args``, the arguments of the training run, replace the
    defaults. Values in ``override``, the ``data_config`` of :func:`load_source`, replace the defaults and the values in
    ``args``.

    Raises:
        ExportError: the size of the images is unknown, or only one of mean and std is known.
    """
    from timm.data.config import resolve_data_config

    config = {**args, **(args.get("data_config") or {}), **(override or {})}
    own = built_for(model)
    if own is not None and not config.keys() & {"input_size", "img_size", "val_crop_size"}:
        config["input_size"] = (getattr(model, "pretrained_cfg", {}).get("input_size", (3,))[0], *own)
    if (getattr(model, "pretrained_cfg", None) or {}).get("mean"):
        try:
            config = {"resize_size": config.get("resize_size"), **resolve_data_config(config, model=model)}
        except AssertionError as error:
            raise ExportError(
                "input_size must be (channels, height, width), with as many values of mean and std as channels; got "
                + ", ".join(f"{key} {config.get(key)}" for key in ("input_size", "mean", "std"))
            ) from error
    else:
        config = _with_changes(_torchvision_config(name), config)
    if not config["input_size"]:
        raise ExportError(
            f"the size of the input of {name} is unknown: give data_config={{'input_size': (C, H, W), 'mean': ..., "
            "'std': ...} (on the command line --input-size, --mean and --std). If the module contains a timm model, "
            "timm.data.resolve_model_data_config(model) returns these values"
        )
    channels = int(config["input_size"][0])
    mean, std = (_per_channel(config[key], channels) for key in ("mean", "std"))
    if bool(mean) != bool(std):
        raise ExportError(f"mean and std belong together: the configuration of {name} has only one of them")
    if not mean:
        warnings.warn(
            f"mean and std of the images of {name} are unknown, so the exported file takes arrays only, not images: "
            "give data_config 'mean' and 'std' (on the command line --mean and --std)",
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
        exif=bool((override or {}).get("exif")),
    )


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


def _with_changes(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: changes[key] for key in (*config, "crop_mode") if changes.get(key)}
    if crop := changes.get("val_crop_size"):  # torchvision's training script has its own keys
        changed["input_size"] = (config["input_size"][0], crop, crop)
    if resize := changes.get("val_resize_size"):
        changed["resize_size"] = (resize, resize)
    elif changed.keys() & {"input_size", "crop_pct"}:
        changed.setdefault("resize_size", None)
    return {**config, **changed}


def _torchvision_config(name: str) -> dict[str, Any]:
    """Return the preprocessing of a torchvision model's published weights. If there are none, some values are empty."""
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
    import torchvision

    plain = name.removeprefix("torchvision:")
    if plain not in torchvision.models.list_models(module=torchvision.models):
        return None
    return getattr(torchvision.models.get_model_weights(plain), "DEFAULT", None)


def _published_names(model: nn.Module, name: str) -> tuple[str, ...] | None:
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if not hasattr(model, "pretrained_cfg"):
        weights = _torchvision_weights(name)
        return None if weights is None else distinct(weights.meta["categories"])
    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return distinct([info.index_to_description(i) for i in range(info.num_classes())])


def _license(model: nn.Module) -> str | None:
    with suppress(AttributeError):
        return model.pretrained_cfg.get("license")  # type: ignore[union-attr]
    return None
