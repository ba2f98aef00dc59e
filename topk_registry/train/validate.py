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
from topk_registry.data.labels import is_indexed
from topk_registry.errors import PluginError, TrainError
from topk_registry.files import write_text
from topk_registry.train.config import INTERPOLATIONS, MULTILABEL, TrainConfig, clean_settings, flag_of, usual_workers

DATA = ("data_dir", "dataset", "dataset_opt", "val_split")  # flags that choose the images
ELSEWHERE = {  # flags of timm's validate.py
    "--checkpoint": "the checkpoint is the first argument: timm validate CHECKPOINT DIR, without --checkpoint",
    "--data-dir": "the directory is the second argument: timm validate CHECKPOINT DIR, without --data-dir",
    "--use-ema": "--weights ema, which is the default, uses EMA weights if the checkpoint has them",
    "--results-file": "--json FILE writes the metrics to a file",
}
# all flags that replace no setting
RUNNING = ("path", "all_images", "weights", "device", "batch_size", "workers", "k", "json")
SHARED: dict[str, dict[str, Any]] = {  # flags of validate and of compare
    "--dataset": {"metavar": "NAME", "help": "a data set by name, as in timm train"},
    "--dataset-opt": {
        "nargs": "*", "action": ParseOptions, "metavar": "K=V", "help": "options of a registered data set",
    },
    "--split": {"dest": "val_split", "metavar": "NAME", "help": "split to evaluate on (default: as in training)"},
    "--all-images": {"action": "store_true", "help": "accept images of training: all of a DIR without splits"},
    "--weights": {
        "choices": ("ema", "model"), "default": "ema", "help": "weights to use (default: the EMA if there is one)",
    },
    "--k": {
        "type": positive, "nargs": "+", "default": [1, 5], "metavar": "K",
        "help": "set sizes of top-k accuracy (default: 1 5)",
    },
    "-b --batch-size": {"type": positive, "default": 256, "metavar": "N", "help": "batch size (default: 256)"},
    "-j --workers": {
        "type": within("[0, inf)", int), "default": usual_workers(), "metavar": "N",
        "help": f"loader processes (default: {usual_workers()})",
    },
    "--device": {"default": "auto", "help": "auto, cpu, cuda or cuda:N (default: auto)"},
    "--json": {"metavar": "FILE", "help": "also write the results to a JSON file"},
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    "path": {"metavar": "CHECKPOINT", "help": "a checkpoint, or an ONNX file"},
    "data_dir": {"nargs": "?", "metavar": "DIR", "help": "root directory of the data"},
    **SHARED,
    "--model": {"metavar": "NAME", "help": "a timm model, if the checkpoint does not name it"},
    "--num-classes": {
        "type": positive, "metavar": "N", "help": "number of classes, if the checkpoint does not name it",
    },
    "--loss": {"metavar": "NAME", "help": "loss that defines the probabilities (default: of the checkpoint)"},
    "--img-size": {"type": positive, "metavar": "N", "help": "image size (default: as in training)"},
    "--crop-pct": {
        "type": within("(0, inf)"), "metavar": "PCT", "help": "share of the center crop (default: as in training)",
    },
    "--mean": {
        "type": within("(-inf, inf)"), "nargs": "+", "metavar": "MEAN",
        "help": "channel means (default: as in training)",
    },
    "--std": {"type": within("(0, inf)"), "nargs": "+", "metavar": "STD", "help": "channel standard deviations"},
    "--interpolation": {"choices": INTERPOLATIONS[1:], "help": "interpolation (default: as in training)"},
    "--multi-crop": {
        "type": int, "choices": (0, 5, 10), "help": "evaluate N crops per image, average top-k marginals",
    },
    "--marginal-temperature": {
        "type": within("(0, inf)"), "metavar": "T", "help": "temperature of the marginals",
    },
    "--amp": {"action": "store_true", "default": None, "help": "evaluate in mixed precision"},
}  # fmt: skip


