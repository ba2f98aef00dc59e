"""Exported models in a model repository of Triton Inference Server.

In the repository, a model with the name NAME has the files ``NAME/config.pbtxt``, ``NAME/labels.txt`` and
``NAME/1/model.onnx``.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from topk_export.errors import ExportError, naming
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.session import open_session
from topk_export.runtime.weights import weights_of
from topk_registry.files import sync

TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(double)": "TYPE_FP64",
    "tensor(float)": "TYPE_FP32",
    "tensor(float16)": "TYPE_FP16",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(string)": "TYPE_STRING",
    "tensor(uint8)": "TYPE_UINT8",
}
PER_CLASS = ("logits", "marginals", "probabilities", "set")  # outputs with one value per class
CONFIG, LABELS = "config.pbtxt", "labels.txt"
MAX_BATCH = 32  # images per run; users can change this number in config.pbtxt


def write_repository(model: str | Path, folder: str | Path) -> Path:
    """Copy an exported model into a model repository of Triton, and return the folder of version 1 of the model.

    Triton does not support optional inputs of batched models, so requests cannot set the inputs ``allowed`` and
    ``alpha``. Therefore all classes are allowed, and the prediction sets of a calibrated model use the alpha of the
    calibration.

    Args:
        model: the exported ONNX file. In the repository, the model has the name of this file without ``.onnx``.
        folder: folder of the repository. The folder is created if necessary.

    Raises:
        ExportError: the repository already has a model with this name, or the model takes batches of a fixed length.
    """
    model, folder = Path(model), Path(folder)
    session = open_session(model, device="cpu")
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(model))
    if metadata.batch is not None:
        raise ExportError(
            f"{model} takes batches of {metadata.batch} rows only: export the original model with a batch axis of any "
            "length"
        )
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", model.stem)
    entry = folder / name
    if os.path.lexists(entry):
        raise ExportError(f"{entry} exists: for a new version of this model, copy the file to {entry}/2/model.onnx")
    config = _config(name, _tensors(session.get_inputs()), _tensors(session.get_outputs(), labels=True))
    folder.mkdir(parents=True, exist_ok=True)
    with naming(entry), tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as staging:
        staged = Path(staging) / name
        version = staged / "1"
        version.mkdir(parents=True)
        shutil.copyfile(model, version / "model.onnx")
        if weights := weights_of(model, metadata.external_weights):
            shutil.copyfile(weights, version / weights.name)
        (staged / LABELS).write_text("\n".join(metadata.class_names) + "\n", encoding="utf-8")
        (staged / CONFIG).write_text(config, encoding="utf-8")
        for path in (*staged.rglob("*"), staged):  # a crash leaves the whole entry, or none
            sync(path)
        os.rename(staged, entry)
        sync(folder)
    return entry / "1"


def _config(name: str, inputs: list[str], outputs: list[str]) -> str:
    lines = [
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {MAX_BATCH}",
        "input [",
        ",\n".join(f"  {tensor}" for tensor in inputs),
        "]",
        "output [",
        ",\n".join(f"  {tensor}" for tensor in outputs),
        "]",
        "dynamic_batching { max_queue_delay_microseconds: 2000 }",
    ]
    return "\n".join(lines) + "\n"


def _tensors(tensors: list[Any], *, labels: bool = False) -> list[str]:
    entries = []
    for tensor in tensors:
        if tensor.type not in TYPES:
            continue  # such as the maps of scikit-learn; Triton returns the other outputs
        shape = tensor.shape[1:]
        # Triton rejects empty dims, so an output with one number per image is declared with the shape [1]
        lengths = [length if isinstance(length, int) else -1 for length in shape or [1]]
        parts = [f"dims: [ {', '.join(map(str, lengths))} ]"]
        if not shape:
            parts.append("reshape: { shape: [ ] }")
        if labels and tensor.name in PER_CLASS:
            parts.append(f'label_filename: "{LABELS}"')
        entries.append(f'{{ name: "{tensor.name}" data_type: {TYPES[tensor.type]} {" ".join(parts)} }}')
    return entries
