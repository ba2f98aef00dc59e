"""External weights of a model: functions that find, check, copy and move the files that contain the weights.

An ONNX file has at most 2 GiB. A larger model stores weights in other files of the same folder. ONNX calls such weights
external data. This module reads the names of the files from the bytes of the ONNX file, which is a protocol buffer.
Therefore prediction does not need the onnx package.
"""

import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import THRESHOLDS

SUFFIX = ".data"  # model.onnx.data contains the external weights of model.onnx

# field numbers in onnx.proto
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA, _EXTERNAL_DATA, _KEY, _VALUE = 7, 5, 8, 9, 13, 1, 2
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}  # size in bytes of fixed-size values


def weights_beside(model: str | Path) -> Path:
    """Return the path to which an export writes the external weights of a model: ``MODEL.onnx.data``."""
    return Path(f"{model}{SUFFIX}")


def files_of(model: str | Path) -> list[Path]:
    """Return the path of an ONNX file, followed by the paths of the files with its external weights.

    Raises:
        ModelFileError: a file is missing, too short, or outside of the folder of the model.
    """
    model = Path(model)
    if not model.is_file():
        raise ModelFileError(f"{model} does not exist or is not a file")
    files = [model]
    for name, size in sorted(external_sizes(model).items()):
        if name != PureWindowsPath(name).name:  # rejects paths of any system
            raise ModelFileError(f"{model} keeps weights outside of its folder, in {name!r}, which is not allowed")
        file = model.parent / name
        if not file.is_file():
            raise ModelFileError(
                f"{model} keeps its weights in {file}, which does not exist: move both together, and do not rename "
                "the weights"
            )
        if (found := file.stat().st_size) < size:
            raise ModelFileError(f"{file} has {found} bytes, {model} needs {size}: copy it again")
        files.append(file)
    return files


def external_sizes(model: str | Path) -> dict[str, int]:
    """Return a dictionary from the name of each file with external weights to the minimum size of the file in bytes.

    The minimum size is the end of the last tensor that ``model`` reads from the file. If ``model`` is not an ONNX file,
    return an empty dictionary.
    """
    sizes: dict[str, int] = {}
    if not os.path.getsize(model):
        return sizes
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for entry in _external_tensors(data):
                end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
                sizes[entry["location"]] = max(end, sizes.get(entry["location"], 0))
        except (IndexError, KeyError, ValueError):
            return {}  # not an ONNX model; the caller will load the file, and that error message is better
    return sizes


def copy_model(model: str | Path, target: str | Path) -> list[Path]:
    """Copy a model to the path ``target``, and its external weights into the folder of ``target``.

    Return the paths of the copies: first the external weights, then the model.
    """
    target = Path(target)
    first, *weights = files_of(model)
    copies = [target.with_name(file.name) for file in weights]
    for file, copy in zip((*weights, first), (*copies, target), strict=True):
        shutil.copyfile(file, copy)
    return [*copies, target]


def digest_of(*files: str | Path) -> str:
    """Return one SHA-256 for the contents of all files in the given order."""
    sha = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def check_digest(model: str | Path, sha256: str | None) -> None:
    """Raise :class:`ModelFileError` if the external weights of a model have another SHA-256 than the metadata say.

    ``sha256`` is the SHA-256 in the metadata. If ``sha256`` is None, or if the model has no external weights, nothing
    is checked.
    """
    _, *weights = files_of(model)
    if weights and sha256 is not None and digest_of(*weights) != sha256:
        raise ModelFileError(f"{weights[0]} does not belong to {model}: its SHA-256 differs, copy both files again")


def check_thresholds(model: str | Path, sets: Mapping[str, Any] | None) -> None:
    """Raise :class:`ModelFileError` if the thresholds of prediction sets changed after the calibration.

    For example, a tool that quantizes the model also changes the thresholds, without an error. ``sets`` is the entry
    ``sets`` in the metadata, which contains the SHA-256 of the thresholds. If ``sets`` is None or empty, the model is
    not calibrated, and nothing is checked.
    """
    if not sets:
        return
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tables = [span for span in _initializers(data) if _texts(data, span, _NAME) == [THRESHOLDS]]
        raw = [data[start:end] for table in tables for start, end in _messages(data, table, _RAW_DATA)]
    if hashlib.sha256(b"".join(raw)).hexdigest() != sets.get("thresholds_sha256"):
        raise ModelFileError(
            f"the thresholds of {model} changed after its calibration: quantize or convert a file first, then "
            "calibrate it"
        )


def _initializers(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    for graph in _messages(data, (0, len(data)), _GRAPH):
        yield from _messages(data, graph, _INITIALIZER)


def _external_tensors(data: mmap.mmap) -> Iterator[dict[str, str]]:
    for tensor in _initializers(data):
        entry = {}
        for pair in _messages(data, tensor, _EXTERNAL_DATA):
            (key,), (value,) = (_texts(data, pair, field) for field in (_KEY, _VALUE))
            entry[key] = value
        if entry:
            yield entry


def _texts(data: mmap.mmap, span: tuple[int, int], field: int) -> list[str]:
    return [data[start:end].decode() for start, end in _messages(data, span, field)]


def _messages(data: mmap.mmap, span: tuple[int, int], wanted: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each value of the field number ``wanted`` in the protobuf message at ``span``."""
    at, end = span
    while at < end:
        tag, at = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LENGTH:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a value ends outside of its message")
            if field == wanted:
                yield at, at + size
            at += size
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a varint of more than 64 bits")
