"""Models that are built for one size of image, and where it is found."""

import pytest
import timm
import torchvision

from topk_export import ExportError
from topk_export.conversion.recipe import built_for, torchvision_name
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


def test_a_model_of_unknown_preprocessing_is_a_warning():
    model = torchvision.models.MobileNetV2(width_mult=0.3)
    with pytest.warns(UserWarning, match="nothing says how images become the input of MobileNetV2"):
        load_source(model)
    load_source(model, data_config={"input_size": (3, 64, 64)})  # the caller has said so
