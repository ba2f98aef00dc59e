"""Maxima over padded windows: the same before and after the rewriting, and under every optimiser's eyes."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests.export.conftest import DATA
from topk_export import export_onnx
from topk_export.conversion.pooling import unfold_padded_maxima
from topk_export.runtime.session import open_session


def padded_maxima(size, pads, value, kernel, stride, dilation):
    """A model of a Pad and a MaxPool on [1, 2, *size]."""
    top, left, bottom, right = pads
    constants = [
        numpy_helper.from_array(np.array([0, 0, top, left, 0, 0, bottom, right], np.int64), "pads"),
        numpy_helper.from_array(np.array(value, np.float32), "value"),
    ]
    nodes = [
        helper.make_node("Pad", ["x", "pads", "value"], ["padded"], "pad"),
        helper.make_node("MaxPool", ["padded"], ["y"], "pool", kernel_shape=kernel, strides=stride, dilations=dilation),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, *size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, None, None])
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(
    ("size", "pads", "value", "kernel", "stride", "dilation"),
    [
        ((8, 8), (1, 1, 1, 1), 0.0, (3, 3), (2, 2), (1, 1)),
        ((7, 9), (1, 0, 0, 1), 0.0, (3, 2), (1, 2), (1, 1)),
        ((9, 7), (2, 1, 0, 2), -0.5, (3, 3), (3, 1), (1, 1)),
        ((12, 11), (1, 2, 2, 1), 0.0, (3, 3), (2, 1), (2, 2)),
        ((6, 6), (0, 0, 1, 1), float("-inf"), (2, 2), (2, 2), (1, 1)),
    ],
)
def test_the_maxima_are_those_of_the_definition(size, pads, value, kernel, stride, dilation):
    x = -1 - np.abs(np.random.default_rng(0).standard_normal((1, 2, *size))).astype(np.float32)  # zeros would win
    top, left, bottom, right = pads
    padded = F.pad(torch.from_numpy(x), (left, right, top, bottom), value=value)
    wanted = F.max_pool2d(padded, kernel, stride, dilation=dilation).numpy()
    model = padded_maxima(size, pads, value, kernel, stride, dilation)
    unfold_padded_maxima(model)
    onnx.checker.check_model(model, full_check=True)
    assert "Pad" not in {node.op_type for node in model.graph.node}
    for optimise in (True, False):
        (got,) = open_session(model.SerializeToString(), device="cpu", optimise=optimise).run(None, {"x": x})
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("pads", [(3, 3, 0, 0), (0, 0, 0, 3)])
def test_a_window_of_padding_alone_is_left_as_it_is(pads):
    model = padded_maxima((8, 8), pads, 0.0, (3, 3), (1, 1), (1, 1))
    before = model.SerializeToString()
    unfold_padded_maxima(model)
    assert model.SerializeToString() == before


class PaddedMaxima(nn.Module):
    """As the stem of resnetv2_50x1_bit: onnxruntime's folding of the Pad makes its logits wrong by percents."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.pool, self.fc = nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), nn.Linear(3, 6)

    def forward(self, x):
        return self.fc(self.pool(self.pad(-1 - x.abs())).mean((2, 3)))


@pytest.mark.slow
def test_a_model_with_padded_maxima_passes_its_verification(tmp_path):
    torch.manual_seed(0)
    path = export_onnx(PaddedMaxima(), tmp_path, k=2, data_config=DATA)
    assert "Pad" not in {node.op_type for node in onnx.load(str(path)).graph.node if node.input[0] == "input"}
