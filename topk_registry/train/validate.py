"""The command ``timm validate`` computes metrics of a checkpoint or of an ONNX file."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from topk_registry import registry
from topk_registry.cli import ArgumentParser, ParseOptions, positive, ticker, within, words_of
from topk_registry.data.held_out import record_of
from topk_registry.errors import PluginError, TrainError
from topk_registry.files import write_text
from topk_registry.train.config import (
    INTERPOLATIONS,
    MULTILABEL,
    OWN_BATCHES,
    TrainConfig,
    clean_settings,
    flag_of,
    usual_workers,
)

DATA = ("data_dir", "dataset", "dataset_opt", "val_split")  # flags that choose the images
ELSEWHERE = {  # flags of timm's validate.py
    "--checkpoint": "the checkpoint is the first argument: timm validate CHECKPOINT DIR, without --checkpoint",
    "--data-dir": "the directory is the second argument: timm validate CHECKPOINT DIR, without --data-dir",
    "--use-ema": "--weights ema, which is the default, uses EMA weights if the checkpoint has them",
    "--results-file": "--json FILE writes the metrics to a file",
}
# all flags that replace no setting
RUNNING = ("path", "all_images", "weights", "device", "batch_size", "workers", "k", "json")


@dataclass
class Evaluated:
    """An opened checkpoint or ONNX file that can run on a data set.

    Args:
        path: path of the file.
        class_names: names of the classes in the order of the logits, or None.
        num_classes: number of classes, or 0 if this number is unknown before the model runs.
        weights: ``"EMA"`` (exponential moving average of the weights), ``"model"``, or a format such as ``"ONNX"``.
        preprocessing: image size, crop, channel means, standard deviations and interpolation. Empty for an ONNX file.
        config: configuration of the training run. None for an ONNX file.
        run: function ``(dataset, keep)`` that calls ``keep(logits [B, n], labels [B])`` for each batch. The logits
            are logits or log-probabilities, so that their softmax gives the class probabilities. An image that cannot
            be read has the label -100.
        options: keyword arguments of :func:`evaluate`. Empty for an ONNX file.
        loader: function that takes a data set and returns a data loader. None for an ONNX file.
        model: the model as a module. None for an ONNX file.
        trained_on: data of the training run, see :func:`topk_registry.data.held_out.record_of`. None: unknown.
    """

    path: Path
    class_names: list[str] | None
    num_classes: int
    weights: str
    preprocessing: dict[str, Any]
    config: TrainConfig | None
    run: Callable[[Any, Callable[..., object]], object]
    options: dict[str, Any]
    loader: Callable[[Any], Any] | None = None
    model: Any = None
    trained_on: Mapping[str, Any] | None = None

    @property
    def prepared(self) -> str:
        """The preprocessing as text, such as "224x224, crop 0.9, bicubic". Empty for an ONNX file."""
        if not (used := self.preprocessing):
            return ""
        return f"{'x'.join(map(str, used['input_size'][1:]))}, crop {used['crop_pct']:g}, {used['interpolation']}"


def open_model(
    path: str | Path,
    *,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 4,
    weights: str = "ema",
    settings: dict[str, Any] | None = None,
) -> Evaluated:
    """Open a checkpoint of ``timm train`` or of timm's training script, or a file in a registered format such as ONNX.

    Args:
        path: path of the file.
        device, batch_size, workers: as in ``timm train``.
        weights: for a checkpoint, "ema" (the EMA weights, if there are any) or "model" (weights without averaging).
        settings: settings that replace settings of the training run, such as another ``crop_pct``. A file in a
            registered format has fixed settings, so only settings of the data are accepted.

    Raises:
        TrainError, PluginError: the file cannot be opened, or the reader of its format is disabled or broken.
    """
    path = Path(path)
    if not path.is_file():
        raise TrainError(f"there is no file {path}")
    if (kind := path.suffix[1:]) and registry.model_files.infos(kind):  # infos: disabled formats too
        if fixed := [flag_of(name) for name in settings or {} if name not in DATA]:
            raise TrainError(f"{', '.join(fixed)}: without effect on {path}, which has its own model and preprocessing")
        return _open_file(kind, path, device, batch_size, workers)
    from topk_registry.train import checkpoint, data, evaluation, loss, model

    saved = checkpoint.settings_in(path)
    if not saved and "model" not in (settings or {}):
        raise TrainError(f"{path} has no model name: pass --model and --num-classes")
    about = {"device": device, "workers": workers, "batch_size": batch_size, "validation_batch_size": batch_size}
    own = {**clean_settings(saved, strict=False), **about, **(settings or {})}
    if "img_size" in (settings or {}):
        own["input_size"] = None
    cleared = {"pretrained": False, "pretrained_path": None, "initial_checkpoint": "", "resume": "", "log": []}
    config = TrainConfig(**{**own, **cleared, "overwrite": False})
    compute = model.Compute.set_up(config)
    network = model.build_model(config, config.num_classes)
    model.load_weights(network, str(path), ema=weights == "ema")
    n: Any = config.num_classes or network.num_classes
    preprocessing = model.preprocessing_of(config, network)
    config = config.replace(num_classes=n, **preprocessing)
    network = model.place_model(config, network, compute)
    criterion = None
    try:
        spec = loss.LossSpec.resolve(config.loss, config.loss_opt, config.task == MULTILABEL, saved)
        if spec.distribution != "timm":  # needed only for its predictive_logits and its marginal_temperature
            counts = [1] * n if spec.needs_class_counts else None
            criterion = loss.build_loss(spec, loss.Facts(n, class_counts=counts)).to(compute.device)
    except (TrainError, PluginError) as error:
        raise TrainError(
            f"{error}. The probabilities depend on the loss: install it, or pass --loss ce for softmax"
        ) from error
    options = evaluation.evaluation_options(config, compute, criterion, None)

    def loader(dataset: Any) -> Any:
        return data.create_eval_loader(config, dataset, preprocessing, compute)

    def run(dataset: Any, keep: Callable[..., object]) -> object:
        return evaluation.evaluate(network, loader(dataset), keep=keep, **options)

    used = "EMA" if weights == "ema" and "state_dict_ema" in model.read_checkpoint(path) else "model"
    names = saved.get("class_names")
    return Evaluated(path, names, n, used, preprocessing, config, run, options, loader, network, record_of(saved))


def _open_file(kind: str, path: Path, device: str, batch_size: int, workers: int) -> Evaluated:
    import torch

    from topk_registry.data.labels import is_indexed

    running = SimpleNamespace(device=device, batch_size=batch_size, workers=workers)
    opened = registry.model_files.builder(kind)(path, running)
    names: list[str] | None = list(opened.class_names or ()) or None

    def run(dataset: Any, keep: Callable[..., object]) -> object:
        images = SimpleNamespace(dataset=dataset, indexed=is_indexed(dataset))
        return opened.run(images, lambda scores, labels: keep(torch.from_numpy(scores), torch.from_numpy(labels)))

    trained_on = getattr(opened, "trained_on", None)
    return Evaluated(path, names, len(names or ()), kind.upper(), {}, None, run, {}, trained_on=trained_on)


def measure(opened: Evaluated, dataset: Any, k: Sequence[int], progress: Callable[[int], bool]) -> dict[str, float]:
    """Return the metrics of an opened model on a data set. ``k`` and ``progress`` are as in :func:`evaluate`."""
    import torch

    from topk_registry.train.evaluation import SingleLabel, evaluate

    n = opened.num_classes
    calibration = max((size for size in k if size < n), default=1)
    if opened.loader is not None:
        several = bool(opened.options["multilabel"])
        options = {**opened.options, "k": list(k), "calibration": 0 if several else calibration, "progress": progress}
        return evaluate(opened.model, opened.loader(dataset), **options) or {}
    metrics = SingleLabel(n, k, device=torch.device("cpu"), calibration=calibration)
    batches = count()

    def keep(scores: Any, labels: Any) -> None:
        progress(next(batches))
        metrics.update(scores, labels)

    opened.run(dataset, keep)
    return metrics.compute()


def main(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint or an exported ONNX file."""
    args = create_parser().parse_args(argv)
    print(f"timm validate: loading torch and {args.path}", file=sys.stderr, flush=True)
    try:
        results = validate(args)
        from topk_registry.train.report import label, number

        width = max(map(len, map(label, results)))
        for name, value in results.items():
            print(f"{label(name):{width}}  {number(name, value) if isinstance(value, float) else value}")
        if args.json:
            write_text(args.json, json.dumps(results, indent=2) + "\n")
    except (TrainError, OSError) as error:
        print(f"timm validate: {words_of(error)}", file=sys.stderr)
        return 2
    return 0


