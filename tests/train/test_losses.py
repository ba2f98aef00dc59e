"""Every registered loss trains, on class indices, and on mixed targets where it takes them."""

import math
import threading
from functools import wraps

import pytest
import torch

import topk_registry as tr
from topk_registry.train.setup.loss import Context, LossSpec
from topk_registry.train.setup.rehearsal import Rehearsal

from .conftest import TINY

MULTI_LABEL = {"twoway", "zlpr", "db"}  # timm builds these for multi-label targets alone
OF_BATCHES = {"conformal_training", "conformal_training_low_variance"}
INDICES_ALONE = {"asl", "jsd", *OF_BATCHES}  # and these only without mixup
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
    rehearsal = Rehearsal(LossSpec.resolve(loss, options), Context(12, 0.0, soft, 10))
    assert rehearsal.idle_options(10) == idle


def test_the_plan_names_options_that_change_nothing(train):
    run = train("--loss", "ldam", "--loss-opt", "beta=0.9", "--dry-run")
    assert "without effect: beta=0.9; 'ldam' is the same without" in run.out


class Counted(torch.nn.Module):
    """Counts its calls, as a loss with a state of its own may."""

    def __init__(self):
        super().__init__()
        self.start, self.calls = torch.nn.Parameter(torch.randn(2)), 0

    def forward(self, logits, target):
        self.calls += 1
        return torch.nn.functional.cross_entropy(logits, target) + self.start.square().sum()


def uncopyable(loss):
    loss.lock = threading.Lock()
    return loss


FACTORIES = {
    "plain": (lambda: Counted(), 1),
    "an option": (lambda k=5: Counted(), 2),  # and once without the option, to say whether it changes anything
    "number of classes": (lambda num_classes: Counted(), 2),  # 100 before the data is read, 12 after
    "number of classes, as guessed": (lambda num_classes: Counted(), 1),
    "class counts": (lambda class_counts: Counted(), 2),
    "no copy": (lambda: uncopyable(Counted()), 3),  # rehearsed for 100 classes and for 12
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_run_builds_its_loss_once_and_again_for_other_facts(name, train, register):
    factory, expected = FACTORIES[name]
    built = []

    @wraps(factory)
    def counting(**options):
        built.append(factory(**options))
        return built[-1]

    register("counted", counting)
    flags = {"an option": ["--loss-opt", "k=3"], "number of classes, as guessed": ["--num-classes", "12"]}
    run = train("--loss", "counted", *flags.get(name, []), "--epochs", "1")
    assert run.status == 0, run.err
    assert len(built) == expected
    calls = sorted(loss.calls for loss in built)
    assert calls[-1] == 6  # steps of the epoch: the rehearsal left none in the loss that trains
    assert all(call <= 3 for call in calls[:-1])  # "an option" is compared in three epochs


def test_the_start_of_a_loss_is_that_of_the_seed(train, register):
    register("counted", Counted)
    starts = []
    for seed in ("1", "1", "2"):
        torch.randn(3)  # whatever was drawn before
        run = train(
            "--loss", "counted", "--seed", seed, "--epochs", "1", "--opt", "sgd", "--lr", "1e-30", "--overwrite"
        )
        starts.append(run.checkpoint()["task_state"]["criterion"]["start"])
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
