"""Small models to export, and each export once."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from topk_export import export_onnx
from topk_export.verification import graph

DATA = {"input_size": (3, 8, 8), "crop_pct": 1.0, "interpolation": "bilinear"}


def tiny(n: int) -> nn.Module:
    """A classifier that converts in a second: a convolution, an average, a matrix product."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, n))


@pytest.fixture(scope="session")
def export(tmp_path_factory):
    """``export(n, **options)``: the path of an exported tiny classifier, converted once for the same arguments."""
    made = {}

    def once(n, **options):
        key = (n, repr(options))
        if key not in made:
            made[key] = export_onnx(tiny(n), tmp_path_factory.mktemp("export"), **{"data_config": DATA, **options})
        return made[key]

    return once


@pytest.fixture(scope="session")
def head_session():
    """A session of the head alone of an exported file."""

    def session(path):
        head = graph.head_model(onnx.load(str(path)))
        return onnxruntime.InferenceSession(head.SerializeToString(), providers=["CPUExecutionProvider"])

    return session
