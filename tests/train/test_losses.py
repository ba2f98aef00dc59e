"""Every registered loss trains, on class indices, and on mixed targets where it takes them."""

import math

import pytest

import topk_registry as tr
from topk_registry.train.setup.loss import Context, LossSpec

from .conftest import TINY

MULTI_LABEL = {"twoway", "zlpr", "db"}  # timm builds these for multi-label targets alone
INDICES_ALONE = {"asl", "jsd"}  # and these only without mixup
OPTIONS = {"jsd": ["--aug-splits", "2"]}
NAMES = [name for name in tr.list_losses() if name not in MULTI_LABEL and tr.loss_info(name).status != "broken"]


@pytest.mark.parametrize("mixing", [[], ["--mixup", "0.3", "--cutmix", "0.5"]], ids=["indices", "mixed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_loss_trains(train, name, mixing):
    if mixing and name in INDICES_ALONE:
        pytest.skip("takes class indices alone")
    tiny = tuple(flag for flag in TINY if name != "jsd" or flag != "--no-aug")  # augmentation splits need augmentation
    flags = [*OPTIONS.get(name, []), *mixing, "--epochs", "1", "--val-split", "0.25"]
    run = train("--loss", name, *flags, tiny=tiny)
    assert run.status == 0, run.err
    assert math.isfinite(run.summary[0]["train_loss"])


@pytest.mark.parametrize("name", sorted(MULTI_LABEL))
def test_multi_label_losses_are_refused_before_training(train, name):
    run = train("--loss", name)
    assert run.status == 2
    assert f"loss '{name}'" in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize("name", sorted(INDICES_ALONE - {"jsd"}))
def test_losses_without_soft_targets_are_refused_with_mixup(train, name):
    run = train("--loss", name, "--mixup", "0.5")
    assert run.status == 2
    assert "mix" in run.err.lower()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["ldam", "--loss-opt", "drw_epoch=100"], "drw_epoch=100 first changes in epoch 100"),
        (["encouraging", "--loss-opt", "start_epoch=2"], "start_epoch=2 first changes in epoch 2"),
    ],
)
def test_a_schedule_that_begins_after_the_run_is_refused(train, flags, said):
    run = train("--loss", *flags)
    assert run.status == 2
    assert f"{said}, counted from 0, and the run has 2 epochs" in run.err
    assert train("--loss", *flags, "--epochs", "101", "--dry-run").status == 0


@pytest.mark.parametrize(
    ("loss", "options", "idle"),
    [
        ("ldam", {"beta": 0.9}, ["beta"]),
        ("ldam", {"beta": 0.9, "drw_epoch": 1}, []),
        ("encouraging", {"rate": 3.0, "scheduled": "log_end"}, ["rate", "scheduled"]),
        ("encouraging", {"rate": 3.0, "schedule": "exponential", "log_end": 1.0}, []),
        ("smooth_topk_svm", {"k": 3, "tau": 1.0}, []),
        ("smooth_topk_svm", {"combine": "likelihood"}, ["combine"]),
        ("generalised_cross_entropy", {"ignore_index": 3}, []),
    ],
)
@pytest.mark.parametrize("soft", [False, True])
def test_options_that_change_nothing_are_known(loss, options, idle, soft):
    spec = LossSpec.resolve(loss, options)
    assert spec.idle_options(Context(12, 0.0, soft, 10), 10) == idle


def test_the_plan_names_options_that_change_nothing(train):
    run = train("--loss", "ldam", "--loss-opt", "beta=0.9", "--dry-run")
    assert "without effect: beta=0.9; 'ldam' is the same without" in run.out
