"""Every registered loss trains, on class indices, and on mixed targets where it takes them."""

import math

import pytest

import topk_registry as tr

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
