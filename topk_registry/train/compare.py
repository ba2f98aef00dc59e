"""The command ``topk-registry compare A B ...`` compares models on the same images.

Each model is compared with the first model. The confidence interval of a difference is a percentile bootstrap interval:
images are drawn with replacement, and all models and measures use the same draws. McNemar's exact test compares the
number of images on which only the first model is correct with the number on which only the other model is correct.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topk_registry.cli import ArgumentParser, positive, within, words_of
from topk_registry.data.folders import class_map
from topk_registry.data.selection import LEFT_OUT
from topk_registry.errors import TrainError
from topk_registry.files import write_text
from topk_registry.train.config import MULTILABEL, TrainConfig
from topk_registry.train.validate import DATA, SHARED, counting, open_model

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
        per_image = (values[0], other)
        per_class = [np.add.reduceat(each, starts) / sizes[:, None] for each in per_image]
        columns = slice(model * len(names), (model + 1) * len(names))
        micro = zip(names, *(each.T for each in per_image), drawn_mean[:, columns].T, strict=True)
        macro = zip(names[:-1], *(each.T[:-1] for each in per_class), drawn_macro[:, columns].T[:-1], strict=True)
        results.append([*(_difference(*each) for each in micro), *(_difference(f"macro {x}", *y) for x, *y in macro)])
    return results


def _difference(measure: str, first: Floats, second: Floats, drawn: Floats) -> Difference:
    """Return the difference of two models from their values per image or per class, and resampled differences."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    a, b = first.mean().item(), second.mean().item()
    tested: dict[str, Any] = {}
    if measure.startswith("top"):
        gained, lost = int((second > first).sum()), int((second < first).sum())
        tested = {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
    return Difference(measure, a, b, b - a, low, high, **tested)


def _per_image(scores: NDArray[Any], labels: Integers, k: Sequence[int]) -> Floats:
    """Return for each image the top-k accuracies in percent and the negative log-likelihood: [N, measures]."""
    scores = scores.astype(np.float64)
    own = scores[np.arange(len(labels)), labels][:, None]
    better, equal = (~(scores <= own)).sum(1), (scores == own).sum(1)  # NaN counts as in TopKAccuracy
    credits = [100 * np.clip(size - better, 0, equal) / np.maximum(equal, 1) for size in k]
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
    if len({Path(path).absolute() for path in args.models}) < len(args.models):
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
    """Run the models, and return their names, scores [N, n], the labels [N], and text about the images and models."""
    names = _short_names(args.models)
    scores: list[Floats] = []
    classes: list[str] = []
    first_labels = np.empty(0, np.int64)
    about: list[str] = []
    config: TrainConfig | None = None
    records: dict[str, Any] = {}
    for path, name in zip(args.models, names, strict=True):
        model = open_model(
            path, device=args.device, batch_size=args.batch_size, workers=args.workers, weights=args.weights
        )
        if model.config is not None and model.config.task == MULTILABEL:
            raise ValueError(f"{name} predicts several labels per image, and compare needs one label per image")
        config = config or _data_of(args, model.config)
        records[name] = model.trained_on
        dataset, notes = model.images(config, records, all_images=args.all_images)
        print(f"{name}: reading images and predicting", file=sys.stderr, flush=True)
        logits, labels = _predictions(args, model, dataset)
        read = labels != LEFT_OUT
        logits, labels = logits[read], labels[read]
        if bad := int((~np.isfinite(logits).all(1)).sum()):
            raise ValueError(f"{name} has logits that are not finite for {bad} of {len(labels)} images")
        own = list(model.class_names or map(str, range(logits.shape[1])))
        about += [note for note in notes if note not in about]
        if not scores:
            classes, first_labels = own, labels
        if not scores and not read.all():
            about.append(f"{(~read).sum()} of {len(read)} images cannot be read and are left out")
        about.append(f"{name}: {model.weights} weights" + (f", {model.config.prepared}" if model.config else ""))
        if extra := logits.shape[1] - len(own):
            about.append(f"{name}: {extra} outputs that have no class are left out")
        columns = _columns(classes, own, names[0], name)
        if not np.array_equal(np.argsort(columns)[labels], first_labels):
            raise ValueError(f"{names[0]} and {name} read different images or labels")
        scores.append(logits[:, columns])
    return names, scores, first_labels, about


def _predictions(args: Any, model: Any, dataset: Any) -> tuple[Floats, Integers]:
    batches: list[tuple[Floats, Integers]] = []
    tell = counting(args.batch_size)

    def keep(x: Any, y: Any) -> None:
        batches.append((x.cpu().numpy(), y.cpu().numpy()))
        tell()

    model.evaluate(dataset, keep=keep)
    logits, labels = zip(*batches, strict=True)
    return np.concatenate(logits), np.concatenate(labels)


def _data_of(args: Any, config: TrainConfig | None) -> TrainConfig:
    """Return the settings of the images that the user chose by flags, or else of the first model's evaluation."""
    given = {name: value for name in DATA if (value := getattr(args, name)) is not None}
    if given.keys() & {"data_dir", "dataset"}:
        return TrainConfig(**given)
    if config is None:
        raise ValueError("specify the images: --data-dir DIR or --dataset NAME")
    return config.replace(**given)


def _columns(first: Sequence[str], other: Sequence[str], first_name: str, name: str) -> Integers:
    if len(first) != len(other):
        raise ValueError(f"{first_name} has {len(first)} classes, but {name} has {len(other)}")
    numbers, _ = class_map(first, other, where=first_name, of=name)
    return np.asarray([numbers[each] for each in first])


def _short_names(paths: Sequence[str]) -> list[str]:
    parts = [Path(path).absolute().parts for path in paths]
    size = next(i for i in range(1, 1 + max(map(len, parts))) if len({p[-i:] for p in parts}) == len(parts))
    return ["/".join(p[-size:]) for p in parts]


FLAGS: dict[str, dict[str, Any]] = {
    "models": {"nargs": "+", "metavar": "MODEL", "help": "checkpoints or ONNX files; the first is the baseline"},
    "--data-dir": {"metavar": "DIR", "help": "folder with one folder per class, or where the data set is"},
    **SHARED,
    "--resamples": {"type": positive, "default": 2000, "metavar": "N", "help": "bootstrap resamples (default: 2000)"},
    "--seed": {
        "type": within("[0, inf)", int), "default": 0, "metavar": "S", "help": "seed of the resamples (default: 0)",
    },
}  # fmt: skip


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry compare",
        description="Compare models on the same images. Each model is compared with the first: accuracies, their means "
        "over classes and the negative log-likelihood, with 95 % paired bootstrap intervals of the difference and "
        "exact McNemar tests. Without --data-dir and --dataset, the images are those of the first model's evaluation.",
    )
    for names, options in FLAGS.items():
        parser.add_argument(*names.split(), **options)
    return parser
