"""``topk-registry predict``: the top-k classes of images, with their exact probabilities of belonging there."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from topk_export.commands.common import add_runtime_flags, command, say, share
from topk_export.errors import ImageError
from topk_export.runtime.predictor import Prediction, Predictor
from topk_registry.cli import ArgumentParser, positive

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"}
Result = tuple[Path, "Prediction | ImageError"]


@command
def main(argv: Sequence[str]) -> int:
    """Print the top-k classes of images from an exported file."""
    args = _parser().parse_args(argv)
    paths = find_images(args.images)
    predictor = Predictor(
        args.model, device=args.device, require_gpu=args.require_gpu, threads=args.threads, exif=args.exif
    )
    results = _with_progress(_results(predictor, paths, args.batch_size, args.coverage), len(paths))
    write = _write_json if args.json else _write_csv if args.csv else _write_table
    return 1 if write(results) else 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry predict", description=__doc__)
    parser.add_argument("model", metavar="model.onnx")
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, or folders to search")
    parser.add_argument("--coverage", type=share, metavar="P", help="also the fewest classes with this softmax share")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N")
    parser.add_argument("--exif", action="store_true", help="turn images as EXIF says (timm's evaluation does not)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON array, one object an image")
    form.add_argument("--csv", action="store_true", help="one line a class")
    add_runtime_flags(parser)
    return parser


def find_images(names: Sequence[str]) -> list[Path]:
    """The files named, and those below the folders named, in order; an error where there are none."""
    found = []
    for name in map(Path, names):
        if not name.is_dir():
            found.append(name)
            continue
        inside = sorted(path for path in name.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if not inside:
            raise ImageError(f"{name} holds no images ({', '.join(sorted(SUFFIXES))})")
        found += inside
    return found


def _results(predictor: Predictor, paths: list[Path], batch_size: int, coverage: float | None) -> Iterator[Result]:
    """In order; an image that cannot be read gives its error, and the others go on."""
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        read = [_read(predictor, path) for path in part]
        inputs = [item for item in read if isinstance(item, np.ndarray)]
        ranked = iter(predictor.rank(predictor.run(np.concatenate(inputs)), coverage=coverage) if inputs else ())
        for path, item in zip(part, read, strict=True):
            yield path, item if isinstance(item, ImageError) else next(ranked)


def _read(predictor: Predictor, path: Path) -> np.ndarray | ImageError:
    try:
        return predictor.preprocess([path])
    except ImageError as error:
        return error


def _with_progress(results: Iterator[Result], total: int) -> Iterator[Result]:
    """Count on stderr where a person watches it and there is something to wait for."""
    watched = total > 1 and sys.stderr.isatty() and not sys.stdout.isatty()
    for done, (path, item) in enumerate(results, 1):
        if watched:
            print(f"\r{done}/{total} images", end="" if done < total else "\n", file=sys.stderr, flush=True)
        if isinstance(item, ImageError):
            say(f"error: {item}")
        yield path, item


def _write_table(results: Iterator[Result]) -> int:
    bad = 0
    for path, item in results:
        if isinstance(item, ImageError):
            bad += 1
            continue
        print(f"{path}\n  in top {len(item.top)}   softmax   class")
        for ranked in item.top:
            print(f"  {ranked.marginal:8.4f}  {ranked.probability:8.4f}   {ranked.name}")
        if item.set is not None:
            total = sum(ranked.probability for ranked in item.set)
            print(f"  set of {len(item.set)} (softmax {total:.3f}): {', '.join(ranked.name for ranked in item.set)}")
    return bad


def _write_json(results: Iterator[Result]) -> int:
    bad, lead = 0, "["
    for path, item in results:
        wrong = isinstance(item, ImageError)
        bad += wrong
        content = {"error": str(item)} if isinstance(item, ImageError) else asdict(item)
        print(lead + json.dumps({"file": str(path), **content}, ensure_ascii=False))
        lead = ","
    print("]" if lead == "," else "[]")
    return bad


def _write_csv(results: Iterator[Result]) -> int:
    bad = 0
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("file", "rank", "index", "class", "marginal", "softmax", "in_top_k", "in_set"))
    for path, item in results:
        if isinstance(item, ImageError):
            bad += 1
            continue
        chosen = item.set or ()
        rows = chosen if len(chosen) > len(item.top) else item.top
        for rank, row in enumerate(rows, 1):
            inside = "" if item.set is None else int(rank <= len(chosen))
            values = (f"{row.marginal:.9g}", f"{row.probability:.9g}", int(rank <= len(item.top)), inside)
            writer.writerow((path, rank, row.index, row.name, *values))
    return bad
