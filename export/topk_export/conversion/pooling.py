"""Maxima over windows that reach into padding, written so that no graph optimiser changes them.

A Pad with zeros before a MaxPool is often folded into the MaxPool's own padding, which is minus infinity: where all
values of a window are negative, the zero is lost (onnxruntime does so). The same maxima without a Pad are

    max(MaxPool(x, own padding), border),    border = 0 where a window reaches into the padding, else the lowest number
"""

from typing import Any

import numpy as np


def unfold_padded_maxima(model: Any) -> None:
    """Rewrite every MaxPool of a ModelProto that reads a constant Pad of the two last axes."""
    from onnx import helper, numpy_helper

    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    shapes = {
        v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.input)
    }
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
    constants = {tensor.name: tensor for tensor in graph.initializer}

    def constant(name: str) -> np.ndarray | None:
        maker = makers.get(name)
        if maker is not None and maker.op_type == "Constant":
            return numpy_helper.to_array(helper.get_node_attr_value(maker, "value"))
        return numpy_helper.to_array(constants[name]) if name in constants else None

    nodes = []
    for node in graph.node:
        nodes.append(node)
        pad = makers.get(node.input[0]) if node.op_type == "MaxPool" else None
        if pad is None or pad.op_type != "Pad" or len(node.output) > 1:
            continue
        padding = _padding(pad, constant)
        size = shapes.get(pad.input[0], ())
        window = _window(node)
        if padding is None or window is None or len(size) != 4 or not all(size[2:]):
            continue
        before, after, value = padding
        if any(p >= k for p, k in zip((*before, *after), 2 * window[0], strict=True)):
            continue  # a window of padding alone is no window of MaxPool
        touched = [_touched(*each) for each in zip(size[2:], before, after, *window, strict=True)]
        kind = helper.tensor_dtype_to_np_dtype(types[pad.input[0]])
        border = np.where(touched[0][:, None] | touched[1], value, np.finfo(kind).min).astype(kind)
        name, inner = f"{node.output[0]}_border", f"{node.output[0]}_inside"
        graph.initializer.append(numpy_helper.from_array(border[None, None], name))
        kept = [a for a in node.attribute if a.name not in ("pads", "auto_pad")]
        pool = helper.make_node("MaxPool", [pad.input[0]], [inner], node.name)
        pool.attribute.extend([*kept, helper.make_attribute("pads", [*before, *after])])
        nodes[-1:] = [pool, helper.make_node("Max", [inner, name], list(node.output), f"{node.name}_border")]
    read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    kept_nodes = [node for node in nodes if node.op_type != "Pad" or read.intersection(node.output)]
    del graph.node[:]
    graph.node.extend(kept_nodes)


def _padding(pad: Any, constant: Any) -> tuple[tuple[int, int], tuple[int, int], float] | None:
    """Return how far a Pad of an image reaches before and after the two last axes, and its value."""
    from onnx import helper

    modes = [helper.get_attribute_value(a) for a in pad.attribute if a.name == "mode"]
    pads = constant(pad.input[1])
    value = constant(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else np.float32(0)
    given_axes = len(pad.input) > 3 and pad.input[3]
    if modes not in ([], [b"constant"]) or pads is None or value is None or given_axes or pads.size != 8:
        return None
    if pads.min() < 0 or pads[[0, 1, 4, 5]].any():
        return None
    return (int(pads[2]), int(pads[3])), (int(pads[6]), int(pads[7])), float(value)


def _window(pool: Any) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """Return kernel, strides and dilations of a MaxPool without padding of its own."""
    from onnx import helper

    given = {a.name: helper.get_attribute_value(a) for a in pool.attribute}
    if any(given.get("pads", ())) or given.get("ceil_mode", 0) or given.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    kernel = tuple(given["kernel_shape"])
    return kernel, tuple(given.get("strides", (1, 1))), tuple(given.get("dilations", (1, 1)))  # type: ignore[return-value]


def _touched(size: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> np.ndarray:
    """Return for each window along an axis whether it reaches into the padding."""
    reach = dilation * (kernel - 1)
    count = (size + before + after - reach - 1) // stride + 1
    start = np.arange(count) * stride - before
    return (start < 0) | (start + reach >= size)
