"""``timm validate``: metrics of a checkpoint, of a pretrained model, or of several.

A checkpoint of ``timm train`` tells its model, classes, data and loss, which need not be said again.
"""

import copy
import json
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topk_registry.train.config.arguments import without_other_loss
from topk_registry.train.config.config import TrainConfig
from topk_registry.train.config.tasks import MULTILABEL
from topk_registry.train.config.validate_flags import create_parser
from topk_registry.train.errors import TrainError

# settings that a training run recorded and a flag need not repeat
RECORDED = {
    *("model", "num_classes", "in_chans", "input_size", "img_size", "crop_pct", "mean", "std", "interpolation", "gp"),
    *("model_kwargs", "data_dir", "dataset", "dataset_opt", "class_map", "input_img_mode", "input_key", "target_key"),
    *("train_split", "val_split", "val_fold", "normalize_classifier", "learn_scale", "seed", "subset", "long_tail"),
    *("label_noise_kind", "label_file", "label_column"),
    *("ignore_unknown_classes", "imbalance_factor", "label_noise", "superclasses", "loss", "loss_opt", "eval_metric"),
    *("task", "labels_csv", "target_format", "multilabel_threshold"),
    "loss_record",
}
# flags that measure the one label of an image
ONE_LABEL = ("real_labels", "metrics_avg", "report", "valid_labels", "tree", "max_nodes", "groups", "group_column")


