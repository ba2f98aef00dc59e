"""The built-in networks: their depths, and timm's interface."""

import pytest
import torch
from timm.data import resolve_model_data_config
from timm.models import create_model, get_pretrained_cfg, resolve_model_input_args
from torch import nn

import topk_registry.nn.convnet  # noqa: F401 (registers both networks)


@pytest.mark.parametrize("norm", [False, True])
def test_the_convolutional_network(norm):
    model = create_model("topk_convnet", num_classes=7, width=8, norm=norm)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 3 * norm
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_is_the_number_of_hidden_layers(depth):
    model = create_model("topk_mlp", num_classes=7, width=8, depth=depth)
    assert sum(isinstance(layer, nn.Linear) for layer in model.modules()) == depth + 1
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 7)


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
