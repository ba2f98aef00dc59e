"""``timm validate``: a checkpoint or a pretrained model in, metrics out.

timm's flags, under timm's names. What a checkpoint of ``timm train`` recorded (model, classes, data, loss) need not be
said again; a flag overrides it.
"""

import argparse
import json
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topk_registry.cli import ArgumentParser, ParseOptions
from topk_registry.train.config.flags import create_parser
from topk_registry.train.errors import TrainError

# what a training run recorded and a flag need not repeat
RECORDED = {
    *("model", "num_classes", "in_chans", "input_size", "img_size", "crop_pct", "mean", "std", "interpolation", "gp"),
    *("model_kwargs", "data_dir", "dataset", "dataset_opt", "class_map", "input_img_mode", "input_key", "target_key"),
    *("train_split", "val_split", "normalize_classifier", "learn_scale", "seed", "subset", "long_tail"),
    *("imbalance_factor", "label_noise", "superclasses", "loss", "loss_opt", "eval_metric"),
}


def main(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint or a pretrained model."""
    args = _parser().parse_args(argv)
    try:
        results = validate(args)
    except TrainError as error:
        print(f"timm validate: {error}", file=sys.stderr)
        return 2
    width = max(map(len, results))
    print("\n".join(f"{name:{width}}  {value}" for name, value in results.items()))
    if args.results_file:
        _write(Path(args.results_file), results, args.results_format)
    print(f"--result\n{json.dumps(results, indent=4)}")
    return 0


def validate(args: Namespace) -> dict[str, Any]:
    """The metrics of a checkpoint or a pretrained model, accuracies in percent."""
    from timm.data import resolve_data_config
    from timm.models import load_checkpoint

    from topk_registry.train.engine.sets import set_evaluation
    from topk_registry.train.setup import build, datasets, models
    from topk_registry.train.setup.compute import Compute

    settings = _settings(args)
    sets = set_evaluation(args, settings.seed)
    compute = Compute.set_up(settings)
    datasets.check_data_arguments(settings)
    data = _open(settings, models.channels_of(settings))
    model = models.build_model(settings, build.classes_of(settings, data))
    if args.checkpoint:
        try:
            load_checkpoint(model, args.checkpoint, use_ema=args.use_ema)
        except (OSError, RuntimeError, KeyError) as error:
            raise TrainError(f"cannot load {args.checkpoint} into {settings.model}: {error}") from error
    config = resolve_data_config(vars(settings), model=model, use_test_size=not args.use_train_size)
    criterion = _criterion(settings, data)
    evaluator = build.create_evaluator(settings, data, config, criterion, compute, sizes=args.topk)
    if sets is not None:
        evaluator.on_batch = sets
    metrics = evaluator(models.place_model(settings, model, compute), criterion)
    assert metrics is not None
    if sets is not None:
        metrics |= sets.results(data.counts)
    return {
        "model": settings.model,
        "checkpoint": args.checkpoint,
        "dataset": datasets.name_of(settings),
        **{name: round(value, 4) if math.isfinite(value) else None for name, value in metrics.items()},
        **{f"top{k}_err": round(100 - metrics[f"top{k}"], 4) for k in (1, 5)},
        "param_count": round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        "img_size": config["input_size"][-1],
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="timm validate", description=__doc__, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("data", nargs="?", metavar="DIR", default=None, help="the data's root directory (or --data-dir)")
    add("--checkpoint", default="", metavar="PATH", help="a checkpoint; without one, the model's published weights")
    add("-m", "--model", metavar="NAME", help="a timm model (default: the checkpoint's, else dpn92)")
    add("--pretrained", action="store_true", default=False, help="use the published weights")
    add("--data-dir", metavar="DIR", help="the data's root directory")
    add("--dataset", metavar="NAME", help="<type>/<name> as in timm, or topk/<name> for a registered data set")
    add("--dataset-opt", nargs="*", action=ParseOptions, metavar="K=V", help="options of a registered data set")
    add("--split", dest="val_split", metavar="NAME", help="the split to evaluate on (default: the training run's)")
    add("--num-samples", dest="val_num_samples", type=int, metavar="N", help="length of a streamed split")
    add("--dataset-download", action="store_true", help="let the data set download itself")
    for flag in ("--class-map", "--input-key", "--input-img-mode", "--target-key", "--interpolation", "--gp"):
        add(flag, metavar="X", help="as in timm")
    for flag in ("--img-size", "--in-chans", "--num-classes"):
        add(flag, type=int, metavar="N", help="as in timm")
    add("--input-size", nargs=3, type=int, metavar="N", help="channels, height and width")
    add("--use-train-size", action="store_true", default=False, help="the training size, where the test size differs")
    add("--crop-pct", type=float, metavar="PCT", help="share of the image kept by the centre crop")
    add("--mean", type=float, nargs="+", metavar="MEAN", help="channel means")
    add("--std", type=float, nargs="+", metavar="STD", help="channel standard deviations")
    add("-j", "--workers", type=int, metavar="N", help="data-loading processes (default: 4)")
    add("-b", "--batch-size", type=int, default=256, metavar="N", help="batch size (default: 256)")
    add("--use-ema", action="store_true", default=False, help="the moving average of the weights, if there is one")
    add("--device", metavar="NAME", help="device (default: cuda, or cpu without it)")
    add("--amp", action="store_true", help="mixed precision")
    add("--amp-dtype", choices=("float16", "bfloat16"), help="its lower precision")
    add("--model-dtype", choices=("float32", "float16", "bfloat16"), help="the model's own precision")
    add("--channels-last", action="store_true", help="channels-last memory layout")
    add("--fast-norm", action="store_true", help="timm's fast normalisation layers")
    add("--pin-mem", action="store_true", help="pin host memory")
    add("--no-prefetcher", action="store_true", help="normalise on the CPU")
    add("--model-kwargs", nargs="*", action=ParseOptions, metavar="K=V", help="extra model options")
    add("--topk", type=int, nargs="+", default=[1, 5], metavar="K", help="set sizes to report (default: 1 5)")
    add("--multi-crop", type=int, choices=(0, 5, 10), help="average top-k probabilities over that many crops")
    add("--marginal-temperature", type=float, metavar="T", help="temperature of those probabilities (else the loss's)")
    add("--sets", default="", metavar="SCORE", help="also prediction sets: lac, aps, raps, saps, topk or log-odds")
    add("--alpha", type=float, default=0.1, metavar="A", help="the share of labels that sets may miss (default: 0.1)")
    add("--sets-opt", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="options of the sets' score")
    add("--loss", metavar="NAME", help="the loss whose probabilities rank the classes (default: the checkpoint's)")
    add("--loss-opt", nargs="*", action=ParseOptions, metavar="K=V", help="its options")
    add("--seed", type=int, metavar="S", help="random seed")
    add("--results-file", default="", metavar="FILE", help="also write the metrics here")
    add("--results-format", default="csv", choices=("csv", "json"), help="how (default: csv)")
    return parser


def _settings(args: Namespace) -> Namespace:
    """The flags of a training run as this evaluation needs them: timm's defaults, the checkpoint's, then the given."""
    settings = create_parser().parse_args([])
    settings.model, settings.loss = "dpn92", "ce"
    recorded = _recorded(args.checkpoint)
    for name, value in [*recorded.items(), *vars(args).items()]:
        if hasattr(settings, name):
            setattr(settings, name, value)
    settings.data_dir = args.data or settings.data_dir
    settings.data = None
    settings.pretrained = args.pretrained or not args.checkpoint
    settings.initial_checkpoint = settings.resume = ""
    settings.validation_batch_size = None
    if not (settings.data_dir or settings.dataset):
        raise TrainError("name the data: --data-dir or --dataset (the checkpoint does not tell)")
    return settings


def _recorded(checkpoint: str) -> dict[str, Any]:
    if not checkpoint:
        return {}
    if not Path(checkpoint).is_file():
        raise TrainError(f"there is no checkpoint {checkpoint}")
    if checkpoint.endswith((".safetensors", ".npz", ".npy")):
        return {}
    from timm.utils.checkpoint_saver import load_checkpoint_metadata

    try:
        content = load_checkpoint_metadata(checkpoint)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise TrainError(f"cannot read {checkpoint}: {error}") from error
    saved = content.get("args") if isinstance(content, dict) else None
    values = vars(saved) if isinstance(saved, Namespace) else saved if isinstance(saved, dict) else {}
    return {name: value for name, value in values.items() if name in RECORDED and value is not None}


def _open(settings: Namespace, channels: int) -> Any:
    from topk_registry.train.setup.datasets import Data, held_out_fraction, number_of_classes, open_data, open_split

    if held_out_fraction(settings) or settings.long_tail:  # the training split tells what was held out, or is rare
        return open_data(settings, channels=channels)
    data = open_split(settings, settings.val_split, training=False, channels=channels)
    return Data(None, data, num_classes=number_of_classes(data))


def _criterion(settings: Namespace, data: Any) -> object:
    from topk_registry.registry.errors import PluginError
    from topk_registry.train.setup.criterion import Context, create_criterion

    counts = data.counts or [1] * settings.num_classes
    try:
        return create_criterion(settings.loss, settings.loss_opt, Context(settings.num_classes, 0.0, False, 1, counts))
    except (PluginError, TrainError) as error:
        print(f"timm validate: classes are ranked by their scores alone: {error}", file=sys.stderr)
        return None


def _write(path: Path, results: dict[str, Any], form: str) -> None:
    from topk_registry.train.report.console import csv_text, write_text

    write_text(path, json.dumps(results, indent=4) + "\n" if form == "json" else csv_text([results]))
