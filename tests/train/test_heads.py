"""A classifier that is trained anew on the frozen features of a checkpoint."""

import pytest
import torch
from timm.models import load_state_dict

from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.errors import ConfigError

from .conftest import stops_at
from .ranked import assert_same

TAIL = ("--long-tail", "exp", "--imbalance-factor", "4", "-b", "8")
NORM = ("--model-kwargs", "width=4", "norm=True")


def weights(run, key="state_dict"):
    return run.checkpoint()[key]


@pytest.fixture
def first(train):
    """A run whose features are used."""
    run = train(*TAIL, *NORM, "--model-ema", "--model-ema-decay", "0.7", "--epochs", "1", name="first")
    assert run.status == 0, run.err
    return run.folder / "last.pth.tar"


def head(name):
    return name.startswith("fc.")


def test_all_but_the_classifier_stays_as_it_was(train, first):
    run = train(*TAIL, *NORM, "--retrain-head", first, "--model-ema", "--model-ema-decay", "0.5")
    assert run.status == 0, run.err
    saved = load_state_dict(str(first))
    assert any("running_mean" in name for name in saved)
    assert any(head(name) for name in saved)
    for key in ("state_dict", "state_dict_ema"):
        found = weights(run, key)
        assert found.keys() == saved.keys()
        for name, value in found.items():
            assert torch.equal(value, saved[name]) != head(name), name
    n = sum(value.numel() for name, value in saved.items() if head(name))
    assert f"--retrain-head {first}: fc is trained, {n} of " in run.out
    assert "all else is frozen and runs as in evaluation" in run.out
    assert "--sampler class_balanced: 52 images an epoch" in run.out
    assert not torch.equal(saved["fc.weight"], weights(train(*TAIL, *NORM, "--epochs", "1", name="x"))["fc.weight"])


def test_the_classifier_begins_anew(train, first):
    run = train(*TAIL, *NORM, "--retrain-head", first, "--lr", "1e-12", "--weight-decay", "0", "--opt", "sgd")
    fresh = Trainer(TrainConfig.from_dict(vars(run.checkpoint()["args"]) | {"retrain_head": ""}), quiet=True).run
    torch.testing.assert_close(weights(run)["fc.weight"], fresh.model.state_dict()["fc.weight"])
    assert not torch.allclose(weights(run)["fc.weight"], load_state_dict(str(first))["fc.weight"], atol=1e-3)


def test_it_may_have_other_classes_and_be_a_cosine_one(train, first):
    other = ("--num-classes", "14", "--normalize-classifier", "8", "--epochs", "1")
    run = train(*TAIL, *NORM, "--retrain-head", first, *other)
    assert run.status == 0, run.err
    assert weights(run)["fc.weight"].shape[0] == 14
    assert weights(run)["fc.scale"] == 8
    plain = train(*TAIL, *NORM, "--retrain-head", first, "--sampler", "instance", "--dry-run")
    assert "--sampler" not in plain.out


def test_only_the_classifier_is_in_the_optimizer(train, first):
    config = TrainConfig.from_dict(vars(torch.load(first, weights_only=False)["args"]) | {"retrain_head": str(first)})
    run = Trainer(config, quiet=True).run
    trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for name, p in run.model.named_parameters() if head(name)}


@pytest.mark.parametrize("at", [3, 9])
def test_a_resumed_run_is_the_uninterrupted_one(train, first, monkeypatch, at):
    flags = (*TAIL, *NORM, "--retrain-head", first, "--model-ema", "--loss", "logit_adjustment")
    whole = train(*flags, name="whole")
    with monkeypatch.context() as patch:
        stops_at(patch, at)
        stopped = train(*flags, name="stopped")
        assert stopped.status == 128 + 15, stopped.err
    first.unlink()  # the checkpoint to resume from has all
    resumed = train(*flags, "--resume", stopped.folder / "last.pth.tar", name="stopped")
    assert resumed.status == 0, resumed.err
    for part in ("state_dict", "state_dict_ema", "optimizer", "task_state"):
        assert_same(whole.checkpoint()[part], resumed.checkpoint()[part])


def test_a_callers_own_model_is_frozen_and_its_classifier_reset(first):
    from timm import create_model

    model = create_model("topk_convnet", num_classes=12, width=4, norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = TrainConfig.from_dict(vars(torch.load(first, weights_only=False)["args"]) | {"retrain_head": str(first)})
    Trainer(config, model=model, quiet=True).run  # noqa: B018
    saved, after = load_state_dict(str(first)), model.state_dict()
    for name in saved:
        assert torch.equal(after[name], saved[name]) != head(name)
    assert not torch.equal(after["fc.weight"], before["fc.weight"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--retrain-head", "/no/such.pth.tar"], "--retrain-head /no/such.pth.tar: there is no such checkpoint"),
        (["--model-kwargs", "width=8", "norm=True"], "size mismatch"),
        (["--model-kwargs", "norm=False"], "is of another model: missing "),
    ],
)
def test_what_does_not_fit_is_refused(train, first, flags, message):
    run = train(*TAIL, *NORM, "--retrain-head", first, *flags)
    assert run.status == 2
    assert message in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pretrained": True}, "--retrain-head and --pretrained both say which weights"),
        ({"drop_path": 0.1}, "--drop-path has no effect with --retrain-head"),
        ({"sync_bn": True}, "--sync-bn has no effect"),
        ({"class_parallel": True}, "without --class-parallel"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(retrain_head="x.pth.tar", **settings)


def test_the_classifier_layers_of_a_distilled_model_are_both_trained(tmp_path):
    from timm import create_model

    name = "deit_tiny_distilled_patch16_224"
    model = create_model(name, num_classes=12, img_size=32)
    features = tmp_path / "features.pth"
    torch.save(model.state_dict(), features)
    config = TrainConfig(
        dataset="topk/hierarchy", dataset_opt={"size": 48, "superclasses": 4, "fine": 3}, model=name,
        model_kwargs={"img_size": 32}, retrain_head=str(features), device="cpu", workers=0, batch_size=8, lr=0.1,
    )  # fmt: skip
    run = Trainer(config, quiet=True).run
    trained = {name.split(".")[0] for name, p in run.model.named_parameters() if p.requires_grad}
    assert trained == {"head", "head_dist"}
