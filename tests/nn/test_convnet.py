"""The built-in networks: their depths, and timm's interface."""

import pytest
import torch
from timm.data import resolve_model_data_config
from timm.models import create_model, get_pretrained_cfg, resolve_model_input_args
from torch import nn

import topk_registry.nn.convnet  # noqa: F401 (registers both networks)


@pytest.mark.parametrize(
    ("name", "shape", "kind", "layers"),
    [
        ("topk_convnet", (3, 32, 32), nn.Conv2d, {1: 3, 2: 6, 3: 9}),
        ("topk_mlp", (3, 8, 8), nn.Linear, {1: 2, 2: 3, 4: 5}),  # the classifier is the last one
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_depth_is_the_number_of_layers(name, shape, kind, layers, norm):
    options = {"norm": norm} if name == "topk_convnet" else {}
    for depth, count in layers.items():
        model = create_model(name, num_classes=7, width=8, depth=depth, **options)
        assert sum(isinstance(layer, kind) for layer in model.modules()) == count
        assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("name", "depth"), [("topk_convnet", 1), ("topk_mlp", 2)])
def test_the_usual_depth_has_the_parameters_it_always_had(name, depth):
    usual, named = create_model(name), create_model(name, depth=depth)
    assert list(usual.state_dict()) == list(named.state_dict())
    first = {"topk_convnet": "features.conv0.weight", "topk_mlp": "features.1.weight"}[name]
    assert next(iter(usual.state_dict())) == first


@pytest.mark.parametrize("name", ["topk_convnet", "topk_mlp"])
def test_timm_knows_how_their_images_are_prepared(name, caplog):
    model = create_model(**resolve_model_input_args(name, {}, in_chans=3))
    assert not caplog.records  # timm warns of a network whose settings it does not know
    known = get_pretrained_cfg(name)
    assert known.input_size == model.default_cfg["input_size"] == resolve_model_data_config(model)["input_size"]
    assert (known.mean, known.std) == (model.default_cfg["mean"], model.default_cfg["std"])
    assert not known.has_weights


@pytest.mark.parametrize("name", ["topk_convnet", "topk_mlp"])
def test_an_unknown_option_is_an_error(name):
    with pytest.raises(TypeError, match="widht"):
        create_model(name, widht=8)
    with pytest.raises(ValueError, match=f"{name} has no pretrained weights"):
        create_model(name, pretrained=True)
