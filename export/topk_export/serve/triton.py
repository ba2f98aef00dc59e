"""A Triton Inference Server repository: ``<name>/config.pbtxt``, the labels, and the model as version 1."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topk_export.errors import naming
from topk_export.runtime.metadata import GROUP, Metadata
from topk_export.runtime.session import open_session
from topk_export.runtime.weights import copy_model

TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(int64)": "TYPE_INT64",
    "tensor(bool)": "TYPE_BOOL",
}
LABELLED = ("logits", "marginals", "probabilities", "labels", "set")  # outputs of one value a class


def write_repository(
    model: str | Path,
    folder: str | Path,
    *,
    name: str | None = None,
    max_batch_size: int = 32,
    ensemble: bool = False,
) -> Path:
    """Write the repository entry of an exported model into ``folder``, and return the entry's path.

    A model of a fixed batch size gets ``max_batch_size: 0`` and its batch in the shapes: Triton batches only models
    whose first axis is free.

    A model with thresholds by group gets the input ``group``, and ``groups.txt`` has the names by number. Each request
    tells it, as -1 where it is not known: Triton has no optional inputs for models that it batches.

    Args:
        model: an exported file.
        folder: the repository, made where it does not exist.
        name: of the entry; default: the file's.
        max_batch_size: the most rows of a run.
        ensemble: also write ``NAME_preprocess``, which decodes and normalises images in Triton's Python backend, and
            ``NAME_ensemble``, which takes encoded images and gives the model's outputs; its path is returned.
    """
    model, folder = Path(model), Path(folder)
    session = open_session(model, device="cpu")
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(model))
    if ensemble and isinstance(session.get_inputs()[0].shape[0], int):
        raise ValueError(f"{model} has a fixed batch size: an ensemble needs a file exported with --batch dynamic")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", name or model.stem)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as staging:
        entry = Path(staging) / name
        (entry / "1").mkdir(parents=True)
        copy_model(model, entry / "1" / "model.onnx")
        (entry / "labels.txt").write_text("\n".join(metadata.class_names) + "\n", encoding="utf-8")
        if metadata.group_names:
            (entry / "groups.txt").write_text("\n".join(metadata.group_names) + "\n", encoding="utf-8")
            _need_group(entry / "1" / "model.onnx")
            session = open_session(entry / "1" / "model.onnx", device="cpu")
        (entry / "config.pbtxt").write_text(_config(name, session, max_batch_size), encoding="utf-8")
        written = [entry]
        if ensemble:
            written += _write_ensemble(entry, session, metadata, max_batch_size)
        for path in written:
            if (folder / path.name).exists():
                shutil.rmtree(folder / path.name)
            os.replace(path, folder / path.name)
    return folder / written[-1].name


def _need_group(model: Path) -> None:
    """Take the default of a file's input ``group`` away, in place; it has the batch's size."""
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            "onnx is not installed, which a repository of a model with thresholds by group needs: pip install onnx"
        ) from error

    proto = onnx.load(str(model), load_external_data=False)
    constants = [tensor for tensor in proto.graph.initializer if tensor.name != GROUP]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(constants)
    source, *others = proto.graph.input
    (group,) = (value for value in others if value.name == GROUP)
    group.type.tensor_type.shape.dim[0].CopyFrom(source.type.tensor_type.shape.dim[0])
    with naming(model):
        onnx.save(proto, str(model))


def _write_ensemble(entry: Path, session: Any, metadata: Metadata, max_batch_size: int) -> list[Path]:
    """Write the entries that prepare images and that join the steps, beside the model's; return their paths."""
    source, *others = session.get_inputs()
    metadata.preprocess.check_known()
    first, joined = (entry.with_name(f"{entry.name}_{kind}") for kind in ("preprocess", "ensemble"))
    for path in (first, joined):
        (path / "1").mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("triton_preprocess.py"), first / "1" / "model.py")
    recipe = asdict(metadata.preprocess) | {"output": source.name, "in_graph": metadata.in_graph}
    (first / "1" / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    lines = [f"name: {json.dumps(first.name)}", 'backend: "python"', *_image_input(max_batch_size, []), "output ["]
    lines += [*_tensors([source], False), "]"]
    (first / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    outputs = session.get_outputs()
    steps = [
        _step(first.name, {"image": "image"}, {source.name: "prepared"}),
        _step(
            entry.name,
            {source.name: "prepared", **{other.name: other.name for other in others}},
            {output.name: output.name for output in outputs},
        ),
    ]
    lines = [
        f"name: {json.dumps(joined.name)}",
        'platform: "ensemble"',
        *_image_input(max_batch_size, _tensors(others, False, ensemble=True)),
        "output [",
        *_tensors(outputs, False, labels=True, ensemble=True),
        "]",
        "ensemble_scheduling { step [",
        ",\n".join(steps),
        "] }",
    ]
    (joined / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copyfile(entry / "labels.txt", joined / "labels.txt")
    return [first, joined]


def _image_input(max_batch_size: int, others: list[str]) -> list[str]:
    image = '  { name: "image" data_type: TYPE_STRING dims: [ 1 ] }' + ("," if others else "")
    return [f"max_batch_size: {max_batch_size}", "input [", image, *others, "]"]


def _step(name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """A step of an ensemble: a model, and the ensemble's tensor for each of its own."""
    maps = [
        f"{kind}_map {{ key: {json.dumps(own)} value: {json.dumps(shared)} }}"
        for kind, pairs in (("input", inputs), ("output", outputs))
        for own, shared in pairs.items()
    ]
    return f"  {{ model_name: {json.dumps(name)} model_version: -1 {' '.join(maps)} }}"


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


def _tensors(tensors: list, fixed: bool, *, labels: bool = False, ensemble: bool = False) -> list[str]:
    entries = []
    for tensor in tensors:
        shape = tensor.shape[0 if fixed else 1 :]
        # Triton refuses empty dims: one number a row is a row of one number, made from what the model gives
        parts = [f"dims: [ {', '.join(map(str, shape or [1]))} ]"]
        if not shape and not ensemble:
            parts.append("reshape: { shape: [ ] }")
        if labels and tensor.name in LABELLED:
            parts.append('label_filename: "labels.txt"')
        entries.append(f'  {{ name: "{tensor.name}" data_type: {TYPES[tensor.type]} {" ".join(parts)} }}')
    return [entry + "," for entry in entries[:-1]] + entries[-1:]
