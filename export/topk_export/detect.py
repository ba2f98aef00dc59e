"""Search for the logits in the graph of an ONNX classifier.

Many classifiers end in a softmax or a sigmoid. The function :func:`find_logits` follows an output of the model back to
this last operation, and returns the tensor before the operation. The function recognizes the ONNX operators Softmax and
Sigmoid, the same functions spelled out with exponentials and sums, and the linear classifier of ai.onnx.ml. Only the
end of an output counts: networks with SiLU activations contain many other sigmoids. The output of a LogSoftmax already
contains logits.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from topk_export.errors import ExportError

SOFTMAX, SIGMOID, LINEAR = "softmax", "sigmoid", "linear classifier"
# operators that change neither the values nor the order of the values of a tensor
MOVING = frozenset(("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
# operators that repeat or move a number per row, or compare the number with a constant
PER_ROW = MOVING | {"Expand", "Max"}
ENDS = MOVING | {"Normalizer", "Transpose", "ZipMap"}
ROWS = "rows"
# what turns logits x into probabilities; _matches describes the patterns
EXP_SUM = (ROWS, ("ReduceSum", ("Exp", "x")))
ONE_PLUS_EXP = ("Add", 1, ("Exp", ("Neg", "x")))
ENDINGS: tuple[tuple[str, Any], ...] = (
    (SOFTMAX, ("Softmax", "x")),
    (SOFTMAX, ("Div", ("Exp", "x"), EXP_SUM)),
    (SOFTMAX, ("Mul", ("Exp", "x"), (ROWS, ("Reciprocal", EXP_SUM)))),
    (SIGMOID, ("Sigmoid", "x")),
    (SIGMOID, ("Div", 1, ONE_PLUS_EXP)),
    (SIGMOID, ("Reciprocal", ONE_PLUS_EXP)),
)
FLOATS = (1, 10, 11, 16)  # float32, float16, float64 and bfloat16 in onnx.TensorProto


class Found(NamedTuple):
    """Tensor of the logits, and the operation that follows the tensor."""

    tensor: str
    end: str = ""  # SOFTMAX, SIGMOID or LINEAR. Empty: the tensor is the output itself
    output: str = ""  # output of the model that :attr:`end` computes


class Graph:
    """Lookup tables of a GraphProto: the node that computes a tensor, constants, and types of tensors."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._types = {value.name: value.type for value in (*graph.value_info, *graph.input, *graph.output)}

    def maker(self, tensor: str) -> Any:
        """Return the node that computes a tensor, or None for inputs and constants."""
        return self._makers.get(tensor)

    def operator(self, tensor: str) -> str:
        """Return the operator that computes a tensor, or an empty string."""
        node = self.maker(tensor)
        return node.op_type if node is not None else ""

    def constant(self, tensor: str) -> np.ndarray | None:
        """Return the value of a constant with at most one number, or None for any other tensor."""
        from onnx import numpy_helper

        held = self._constants.get(tensor)
        node = self.maker(tensor)
        if held is None and node is not None and node.op_type == "Constant":
            held = next((a.t for a in node.attribute if a.name == "value"), None)
        if held is None or np.prod(held.dims, dtype=int) > 1 or held.external_data:
            return None
        return numpy_helper.to_array(held)

    def type_of(self, tensor: str) -> Any:
        """Return the declared type of a tensor, or None."""
        return self._types.get(tensor)

    def known(self, tensor: str) -> bool:
        """Return whether the graph has a tensor of this name."""
        return tensor in self._makers or tensor in self._types or tensor in self._constants

    def back(self, tensor: str, operators: frozenset[str]) -> str:
        """Follow a tensor back through nodes with these operators, along inputs that are not constants."""
        while self.operator(tensor) in operators:
            node = self.maker(tensor)
            tensor = next((name for name in node.input if name and self.constant(name) is None), node.input[0])
        return tensor


def find_logits(graph: Any, *, name: str | None = None, ends: bool = True) -> Found:
    """Find the logits of a classifier.

    Args:
        graph: a GraphProto with the types that the shape inference of ONNX has added.
        name: name of the tensor with the logits. Default: search for the logits before the end of the outputs.
        ends: whether to search before the end of an output. If False, the result is an output itself.

    Raises:
        ExportError: there is no tensor of this name, no output can contain logits, or several outputs can.
    """
    lookup = Graph(graph)
    if name is not None:
        if not lookup.known(name):
            outputs = ", ".join(f"{value.name} {shape_text(value.type)}" for value in graph.output)
            raise ExportError(f"the graph has no tensor {name!r}; the outputs are {outputs}")
        found = (_before_end(lookup, output.name) for output in graph.output if ends and _fits(lookup, output))
        return next((each for each in found if each.tensor == name), _itself(lookup, name))
    outputs = [output.name for output in graph.output if _fits(lookup, output)]
    candidates = {output: _before_end(lookup, output) if ends else _itself(lookup, output) for output in outputs}
    if not candidates:
        outputs = ", ".join(f"{value.name} {shape_text(value.type)}" for value in graph.output)
        raise ExportError(
            f"expected an output of floating-point numbers with one value per class, the model has {outputs}: name the "
            "tensor with the logits (--logits NAME)"
        )
    distinct = {found.tensor: found for found in candidates.values()}
    if len(distinct) > 1:
        # an output that is the tensor before the end of another output is not a second candidate
        lines = "".join(
            f"\n  {found.tensor} {shape_text(lookup.type_of(found.tensor))}"
            + (f", before the {found.end} of the output {output}" if found.end else "")
            for output, found in candidates.items()
        )
        raise ExportError(f"several tensors may be the logits, choose one (--logits NAME):{lines}")
    ended = [found for found in candidates.values() if found.end]
    return ended[0] if ended else next(iter(candidates.values()))


