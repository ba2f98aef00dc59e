"""The command ``topk-registry compare A B ...`` compares models on the same images.

Each model is compared with the first model. The confidence interval of a difference is a percentile bootstrap interval:
images are drawn with replacement, and all models and measures use the same draws. McNemar's exact test compares the
number of images on which only the first model is correct with the number on which only the other model is correct.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.cli import ArgumentParser, ParseOptions, positive, ticker, within, words_of
from topk_registry.data.selection import LEFT_OUT
from topk_registry.errors import TrainError
from topk_registry.files import write_text
from topk_registry.train.config import MULTILABEL, OWN_BATCHES, TrainConfig, usual_workers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MAX_DRAWN = 1 << 22  # drawn images that are processed at once, which limits the memory to 32 MB
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """The difference of one measure, such as top-1 accuracy, between two models.

    Args:
        measure: ``top1``, ``macro top5`` (mean over the classes), ``nll`` and so on. Accuracies are in percent.
        first, second: values of the two models.
        difference: second - first.
        low, high: 95 % bootstrap interval of the difference.
        gained: number of images that only the second model predicts correctly. None for ``macro`` and ``nll``.
        lost: number of images that only the first model predicts correctly. None for ``macro`` and ``nll``.
        p: two-sided p-value of McNemar's exact test. None for ``macro`` and ``nll``.
    """

    measure: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    gained: int | None = None
    lost: int | None = None
    p: float | None = None


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    ``gained`` is the number of images on which only the second of two models is correct, and ``lost`` the number on
    which only the first model is correct. Under the null hypothesis, ``gained`` is Binomial(gained + lost, 1/2).

    Example:
        >>> round(mcnemar(1, 9), 6)
        0.021484
    """
    total, fewer = gained + lost, min(gained, lost)
    terms = (math.lgamma(total + 1) - math.lgamma(i + 1) - math.lgamma(total - i + 1) for i in range(fewer + 1))
    return min(1.0, 2 * math.fsum(math.exp(term - total * math.log(2)) for term in terms))


