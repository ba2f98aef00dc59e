"""``--class-parallel``: two processes train what one process trains, and either goes on where the other stopped."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from timm.utils.checkpoint_saver import load_checkpoint_metadata

from tests import ranks
from tests.train.ranked import last, same_checkpoint, stopped, trained, trained_on_two
from topk_registry.train import TrainConfig, TrainError

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

CHECKS = {}
CONFIG = TrainConfig(
    dataset="topk/hierarchy", dataset_opt={"size": 48, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    model="topk_convnet", model_kwargs={"width": 2}, dist_bn="", no_aug=True, device="cpu", workers=0,
    epochs=2, opt="adamw", lr=0.01, warmup_epochs=0, smoothing=0.0, batch_size=12, validation_batch_size=7,
    loss="smooth_topk_svm", loss_opt={"k": 3, "tau": 0.5},
)  # fmt: skip
SPREAD = {"batch_size": 6, "class_parallel": True}
COMPARED = {
    "average": {"model_ema": True, "model_ema_decay": 0.7, "val_interval": 2},
    "clipped": {"clip_grad": 0.05, "smoothing": 0.1, "grad_accum_steps": 2, "opt": "sgd", "weight_decay": 0.01},
    "weights": {
        "loss_opt": {"k": [1, 3], "weight": torch.linspace(0.5, 2, 12).tolist()}, "opt": "lion", "lr": 0.001,
        "epochs": 1, "num_classes": 12,
    },
    "likelihood": {"loss": "topk_nll", "loss_opt": {"k": 1}, "opt": "momentum", "epochs": 1},
    "threshold": {
        "loss": "soft_topk", "loss_opt": {"k": 2.5, "weight": torch.linspace(0.5, 2, 12).tolist()}, "smoothing": 0.1,
        "epochs": 1, "num_classes": 12,
    },
}  # fmt: skip
UPDATED = {
    "momentum": {"opt": "momentum", "weight_decay": 0.01, "smoothing": 0.1, "epochs": 1},
    "adamw": {
        "loss_opt": {"k": [1, 3], "weight": torch.linspace(0.5, 2, 12).tolist()}, "clip_grad": 0.05,
        "grad_accum_steps": 2, "num_classes": 12,
    },
}  # fmt: skip
RESUMED = CONFIG.replace(model_ema=True)


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def runs_to_compare():
    for name, options in COMPARED.items():
        trained(CONFIG.replace(**options).replace(**SPREAD), f"{name}-two")


@check
def classifiers_updated_in_chunks():
    for name, options in UPDATED.items():
        config = CONFIG.replace(**options).replace(**SPREAD, chunked_update="float32")
        trained(config, f"{name}-updated-two")
    low = CONFIG.replace(**SPREAD, chunked_update="int8", classifier_dtype="bfloat16", model_ema=True)
    whole = trained(low, "low")
    stopped(low, "low-stopped")
    again = trained(low.replace(resume=str(last("low-stopped"))), "low-again")
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


@check
def mixed_images():
    """Mixup draws for each process, so that the batch of one is not that of two."""
    result = trained(CONFIG.replace(mixup=0.5, smoothing=0.1, epochs=1, **SPREAD), "mixup")
    assert math.isfinite(result.history[-1]["train_loss"])
    assert 0 < result.history[-1]["eval_top5"] < 100


@check
def low_precision_and_a_part_of_the_classes():
    config = CONFIG.replace(amp=True, class_sample=0.5, clip_grad=1.0, clip_mode="agc", epochs=1, **SPREAD)
    result = trained(config, "amp")
    assert 0 < result.history[-1]["eval_top5"] < 100
    dist.barrier()
    assert load_checkpoint_metadata(last("amp"))["state_dict"]["fc.weight"].dtype == torch.float32


@check
def an_overflow_in_one_process_skips_the_step_in_all():
    from topk_registry.train.engine.spread_classes import SpreadScaler

    class Task:
        group = dist.group.WORLD

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), SpreadScaler("cpu", Task())
    for overflow in (True, False):
        before = weight.detach().clone()
        factor = math.inf if overflow and dist.get_rank() else 1.0
        scaler((weight * factor).sum(), optimizer)
        optimizer.zero_grad()
        assert torch.equal(weight.detach(), before) == overflow
    assert scaler.state_dict()["scale"] == 2**15


@check
def other_numbers_of_processes_go_on():
    """Two processes stop, and go on where one stopped; each way in the middle of an epoch."""
    stopped(RESUMED.replace(**SPREAD), "stopped-two")
    trained(RESUMED.replace(**SPREAD, resume=str(last("stopped-one"))), "one-to-two")


@check
def refusals_on_all_ranks():
    cases = [
        ({"loss": "focal", "loss_opt": {}}, r"scores of all classes.*serves .*smooth_topk_svm.*soft_topk.*topk_nll"),
        ({"loss": "soft_topk", "class_sample": 0.5}, "soft_topk takes all classes in every step"),
        ({"loss": "soft_topk", "chunked_update": "int8"}, "--chunked-update needs a loss"),
        ({"loss_opt": {"k": [1, 3], "combine": "likelihood"}}, "combine='mean'"),
        ({"opt": "lamb"}, "'lamb' looks at a whole matrix"),
        ({"multi_crop": 5}, "--multi-crop averages"),
        ({"model": "resnetv2_18", "model_kwargs": {}}, "whose classifier is one Linear, this one has head.fc: Conv2d"),
    ]
    for options, message in cases:
        with pytest.raises(TrainError, match=message):
            trained(CONFIG.replace(**{**SPREAD, **options}), "refused")
    with pytest.raises(TrainError, match="--class-sample must be"):
        CONFIG.replace(class_sample=0.5)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    before = partial(stopped, RESUMED, "stopped-one")
    with trained_on_two(CHECKS, tmp_path_factory.mktemp("runs"), before=before) as errors:
        yield errors


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(found, name):
    ranks.expect_none(found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_two_processes_leave_the_checkpoint_of_one(found, name):
    trained(CONFIG.replace(**COMPARED[name]), name)
    same_checkpoint(name, f"{name}-two")


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATED)
def test_two_processes_that_update_in_chunks_leave_the_checkpoint_of_one(found, name):
    trained(CONFIG.replace(**UPDATED[name]), f"{name}-plain")
    same_checkpoint(f"{name}-plain", f"{name}-updated-two")


@pytest.mark.slow
def test_one_process_goes_on_from_states_in_8_bits_of_two(found):
    saved = load_checkpoint_metadata(last("low-stopped"))
    assert saved["state_dict"]["fc.weight"].dtype == torch.bfloat16
    codes = [state["exp_avg_codes"] for state in saved["optimizer"]["state"].values() if "exp_avg_codes" in state]
    assert [code.shape for code in codes] == [saved["state_dict"]["fc.weight"].shape]
    plain = RESUMED.replace(resume=str(last("low-stopped")))
    for name, config in (("low-plain", plain), ("low-one", plain.replace(class_parallel=True, chunked_update="int8"))):
        result = trained(config, name)
        assert math.isfinite(result.history[-1]["train_loss"])


@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_processes(found):
    trained(RESUMED, "whole")
    trained(RESUMED.replace(resume=str(last("stopped-two"))), "two-to-one")
    trained(RESUMED.replace(resume=str(last("stopped-two")), class_parallel=True), "two-to-one-spread")
    for name in ("one-to-two", "two-to-one", "two-to-one-spread"):
        same_checkpoint("whole", name)
