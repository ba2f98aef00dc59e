"""Options of the built-in data sets: one check for all, that says what was expected and what came."""

import inspect
import math

import pytest
import torch
import torchvision.transforms as T
from PIL import Image
from timm.data import create_loader

from topk_registry.data.drawn import only_converts
from topk_registry.data.hierarchy import Hierarchy
from topk_studies.data.ambiguous import Ambiguous
from topk_studies.data.several import Several

KINDS = (Ambiguous, Hierarchy, Several)
COUNTS = {"size", "superclasses", "families", "fine", "side", "things", "scenes"}
INTERVALS = {
    Ambiguous: {
        "spread": "[0, 1]",
        "feature_noise": "(0, inf)",
        "ambiguity": "[0, 1]",
        "imbalance": "[1, inf)",
        "label_noise": "[0, 1]",
    },
    Hierarchy: {"fine_amplitude": "[0, inf)", "pixel_noise": "[0, inf)"},
    Several: {"mean_labels": "(0, 20)", "imbalance": "[1, inf)", "pixel_noise": "[0, inf)"},
}
COUNT_CASES = [(kind, name) for kind in KINDS for name in sorted(COUNTS & {*inspect.signature(kind).parameters})]
NUMBER_CASES = [(kind, name, interval) for kind, each in INTERVALS.items() for name, interval in each.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_tried_here(kind):
    others = {"split", "eval_size", "seed"}  # the size of a split, and numpy's own seed
    assert {*inspect.signature(kind).parameters} == others | (COUNTS & {*inspect.signature(kind).parameters}) | {
        *INTERVALS[kind]
    }


@pytest.mark.parametrize(("kind", "name"), COUNT_CASES)
@pytest.mark.parametrize("wrong", [0, -1, 2.5, math.nan, "3"])
def test_a_count_is_a_whole_number_from_one(kind, name, wrong):
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got {wrong!r}$"):
        kind(**{"size": 3, name: wrong})


@pytest.mark.parametrize(("kind", "name", "interval"), NUMBER_CASES)
def test_a_number_is_in_its_interval(kind, name, interval):
    low, high = map(float, interval[1:-1].split(","))
    outside = [math.nan, -math.inf, math.inf, low - 1, "many", None]
    outside += [low] if interval[0] == "(" else []
    outside += [high] if interval[-1] == ")" else [high + 1]
    for wrong in outside:
        with pytest.raises(ValueError, match=rf"^{name} must be in ") as error:
            kind(size=3, **{name: wrong})
        assert str(error.value) == f"{name} must be in {interval}, got {wrong!r}"
    inside = [low] if interval[0] == "[" else [low + 1e-3]
    inside += [high] if interval[-1] == "]" else []
    for right in inside:
        assert len(kind(size=3, **{name: right})) == 3


@pytest.mark.parametrize(
    ("kind", "options"), [(Ambiguous, {"families": 1, "fine": 1}), (Hierarchy, {"superclasses": 1, "fine": 1}),
                          (Several, {"things": 1})],
)  # fmt: skip
def test_one_class_is_too_few(kind, options):
    with pytest.raises(ValueError, match=r"need at least 2 classes, got \w+=1"):
        kind(size=3, **options)


def timms(side=32, **options):
    create_loader(data := Hierarchy(size=4), (3, side, side), 4, device=torch.device("cpu"), num_workers=0, **options)
    return data.transform


@pytest.mark.parametrize(
    "transform", [timms(is_training=True, no_aug=True), timms(crop_pct=1.0), T.Compose([T.Resize(32), T.PILToTensor()])]
)
def test_images_that_are_only_converted_are_those_of_pillow(transform, monkeypatch):
    data = Hierarchy(size=4)
    data.transform = transform
    expected = [transform(Image.fromarray(image)) for image in data.images]
    monkeypatch.setattr("topk_registry.data.drawn.Image", None)
    for i, theirs in 2 * [*enumerate(expected)]:  # a change to a tensor does not change the data set
        ours = data[i][0]
        assert (ours.dtype, ours.stride(), torch.equal(ours, theirs)) == (theirs.dtype, theirs.stride(), True)
        ours.zero_()
    others = [timms(is_training=True, hflip=1.0), timms(use_prefetcher=False), timms(24), T.ToTensor(), None]
    assert not any(only_converts(other, (32, 32)) for other in [*others, T.Compose([T.Resize(40), transform])])
