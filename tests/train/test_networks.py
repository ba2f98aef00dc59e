"""The built-in networks: their depths, and timm's interface."""

import pytest
import torch
from timm.models import create_model
from torch import nn

import topk_registry.train.setup.mlp  # noqa: F401 (registers both networks)


@pytest.mark.parametrize(
    ("name", "shape", "kind", "layers"),
    [
        ("topk_convnet", (3, 32, 32), nn.Conv2d, {1: 3, 2: 6, 3: 9}),
        ("topk_mlp", (3, 8, 8), nn.Linear, {1: 2, 2: 3, 4: 5}),  # the classifier is the last one
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_depth_is_the_number_of_layers(name, shape, kind, layers, norm):
    for depth, count in layers.items():
        model = create_model(name, num_classes=7, width=8, depth=depth, norm=norm)
        assert sum(isinstance(layer, kind) for layer in model.modules()) == count
        assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("name", "depth"), [("topk_convnet", 1), ("topk_mlp", 2)])
def test_the_usual_depth_has_the_parameters_it_always_had(name, depth):
    usual, named = create_model(name), create_model(name, depth=depth)
    assert list(usual.state_dict()) == list(named.state_dict())
    first = {"topk_convnet": "features.conv0.weight", "topk_mlp": "features.1.weight"}[name]
    assert next(iter(usual.state_dict())) == first
