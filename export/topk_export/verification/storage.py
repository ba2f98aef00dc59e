"""Model files with their weights inside or beside them, with the onnx package alone."""

import hashlib
import json
from pathlib import Path
from typing import Any

from topk_export.errors import ModelFileError, naming
from topk_export.runtime.weights import files_of, weights_beside
from topk_export.verification import graph

LIMIT = 2**31 - 2**26  # bytes of one file: protocol buffers end at 2 GiB, less room for the graph and for thresholds
SMALL = 1024  # bytes: tensors below are shapes and scalars, which checkers want to see
ALIGNMENT = 4096  # bytes of a page, so that runtimes map weights without a copy
DIGEST = "weights_sha256"  # in the metadata


def load(path: str | Path) -> Any:
    """Return a file's ModelProto; of weights in a second file, only those that the head reads are loaded."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    files_of(path)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class with onnx's
        raise ModelFileError(f"{path} is not an ONNX model: {error}") from error
    head = graph.head_constants(model.graph)
    for tensor in model.graph.initializer:
        if tensor.name in head and uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(Path(path).parent))
    return model


def save(model: Any, path: Path, *, external: bool = False, source: Path | None = None) -> None:
    """Write a ModelProto, with its weights in ``PATH.data`` if that is wanted or one file cannot hold them.

    These weights are removed from the ModelProto, and their SHA-256 is added to the file's metadata.

    Args:
        model: what to write.
        path: the file to write, which must not exist yet.
        external: put the weights beside the file, whatever their size.
        source: folder of the weights that the ModelProto names and does not hold; they become the new file's.
    """
    import onnx
    from onnx.external_data_helper import uses_external_data

    graph.drop_metadata(model, DIGEST)
    tensors, digest = model.graph.initializer, None
    if external or any(map(uses_external_data, tensors)) or size_of(model) > LIMIT:
        with naming(weights_beside(path)):
            digest = _write_weights(model, weights_beside(path), source)
    model.metadata_props.add(key=DIGEST, value=json.dumps(digest))
    with naming(path):
        onnx.save(model, str(path))


def size_of(model: Any) -> int:
    """Return the bytes of the weights that a ModelProto holds."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def _write_weights(model: Any, file: Path, source: Path | None) -> str:
    from onnx.external_data_helper import load_external_data_for_tensor, set_external_data, uses_external_data

    sha, head = hashlib.sha256(), graph.head_constants(model.graph)
    with open(file, "wb") as stream:
        for tensor in model.graph.initializer:
            if uses_external_data(tensor):
                load_external_data_for_tensor(tensor, str(source))
            content = tensor.raw_data
            if len(content) < SMALL or tensor.name in head:
                continue
            gap = bytes(-stream.tell() % ALIGNMENT)
            for block in (gap, content):
                stream.write(block)
                sha.update(block)
            set_external_data(tensor, file.name, stream.tell() - len(content), len(content))
            tensor.ClearField("raw_data")
    return sha.hexdigest()
