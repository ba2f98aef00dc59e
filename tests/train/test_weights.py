"""Weights that a run begins with, and compiled models."""

import re

import pytest
import timm
import torch

from tests.train.conftest import TINY
from topk_registry.errors import TrainError
from topk_registry.train import TrainConfig
from topk_registry.train.model import _sized, load_weights


def backbone(state):
    return {name: value for name, value in state.items() if not name.startswith(("fc.", "classifier.", "head."))}


@pytest.mark.parametrize("by_path", [False, True])
def test_published_weights_come_from_a_file_and_the_classifier_is_new(train, tmp_path, monkeypatch, by_path):
    """``--pretrained`` with the published file in place, so that nothing is downloaded; and a file by its path."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("timm.models._builder._USE_OLD_CACHE", True)  # timm's TIMM_USE_OLD_CACHE=1
    published = timm.create_model("tinynet_e", pretrained=False)
    place = tmp_path / "cache" / "hub" / "checkpoints"
    place.mkdir(parents=True)
    file = place / published.default_cfg["url"].rpartition("/")[2]
    torch.save(published.state_dict(), file)
    tiny = [word for word in TINY if word not in ("--model-kwargs", "width=4")]
    source = ["--pretrained"]
    if by_path:
        source = ["--initial-checkpoint", file]
        refused = train("--model", "tinynet_e", *source, tiny=tiny)
        assert refused.status == 2
        assert f"{file} does not fit 'tinynet_e' with 12 classes: size mismatch for classifier" in refused.err
        source = re.search(r"--pretrained-path \S+", refused.err)[0].split()  # the alternative in the error works
    run = train("--model", "tinynet_e", *source, "--lr", "0", "--epochs", "1", tiny=tiny)
    assert run.status == 0, run.err
    plan = train("--model", "tinynet_e", *source, "--opt", "sgd", "--epochs", "300", "--dry-run", tiny=tiny).out
    assert "use --config finetune" in plan
    saved = run.checkpoint()["state_dict"]
    assert saved["classifier.weight"].shape[0] == 12
    for name, value in backbone(published.state_dict()).items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):  # which training moves
            assert torch.equal(saved[name], value), name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"img_size": 64}, {"img_size": 64}),
        ({"input_size": [3, 32, 48]}, {"img_size": (32, 48)}),
        ({}, {}),
        ({"img_size": 64, "model_kwargs": {"img_size": 48}}, {}),
        ({"img_size": 64, "model": "resnet18"}, {}),  # takes every size
    ],
)
def test_a_model_of_a_fixed_input_size_is_built_for_the_size_of_the_images(flags, expected):
    assert _sized(TrainConfig(**{"model": "vit_tiny_patch16_224", **flags})) == expected


def test_weights_of_another_shape_are_an_error(tmp_path):
    torch.save(timm.create_model("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pth")
    with pytest.raises(TrainError, match=r"cannot load .*w\.pth into ResNet: Error"):
        load_weights(timm.create_model("test_resnet", num_classes=4), str(tmp_path / "w.pth"))


def test_weights_of_other_names_are_an_error(train, tmp_path):
    """timm warns and goes on with random weights."""
    state = {f"network.{name}": value for name, value in timm.create_model("test_resnet").state_dict().items()}
    torch.save(state, tmp_path / "other.pth")
    tiny = [word for word in TINY if word not in ("--model-kwargs", "width=4")]
    run = train("--model", "test_resnet", "--pretrained-path", tmp_path / "other.pth", tiny=tiny)
    assert run.status == 2
    assert "the model has no weight of this file" in run.err


def test_weights_that_are_not_published_are_an_error(train):
    run = train("--pretrained")
    assert run.status == 2
    assert "topk_convnet" in run.err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])  # a C++ compiler
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_trains_resumes_and_validates(train, backend):
    flags = ("--loss", "smooth_topk_svm", "--model-ema")
    plain = train(*flags, name="plain")
    run = train(*flags, "--torchcompile", backend)
    assert run.status == 0, run.err
    for one, two in zip(plain.summary, run.summary, strict=True):
        assert float(two["train_loss"]) == pytest.approx(float(one["train_loss"]), rel=1e-3)  # sums in another order
    assert {*run.checkpoint()["state_dict"]} == {*plain.checkpoint()["state_dict"]}
    resumed = train(*flags, "--torchcompile", backend, "--epochs", "3", "--resume", "auto")
    assert resumed.status == 0, resumed.err
    assert [row["epoch"] for row in resumed.summary] == ["1", "2", "3"]


def test_plain_timm_loads_the_best_checkpoint(train):
    """The lines on docs/export.md: the model has the weights of the run."""
    run = train("--loss", "ce")
    path = run.folder / "model_best.pth.tar"
    model = timm.create_model("topk_convnet", num_classes=12, width=4, checkpoint_path=str(path))
    saved = run.checkpoint(path.name)["state_dict"]
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
