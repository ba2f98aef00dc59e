"""``timm train --chunked-update``: a classifier updated a chunk of classes at a time trains as it does without."""

import pytest
import torch

from tests.train.ranked import FOLDER, assert_same, last, same_checkpoint, stopped, trained
from topk_registry.train import TrainConfig, Trainer, TrainError
from topk_registry.train.errors import ConfigError

CONFIG = TrainConfig(
    dataset="topk/hierarchy", dataset_opt={"size": 48, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    model="topk_convnet", model_kwargs={"width": 2}, dist_bn="", no_aug=True, device="cpu", workers=0,
    epochs=2, opt="adamw", lr=0.01, warmup_epochs=0, smoothing=0.0, batch_size=12, validation_batch_size=7,
    loss="topk_nll", loss_opt={"k": 1}, class_parallel=True,
)  # fmt: skip
LOW = CONFIG.replace(chunked_update="int8", classifier_dtype="bfloat16")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "torch")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"opt": "sgd", "weight_decay": 0.01, "sched_on_updates": True},
        {
            "clip_grad": 0.05, "grad_accum_steps": 2, "num_classes": 12,
            "loss_opt": {"k": 1, "weight": [0.5, *[1.0] * 11]},
        },
        {"loss": "smooth_topk_svm", "loss_opt": {"k": [1, 3]}, "mixup": 0.5, "model_ema": True},
    ],
    ids=["adamw", "sgd", "clipped", "two sizes"],
)  # fmt: skip
def test_the_checkpoint_is_that_of_a_run_without(options):
    config = CONFIG.replace(**options)
    trained(config, "plain")
    trained(config.replace(chunked_update="float32"), "chunked")
    same_checkpoint("plain", "chunked")


def test_the_plan_says_when_and_the_arguments_record_it():
    says = []
    for options in ({}, {"clip_grad": 1.0, "loss": "smooth_topk_svm", "loss_opt": {"k": [1, 3]}}):
        run = Trainer(LOW.replace(**options), quiet=True).run
        says.append(run.notes[-1])
        assert run.config.to_dict()["chunked_update"] == "int8"
        assert run.task.update is not None
        assert run.task.update.when == ("step" if options else "backward")
    assert "in the backward pass, its optimizer's states in int8, its weight in bfloat16" in says[0]
    assert "in the step, for the sake of --clip-grad, a loss that uses the classifier several times" in says[1]


def test_a_run_in_low_precision_goes_on_bit_for_bit():
    trained(LOW, "whole")
    stopped(LOW, "stopped")
    trained(LOW.replace(resume=str(last("stopped"))), "again")
    whole, again = (torch.load(last(name), weights_only=False) for name in ("whole", "again"))
    for key in ("state_dict", "optimizer"):
        assert_same(whole[key], again[key], key)
    assert whole["state_dict"]["fc.weight"].dtype == torch.bfloat16


def test_runs_go_on_with_and_without():
    stopped(CONFIG, "plain")
    stopped(CONFIG.replace(chunked_update="float32"), "chunked")
    for start in ("plain", "chunked"):
        for goes, update in (("on", None), ("chunked-on", "float32")):
            trained(CONFIG.replace(chunked_update=update, resume=str(last(start))), f"{start}-{goes}")
    for name in ("plain-chunked-on", "chunked-on", "chunked-chunked-on"):
        same_checkpoint("plain-on", name)
    stopped(LOW, "low")
    trained(CONFIG.replace(class_parallel=False, resume=str(last("low"))), "low-plain")
    optimizer = torch.load(last("low-plain"), weights_only=False)["optimizer"]
    assert not any(key.endswith("_codes") for state in optimizer["state"].values() for key in state)


def test_what_it_cannot_serve_is_refused():
    for options, message in (
        ({"class_parallel": False}, "needs --class-parallel, which one process can run"),
        ({"class_sample": 0.5}, "--class-sample computes the gradient of a part"),
        ({"clip_grad": 1.0, "clip_mode": "value"}, "--clip-mode value looks at a gradient of all weights"),
        ({"chunked_update": None}, "--classifier-dtype needs --chunked-update"),
    ):
        with pytest.raises(ConfigError, match=message):
            LOW.replace(**options)
    with pytest.raises(TrainError, match=r"--chunked-update cannot use optimizer 'lion': .*SGD, Adam and AdamW"):
        trained(LOW.replace(opt="lion"), "refused")
