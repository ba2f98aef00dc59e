"""Prediction of the classes of images in files, folders and lists, with results as text, JSON lines, CSV or Parquet.

Each Parquet file contains the results for a fixed range of the images, and is written atomically. If a run is killed,
the next run with the same arguments writes only the missing files. Therefore the folder never contains two results for
one image.
"""

import csv
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from topk_export.errors import ImageError, PredictionError, printable
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.preprocess import SUFFIXES
from topk_export.runtime.ranking import Prediction
from topk_export.runtime.weights import digest_of
from topk_registry.data.folders import images_below
from topk_registry.files import replacing, write_text

Failure = (ImageError, PredictionError)
Row = tuple[str, Any]  # path of an image, and its Prediction or exception
LISTS = (".txt", ".lst")
SHOWN = 10  # names of a prediction set on a line of the table; class names may contain commas
RUN = "_run.json"  # programs that read a folder of Parquet files skip names that start with _
CSV_COLUMNS = ("file", "rank", "index", "class", "marginal", "probability", "in_set", "error")


class SourceError(ValueError):
    """An image file, a folder or a list does not exist, or there are no images."""


class OutputError(ValueError):
    """The output folder contains the results of a run with other arguments."""


def find_images(sources: Sequence[str], stdin: TextIO | None = None) -> list[str]:
    """Return the paths of the images that the sources name.

    Args:
        sources: image files, folders and lists. A folder stands for all images in the folder and its subfolders. A list
            is a text file with the suffix ``.txt`` or ``.lst`` and one path per line. For ``-``, the function reads a
            list from stdin.
        stdin: stream for the source ``-``. Default: ``sys.stdin``.

    Raises:
        SourceError: a source does not exist, a folder has no images, or there are no images in total.
    """
    found: list[str] = []
    for source in sources:
        if source == "-" or source.lower().endswith(LISTS):
            found += _listed(source, stdin or sys.stdin)
        elif os.path.isdir(source):
            below = images_below(source, SUFFIXES)
            if not below:
                raise SourceError(f"the folder {printable(source)} has no images ({', '.join(sorted(SUFFIXES))})")
            found += below
        elif os.path.exists(source):
            found.append(source)
        else:
            raise SourceError(f"{printable(source)} does not exist")
    if not found:
        raise SourceError("there are no images")
    return found


def _listed(source: str, stdin: TextIO) -> list[str]:
    try:
        text = stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError as error:
        raise SourceError(f"{printable(source)} does not exist") from error
    return _lines(text)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.removeprefix("\ufeff").splitlines() if line.strip()]