def main(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint or a pretrained model."""
    args = create_parser().parse_args(argv)
    from topk_registry.train.report.console import label

    try:
        several = targets(args)
        if args.report and (several or args.real_labels):
            raise TrainError("--report is of one model on the labels of its data: name one, without --real-labels")
        results = validate_all(args, several) if several else retrying(args) if args.retry else validate(args)
    except TrainError as error:
        print(f"timm validate: {error}", file=sys.stderr)
        return 2
    for each in results if isinstance(results, list) else [results]:
        plain, tables = _split(each)
        width = max(map(len, map(label, plain)))
        print("\n".join(f"{label(name):{width}}  {value}" for name, value in plain.items()))
        for name, rows in tables.items():
            print("\n".join((label(name), *map(_line, rows))))
    if args.results_file:
        _write(Path(args.results_file), results, args.results_format)
    print(f"--result\n{json.dumps(results, indent=4)}")
    return 0


def targets(args: Namespace) -> list[dict[str, Any]]:
    """Return the models or checkpoints where the flags name several, else an empty list."""
    from timm.models import is_model, list_models

    from topk_registry.nn import convnet  # noqa: F401  registers the built-in network

    folder, name = Path(args.checkpoint), getattr(args, "model", "")
    if args.checkpoint and folder.is_dir():
        checkpoints = sorted([*folder.glob("*.pth.tar"), *folder.glob("*.pth")])
        return [{"checkpoint": str(path)} for path in checkpoints]
    if args.checkpoint or not name or is_model(name.split("/", 1)[-1].split(".")[0]) or ":" in name:
        return []
    if Path(name).is_file():
        names = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        names = list_models("*" if name == "all" else name, pretrained=True)
    if not names:
        raise TrainError(f"timm has no model {name!r}, and none with published weights matches it")
    return [{"model": each} for each in names]


def validate_all(args: Namespace, several: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of each, best first; report and leave out one that fails."""
    results = []
    for target in several:
        try:
            results.append(retrying(Namespace(**{**vars(args), **target})))
        except (TrainError, RuntimeError) as error:
            print(f"timm validate: {next(iter(target.values()))} is left out: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # what was measured so far is shown
            break
    if not results:
        raise TrainError("none could be evaluated")
    return sorted(results, key=lambda each: each["top1" if "top1" in each else "map"] or 0.0, reverse=True)


def retrying(args: Namespace) -> dict[str, Any]:
    """Run :func:`validate` with smaller batches as long as memory runs out."""
    from timm.utils import check_batch_size_retry, decay_batch_step

    args = copy.copy(args)
    while True:
        try:
            return validate(args)
        except RuntimeError as error:
            smaller = decay_batch_step(args.batch_size)
            if not smaller or not check_batch_size_retry(str(error)):
                raise TrainError(f"{error}") from error
            print(f"timm validate: {error}; trying a batch of {smaller}", file=sys.stderr)
            args.batch_size = smaller


@dataclass(frozen=True)
class Prepared:
    """A model that is ready for evaluation, and the data under its class numbers.

    Args:
        config: the settings of the evaluation.
        compute: device and precision.
        data: the evaluation split, aligned with the model's classes.
        model: with its weights, on its device.
        data_config: preprocessing, in timm's words.
        criterion: the loss, whose probabilities rank the classes where it has some; None where it cannot be built.
        names: of the model's classes.
        kept: the classes to keep, where the labels count only these.
        parameters: of the model.
    """

    config: TrainConfig
    compute: Any
    data: Any
    model: Any
    data_config: dict[str, Any]
    criterion: Any
    names: list[str]
    kept: Any
    parameters: int

    def evaluator(self, args: Namespace, data: Any = None) -> Any:
        """The evaluator of the model over its data, or over a part of it."""
        from topk_registry.train.engine import build

        rest = (self.data_config, self.criterion, self.compute)
        evaluator = build.create_evaluator(self.config, data or self.data, *rest, sizes=args.topk, model=self.model)
        evaluator.classes = self.kept
        return evaluator


def prepare(args: Namespace, data: Any = None) -> Prepared:
    """Open the model that the flags name, and its data unless it is given.

    Args:
        args: the flags of ``timm validate``.
        data: the evaluation split under class numbers of its own; its copy is aligned with the model's classes.
    """
    from timm.data import resolve_data_config
    from timm.layers import apply_test_time_pool

    from topk_registry.train.engine import build, measures
    from topk_registry.train.setup import datasets, models
    from topk_registry.train.setup.compute import Compute
    from topk_registry.train.setup.inference import load

    config = config_of(args)
    several = config.task == MULTILABEL
    if several:
        _check_flags(args)
    compute = Compute.set_up(config)
    for note in compute.notes:
        print(f"timm validate: {note}", file=sys.stderr)
    datasets.check_data_arguments(config)
    told_here = data is None  # whoever gives the data tells of it
    if data is None:
        data = open_evaluation(config, models.channels_of(config), flat=bool(args.real_labels))
    else:
        data = replace(data, notes=[*data.notes])
    # published weights have classes of their own, whatever the data has
    told = data.num_classes if args.checkpoint or config.dataset.startswith(datasets.PREFIX) else None
    model = load(models.build_model(config, config.num_classes or told), args)
    config = build.settle_classes(config, model, data)
    kept = measures.valid_labels(args.valid_labels)
    names = _class_names(config, args.checkpoint)
    names = names if kept is None else [names[i] for i in kept.tolist()]
    if not (args.real_labels or config.class_map):
        align_data(config, data, names)
        for note in data.notes if told_here else ():
            print(f"timm validate: {note}", file=sys.stderr)
    cropping = {"crop_mode": args.crop_mode, "crop_border_pixels": args.crop_border_pixels}
    data_config = resolve_data_config(
        {**config.to_dict(), **cropping}, model=model, use_test_size=not args.use_train_size
    )
    data_config |= {name: getattr(args, name) for name in ("crop_border_pixels", "tf_preprocessing")}
    if args.naflex_loader:
        data_config["naflex_max_seq_len"] = args.naflex_max_seq_len
    parameters = sum(p.numel() for p in model.parameters())
    criterion = None if several else _criterion(config, data)
    evaluated: Any = models.place_model(config, model, compute)
    if args.test_pool:
        evaluated, pooled = apply_test_time_pool(evaluated, data_config)
        data_config["crop_pct"] = 1.0 if pooled else data_config["crop_pct"]
    return Prepared(config, compute, data, evaluated, data_config, criterion, names, kept, parameters)


def validate(args: Namespace) -> dict[str, Any]:
    """The metrics of a checkpoint or a pretrained model, accuracies in percent."""
    from topk_registry.train.engine import measures
    from topk_registry.train.engine.sets import SetEvaluation
    from topk_registry.train.setup import datasets
    from topk_registry.train.setup.inference import optimised
    from topk_registry.train.setup.loaders import end_workers
    from topk_registry.train.setup.unreadable import report_unreadable

    ready = prepare(args)
    config, data, data_config = ready.config, ready.data, ready.data_config
    several = config.task == MULTILABEL
    observers = measures.create(
        args,
        data.validation,
        seed=config.seed,
        class_counts=data.counts,
        several=several,
        names=ready.names,
        folder=_folder(config),
    )
    if not (args.real_labels or several):
        observers.append(measures.LabelCheck(ready.names))
    evaluator = ready.evaluator(args)
    evaluator.observers = observers
    kept: list[tuple[Any, Any]] = []
    if args.report:
        evaluator.keep = lambda scores, labels: kept.append((scores.cpu(), labels.cpu()))
    try:
        metrics = evaluator(optimised(ready.model, args, ready.compute), ready.criterion)
    finally:
        end_workers(evaluator.loader)
    assert metrics is not None
    tables: dict[str, Any] = {}
    for observer in observers:
        metrics |= observer.results()
        if isinstance(observer, SetEvaluation):
            tables |= observer.tables()
            for lack in filter(None, (group.lack for group in observer.by_group)):
                print(f"timm validate: {lack}", file=sys.stderr)
    if args.report:
        _write_report(args, ready, kept)
    unreadable = report_unreadable(data.validation, "evaluation")
    if unreadable:
        print(f"timm validate: {unreadable}", file=sys.stderr)
    return {
        "model": config.model,
        "checkpoint": args.checkpoint,
        "dataset": datasets.name_of(config),
        **{name: round(value, 4) if math.isfinite(value) else None for name, value in metrics.items()},
        **({} if several else {f"top{k}_err": round(100 - metrics[f"top{k}"], 4) for k in (1, 5)}),
        **tables,
        "param_count": round(ready.parameters / 1e6, 2),
        "img_size": data_config["input_size"][-1],
        "crop_pct": data_config["crop_pct"],
        "interpolation": data_config["interpolation"],
    }


def _folder(config: TrainConfig) -> Path | None:
    """The folder of the evaluation's images; None where they are no folder of images."""
    from topk_registry.folders.images import split_folder

    if config.dataset or not config.data_dir:
        return None
    return split_folder(config.data_dir, config.val_split) or Path(config.data_dir)


def _split(results: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of one number or text, and tables of rows."""
    tables = {name: value for name, value in results.items() if isinstance(value, list)}
    return {name: value for name, value in results.items() if name not in tables}, tables


def _line(row: Mapping[str, Any]) -> str:
    """A row of coverage for people."""
    name = next(str(row[key]) for key in ("group", "size") if key in row)
    if "coverage" not in row:
        return f"  {name}: no images to measure the coverage on"
    low, high = row["interval"]
    size = f", mean size {row['mean_size']}" if "mean_size" in row else ""
    return f"  {name}: coverage {row['coverage']} ({low} to {high}) on {row['samples']} images{size}"


def _check_flags(args: Namespace) -> None:
    for name in ONE_LABEL:
        if getattr(args, name):
            raise TrainError(
                f"--{name.replace('_', '-')} measures one label an image, and --task multilabel has several"
            )


def _write_report(args: Namespace, ready: Prepared, kept: Sequence[tuple[Any, Any]]) -> None:
    import torch

    from topk_registry.analysis import report, report_page
    from topk_registry.pages import thumbnail, write_page
    from topk_registry.train.setup.pictures import path_of, picture_of

    def show(index: int) -> str:
        picture = picture_of(images, index)
        return "" if picture is None else thumbnail(picture)

    images, (scores, labels) = ready.data.validation, (torch.cat(parts) for parts in zip(*kept, strict=True))
    name = args.checkpoint or ready.config.model
    analysis = report(scores.float(), labels, name=name, class_names=ready.names, k=args.topk)
    write_page(Path(args.report), report_page(analysis, show, lambda index: path_of(images, index)))
    print(f"timm validate: wrote {args.report}", file=sys.stderr)


def config_of(args: Namespace) -> TrainConfig:
    """The settings of a training run as this evaluation needs them: the checkpoint's under the given ones."""
    given = {name: value for name, value in vars(args).items() if name in TrainConfig.__dataclass_fields__}
    recorded = without_other_loss(recorded_in(args.checkpoint), given, "timm validate")
    for name, other in (("labels_csv", "dataset"), ("dataset", "labels_csv")):
        if given.get(name):
            recorded.pop(other, None)
    settings = {"model": "dpn92", "loss": "ce", **recorded, **given}
    if settings["loss"] == recorded.get("loss"):
        _keep_defaults(settings, recorded.get("loss_record") or {})
    settings["data_dir"] = args.data or settings.get("data_dir")
    settings["pretrained"] = args.pretrained or not args.checkpoint
    settings["val_split"] = settings.get("val_split") or "validation"  # a run without evaluation recorded none
    if not (settings["data_dir"] or settings.get("dataset") or settings.get("labels_csv")):
        raise TrainError("name the data: --data-dir or --dataset (the checkpoint does not tell)")
    for name in ("torchcompile", "torchscript", "fuser", "naflex_loader", "naflex_max_seq_len", "train_script"):
        settings.pop(name, None)  # done here, or not in training
    return TrainConfig.from_dict(settings)


def _keep_defaults(settings: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Give the loss the defaults that the run began with, where they have changed since."""
    from topk_registry import registry
    from topk_registry.registry.errors import PluginError
    from topk_registry.registry.options import defaults_since_changed

    with suppress(PluginError):  # which is told of when the loss is built
        before = defaults_since_changed(registry.get_loss_builder(settings["loss"]), record)
        settings["loss_opt"] = {**before, **(settings.get("loss_opt") or {})}


def recorded_in(checkpoint: str) -> dict[str, Any]:
    """The settings that a training run left in its checkpoint, as far as an evaluation needs them."""
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


def open_evaluation(config: TrainConfig, channels: int, *, flat: bool = False) -> Any:
    """The evaluation split under class numbers of its own; ``flat`` takes a folder of images that name no class."""
    from topk_registry.data.labels import class_names_of
    from topk_registry.train.setup.datasets import Data, held_out_fraction, notes_of, open_data, open_split

    if held_out_fraction(config) or config.long_tail:  # the training split tells what was held out, or is rare
        return open_data(config, channels=channels)
    data = open_split(config, config.val_split, training=False, channels=channels, flat=flat)
    return Data(None, data, class_names=class_names_of(data), notes=notes_of(data))


def _class_names(config: TrainConfig, checkpoint: str) -> list[str]:
    """The names of the model's classes: the training run's, ImageNet's synsets for published weights, else numbers."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    from topk_registry.train.report.console import read_class_names

    n = config.num_classes or 0
    if checkpoint:
        names = read_class_names(Path(checkpoint).parent)
    else:
        subset = infer_imagenet_subset({"num_classes": n})
        names = ImageNetInfo(subset).label_names() if subset else []
    return [*names, *map(str, range(len(names), n))] if len(names) <= n else [str(i) for i in range(n)]


def align_data(config: TrainConfig, data: Any, names: Sequence[str]) -> None:
    """Give the data the class numbers of the model, and note which."""
    from topk_registry.train.setup.classes import align
    from topk_registry.train.setup.datasets import name_of

    data.validation = align(
        data.validation,
        names,
        where=name_of(config),
        of="the model",
        by_order=True,
        ignore_unknown=config.ignore_unknown_classes,
        note=lambda mapping: data.notes.append(f"classes: {mapping.told}"),
        several=config.task == MULTILABEL,
    )


def _criterion(config: TrainConfig, data: Any) -> Any:
    from topk_registry.registry.errors import PluginError
    from topk_registry.train.setup.loss import Context, LossSpec

    n = config.num_classes or 0
    try:
        return LossSpec.resolve(config.loss, config.loss_opt).build(Context(n, 0.0, False, 1, data.counts or [1] * n))
    except (PluginError, TrainError) as error:
        print(f"timm validate: classes are ranked by their scores alone: {error}", file=sys.stderr)
        return None


def _write(path: Path, results: Any, form: str) -> None:
    from topk_registry.train.report.console import csv_text, write_text

    rows = [_split(each)[0] for each in (results if isinstance(results, list) else [results])]
    write_text(path, json.dumps(results, indent=4) + "\n" if form == "json" else csv_text(rows))
