"""Models that are built for one size of image, and where it is found."""

import pytest
import timm
import torch
import torchvision

from topk_export import ExportError
from topk_export.conversion.recipe import KEYS, built_for, torchvision_name
from topk_export.conversion.source import load_source
from topk_export.conversion.to_onnx import _prepare

SMALL = {"input_size": (3, 96, 64)}


@pytest.mark.parametrize("name", ["test_vit", "swin_s3_tiny_224"])
def test_a_model_by_name_is_built_for_the_wanted_size(name):
    size = (3, 64, 64)
    source = load_source(name, num_classes=5, data_config={"input_size": size})
    assert built_for(source.model) == (64, 64)
    assert source.preprocess.input_size == size
    _prepare(source)


def test_a_model_that_takes_any_size_is_left_alone():
    source = load_source("test_resnet", num_classes=5, data_config=SMALL)
    assert built_for(source.model) is None
    assert source.preprocess.input_size == (3, 96, 64)


@pytest.mark.slow
def test_torchvisions_transformer_is_built_for_the_wanted_size():
    source = load_source("torchvision:vit_b_16", num_classes=5, data_config={"input_size": (3, 64, 64)})
    assert built_for(source.model) == (64, 64)


def test_a_module_is_recognised_from_its_patch_embedding():
    model = timm.create_model("test_vit", img_size=64, num_classes=5)
    source = load_source(model)
    assert source.preprocess.input_size == (3, 64, 64)
    _prepare(source)


def test_the_error_names_the_flags():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1)
    with pytest.raises(ExportError, match=r"does not run on an input of size .*--input-size C H W"):
        _prepare(load_source(model, data_config=SMALL))


def test_arguments_of_the_factory_are_passed_on():
    source = load_source("test_vit", model_kwargs={"num_classes": 7, "global_pool": "avg"})
    assert source.model.global_pool == "avg"
    assert source.model.num_classes == 7


def test_torchvisions_modules_are_known_by_their_weights_shapes():
    model = torchvision.models.mobilenet_v3_large(num_classes=9)
    assert torchvision_name(model) == "torchvision:mobilenet_v3_large"
    source = load_source(model)
    preset = torchvision.models.MobileNet_V3_Large_Weights.DEFAULT.transforms()
    assert source.preprocess.resize_size == (preset.resize_size[0],) * 2
    assert source.preprocess.interpolation == preset.interpolation.value


def test_a_module_of_ones_own_must_say_its_images():
    model, size = torchvision.models.MobileNetV2(width_mult=0.3), {"input_size": (3, 64, 64)}
    with pytest.raises(ExportError, match=r"nothing says how images become the input of MobileNetV2: .*--input-size"):
        load_source(model)
    with pytest.raises(ExportError, match="mean and std belong together: data_config gives MobileNetV2 one of them"):
        load_source(model, data_config={**size, "mean": (0.5,)})
    with pytest.warns(UserWarning, match="the file says 'unknown', and takes arrays alone"):
        unknown = load_source(model, data_config=size).preprocess
    assert (unknown.mean, unknown.std, unknown.color) == ((), (), "unknown")
    known = load_source(model, data_config={**size, "mean": (0.5,), "std": (0.2, 0.3, 0.4)}).preprocess
    assert (known.mean, known.std, known.color) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4), "RGB")
    assert (known.scale_size, known.interpolation) == ((73, 73), "bilinear")


@pytest.mark.parametrize("what", ["test_resnet", "torchvision:squeezenet1_1", torch.nn.Linear(2, 2)])
def test_unknown_keys_of_the_transform_are_refused(what):
    with pytest.raises(
        ValueError, match=r"no key 'input_sise' \(did you mean 'input_size'\?\); it takes input_size, mean"
    ):
        load_source(what, data_config={"input_sise": (3, 64, 64)})


@pytest.mark.parametrize("name", ["test_resnet", "torchvision:squeezenet1_1"])
def test_every_key_of_the_transform_is_read(name):
    given = {
        "input_size": (3, 64, 48),
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "hamming",
        "crop_pct": 0.5,
        "crop_mode": "squash",
        "resize_size": (70, 80),
    }
    assert given.keys() == set(KEYS)
    made = load_source(name, num_classes=5, data_config=given).preprocess
    assert {key: getattr(made, key) for key in KEYS} == given
