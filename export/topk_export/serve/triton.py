"""A Triton Inference Server repository: ``<name>/config.pbtxt``, the labels, and the model as version 1."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from topk_export.runtime.metadata import Metadata
from topk_export.runtime.session import open_session

TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(int64)": "TYPE_INT64",
    "tensor(bool)": "TYPE_BOOL",
}


def write_repository(
    model: str | Path, folder: str | Path, *, name: str | None = None, max_batch_size: int = 32
) -> Path:
    """Write the repository entry of an exported model into ``folder``, and return the entry's path.

    A model of a fixed batch size gets ``max_batch_size: 0`` and its batch in the shapes: Triton batches only models
    whose first axis is free.
    """
    model, folder = Path(model), Path(folder)
    session = open_session(model, device="cpu")
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(model))
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name or model.stem)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as staging:
        entry = Path(staging) / name
        (entry / "1").mkdir(parents=True)
        shutil.copyfile(model, entry / "1" / "model.onnx")
        (entry / "labels.txt").write_text("\n".join(metadata.class_names) + "\n", encoding="utf-8")
        (entry / "config.pbtxt").write_text(_config(name, session, max_batch_size), encoding="utf-8")
        if (folder / name).exists():
            shutil.rmtree(folder / name)
        os.replace(entry, folder / name)
    return folder / name


def _config(name: str, session: object, max_batch_size: int) -> str:
    inputs, outputs = session.get_inputs(), session.get_outputs()  # type: ignore[attr-defined]
    fixed = isinstance(inputs[0].shape[0], int)
    lines = [
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {0 if fixed else max_batch_size}",
        "input [",
        *_tensors(inputs, fixed),
        "]",
        "output [",
        *_tensors(outputs, fixed, labels=True),
        "]",
    ]
    if not fixed:
        lines.append("dynamic_batching { max_queue_delay_microseconds: 2000 }")
    return "\n".join(lines) + "\n"


def _tensors(tensors: list, fixed: bool, *, labels: bool = False) -> list[str]:
    entries = []
    for tensor in tensors:
        dims = ", ".join(map(str, tensor.shape[0 if fixed else 1 :]))
        label = ' label_filename: "labels.txt"' if labels and tensor.name != "indices" else ""
        entries.append(f'  {{ name: "{tensor.name}" data_type: {TYPES[tensor.type]} dims: [ {dims} ]{label} }}')
    return [entry + "," for entry in entries[:-1]] + entries[-1:]
