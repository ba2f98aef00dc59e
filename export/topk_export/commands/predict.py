"""Predict the top-k classes of images, and the prediction sets if the file is calibrated.

The exit status is 0 if each image has a prediction. If an image has no prediction, for example because the image cannot
be read, the output contains the error, and the exit status is 1. After any other error, the exit status is 2. After
Ctrl-C, the exit status is 130.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from topk_export.arrays import read_arrays
from topk_export.commands.common import add_runtime_flags, command, say
from topk_registry.cli import ArgumentParser, positive, within

MAX_SET = 100


@command
def main(argv: Sequence[str]) -> int:
    """Predict the classes of images with an exported file."""
    parser = _parser()
    args = parser.parse_args(argv)
    if bool(args.images) == (args.inputs is not None) or (args.inputs is not None and args.output):
        parser.error("give images, or arrays with --inputs; arrays with --json, --csv or a table")
    from tqdm import tqdm

    from topk_export.predict import (
        chosen_classes,
        find_images,
        predict_to_parquet,
        predicted,
        predicted_rows,
        write_csv,
        write_json,
        write_table,
    )
    from topk_export.runtime.predictor import Predictor

    images = find_images(args.images) if args.inputs is None else []
    say(f"loading {args.model}" + (f" for {len(images)} images" if images else ""))
    predictor = Predictor(
        args.model,
        device=args.device,
        require_gpu=args.require_gpu,
        threads=args.threads,
        workers=args.workers,
    )
    options: dict[str, Any] = {"batch_size": args.batch_size, "max_set": args.max_set}
    if args.allow:
        options["allowed"] = chosen_classes(args.allow, predictor.metadata.class_names)
    options |= {} if args.alpha is None else {"alpha": args.alpha}
    if forced := (predictor.metadata.sets or {}).get("forced"):
        say(f"warning: the prediction sets have no guarantee: {forced}")
    if args.output:
        with tqdm(total=len(images), unit="image", disable=None) as bar:

            def counted(rows: Iterator[Any], done: int) -> Iterable[Any]:
                bar.update(done - bar.n)
                for row in rows:
                    yield row
                    bar.update()

            shard = {"shard_size": args.shard_size, "progress": counted}
            count, failed = predict_to_parquet(predictor, images, args.output, **shard, **options)
        say(f"{count} images in {args.output}, {failed} without a prediction")
        return int(failed > 0)
    writer, place = (write_json, args.json) if args.json else (write_csv, args.csv) if args.csv else (write_table, "-")
    if args.inputs is not None:
        arrays = read_arrays(args.inputs)
        count, results = len(next(iter(arrays.values()), ())), predicted_rows(predictor, arrays, **options)
    else:
        count, results = len(images), predicted(predictor, images, **options)
    # on a terminal, a progress bar would appear between the lines of the table
    silent = None if place != "-" or not sys.stdout.isatty() else True
    rows = tqdm(results, total=count, unit="image", disable=silent)
    with (
        contextlib.nullcontext(sys.stdout) if place == "-" else open(place, "w", encoding="utf-8", newline="") as stream
    ):
        failed = writer(rows, stream)
    if failed:
        say(f"{failed} of {count} images have no prediction")
    return int(failed > 0)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry predict", description=__doc__)
    add = parser.add_argument
    add("model", metavar="model.onnx", help="an ONNX file that topk-registry export, attach or calibrate wrote")
    add(
        "images",
        nargs="*",
        metavar="IMAGES",
        help="image files, folders with images, or lists of image paths (.txt, .lst, or - for stdin)",
    )
    add("--inputs", metavar="FILE.npz", help="arrays in place of images: one array per input of the model")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", metavar="FILE", help="write one JSON object per image and line (- for stdout)")
    shape.add_argument("--csv", metavar="FILE", help="write one line per image and class (- for stdout)")
    shape.add_argument("--output", metavar="DIR", help="write Parquet files; a new run continues a run that was killed")
    add("--shard-size", type=positive, default=1000, metavar="N", help="images per Parquet file (default: 1000)")
    allow = "an allowed class, or a file with one name per line; repeat the flag for more; a part of a name is enough"
    add("--allow", action="append", metavar="NAME|FILE", help=allow)
    add("--alpha", type=within("(0, 1)"), help="probability that a set misses the class (default: of the calibration)")
    limit = f"maximum number of classes to list per prediction set (default: {MAX_SET})"
    add("--max-set", type=positive, default=MAX_SET, metavar="N", help=limit)
    add("--batch-size", type=positive, default=32, metavar="N", help="images per run of the model (default: 32)")
    add("--workers", type=positive, metavar="N", help="threads that read images (default: number of CPUs, at most 8)")
    add_runtime_flags(parser)
    return parser