def compare_scores(
    scores: Sequence[NDArray[Any]], labels: Integers, *, k: Sequence[int] = (1, 5), resamples: int = 2000, seed: int = 0
) -> list[list[Difference]]:
    """Compare each model with the first model.

    The measures are top-k accuracy, the mean of the top-k accuracies of the classes (``macro``), and the mean negative
    log-likelihood of the label (``nll``).

    Args:
        scores: one array of scores [N, n] per model, with the classes in the same order. The softmax of the scores
            gives the probabilities of a model.
        labels: labels of the images [N].
        k: values of k for top-k accuracy. If other classes have the same score as the label, the accuracy of the image
            is the probability that the label is in the top k after the ties are broken at random.
        resamples: number of bootstrap resamples.
        seed: seed of the resamples.

    Returns:
        For the second and each later model, a list with one :class:`Difference` per measure.
    """
    order = np.argsort(labels, kind="stable")
    labels = np.asarray(labels)[order]
    starts = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]])
    values = [_per_image(np.asarray(each)[order], labels, k) for each in scores]  # [N, measures]
    images, sizes = len(labels), np.diff(np.r_[starts, len(labels)])
    paired = np.concatenate([other - values[0] for other in values[1:]], axis=1)  # [N, models * measures]
    means, macros = [], []
    for drawn in _resamples(images, resamples, seed):
        means.append(drawn @ paired / images)
        seen = np.add.reduceat(drawn, starts, axis=1)  # [b, classes]
        columns = [np.add.reduceat(drawn * column, starts, axis=1) for column in paired.T]
        classes = [np.divide(total, seen, out=np.zeros_like(total), where=seen > 0).sum(1) for total in columns]
        macros.append(np.stack(classes, 1) / (seen > 0).sum(1, keepdims=True))
    drawn_mean, drawn_macro = np.concatenate(means), np.concatenate(macros)  # [resamples, models * measures]
    names = [*(f"top{size}" for size in k), "nll"]
    results: list[list[Difference]] = []
    for model, other in enumerate(values[1:]):
        differences: list[Difference] = []
        for kind, drawn in (("", drawn_mean), ("macro ", drawn_macro)):
            for column, name in enumerate(names if not kind else names[:-1]):
                a, b = values[0][:, column], other[:, column]
                if kind:
                    a, b = (np.add.reduceat(each, starts) / sizes for each in (a, b))
                scale = 1.0 if name == "nll" else 100.0
                low, high = np.quantile(drawn[:, model * len(names) + column], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                first, second = scale * a.mean(), scale * b.mean()
                tested: dict[str, Any] = {}
                if not kind and name != "nll":
                    gained, lost = int((b > a).sum()), int((b < a).sum())
                    tested = {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
                interval = float(scale * low), float(scale * high)
                differences.append(
                    Difference(kind + name, float(first), float(second), float(second - first), *interval, **tested)
                )
        results.append(differences)
    return results


def _per_image(scores: NDArray[Any], labels: Integers, k: Sequence[int]) -> Floats:
    scores = scores.astype(np.float64)
    own = scores[np.arange(len(labels)), labels][:, None]
    better, equal = (~(scores <= own)).sum(1), (scores == own).sum(1)  # NaN counts as in TopKAccuracy
    credits = [np.clip(size - better, 0, equal) / np.maximum(equal, 1) for size in k]
    shifted = scores - scores.max(1, keepdims=True)
    nll = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    return np.stack([*credits, nll], 1)


def _resamples(images: int, count: int, seed: int) -> Iterator[Floats]:
    """Yield ``count`` resamples as rows, several rows at a time. Entry j of a row: how often image j was drawn."""
    rng = np.random.default_rng(seed)
    size = max(1, MAX_DRAWN // images)
    for start in range(0, count, size):
        rows = min(size, count - start)
        drawn = rng.integers(0, images, (rows, images)) + images * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


def table(names: Sequence[str], results: Sequence[Sequence[Difference]]) -> str:
    header = ("MODEL", "MEASURE", names[0], "MODEL'S", "DIFFERENCE", "95 % INTERVAL", "ONLY THIS : ONLY FIRST", "P")
    rows: list[Sequence[str]] = [header]
    for name, differences in zip(names[1:], results, strict=True):
        for d in differences:
            digits = 4 if d.measure == "nll" else 2
            a, b, difference, low, high = (
                f"{value:{sign}.{digits}f}"
                for value, sign in ((d.first, ""), (d.second, ""), (d.difference, "+"), (d.low, "+"), (d.high, "+"))
            )
            tested = ("", "") if d.p is None else (f"{d.gained} : {d.lost}", f"{d.p:.3g}")
            rows.append((name, d.measure, a, b, difference, f"{low} to {high}", *tested))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(argv: Sequence[str]) -> int:
    """Compare models on the same images, with confidence intervals and exact tests."""
    parser = _parser()
    args = parser.parse_args(argv)
    if len(args.models) < 2:
        parser.error("expected at least two models")
    if len(set(args.models)) < len(args.models):
        parser.error("a model is named twice")
    print(f"topk-registry compare: loading torch and {args.models[0]}", file=sys.stderr, flush=True)
    try:
        _compare(args)
    except (TrainError, OSError, ValueError) as error:
        print(f"topk-registry compare: {words_of(error)}", file=sys.stderr)
        return 2
    return 0


def _compare(args: Any) -> None:
    """Compare the models that the flags name, then print and write the results."""
    names, scores, labels, about = _run(args)
    sizes = [size for size in args.k if size < scores[0].shape[1]]
    results = compare_scores(scores, labels, k=sizes, resamples=args.resamples, seed=args.seed)
    print("\n".join(about))
    print(f"{len(labels)} images of {scores[0].shape[1]} classes; each model is compared with {names[0]}\n")
    print(table(names, results))
    if args.json:
        report = {
            "models": args.models,
            "about": about,
            "images": len(labels),
            "classes": scores[0].shape[1],
            "resamples": args.resamples,
            "seed": args.seed,
            "comparisons": [
                {"first": args.models[0], "second": path, "differences": [asdict(d) for d in differences]}
                for path, differences in zip(args.models[1:], results, strict=True)
            ],
        }
        write_text(args.json, json.dumps(report, indent=2) + "\n")


def _run(args: Any) -> tuple[list[str], list[Floats], Integers, list[str]]:
    from topk_registry.train.validate import open_model

    names = _short_names(args.models)
    scores: list[Floats] = []
    classes: list[str] = []
    first_labels = np.empty(0, np.int64)
    about: list[str] = []
    first: TrainConfig | None = None
    records: dict[str, Any] = {}
    tick = ticker()
    for path, name in zip(args.models, names, strict=True):
        model = open_model(
            path, device=args.device, batch_size=args.batch_size, workers=args.workers, weights=args.weights
        )
        if model.config is not None and model.config.task == MULTILABEL:
            raise ValueError(f"{name} predicts several labels per image, and compare needs one label per image")
        first = first or model.config
        channels = (model.config.input_size or [3])[0] if model.config is not None else 3
        records[name] = model.trained_on
        images, used = _images(args, first, channels, records)
        dataset = _aligned(images, model, name)
        about += [] if scores else [*used, *getattr(dataset, "notes", ())]
        batches: list[tuple[Floats, Integers]] = []
        print(f"{name}: reading images and predicting", file=sys.stderr, flush=True)

        def keep(x: Any, y: Any, batches: list[Any] = batches) -> None:
            batches.append((x.cpu().numpy(), y.cpu().numpy()))
            tick(f"{len(batches)} batches of {args.batch_size}")

        model.run(dataset, keep)
        logits, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        read = labels != LEFT_OUT
        logits, labels = logits[read], labels[read]
        if not scores and not read.all():
            about.append(f"{(~read).sum()} of {len(read)} images cannot be read and are left out")
        if bad := int((~np.isfinite(logits).all(1)).sum()):
            raise ValueError(f"{name} has logits that are not finite for {bad} of {len(labels)} images")
        about.append(f"{name}: {model.weights} weights" + f", {model.prepared}" * bool(model.prepared))
        if _other_split(args, first, records[names[0]], model.trained_on):
            about.append(f"warning: {name} was trained on another part of the data, perhaps on some of these images")
        if extra := logits.shape[1] - len(_names(model, logits)):
            about.append(f"{name}: {extra} outputs that have no class are left out")
        if not scores:
            classes, first_labels = _names(model, logits), labels
        columns = _columns(classes, _names(model, logits), names[0], name)
        labels = np.argsort(columns)[labels]
        if not np.array_equal(labels, first_labels):
            raise ValueError(f"{names[0]} and {name} read different images or labels")
        scores.append(logits[:, columns])
    return names, scores, first_labels, about


def _names(model: Any, logits: NDArray[Any]) -> list[str]:
    return list(model.class_names or map(str, range(logits.shape[1])))


def _images(args: Any, config: TrainConfig | None, channels: int, records: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Open the data set that the user chose by flags, or else the evaluation images of the run ``config``.

    ``records`` are the records of the training runs by the name of the model. The text says which images are used.
    """
    from topk_registry.train.data import open_evaluation, open_split, without_training_images

    if args.data_dir or args.dataset:
        chosen = TrainConfig(dataset=args.dataset or "", data_dir=args.data_dir, dataset_opt=args.dataset_opt)
        chosen, used = without_training_images(chosen, records, args.all_images)
        if used:
            return open_evaluation(chosen, channels=channels), used
        return open_split(chosen, args.split or "validation", channels=channels), []
    if config is None or config.dataset == OWN_BATCHES:
        raise ValueError("specify the images: --data-dir DIR or --dataset NAME")
    config = config.replace(val_split=args.split) if args.split else config
    return open_evaluation(config, channels=channels), []


def _other_split(args: Any, first: TrainConfig | None, record: Any, other: Any) -> bool:
    """Return whether a run may have trained on the images that the run ``first`` held out, from both records."""
    from topk_registry.train.data import held_out_fraction

    if args.data_dir or args.dataset or args.split or first is None or not held_out_fraction(first):
        return False
    return other is None or other != record


def _aligned(dataset: Any, model: Any, name: str) -> Any:
    from topk_registry.data import class_names_of, renumber
    from topk_registry.data.folders import class_map

    found = class_names_of(dataset)
    if found is None or model.class_names is None or found == list(model.class_names):
        return dataset
    numbers, _ = class_map(found, list(model.class_names), of=name)
    return renumber(dataset, {i: numbers[each] for i, each in enumerate(found)}, list(model.class_names))


def _columns(first: Sequence[str], other: Sequence[str], first_name: str, name: str) -> Integers:
    from topk_registry.data.folders import class_map

    if len(first) != len(other):
        raise ValueError(f"{first_name} has {len(first)} classes, but {name} has {len(other)}")
    numbers, _ = class_map(first, other, where=first_name, of=name)
    return np.asarray([numbers[each] for each in first])


def _short_names(paths: Sequence[str]) -> list[str]:
    parts = [Path(path).absolute().parts for path in paths]
    size = next(i for i in range(1, 1 + max(map(len, parts))) if len({p[-i:] for p in parts}) == len(parts))
    return ["/".join(p[-size:]) for p in parts]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry compare",
        description="Compare models on the same images. Each model is compared with the first: accuracies, their means "
        "over classes and the negative log-likelihood, with 95 % paired bootstrap intervals of the difference and "
        "exact McNemar tests. Without --data-dir and --dataset, the images are those of the first model's evaluation.",
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="checkpoints or ONNX files; the first is the baseline")
    add("--data-dir", metavar="DIR", help="folder with one folder per class, or where the data set is")
    add("--dataset", default="", metavar="NAME", help="data set, as in timm train")
    add("--dataset-opt", nargs="+", default={}, action=ParseOptions, metavar="K=V", help="options of the data set")
    add("--all-images", action="store_true", help="use all images of a DIR without splits, also those of training")
    add("--split", default="", metavar="NAME", help="split of the data set (default: validation)")
    add("--k", type=positive, nargs="+", default=[1, 5], metavar="K", help="k of top-k accuracies (default: 1 5)")
    add("--resamples", type=positive, default=2000, metavar="N", help="bootstrap resamples (default: 2000)")
    add("--seed", type=within("[0, inf)", int), default=0, metavar="S", help="seed of the resamples (default: 0)")
    add("--weights", choices=("ema", "model"), default="ema", help="weights to use if there are both (default: ema)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("-b", "--batch-size", type=positive, default=256, metavar="N", help="images per batch (default: 256)")
    workers = f"loader processes (default: {usual_workers()})"
    add("-j", "--workers", type=within("[0, inf)", int), default=usual_workers(), metavar="N", help=workers)
    add("--json", metavar="FILE", help="also write the results to a JSON file")
    return parser