def validate(args: Any) -> dict[str, Any]:
    """Evaluate the model that the flags name. Return metrics, image count, kind of weights and preprocessing."""
    given = {name: value for name, value in vars(args).items() if name not in RUNNING and value is not None}
    about = {"device": args.device, "batch_size": args.batch_size, "workers": args.workers}
    opened = open_model(args.path, weights=args.weights, settings=given, **about)
    from topk_registry.train import data

    config = opened.config or TrainConfig(**{name: given[name] for name in DATA if name in given})
    if config.dataset == OWN_BATCHES:
        if not config.data_dir:
            raise TrainError(f"{args.path} was trained on your own loaders: specify the data with DIR or --dataset")
        config = config.replace(dataset="")
    config, used = data.without_training_images(config, {args.path: opened.trained_on}, args.all_images)
    dataset = data.open_evaluation(config, channels=(config.input_size or [3])[0])
    for note in [*used, *getattr(dataset, "notes", ())]:
        print(note, file=sys.stderr)
    if opened.class_names:
        dataset = data.align(dataset, opened.class_names, f"split {config.val_split!r}")
    if not opened.num_classes:
        opened.num_classes = len(data.class_names_of(dataset) or ())

    tick, size = ticker(), getattr(dataset, "__len__", lambda: "streamed")()
    print(f"{args.path}: evaluating {size} images", file=sys.stderr, flush=True)

    def progress(batch: int) -> bool:
        tick(f"{batch} batches of {args.batch_size}")
        return False

    results: dict[str, Any] = dict(measure(opened, dataset, args.k, progress))
    left_out = int(results.pop("left_out", 0))
    results["images"] = getattr(dataset, "__len__", lambda: 0)() - left_out
    results |= ({"left_out": left_out} if left_out else {}) | {"weights": opened.weights}
    return results | ({"prepared": opened.prepared} if opened.prepared else {})


