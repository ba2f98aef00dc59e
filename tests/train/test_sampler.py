"""Samplers of a run: what the plan says, the same over ranks and after an interrupt, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import torch
import yaml

from topk_registry.data.labels import labels_of
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.config.sampling import SAMPLERS
from topk_registry.train.errors import ConfigError, DataError
from topk_registry.train.setup.batches import BatchOrder
from topk_studies.old_trainer.data.sampling import Draw, expected_copies

from .conftest import TINY, stops_at
from .ranked import assert_same

TAIL = ("--long-tail", "exp", "--imbalance-factor", "4")
COUNTS = [8, 7, 6, 5, 5, 4, 4, 3, 3, 3, 2, 2]


def order_of(draw, **settings):
    return BatchOrder(len(draw), settings.pop("batch_size", 12), seed=5, draw=draw, **settings)


def batches(order, epoch, step=0):
    order.start(epoch, step)
    return [indices for _, _, indices in order]


@pytest.fixture
def draw():
    labels = np.repeat(np.arange(5), [60, 25, 10, 4, 1])
    return Draw(labels, expected_copies(labels, "class_balanced"))


@pytest.mark.parametrize("world", [2, 3])
def test_processes_together_see_the_batch_of_one(draw, world):
    alone = batches(order_of(draw), 2)
    ranks = [batches(order_of(draw, batch_size=12 // world, rank=r, world=world), 2) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    for together, *parts in zip(alone, *ranks, strict=False):
        assert Counter(together) == Counter(i for part in parts for i in part)
    assert Counter(i for batch in alone for i in batch)[99] > 10  # the only image of its class


def test_an_epoch_can_be_entered_anywhere_and_may_be_longer_than_the_draw(draw):
    assert batches(order_of(draw), 3, 4) == batches(order_of(draw), 3)[4:]
    assert batches(order_of(draw), 3) != batches(order_of(draw), 4)
    long = batches(order_of(draw, batches=20), 0)
    assert len(long) == 20
    assert long[:8] == batches(order_of(draw), 0)[:8]
    assert {len(batch) for batch in long} == {12}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_trains_with_it_and_says_so(train, sampler):
    run = train(*TAIL, "--sampler", sampler, "--epochs", "1", "-b", "4")
    assert run.status == 0, run.err
    assert yaml.safe_load((run.folder / "args.yaml").read_text())["sampler"] == sampler
    said = [line for line in run.out.splitlines() if "--sampler" in line]
    assert len(said) == (sampler != "instance")
    if sampler == "class_balanced":
        whole, share = sum(COUNTS), sum(COUNTS) / 12
        assert said[0].strip() == (
            f"--sampler class_balanced: {whole} images an epoch, of {whole}; an image comes from {share / 8:.3g} "
            f"times (class field 00-0, 8 of them) to {share / 2:.3g} times (class field 03-2, 2 of them)"
        )


def test_a_repeating_sampler_makes_epochs_longer():
    flags = [*TINY, *TAIL, "-b", "4", "--sampler", "repeat_factor", "--sampler-threshold", "0.2"]
    run = Trainer(parse_args(flags), quiet=True).run
    labels = labels_of(run.data.train)
    assert run.loader.order.size == int(expected_copies(labels, "repeat_factor", threshold=0.2).sum()) > sum(COUNTS)
    assert len(run.loader) == run.loader.order.size // 4 > sum(COUNTS) // 4


def test_labels_are_those_that_training_has():
    flags = [*TINY, "--label-noise", "1", "--val-split", "0.25", "--sampler", "class_balanced"]
    run = Trainer(parse_args(flags), quiet=True).run
    draw = run.loader.order.draw
    assert draw.labels.tolist() == run.data.train.targets.tolist()
    assert np.bincount(draw.labels, draw.copies) == pytest.approx(len(draw.labels) / 12)


@pytest.mark.parametrize("at", [2, 5])
def test_a_resumed_run_is_the_uninterrupted_one(train, monkeypatch, at):
    flags = (*TAIL, "--sampler", "sqrt", "-b", "8", "--mixup", "0.3")
    whole = train(*flags, name="whole")
    with monkeypatch.context() as patch:
        stops_at(patch, at)
        assert train(*flags, name="stopped").status == 128 + 15
    resumed = train(*flags, "--resume", "auto", name="stopped")
    assert resumed.status == 0, resumed.err
    assert whole.summary == resumed.summary
    for part in ("state_dict", "optimizer", "task_state"):
        assert_same(whole.checkpoint()[part], resumed.checkpoint()[part])


def test_another_sampler_is_another_run(train):
    first = train(*TAIL, "--sampler", "sqrt", "--epochs", "1")
    assert first.status == 0, first.err
    refused = train(*TAIL, "--sampler", "class_balanced", "--epochs", "1", "--resume", "auto")
    assert refused.status == 2
    assert "sampler: sqrt -> class_balanced" in refused.err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "rare"}, "--sampler must be one of instance, class_balanced"),
        ({"sampler_beta": 0.9}, "--sampler-beta 0.9 is for --sampler effective_num, got instance"),
        ({"sampler": "sqrt", "sampler_threshold": 0.1}, "is for --sampler repeat_factor, got sqrt"),
        ({"sampler": "effective_num", "sampler_beta": 1.0}, "must be above 0 and below 1, got 1.0"),
        ({"sampler": "sqrt", "aug_repeats": 3}, "--sampler sqrt and --aug-repeats both say how often"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize("flags", [["--sampler", "sqrt"], ["--retrain-head", "x.pth.tar"]])
def test_a_stream_is_refused(train, flags):
    run = train("--dataset", "hfids/some/images", "--data-dir", "x", "--num-classes", "4", *flags)
    assert run.status == 2
    assert "needs data whose images can be picked, and hfids/some/images yields them in its own order" in run.err
    assert ("--sampler instance goes without" in run.err) == (flags[0] == "--retrain-head")


def test_a_callers_own_loader_is_refused():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    batches = [(torch.randn(4, 3, 8, 8), torch.arange(4))]
    with pytest.raises(DataError, match="the train_loader yields them in its own order"):
        Trainer(TrainConfig(sampler="sqrt", num_classes=4), model=model, train_loader=batches, quiet=True).run  # noqa: B018


def test_the_plan_says_that_rare_classes_count_twice(train):
    flags = ("--loss", "ldam", *TAIL, "--sampler", "class_balanced", "--class-weight", "inv_freq", "--dry-run")
    said = "loss 'ldam' by its class counts, --class-weight inv_freq by weights, --sampler class_balanced by drawing"
    assert f"rare classes count more than once: {said}" in train(*flags).out
