import contextlib

import pytest
import timm
import torch
import torchvision
from torch import nn

from topk_registry import CosineClassifier, normalize_classifier
from topk_registry.nn.classifier import find_classifier, num_classes_of, replace_classifier

TIMM = {
    "resnet18": ["fc"],
    "vit_tiny_patch16_224": ["head"],
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "levit_128": ["head.linear", "head_dist.linear"],
    "repvit_m0_9": ["head.head.l", "head.head_dist.l"],
    "crossvit_9_240": ["head.0", "head.1"],
    "volo_d1_224": ["head", "aux_head"],
    "efficientnet_b0": ["classifier"],
    "mobilenetv3_small_100": ["classifier"],
    "convnext_atto": ["head.fc"],
    "swin_tiny_patch4_window7_224": ["head.fc"],
    "vgg11": ["head.fc"],
    "densenet121": ["classifier"],
    "regnetx_002": ["head.fc"],
    "inception_v3": ["fc"],
    "caformer_s18": ["head.fc.fc2"],
    "dla34": ["fc"],
    "resnetv2_50": ["head.fc"],
    "selecsls42": ["fc"],
    "nasnetalarge": ["last_linear"],
}

TORCHVISION = {
    "alexnet": ["classifier.6"],
    "convnext_tiny": ["classifier.2"],
    "densenet121": ["classifier"],
    "efficientnet_b0": ["classifier.1"],
    "googlenet": ["fc", "aux1.fc2", "aux2.fc2"],
    "inception_v3": ["fc", "AuxLogits.fc"],
    "maxvit_t": ["classifier.5"],
    "mnasnet0_5": ["classifier.1"],
    "mobilenet_v2": ["classifier.1"],
    "mobilenet_v3_small": ["classifier.3"],
    "regnet_x_400mf": ["fc"],
    "resnet18": ["fc"],
    "shufflenet_v2_x0_5": ["fc"],
    "squeezenet1_1": ["classifier.1"],
    "swin_t": ["head"],
    "swin_v2_t": ["head"],
    "vgg11": ["classifier.6"],
    "vit_b_32": ["heads.head"],
}


QUICK = ("efficientnet_b0", "googlenet", "resnet18", "squeezenet1_1", "vit_b_32")  # one per place of the classifier


def torchvision_model(name: str, **options: object) -> nn.Module:
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # their own initialisation takes seconds, and warns
    # regnet computes its widths on the default device
    on_meta = contextlib.nullcontext() if name.startswith("regnet") else torch.device("meta")
    with on_meta:
        return torchvision.models.get_model(name, weights=None, **options)


def eleven_classes(old: nn.Module) -> nn.Module:
    if isinstance(old, nn.Conv2d):
        return nn.Conv2d(old.in_channels, 11, 1, device=old.weight.device)
    return nn.Linear(old.in_features, 11, device=old.weight.device)


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.slow
def test_timm_classifiers_are_found(name):
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, num_classes=7)
    assert [found for found, _ in find_classifier(model)] == TIMM[name]
    assert num_classes_of(model) == 7
    normalize_classifier(model)
    assert all(isinstance(layer, CosineClassifier) for _, layer in find_classifier(model))
    assert num_classes_of(model) == 7


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TORCHVISION])
def test_torchvision_classifiers_are_found(name):
    model = torchvision_model(name, num_classes=7)
    assert [found for found, _ in find_classifier(model)] == TORCHVISION[name]
    assert num_classes_of(model) == 7
    replace_classifier(model, eleven_classes)
    assert num_classes_of(model) == 11
    device = next(model.parameters()).device
    assert model.eval()(torch.zeros(1, 3, 224, 224, device=device)).shape == (1, 11)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 64), ("deit_tiny_distilled_patch16_224", 224), ("dla34", 64), ("convnext_atto", 64)]
)
def test_a_normalised_timm_model_gives_scaled_cosines(name, size):
    model = normalize_classifier(timm.create_model(name, pretrained=False, num_classes=7).eval(), scale=3.0)
    logits = model(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    assert logits.abs().max() <= 3.0 * (1 + 1e-6)
    assert logits.std() > 0


def test_every_name_of_a_shared_classifier_is_replaced():
    model = torchvision_model("resnet18")
    model.alias = model.fc
    replace_classifier(model, eleven_classes)
    assert model.alias is model.fc
    assert model.fc.out_features == 11


def test_a_sequential_ends_in_its_classifier():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert [name for name, _ in find_classifier(model)] == ["3"]


@pytest.mark.parametrize(
    "model",
    [
        timm.create_model("resnet18", pretrained=False, num_classes=0),
        nn.Sequential(nn.Flatten()),
        nn.TransformerEncoderLayer(8, 2),
        nn.Linear(4, 2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_without_a_classifier_is_an_error(model):
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no classifier"):
        find_classifier(model)


def test_a_wide_convolution_cannot_be_normalised():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten())
    with pytest.raises(ValueError, match="only a 1 x 1"):
        normalize_classifier(model)


def test_cosines_are_those_of_float64():
    layer = CosineClassifier(16, 5, scale=7.0)
    x = 3 * torch.randn(4, 16)
    expected = 7 * nn.functional.cosine_similarity(x.double()[:, None], layer.weight.double(), dim=-1)
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=7 * 16 * 2**-23)


def test_channels_first_is_the_same_at_each_position():
    flat = CosineClassifier(6, 4)
    layer = CosineClassifier(6, 4, channels_first=True)
    layer.load_state_dict(flat.state_dict())
    x = torch.randn(2, 6, 3, 5)
    torch.testing.assert_close(layer(x), flat(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_gradients():
    layer = CosineClassifier(5, 3, scale=2.0, learn_scale=True, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, layer.weight, layer.scale))


def test_features_of_no_length_score_zero_with_a_tame_gradient():
    layer = CosineClassifier(5, 3)
    x = torch.zeros(2, 5, requires_grad=True)
    scores = layer(x)
    scores.sum().backward()
    assert torch.equal(scores, torch.zeros(2, 3))
    assert x.grad is not None
    assert x.grad.abs().max() <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norms_do_not_overflow(dtype):
    layer = CosineClassifier(64, 3)
    x = torch.full((1, 64), 6e4)  # |x|^2 is far above float16's 65504
    expected = layer(x)
    with torch.autocast("cpu", dtype):
        mixed = layer(x.to(dtype))
    half = layer.to(dtype)(x.to(dtype))
    tolerance = 3 * torch.finfo(dtype).eps  # the inputs and the product are each rounded once
    torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=tolerance)


def test_scale_is_learned_on_request_and_loads_either_way():
    learned, fixed = CosineClassifier(4, 3, scale=9.0, learn_scale=True), CosineClassifier(4, 3)
    assert {name for name, _ in learned.named_parameters()} == {"weight", "scale"}
    assert {name for name, _ in fixed.named_parameters()} == {"weight"}
    fixed.load_state_dict(learned.state_dict())
    assert fixed.scale == 9.0
    with pytest.raises(ValueError, match="scale must be above 0"):
        CosineClassifier(4, 3, scale=0.0)


def test_normalising_keeps_directions_freezing_and_mode():
    model = torchvision.models.resnet18(num_classes=4).eval().requires_grad_(False)
    old = model.fc.weight.clone()
    normalize_classifier(model, learn_scale=True)
    assert torch.equal(model.fc.weight, old)
    assert not model.fc.weight.requires_grad
    assert not model.fc.training