def create_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="timm validate",
        description="Evaluate a checkpoint of `timm train` or an exported ONNX file. A checkpoint records model, data "
        "and preprocessing, and flags replace what it records. EMA weights are used if the checkpoint has them.",
        elsewhere=ELSEWHERE,
    )
    add: Any = parser.add_argument
    add("path", metavar="CHECKPOINT", help="a checkpoint, or an ONNX file")
    add("data_dir", nargs="?", metavar="DIR", help="root directory of the data")
    add("--dataset", metavar="NAME", help="a data set by name, as in timm train")
    add("--dataset-opt", nargs="*", action=ParseOptions, metavar="K=V", help="options of a registered data set")
    add("--split", dest="val_split", metavar="NAME", help="split to evaluate on (default: as in training)")
    add("--all-images", action="store_true", help="use all images of a DIR without splits, also those of training")
    add("--weights", choices=("ema", "model"), default="ema", help="weights to use (default: the EMA if there is one)")
    add("--model", metavar="NAME", help="a timm model, if the checkpoint does not name it")
    add("--num-classes", type=positive, metavar="N", help="number of classes, if the checkpoint does not name it")
    add("--k", type=positive, nargs="+", default=[1, 5], metavar="K", help="set sizes of top-k accuracy (default: 1 5)")
    add("--loss", metavar="NAME", help="loss that defines the probabilities (default: of the checkpoint)")
    add("--img-size", type=positive, metavar="N", help="image size (default: as in training)")
    add("--crop-pct", type=within("(0, inf)"), metavar="PCT", help="share of the center crop (default: as in training)")
    add("--mean", type=within("(-inf, inf)"), nargs="+", metavar="MEAN", help="channel means (default: as in training)")
    add("--std", type=within("(0, inf)"), nargs="+", metavar="STD", help="channel standard deviations")
    add("--interpolation", choices=INTERPOLATIONS[1:], help="interpolation (default: as in training)")
    add("--multi-crop", type=int, choices=(0, 5, 10), help="evaluate N crops per image, average top-k marginals")
    add("--marginal-temperature", type=within("(0, inf)"), metavar="T", help="temperature of the marginals")
    add("-b", "--batch-size", type=positive, default=256, metavar="N", help="batch size (default: 256)")
    workers = f"loader processes (default: {usual_workers()})"
    add("-j", "--workers", type=within("[0, inf)", int), default=usual_workers(), metavar="N", help=workers)
    add("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    add("--amp", action="store_true", default=None, help="evaluate in mixed precision")
    add("--json", default="", metavar="FILE", help="also write the metrics here")
    return parser