def shape_text(kind: Any) -> str:
    """Return a text such as ``[batch, 1000]`` for the type of a tensor. An unknown length is ``?``."""
    if kind is None or kind.WhichOneof("value") != "tensor_type":
        return "of unknown shape" if kind is None else f"({kind.WhichOneof('value').replace('_type', '')})"
    if not kind.tensor_type.HasField("shape"):
        return "of unknown shape"
    return f"[{', '.join(str(d.dim_param or d.dim_value or '?') for d in kind.tensor_type.shape.dim)}]"


def _fits(lookup: Graph, output: Any) -> bool:
    """Return whether an output may contain logits or probabilities: floats with 1 to 3 axes and several classes."""
    if output.type.WhichOneof("value") == "sequence_type":
        return lookup.operator(output.name) == "ZipMap"
    kind = output.type.tensor_type
    if kind.elem_type not in FLOATS:
        return False
    dims = kind.shape.dim
    last = dims[-1].dim_value if len(dims) else 0
    return not kind.HasField("shape") or (1 <= len(dims) <= 4 and last != 1)


def _before_end(lookup: Graph, output: str) -> Found:
    """Return the tensor before the last operation of an output. Without a known operation, return the output."""
    for tensor in _tensors_before(lookup, output):
        for end, pattern in ENDINGS:
            held: dict[str, str] = {}
            if _matches(lookup, tensor, pattern, held):
                logits = _without_maximum(lookup, held["x"]) if end == SOFTMAX else held["x"]
                return Found(logits, end, output)
        if _linear_classifier(lookup, tensor):
            return Found(tensor, LINEAR, output)
    return _itself(lookup, output)


def _itself(lookup: Graph, output: str) -> Found:
    """Return an output as the logits. For the maps of scikit-learn, return the tensor from which they are made."""
    tensor = lookup.maker(output).input[0] if lookup.operator(output) == "ZipMap" else output
    return Found(tensor, "", output)


def _tensors_before(lookup: Graph, tensor: str) -> Iterator[str]:
    """Yield a tensor, and then the tensors from which it differs by its layout, its type or a constant factor."""
    while True:
        yield tensor
        node = lookup.maker(tensor)
        if node is None:
            return
        scaled = node.op_type in ("Mul", "Div") and any(lookup.constant(name) is not None for name in node.input)
        if node.op_type not in ENDS and not scaled:
            return
        tensor = next((name for name in node.input if lookup.constant(name) is None), "")


def _matches(lookup: Graph, tensor: str, pattern: Any, held: dict[str, str]) -> bool:
    """Return whether a tensor is computed as a pattern says, and store the tensors that the pattern names in ``held``.

    A pattern is the number 1, a name, or a tuple (operator, inputs). A name stands for the same tensor at all places.
    ``(ROWS, pattern)`` stands for a number per row that is repeated, moved or compared with a constant on its way.
    """
    if isinstance(pattern, str):
        return held.setdefault(pattern, tensor) == tensor
    if pattern == 1:
        value = lookup.constant(tensor)
        return value is not None and value.size == 1 and value.item() == 1
    first, *inputs = pattern
    if first == ROWS:
        return _matches(lookup, lookup.back(tensor, PER_ROW), inputs[0], held)
    node = lookup.maker(tensor)
    if node is None or node.op_type != first:
        return False
    orders = [node.input, node.input[::-1]] if first in ("Add", "Mul") else [node.input]
    for names in orders:
        trial = dict(held)
        if all(_matches(lookup, name, part, trial) for name, part in zip(names, inputs, strict=False)):
            held.update(trial)
            return True
    return False


def _without_maximum(lookup: Graph, tensor: str) -> str:
    """Return x for a tensor x - max(x). Return any other tensor unchanged: a shift does not change the softmax."""
    held: dict[str, str] = {}
    return held["x"] if _matches(lookup, tensor, ("Sub", "x", (ROWS, ("ReduceMax", "x"))), held) else tensor


def _linear_classifier(lookup: Graph, tensor: str) -> bool:
    """Return whether a tensor comes from a classifier of ai.onnx.ml with a softmax in ``post_transform``."""
    node = lookup.maker(tensor)
    if node is None or node.op_type != "LinearClassifier" or node.domain != "ai.onnx.ml":
        return False
    return any(a.name == "post_transform" and a.s == b"SOFTMAX" for a in node.attribute)
