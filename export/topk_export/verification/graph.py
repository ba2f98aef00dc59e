"""Reading and cleaning exported graphs, with the onnx package alone.

The *head* of a graph is every node that depends on the tensor named ``logits``; the rest is the backbone.
"""

from collections.abc import Iterable
from typing import Any

from topk_export.errors import ExportError

LOGITS = "logits"
FORBIDDEN_IN_HEAD = frozenset(
    (
        *("Loop", "Scan", "If", "Sigmoid", "MatMul", "Gemm", "Einsum", "Atan", "CumProd"),
        *("MatMulInteger", "QLinearMatMul", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    )
)


def head_nodes(graph: Any) -> list[Any]:
    """Return the nodes of a GraphProto that depend on ``logits``, in order."""
    reached, head = {LOGITS}, []
    for node in graph.node:
        if reached.intersection(node.input):
            reached.update(node.output)
            head.append(node)
    return head


def forbidden(graph: Any) -> list[str]:
    """Return the head's operators that break CUDA graphs, precision or quantisation."""
    return sorted({node.op_type for node in head_nodes(graph)} & FORBIDDEN_IN_HEAD)


def domains(model: Any) -> list[str]:
    """Return the operator domains that a ModelProto uses beside the default one."""
    used = {node.domain for node in model.graph.node} | {entry.domain for entry in model.opset_import}
    return sorted((used | {function.domain for function in model.functions}) - {"", "ai.onnx"})


def strip(model: Any) -> None:
    """Remove what the exporter leaves of the machine it ran on: stack traces, file names, module paths."""
    graph = model.graph
    named = [*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, *model.functions]
    for item in named:
        item.ClearField("doc_string")
        if hasattr(item, "metadata_props"):
            item.ClearField("metadata_props")
    graph.ClearField("metadata_props")
    graph.ClearField("doc_string")
    model.ClearField("doc_string")


def plain_attributes(model: Any) -> None:
    """Drop attributes without effect that some runtimes misread.

    MNN loses the axis of a ScatterElements after ``reduction="none"``. onnx2torch refuses ``allowzero`` of Reshape,
    which matters only where the shape has a zero.
    """
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        unsaid = set()
        if node.op_type in ("ScatterElements", "ScatterND"):
            unsaid = {a.name for a in node.attribute if a.name == "reduction" and a.s == b"none"}
        elif node.op_type == "Reshape" and (shape := constants.get(node.input[1])) is not None:
            unsaid = {"allowzero"} if numpy_helper.to_array(shape).all() else set()
        _replace(node.attribute, [a for a in node.attribute if a.name not in unsaid])


def traces(model: Any) -> int:
    """Count the nodes that still carry metadata or documentation of their origin."""
    return sum(bool(node.doc_string or len(node.metadata_props)) for node in model.graph.node)


def head_model(model: Any) -> Any:
    """Return the head alone as a ModelProto: input ``logits`` [batch, n], and the outputs that depend on it.

    Inputs with a default, which the head reads beside the logits, stay inputs with that default.
    """
    import onnx
    from onnx import helper

    nodes = head_nodes(model.graph)
    inside = {LOGITS}.union(*(node.output for node in nodes))
    outputs = [output for output in model.graph.output if output.name in inside and output.name != LOGITS]
    if not outputs:
        raise ExportError("the model has no output that depends on its logits")
    n = value_shape(model.graph, LOGITS)[1]
    logits = helper.make_tensor_value_info(LOGITS, onnx.TensorProto.FLOAT, ["batch", n])
    feeders, free = _constant_feeders(model.graph, nodes, inside)
    constants = [tensor for tensor in model.graph.initializer if tensor.name in free]
    defaults = {tensor.name for tensor in constants}
    others = [value for value in model.graph.input if value.name in defaults]
    graph = helper.make_graph([*feeders, *nodes], "head", [logits, *others], outputs, constants)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def head_constants(graph: Any) -> set[str]:
    """Return the names of everything that the head reads beside the logits."""
    nodes = head_nodes(graph)
    return _constant_feeders(graph, nodes, {LOGITS}.union(*(node.output for node in nodes)))[1]


def _constant_feeders(graph: Any, nodes: list[Any], inside: set[str]) -> tuple[list[Any], set[str]]:
    """Return the nodes that compute a head's constants, and the names of everything it reads from outside."""
    free = {name for node in nodes for name in node.input} - inside
    feeders = []
    for node in reversed(graph.node):
        if free.intersection(node.output):
            free.update(node.input)
            feeders.append(node)
    defaults = {tensor.name for tensor in graph.initializer}
    if foreign := free.intersection(value.name for value in graph.input) - defaults:
        raise ExportError(f"the head reads the model's {', '.join(sorted(foreign))} beside its logits")
    return feeders[::-1], free


def value_shape(graph: Any, name: str) -> list[int | str]:
    """Return the shape of a tensor that the graph declares, symbols as strings."""
    for value in (*graph.output, *graph.value_info, *graph.input):
        if value.name == name:
            return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
    raise ExportError(f"the graph declares no tensor named {name!r}")


def keep_outputs(model: Any, names: Iterable[str]) -> None:
    """Drop the other outputs, and every node and constant that only they needed."""
    graph, names = model.graph, list(names)  # in this order
    kept = {output.name: output for output in graph.output if output.name in names}
    needed, nodes = set(kept), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    for output in graph.output:
        if output.name in needed and output.name not in kept:
            graph.value_info.append(output)  # logits stays declared: the head begins there
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    _replace(graph.node, reversed(nodes))
    _replace(graph.initializer, constants)
    _replace(graph.output, [kept[name] for name in names])


def expose(model: Any, name: str) -> None:
    """Make a declared tensor an output of the graph, unless it is one."""
    if name in {output.name for output in model.graph.output}:
        return
    model.graph.output.extend([value for value in model.graph.value_info if value.name == name])


def forget_constants(model: Any) -> None:
    """Drop declared shapes of constants: the quantiser transposes some, and then trips over the old shapes."""
    constants = {tensor.name for tensor in model.graph.initializer}
    _replace(model.graph.value_info, [v for v in model.graph.value_info if v.name not in constants])


def set_metadata(model: Any, props: dict[str, str]) -> None:
    model.ClearField("metadata_props")
    for key, value in props.items():
        model.metadata_props.add(key=key, value=value)


def drop_metadata(model: Any, key: str) -> None:
    _replace(model.metadata_props, [entry for entry in model.metadata_props if entry.key != key])


def _replace(field: Any, items: Iterable[Any]) -> None:
    items = list(items)
    del field[:]
    field.extend(items)
