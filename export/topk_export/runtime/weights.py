"""Files of a model: its external weights, and digests that show whether the files belong together.

An ONNX file has at most 2 GiB. A larger model stores its weights in a second file of the same folder, which ONNX calls
external data. The metadata contain the name and the SHA-256 of this file, so that prediction does not need the onnx
package. onnxruntime refuses weights that are missing, too short, or outside of the folder of the model.
"""

import hashlib
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import THRESHOLDS

SUFFIX = ".data"  # model.onnx.data contains the external weights of model.onnx
# in an ONNX file, the values of a tensor (tag J) follow its name (tag B, length, text)
THRESHOLDS_MARK = b"B" + bytes([len(THRESHOLDS)]) + THRESHOLDS.encode() + b"J"


def weights_beside(model: str | Path) -> Path:
    """Return the path to which an export writes the external weights of a model: ``MODEL.onnx.data``."""
    return Path(f"{model}{SUFFIX}")


def weights_of(model: str | Path, weights: Mapping[str, str] | None) -> Path | None:
    """Return the path of the external weights of a model, or None if the model has none.

    ``weights`` is the entry ``external_weights`` of the metadata. A program that moves the weights into the ONNX file
    keeps this entry. Therefore the result is also None if the file does not exist: onnxruntime has already loaded the
    model.
    """
    file = None if weights is None else Path(model).with_name(weights["file"])
    return file if file is not None and file.is_file() else None


def digest_of(file: str | Path) -> str:
    """Return the SHA-256 of a file."""
    sha = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def check_weights(model: str | Path, weights: Mapping[str, str] | None) -> None:
    """Raise :class:`ModelFileError` if the external weights of a model have another SHA-256 than the metadata say.

    ``weights`` is the entry ``external_weights`` of the metadata. If it is None, the model has no external weights.
    """
    file = weights_of(model, weights)
    if weights is not None and file is not None and digest_of(file) != weights["sha256"]:
        raise ModelFileError(f"{file} does not belong to {model}: its SHA-256 differs, copy both files again")


def check_thresholds(model: str | Path, sets: Mapping[str, Any] | None) -> None:
    """Raise :class:`ModelFileError` if the thresholds of prediction sets changed after the calibration.

    For example, a tool that quantizes the model also changes the thresholds, without an error. ``sets`` is the entry
    ``sets`` in the metadata, which contains the SHA-256 of the thresholds and their length in bytes. If ``sets`` is
    None or empty, the model is not calibrated, and nothing is checked.
    """
    if not sets:
        return
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.rfind(THRESHOLDS_MARK) + len(THRESHOLDS_MARK)
        while data[start] & 128:  # the length of the values comes first, and its last byte is below 128
            start += 1
        table = data[start + 1 : start + 1 + int(sets.get("thresholds_bytes", 0))]
    if hashlib.sha256(table).hexdigest() != sets.get("thresholds_sha256"):
        raise ModelFileError(
            f"the thresholds of {model} changed after its calibration: quantize or convert a file first, then "
            "calibrate it"
        )
