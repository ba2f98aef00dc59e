"""Functions that read, change and write the ONNX graphs of exported models. These functions need the onnx package.

The *head* of a graph consists of all nodes with a name that starts with ``PREFIX``. These nodes compute all outputs of
this package from the tensor named ``logits``. All other nodes form the backbone.
"""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ExportError, ModelFileError, naming
from topk_export.runtime.metadata import LOGITS
from topk_export.runtime.weights import weights_beside

PREFIX = "topk/"  # of the names of the head's nodes
FORBIDDEN_IN_HEAD = frozenset(("Loop", "Scan", "If", "Sigmoid", "MatMul", "Gemm", "Einsum", "Atan", "CumProd"))
LIMIT = 2**31 - 2**26  # bytes of weights per ONNX file: a protocol buffer has at most 2 GiB, and the graph needs space
SMALL = 1024  # bytes: smaller tensors stay in the ONNX file, because the ONNX checker reads shapes and scalars
ALIGNMENT = 4096  # bytes per memory page: each tensor starts at a new page, so that runtimes can map it into memory
WEIGHTS = "external_weights"  # metadata key for the name and the SHA-256 of the file with external weights


def load(path: str | Path) -> Any:
    """Read an ONNX file, and return the ModelProto.

    A large model has external weights: weights in other files of the same folder. Of the external weights, this
    function loads only the tensors that the head needs.

    Raises:
        ModelFileError: the file is missing or is not an ONNX model.
        ImportError: the onnx package is not installed.
    """
    try:
        import onnx
        from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data
    except ImportError as error:
        raise ImportError("onnx is not installed: in the checkout, pip install -e '.[onnx]'") from error
    if not Path(path).is_file():
        raise ModelFileError(f"{path} does not exist or is not a file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # the errors of protobuf and onnx share no base class
        raise ModelFileError(f"{path} is not an ONNX model: {error}") from error
    head = _head_inputs(model.graph) if has_head(model) else set()
    for tensor in model.graph.initializer:
        if tensor.name in head and uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(Path(path).parent))
    return model


def check_weights_stay(model: Any, source: Path, path: Path) -> None:
    """Raise ValueError if :func:`save` to ``path`` would replace external weights of the ONNX file ``source``."""
    new = weights_beside(path)
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    files = {source.parent / entry.value for entry in entries if entry.key == "location"}
    if any(new.exists() and file.exists() and new.samefile(file) for file in files):
        raise ValueError(f"a model at {path} replaces {new}, which contains weights of {source}: choose another file")


def save(model: Any, path: Path, *, source: Path | None = None) -> None:
    """Write a ModelProto to an ONNX file.

    If the weights have more than ``LIMIT`` bytes, or if ``model`` already has external weights, the function writes
    weights to the file ``PATH.data``: all tensors of at least ``SMALL`` bytes, except tensors of the head. The
    metadata of the ONNX file then contain the name and the SHA-256 of ``PATH.data``.

    Args:
        model: the ModelProto. The function removes the tensors in ``PATH.data`` from this object.
        path: the ONNX file to write, in another folder than ``source``.
        source: folder with the external weights (weights in other files) of ``model``. None: there are none.
    """
    import onnx
    from onnx.external_data_helper import uses_external_data

    tensors, written = model.graph.initializer, None
    _replace(model.metadata_props, [entry for entry in model.metadata_props if entry.key != WEIGHTS])
    if any(map(uses_external_data, tensors)) or sum(len(tensor.raw_data) for tensor in tensors) > LIMIT:
        file = weights_beside(path)
        with naming(file):
            written = {"file": file.name, "sha256": _write_weights(model, file, source)}
    model.metadata_props.add(key=WEIGHTS, value=json.dumps(written))
    with naming(path):
        onnx.save(model, str(path))


def _write_weights(model: Any, file: Path, source: Path | None) -> str:
    from onnx.external_data_helper import load_external_data_for_tensor, set_external_data, uses_external_data

    sha, head = hashlib.sha256(), _head_inputs(model.graph)
    with open(file, "wb") as stream:
        for tensor in model.graph.initializer:
            if uses_external_data(tensor):
                load_external_data_for_tensor(tensor, str(source))
            content = tensor.raw_data
            if len(content) < SMALL or tensor.name in head:
                continue
            for block in (bytes(-stream.tell() % ALIGNMENT), content):
                stream.write(block)
                sha.update(block)
            set_external_data(tensor, file.name, stream.tell() - len(content), len(content))
            tensor.ClearField("raw_data")
    return sha.hexdigest()