@dataclass(frozen=True)
class Evaluated:
    """An opened checkpoint or ONNX file that can be evaluated.

    Args:
        evaluate: function of a data set that returns metrics, with keyword arguments of
            :func:`topk_registry.train.evaluate`: ``k``, ``calibration`` and ``keep``.
        class_names: names of the classes in the order of the logits, or None.
        weights: ``"EMA"`` (exponential moving average of the weights), ``"model"``, or a format such as ``"ONNX"``.
        trained_on: data of the training run, see :func:`topk_registry.data.held_out.record_of`. None: unknown.
        config: configuration of the training run, with the preprocessing. None for an ONNX file.
    """

    evaluate: Callable[..., dict[str, float]]
    class_names: list[str] | None
    weights: str
    trained_on: Mapping[str, Any] | None
    config: TrainConfig | None = None

    def images(self, config: TrainConfig, records: Mapping[str, Any], *, all_images: bool) -> tuple[Any, list[str]]:
        """Open images as :func:`topk_registry.train.data.open_images`, with the class indices of this model."""
        from topk_registry.train import data

        channels = self.config.channels if self.config is not None else 3
        dataset, notes = data.open_images(config, records, channels=channels, all_images=all_images)
        return data.align(dataset, self.class_names, f"split {config.val_split!r}"), notes


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
    path, settings = Path(path), settings or {}
    running = {"device": device, "batch_size": batch_size, "workers": workers}
    if path.is_file() and path.suffix and registry.model_files.infos(path.suffix[1:]):  # infos: disabled formats too
        if fixed := [flag_of(name) for name in settings if name not in DATA]:
            raise TrainError(f"{', '.join(fixed)}: without effect on {path}, which has its own model and preprocessing")
        return _open_file(path, running)
    from topk_registry.train import checkpoint, data, evaluation, loss, model

    saved = checkpoint.settings_in(path)
    if not saved and "model" not in settings:
        raise TrainError(f"{path} has no model name: pass --model and --num-classes")
    own: dict[str, Any] = {"pretrained": False, "pretrained_path": None, "initial_checkpoint": "", "resume": ""}
    own |= {"overwrite": False, "mixup": 0.0, "cutmix": 0.0, **running, "validation_batch_size": batch_size}
    own |= {"input_size": None} if "img_size" in settings else {}
    recorded = clean_settings(saved, strict=False)
    if "loss" in settings and settings["loss"] != recorded.get("loss"):
        recorded.pop("loss_opt", None)  # these options belong to the loss of training
    config = TrainConfig(**{**recorded, **own, **settings})
    compute = model.Compute.set_up(config)
    network = model.build_model(config, config.num_classes)
    model.load_weights(network, str(path), ema=weights == "ema")
    n: Any = config.num_classes or network.num_classes
    config = config.replace(num_classes=n, **model.preprocessing_of(config, network))
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

    def evaluate(dataset: Any, **how: Any) -> dict[str, float]:
        loader = data.create_eval_loader(config, dataset, compute)
        return evaluation.evaluate(network, loader, **{**options, **how}) or {}

    used = "EMA" if weights == "ema" and "state_dict_ema" in model.read_checkpoint(path) else "model"
    return Evaluated(evaluate, saved.get("class_names"), used, record_of(saved), config)


def _open_file(path: Path, running: dict[str, Any]) -> Evaluated:
    """Open a file whose reader has a method ``run(images, keep)``, which calls ``keep(scores, labels)`` per batch."""
    import torch

    from topk_registry.train.evaluation import SingleLabel

    kind = path.suffix[1:]
    opened = registry.model_files.builder(kind)(path, SimpleNamespace(**running))

    def evaluate(dataset: Any, *, keep: Callable[..., object], **options: Any) -> dict[str, float]:
        metrics: list[SingleLabel] = []

        def update(scores: Any, labels: Any) -> None:
            if not metrics:  # only the first batch tells the number of classes of any file
                metrics.append(SingleLabel(scores.shape[1], device="cpu", **options))
            target = torch.from_numpy(labels)
            keep(metrics[0].update(torch.from_numpy(scores), target), target)

        opened.run(SimpleNamespace(dataset=dataset, indexed=is_indexed(dataset)), update)
        return metrics[0].compute()

    names: list[str] | None = list(opened.class_names or ()) or None
    return Evaluated(evaluate, names, kind.upper(), getattr(opened, "trained_on", None))


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
    config = opened.config or TrainConfig(**{name: given[name] for name in DATA if name in given})
    dataset, notes = opened.images(config, {args.path: opened.trained_on}, all_images=args.all_images)
    size = getattr(dataset, "__len__", lambda: 0)()
    print(*notes, f"{args.path}: evaluating {size or 'streamed'} images", sep="\n", file=sys.stderr, flush=True)
    found = opened.evaluate(dataset, k=args.k, calibration=True, keep=counting(args.batch_size))
    results: dict[str, Any] = {name: value for name, value in found.items() if name != "left_out"}
    results["images"] = size - int(found.get("left_out", 0))
    results |= {"left_out": int(found["left_out"])} if "left_out" in found else {}
    return results | {"weights": opened.weights} | ({"prepared": opened.config.prepared} if opened.config else {})


def counting(batch_size: int) -> Callable[..., None]:
    """Return a function that is called after each batch, and prints every few seconds how many batches are done."""
    tick, batches = ticker(), count(1)
    return lambda *batch: tick(f"{next(batches)} batches of {batch_size}")


def create_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="timm validate",
        description="Evaluate a checkpoint of `timm train` or an exported ONNX file. A checkpoint records model, data "
        "and preprocessing, and flags replace what it records. EMA weights are used if the checkpoint has them.",
        elsewhere=ELSEWHERE,
    )
    for names, options in FLAGS.items():
        parser.add_argument(*names.split(), **options)
    return parser
