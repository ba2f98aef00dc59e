"""``topk-registry predict``: the top-k classes of images with their exact probabilities, or their several labels."""

import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.commands.common import add_runtime_flags, command, say
from topk_export.commands.label_rows import names_of, write_label_csv, write_label_table
from topk_export.errors import ImageError, ModelFileError, PredictionError, SourceError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.ranking import Prediction, node_above
from topk_export.scoring.files import is_url
from topk_export.scoring.sources import images_below, is_list, listed, told
from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.folders.agreement import agreement
from topk_registry.folders.classes import class_map
from topk_registry.folders.images import natural_key

Failure = (ImageError, PredictionError)
CSV_COLUMNS = ("file", "rank", "index", "class", "marginal", "softmax", "in_top_k", "in_set", "in_softmax_set")
Result = tuple[Path, Any]  # a prediction, or one of these errors


@command
def main(argv: Sequence[str]) -> int:
    """Print the top-k classes or the several labels of images from an exported file."""
    args = _parser().parse_args(argv)
    skipped: Counter[str] = Counter()
    paths = find_images(args.images, skipped)
    if +skipped:
        say(told(skipped))
    predictor = Predictor(
        args.model,
        device=args.device,
        require_gpu=args.require_gpu,
        threads=args.threads,
        exif=args.exif,
        workers=args.workers,
        group=args.group,
    )
    if args.group is None and (names := predictor.metadata.group_names):
        say(f"note: sets have the largest threshold of all groups; --group takes one of {', '.join(names)}")
    several = predictor.metadata.several
    if args.labels and several:
        raise ModelFileError(
            f"--labels expects a file with one label an image, as folders tell one, and {args.model} gives several: "
            "topk-registry calibrate measures it on a data set of several labels"
        )
    labels = _labels(paths, predictor, ignore_unknown=args.ignore_unknown_classes) if args.labels else None
    stream = predictor.stream(
        paths, batch_size=args.batch_size, softmax_mass=args.softmax_mass, max_set=args.max_set, on_error="yield"
    )
    results = _with_progress(zip(paths, stream, strict=True), len(paths))
    if labels is not None:
        results = _judged(results, labels, predictor.metadata.class_names, force=args.force)
    one_csv = partial(_write_csv, predictor.metadata)
    in_csv, in_table = (write_label_csv, write_label_table) if several else (one_csv, _write_table)
    write = _write_json if args.json else in_csv if args.csv else in_table
    return 1 if write(results) else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry predict", description=main.__doc__)
    parser.add_argument("model", metavar="model.onnx", help="a file of topk-registry export")
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGES",
        help="files, folders to search, or lists of paths (.txt, or - for the standard input)",
    )
    parser.add_argument(
        "--softmax-mass",
        type=within("(0, 1]"),
        metavar="P",
        help="also write the fewest classes that hold this share of the softmax",
    )
    parser.add_argument("--max-set", type=positive, metavar="N", help="the most classes of a set to write")
    parser.add_argument("--group", metavar="NAME", help="the group of these images, where thresholds are by group")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images a run (default: 32)")
    parser.add_argument("--workers", type=positive, metavar="N", help="threads that read images (default: CPUs, max 8)")
    parser.add_argument("--exif", action="store_true", help="turn images as EXIF says (timm's evaluation does not)")
    parser.add_argument(
        "--labels", action="store_true", help="take the folder of an image for its class, and measure the accuracy"
    )
    parser.add_argument(
        "--ignore-unknown-classes",
        action="store_true",
        help="with --labels: do not measure images of folders with the name of no class (default: refuse them)",
    )
    parser.add_argument(
        "--force", action="store_true", help="with --labels: exit with status 0 although labels look wrong"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON Lines, one object an image")
    form.add_argument("--csv", action="store_true", help="print CSV, one line a class of an image")
    add_runtime_flags(parser)
    return parser


def find_images(names: Sequence[str], skipped: Counter[str]) -> list[Path]:
    """List the files named, those in the lists named and the images below the folders named, in order.

    Args:
        names: of files, of folders, of lists; ``-`` is a list from the standard input.
        skipped: counts the files of folders that are left out, by their endings.

    Raises:
        SourceError: a folder or a list has no images, or a name is a URL.
    """
    files: list[str] = []
    for name in names:
        inside = listed(name) if is_list(name) else images_below(name, skipped) if os.path.isdir(name) else iter([name])
        count = len(files)
        files += inside
        if len(files) == count:
            raise SourceError(f"the list {name} names no images")
    if url := next((name for name in files if is_url(name) and not os.path.exists(name)), None):
        raise SourceError(f"{url} is a URL, and predict reads files: fetch it first, or give it to topk-registry score")
    return list(map(Path, files))


def _labels(paths: Sequence[Path], predictor: Predictor, *, ignore_unknown: bool) -> list[int | None]:
    """The class of each image by the name of its folder; None where the folder is left out."""
    folders = [path.absolute().parent.name for path in paths]
    classes = predictor.metadata.class_names
    names = sorted(set(folders), key=natural_key)
    mapping = class_map(names, classes, of="the file", ignore_unknown=ignore_unknown)
    say(mapping.told)
    return [mapping.numbers.get(name) for name in folders]


def _judged(
    results: Iterator[Result], labels: Sequence[int | None], classes: Sequence[str], *, force: bool
) -> Iterator[Result]:
    """Pass results on, and say the accuracy after the last.

    Raises:
        WrongLabelsError: labels look wrong, and that is not forced.
    """
    judged: list[tuple[int, int]] = []
    hits = k = 0
    for label, (path, item) in zip(labels, results, strict=True):
        if label is not None and isinstance(item, Prediction):
            judged.append((item.top[0].index, label))
            k = len(item.top)
            hits += label in [ranked.index for ranked in item.top]
        yield path, item
    if judged:
        best, wanted = map(np.array, zip(*judged, strict=True))
        accuracy = agreement(best, wanted, classes)
        say(f"top-1 accuracy {accuracy}, top-{k} {hits / len(judged):.1%}")
        accuracy.check(force=force)


def _with_progress(results: Iterator[Result], total: int) -> Iterator[Result]:
    """Show progress on stderr where it is a terminal, and tell errors there."""
    watched = total > 1 and sys.stderr.isatty() and not sys.stdout.isatty()
    for done, (path, item) in enumerate(results, 1):
        if watched:
            print(f"\r{done}/{total} images", end="" if done < total else "\n", file=sys.stderr, flush=True)
        if isinstance(item, Failure):
            say(f"error: {path}: {item}" if isinstance(item, PredictionError) else f"error: {item}")
        yield path, item


def _write_table(results: Iterator[Result]) -> int:
    bad = 0
    for path, item in results:
        if isinstance(item, Failure):
            bad += 1
            continue
        print(f"{path}\n  marginal   softmax   class")
        for ranked in item.top:
            print(f"  {ranked.marginal:8.4f}  {ranked.softmax:8.4f}   {ranked.name}")
        if item.set is not None:
            whole = f"{' and '.join(item.set_nodes)}: " if item.set_nodes is not None else ""
            print(f"  prediction set of {item.set_size}: {whole}{names_of(item.set, item.set_size)}")
        if item.softmax_set is not None:
            total = sum(ranked.softmax for ranked in item.softmax_set)
            names = names_of(item.softmax_set, item.softmax_set_size)
            print(f"  {item.softmax_set_size} with softmax {total:.3f}: {names}")
    return bad


def _write_json(results: Iterator[Result]) -> int:
    bad = 0
    for path, item in results:
        bad += isinstance(item, Failure)
        content = {"error": str(item)} if isinstance(item, Failure) else asdict(item)
        print(json.dumps({"file": str(path), **content}, ensure_ascii=False), flush=True)
    return bad


def _write_csv(metadata: Metadata, results: Iterator[Result]) -> int:
    bad = 0
    writer = csv.writer(sys.stdout, lineterminator="\n")
    # of a file with a tree also the node that brings the class into the set
    node = ("node",) if "tree" in (metadata.sets or {}) else ()
    writer.writerow((*CSV_COLUMNS, *node))
    for path, item in results:
        if isinstance(item, Failure):
            bad += 1
            continue
        # sets are ordered like the top k, but one with thresholds by class may leave some of them out
        rows = {row.index: row for row in (*item.top, *(item.softmax_set or ()), *(item.set or ()))}
        for rank, row in enumerate(sorted(rows.values(), key=lambda row: -row.softmax), 1):
            inside = ("" if chosen is None else int(row in chosen) for chosen in (item.top, item.set, item.softmax_set))
            above = [node_above(row.index, item.set_nodes or (), metadata) or "" for _ in node]
            numbers = f"{row.marginal:.9g}", f"{row.softmax:.9g}"
            writer.writerow((path, rank, row.index, row.name, *numbers, *inside, *above))
    return bad