def chosen_classes(values: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names of the classes that the values of ``--allow`` select.

    Args:
        values: names, or paths of files with one name per line. A name may be shortened to a part that occurs in the
            name of one class only.
        known: the names of all classes.

    Raises:
        ValueError: a name fits no class or several classes, or a file is empty. The message lists similar names.
    """
    names: list[str] = []
    for value in values:
        if value in known or not os.path.isfile(value):
            names.append(value)
            continue
        try:
            listed = _lines(Path(value).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{value} is not a list of class names: it is not UTF-8 text") from error
        if not listed:
            raise ValueError(f"the class list {value} is empty")
        names += listed
    return list(dict.fromkeys(_class_named(name, known) for name in names))


def _class_named(name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    lower = name.strip().lower()
    fitting = [each for each in known if each.lower() == lower] or [each for each in known if lower in each.lower()]
    if lower and len(fitting) == 1:
        return fitting[0]
    if lower and fitting:
        shown = ", ".join(map(repr, fitting[:5])) + (f" and {len(fitting) - 5} more" if len(fitting) > 5 else "")
        raise ValueError(f"{name!r} fits {len(fitting)} classes: {shown}")
    close = get_close_matches(name, known)
    hints = f"; close names: {', '.join(map(repr, close))}" if close else ""
    raise ValueError(f"the model has no class {name!r}{hints}")


def as_row(file: str, result: Any) -> dict[str, Any]:
    """Return the result for the image at the path ``file`` as a dictionary of JSON values.

    If ``result`` is a :class:`~topk_export.Prediction`, the keys are ``file``, ``top``, ``set`` and ``set_size``. If
    ``result`` is an exception, the keys are ``file`` and ``error``.
    """
    content = {"error": _encodable(str(result))} if isinstance(result, Failure) else asdict(result)
    return {"file": _encodable(file), **content}


def _encodable(text: str) -> str:
    # the name of a file, also in the text of an error, may not be UTF-8
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def write_table(rows: Iterable[Row], stream: TextIO) -> int:
    """Write the predicted classes of each image as a table. Return the number of images without a prediction."""
    failed = 0
    for file, result in rows:
        print(printable(file), file=stream)
        if isinstance(result, Failure):
            failed += 1
            print(f"  error: {printable(str(result))}", file=stream)
            continue
        names = [printable(entry.name) for entry in result.top]
        width = max(map(len, ["class", *names]))
        marginals = any(entry.marginal is not None for entry in result.top)
        print(f"     {'class':{width}s}  probability" + ("  marginal" if marginals else ""), file=stream)
        for rank, (name, entry) in enumerate(zip(names, result.top, strict=True), 1):
            marginal = "" if entry.marginal is None else f"  {entry.marginal:8.4f}"
            print(f"  {rank:2d} {name:{width}s}  {entry.probability:11.4f}{marginal}", file=stream)
        if result.set is not None:
            shown = [printable(entry.name) for entry in result.set[:SHOWN]]
            more = result.set_size - len(shown)
            text = " | ".join(shown) + (f" | and {more} more" if more else "")
            print(f"  set of {result.set_size}: {text or 'empty'}", file=stream)
    return failed


def write_json(rows: Iterable[Row], stream: TextIO) -> int:
    """Write one line with a JSON object per image. Return the number of images without a prediction."""
    failed = 0
    for file, result in rows:
        failed += isinstance(result, Failure)
        print(json.dumps(as_row(file, result), ensure_ascii=False), file=stream)
    return failed


def write_csv(rows: Iterable[Row], stream: TextIO) -> int:
    """Write the predictions as CSV. Return the number of images without a prediction.

    For each image, there is one line per class: first the top-k classes, then the other classes of the prediction set.
    For an image without a prediction, there is one line with the error. The column ``in_set`` is 1 if the prediction
    set contains the class, 0 if not, and empty if the result lists only a part of the set or has no set.
    """
    failed, writer = 0, csv.writer(stream)
    writer.writerow(CSV_COLUMNS)
    for file, result in rows:
        name = _encodable(file)
        if isinstance(result, Failure):
            failed += 1
            writer.writerow((name, "", "", "", "", "", "", _encodable(str(result))))
            continue
        members = {entry.index for entry in result.set or ()}
        beyond = [entry for entry in result.set or () if entry.index not in {entry.index for entry in result.top}]
        for rank, entry in enumerate((*result.top, *beyond), 1):
            unknown = result.set is None or (entry.index not in members and len(members) < result.set_size)
            inside = "" if unknown else int(entry.index in members)
            marginal = "" if entry.marginal is None else entry.marginal
            writer.writerow((name, rank, entry.index, entry.name, marginal, entry.probability, inside, ""))
    return failed


def predict_to_parquet(
    predictor: Predictor,
    images: Sequence[str],
    output: str | Path,
    *,
    shard_size: int = 1000,
    progress: Callable[[Iterator[Any], int], Iterable[Any]] = lambda rows, done: rows,
    **options: Any,
) -> tuple[int, int]:
    """Predict the classes of images, and write the results to a folder of Parquet files.

    If an interrupted run with the same arguments has already written some of the files, only the missing files are
    computed.

    Args:
        predictor: the model.
        images: paths of the images.
        output: folder for the Parquet files. The folder is created if necessary.
        shard_size: number of images per Parquet file.
        progress: function ``(rows, done)`` that returns an iterator over ``rows``, for example a progress bar. The
            function is called once per Parquet file that is missing. ``rows`` yields one item per image of this file.
            ``done`` is the number of images in all earlier files.
        options: options of :meth:`Predictor.stream`, except ``on_error``.

    Returns:
        Two numbers: the number of images, and the number of images without a prediction.

    Raises:
        OutputError: the folder contains the results of a run with other arguments.
        ImportError: pyarrow is not installed.
    """
    pa, pq = _arrow()
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    _check_run(output, _run_of(predictor, images, shard_size, options))
    failed = 0
    for start in range(0, len(images), shard_size):
        shard = output / f"part-{start // shard_size:06d}.parquet"
        if not shard.exists():
            part = images[start : start + shard_size]
            rows = [as_row(*row) for row in progress(predicted(predictor, part, **options), start)]
            table = pa.Table.from_pylist([_flat(row) for row in rows], schema=_schema(pa))
            with replacing(shard) as staged:
                pq.write_table(table, staged)
        errors = pq.read_table(shard, columns=["error"])["error"]
        failed += len(errors) - errors.null_count
    return len(images), failed


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("pyarrow is not installed: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet


def _schema(pa: Any) -> Any:
    text, number, names = pa.string(), pa.float32(), pa.list_(pa.string())
    columns = {
        "file": text,
        "error": text,
        "classes": names,
        "indices": pa.list_(pa.int32()),
        "marginals": pa.list_(number),
        "probabilities": pa.list_(number),
        "set": names,
        "set_size": pa.int32(),
    }
    return pa.schema(list(columns.items()))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    if "error" in row:
        return row
    top, inside = row["top"], row["set"]
    return {
        "file": row["file"],
        "classes": [entry["name"] for entry in top],
        "indices": [entry["index"] for entry in top],
        "marginals": [entry["marginal"] for entry in top],
        "probabilities": [entry["probability"] for entry in top],
        "set": None if inside is None else [entry["name"] for entry in inside],
        "set_size": row["set_size"],
    }


def _run_of(predictor: Predictor, images: Sequence[str], shard_size: int, options: dict[str, Any]) -> dict[str, Any]:
    listing = hashlib.sha256("\0".join(images).encode("utf-8", "surrogateescape")).hexdigest()
    lists = (tuple, np.ndarray)
    known = {name: np.asarray(x).tolist() if isinstance(x, lists) else x for name, x in options.items()}
    known.pop("batch_size", None)
    return {
        "model": digest_of(predictor.path),  # the metadata contain the digest of external weights
        "images": listing,
        "count": len(images),
        "shard_size": shard_size,
        "options": known,
    }


def _check_run(output: Path, run: dict[str, Any]) -> None:
    path = output / RUN
    results = any(output.glob("part-*.parquet"))
    if not path.exists() and results:
        raise OutputError(f"{output} has Parquet files and no {RUN}: choose another folder")
    if not results:  # perhaps an earlier run failed before its first result, for example because an option was wrong
        write_text(path, json.dumps(run, indent=1))
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise OutputError(f"{path} cannot be read: {error}") from error
    if differing := sorted(key for key in {*run, *before} if run.get(key) != before.get(key)):
        raise OutputError(
            f"{output} has the results of another run: {', '.join(differing)} differ; choose another folder"
        )


def predicted(
    predictor: Predictor, images: Sequence[str], **options: Any
) -> Iterator[tuple[str, Prediction | Exception]]:
    """Yield one pair per image: the path, and either the prediction or the exception.

    ``options`` are options of :meth:`Predictor.stream`, except ``on_error``.
    """
    return zip(images, predictor.stream(images, on_error="yield", **options), strict=True)


def predicted_rows(
    predictor: Predictor, inputs: Mapping[str, np.ndarray], **options: Any
) -> Iterator[tuple[str, Prediction | Exception]]:
    """Yield one pair per row of the inputs: the number of the row, and either the prediction or the exception.

    ``options`` are options of :meth:`Predictor.rows`.
    """
    return ((f"row {i}", result) for i, result in enumerate(predictor.rows(inputs, **options)))