class Nodes:
    """Builder that appends nodes, constants and outputs to the graph of an ONNX model (a ModelProto).

    The names of all nodes and of their tensors start with ``prefix``. Constants with equal values exist once.
    """

    def __init__(self, model: Any, prefix: str) -> None:
        self._graph, self._prefix, self.opset = model.graph, prefix, opset_of(model)
        self._constants: dict[tuple[Any, ...], str] = {}

    def __call__(self, op: str, *inputs: Any, out: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Append a node of the ONNX operator ``op``, and return the name of its output.

        An input is the name of a tensor, or the value of a constant: numbers and arrays are written as float32, and
        integers as int64. If ``outputs`` is above 1, return a list of ``outputs`` names. ``out`` is the name of the
        first output. By default, the method generates a name.
        """
        from onnx import helper

        first = out or f"{self._prefix}{op}_{len(self._graph.node)}"
        names = [first, *(f"{first}_{i}" for i in range(1, outputs))]
        tensors = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        name = first if first.startswith(self._prefix) else f"{self._prefix}{first}"
        self._graph.node.append(helper.make_node(op, tensors, names, name=name, **attributes))
        return first if outputs == 1 else names

    def reduce(self, op: str, tensor: str, axis: int, *, keepdims: bool = True) -> str:
        """Append a reduction such as ``ReduceMin`` along one axis, and return the name of its output."""
        if op == "ReduceSum" or self.opset >= 18:  # older reductions take the axes as an attribute
            return self(op, tensor, [axis], keepdims=int(keepdims))
        return self(op, tensor, axes=[axis], keepdims=int(keepdims))

    def constant(self, value: Any, name: str = "") -> str:
        """Append a constant (an ONNX initializer), and return its name. By default, the method generates a name."""
        from onnx import numpy_helper

        array = np.asarray(value)
        if array.dtype != bool:
            array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
        key = (name, array.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name or f"{self._prefix}constant_{len(self._graph.initializer)}"
            self._graph.initializer.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def output(self, name: str, kind: int, shape: Iterable[Any]) -> None:
        """Declare the tensor ``name`` as an output of the graph. ``kind`` is a data type of ``onnx.TensorProto``."""
        from onnx import helper

        self._graph.output.append(helper.make_tensor_value_info(name, kind, list(shape)))


def opset_of(model: Any) -> int:
    """Return the version of the default operator set that a ModelProto uses, or 0 if it uses none."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def merge_opsets(model: Any) -> None:
    """Remove repeated operator sets from a ModelProto, in place. skl2onnx writes the default operator set twice."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if "ai.onnx" in versions:  # another name of the default domain
        versions[""] = versions.pop("ai.onnx")
    del model.opset_import[:]
    for domain, version in versions.items():
        model.opset_import.add(domain=domain, version=version)


def all_names(graph: Any) -> set[str]:
    """Return the names of all tensors and nodes of a GraphProto and of the graphs inside its nodes."""
    names = {item.name for item in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)}
    for node in graph.node:
        names |= {node.name, *node.input, *node.output}
        for inner in _graphs_in(node):
            names |= all_names(inner)
    return names


def rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename tensors and nodes of a GraphProto and of the graphs inside its nodes, in place."""
    for item in (*graph.input, *graph.output, *graph.initializer, *graph.value_info, *graph.node):
        item.name = names.get(item.name, item.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inner in _graphs_in(node):
            rename(inner, names)


def _graphs_in(node: Any) -> list[Any]:
    """Return the bodies of an If, Loop or Scan node."""
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def without_nodes(model: Any, prefix: str | tuple[str, ...] = PREFIX) -> Any:
    """Return a copy of a ModelProto without the nodes whose names start with ``prefix``: by default, the head.

    The outputs of these nodes, and the inputs and constants that only they read, are removed, too.
    """
    model = copy.deepcopy(model)
    graph = model.graph
    nodes = [node for node in graph.node if node.name.startswith(prefix)]
    left = [node for node in graph.node if not node.name.startswith(prefix)]
    made = {name for node in nodes for name in node.output}
    read = {name for node in left for name in node.input} | {output.name for output in graph.output} - made
    unread = {name for node in nodes for name in node.input} - read
    _replace(graph.node, left)
    _replace(graph.output, [output for output in graph.output if output.name not in made])
    _replace(graph.input, [value for value in graph.input if value.name not in unread])
    _replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in unread])
    return model


def has_head(model: Any) -> bool:
    """Return whether this package wrote a ModelProto. Other programs may also use the prefix of the head's nodes."""
    return "topk_registry" in metadata_of(model).get("schema", "")


def head_nodes(graph: Any) -> list[Any]:
    """Return the nodes of the head: the nodes of a GraphProto with a name that starts with ``PREFIX``."""
    return [node for node in graph.node if node.name.startswith(PREFIX)]


def forbidden(graph: Any) -> list[str]:
    """Return the types of operators that the head contains but must not contain, in alphabetical order.

    Such operators do not work in CUDA graphs, are imprecise, or are replaced by tools that quantize a model.
    """
    return sorted({node.op_type for node in head_nodes(graph)} & FORBIDDEN_IN_HEAD)


def domains(model: Any) -> list[str]:
    """Return the domains (namespaces of operators) that a ModelProto uses, except the default domain of ONNX."""
    used = {node.domain for node in model.graph.node} | {entry.domain for entry in model.opset_import}
    return sorted((used | {function.domain for function in model.functions}) - {"", "ai.onnx"})


def strip(model: Any) -> None:
    """Remove two things from a ModelProto, in place: traces of the exporting machine, and declared shapes of weights.

    Traces of the machine are stack traces, file names and module paths. The function removes declared shapes because
    some tools transpose weights but do not update the declared shapes.
    """
    graph = model.graph
    weights = {weight.name for weight in graph.initializer}
    _replace(graph.value_info, [value for value in graph.value_info if value.name not in weights])
    named = [*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, *model.functions]
    for item in [*named, graph, model]:
        item.ClearField("doc_string")
        if hasattr(item, "metadata_props") and item is not model:
            item.ClearField("metadata_props")


def traces(model: Any) -> int:
    """Return the number of nodes that have metadata or documentation.

    Metadata and documentation may contain paths of the exporting machine.
    """
    return sum(bool(node.doc_string or len(node.metadata_props)) for node in model.graph.node)


def optional_input(model: Any, name: str, default: Any, shape: Iterable[int | str]) -> None:
    """Add an optional input to a ModelProto, in place.

    In ONNX, an input is optional if a constant (an initializer) has the same name. This function adds the constant
    ``default``. Text in ``shape``, such as ``"batch"``, declares an axis of any length.
    """
    from onnx import helper, numpy_helper

    tensor = numpy_helper.from_array(default, name)
    model.graph.initializer.append(tensor)
    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(shape)))


def head_model(model: Any) -> Any:
    """Return the head of a model as a separate ModelProto.

    The new model has the input ``logits`` [batch, n] or [batch, positions, n]. The outputs are all outputs of ``model``
    that the head computes. Optional inputs of the head, such as ``allowed``, remain optional.

    Raises:
        ExportError: ``model`` has no head, or the head reads a required input of ``model``.
    """
    import onnx
    from onnx import helper

    nodes = head_nodes(model.graph)
    inside = {LOGITS}.union(*(node.output for node in nodes))
    outputs = [output for output in model.graph.output if output.name in inside and output.name != LOGITS]
    if not outputs:
        raise ExportError("the model has no head")
    _, *inner, n = value_shape(model.graph, LOGITS)
    logits = helper.make_tensor_value_info(LOGITS, onnx.TensorProto.FLOAT, ["batch", *inner, n])
    feeders, free = _feeders(model.graph, nodes, inside)
    constants = [tensor for tensor in model.graph.initializer if tensor.name in free]
    defaults = {tensor.name for tensor in constants}
    optional = [value for value in model.graph.input if value.name in defaults]
    graph = helper.make_graph([*feeders, *nodes], "head", [logits, *optional], outputs, constants)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _head_inputs(graph: Any) -> set[str]:
    nodes = head_nodes(graph)
    return _feeders(graph, nodes, {LOGITS}.union(*(node.output for node in nodes)))[1]


def _feeders(graph: Any, nodes: list[Any], inside: set[str]) -> tuple[list[Any], set[str]]:
    # the nodes outside of the head that compute its inputs, and the tensors outside of the head that both read
    free = {name for node in nodes for name in node.input} - inside
    feeders = []
    for node in reversed(graph.node):
        if free.intersection(node.output) and not inside.intersection(node.output):
            free.update(node.input)
            feeders.append(node)
    defaults = {tensor.name for tensor in graph.initializer}
    if foreign := free.intersection(value.name for value in graph.input) - defaults:
        raise ExportError(f"the nodes that follow the logits also read the input {', '.join(sorted(foreign))}")
    return feeders[::-1], free


def value_shape(graph: Any, name: str) -> list[int | str]:
    """Return the declared shape of a tensor. For an axis of any length, the entry is text, such as ``"batch"``.

    Raises:
        ExportError: the graph declares no shape for a tensor of this name.
    """
    for value in (*graph.output, *graph.value_info, *graph.input):
        if value.name == name:
            return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
    raise ExportError(f"the graph declares no tensor named {name!r}")


def metadata_of(model: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def set_metadata(model: Any, props: dict[str, str]) -> None:
    """Replace all metadata of a ModelProto by the entries of ``props``."""
    model.ClearField("metadata_props")
    for key, value in props.items():
        model.metadata_props.add(key=key, value=value)


def _replace(field: Any, items: Iterable[Any]) -> None:
    items = list(items)
    del field[:]
    field.extend(items)
