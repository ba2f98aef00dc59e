"""What the trainer asks of a loss, gives to it, and keeps of it."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.train.loss import Facts, LossSpec


@pytest.fixture
def register(monkeypatch):
    """Register a loss for one test."""
    monkeypatch.setattr(registry.losses, "_registered", {})
    return lambda name, factory: registry.register_loss(name)(factory)


def test_a_learned_parameter_of_the_loss_is_trained_and_saved_and_restored(train, register, tmp_path, capsys):
    class Scaled(torch.nn.Module):
        def __init__(self, k=5, option_of_a_newer_version=1):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, logits, target):
            return F.cross_entropy(self.scale * logits, target)

    register("scaled", Scaled)
    run = train("--loss", "scaled", "--epochs", "1")
    saved, path = run.checkpoint(), tmp_path / "changed.pth.tar"
    assert saved["task_state"]["criterion"][0]["scale"].item() != 2.0

    def resumed(name="scaled"):
        torch.save(saved, path)
        run = train("--loss", name, "--resume", path, "--dry-run", name="other")
        return run.out.partition("dry run")[2] or run.err

    losses = [resumed()]
    for changed in ({"version": "0", "defaults": {"k": 5}}, {"defaults": {"k": 6}}):
        saved["task_state"]["loss"] |= changed
        losses.append(resumed())
    assert losses[0] == losses[1] != losses[2]
    saved["task_state"]["loss"]["defaults"], saved["task_state"]["criterion"] = {"k": 5}, [{}]
    assert 'Missing key(s) in state_dict: "scale"' in resumed()
    saved["args"].loss, saved["args"].loss_record = "gone", {"name": "gone", "distribution": "acme"}
    missing = "no loss is called 'acme:gone'; no installed distribution 'acme' has a loss"
    assert missing in resumed("gone")
    assert (main(["validate", str(path)]), missing in capsys.readouterr().err) == (2, True)


def test_a_loss_gets_what_it_names_and_hears_of_epochs(train, register):
    heard = {}

    class Curious(torch.nn.Module):
        def __init__(self, num_classes, class_counts, smoothing, total_epochs):
            super().__init__()
            heard.update(n=num_classes, counts=class_counts, smoothing=smoothing, total=total_epochs)
            self.epochs = heard["epochs"] = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def forward(self, logits, target):
            return F.cross_entropy(logits, target)

    register("curious", Curious)
    assert train("--loss", "curious", "--smoothing", "0.2").status == 0
    assert (heard["n"], list(heard["counts"])) == (12, [8] * 12)
    assert (heard["smoothing"], heard["total"]) == (0.2, 2)
    assert heard["epochs"] == [0, 1]


def test_predictive_logits_of_the_loss_rank_the_classes(train, register):
    class Reversed(torch.nn.Module):
        def forward(self, logits, target):
            return F.cross_entropy(-logits, target)

        def predictive_logits(self, scores):
            return -scores

    register("reversed", Reversed)
    run = train("--loss", "reversed", "--epochs", "8", "--dataset-opt", "pixel_noise=1.0")
    assert float(run.summary[-1]["eval_top1"]) > 100 / 12 * 3
    assert float(run.summary[-1]["eval_nll"]) < math.log(12)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_name(train, register):
    register("broken", lambda: lambda logits, target: F.cross_entropy(logits, target) * float("nan"))
    run = train("--loss", "broken")
    assert run.status == 2
    assert "'broken'" in run.err
    assert "finite" in run.err


def test_a_loss_of_indices_refuses_mixtures_before_training(train, register):
    register("indices", lambda: lambda logits, target: -logits.log_softmax(1)[torch.arange(len(target)), target].mean())
    run = train("--loss", "indices", "--mixup", "0.3")
    assert run.status == 2
    assert "'indices' does not train on soft targets" in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("k=12", "loss 'topk_nll': k must be below the number of classes: k = 12"),
        ("k=abc", "k must be an integer of at least 1, got 'abc'"),
        ("k_weights=abc", "k_weights must be a finite number of at least 0, got 'abc'"),
        ("label_smoothing=0.2 --smoothing 0.1", "--smoothing 0.1 and --loss-opt label_smoothing=0.2 both smooth"),
        ("smoothing=0.2 --smoothing 0.1", "takes no option 'smoothing'; did you mean 'label_smoothing'?"),
        ("weight=3 --class-weight inv_freq", "--class-weight and --loss-opt weight both weigh classes"),
        ("foo=1 --class-weight inv_freq --loss ce", "takes no options together with --class-weight, got foo"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_given(train, options, message):
    run = train("--loss", "topk_nll", "--loss-opt", *options.split())
    assert (run.status, message in run.err) == (2, True), run.err


@pytest.mark.parametrize("name", ["ce", "bce", "poly"])
def test_the_plan_lists_the_options_of_this_loss_alone(train, name):
    run = train("--loss", name, "--dry-run")
    assert run.status == 0, run.err
    (line,) = (line for line in run.out.splitlines() if line.startswith("loss "))
    own = {"ce": [], "bce": ["bce_sum=False"], "poly": ["poly_epsilon=2.0"]}[name]
    assert re.findall(r"\w+=[^,)]*", line) == own


def test_an_option_of_another_loss_is_an_error_that_names_its_owner(train):
    run = train("--loss", "ce", "--loss-opt", "poly_epsilon=1")
    assert run.status == 2
    assert "loss 'ce' takes no option 'poly_epsilon', which belongs to poly (it takes" in run.err


SPLIT = ("--loss", "jsd", "--epochs", "1", "--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "8", "-j", "0")
SPLIT += ("--device", "cpu", "--warmup-epochs", "0", "--lr", "0.01", "--input-size", "3", "32", "32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "loss 'jsd' compares augmented copies of each image: pass --aug-splits"),
        (("--loss-opt", "jsd_splits=2"), "loss 'jsd' compares augmented copies of each image: pass --aug-splits"),
        (("--aug-splits", "2", "--loss-opt", "jsd_splits=3"), "jsd_splits=3 contradicts --aug-splits 2"),
    ],
)
def test_jsd_without_the_copies_that_it_compares_is_an_error(train, folder, flags, message):
    run = train(folder, *SPLIT, *flags, tiny=())
    assert (run.status, message in run.err) == (2, True), run.err


@pytest.mark.parametrize("flags", [(), ("--loss-opt", "jsd_splits=3")])
def test_jsd_compares_as_many_copies_as_there_are(train, folder, flags):
    trained = train(folder, *SPLIT, "--aug-splits", "3", "--aa", "augmix", *flags, tiny=())
    assert trained.status == 0, trained.err
    assert main(["validate", str(trained.folder / "last.pth.tar"), "-j", "0"]) == 0
    facts = Facts(5, splits=3)
    assert LossSpec.resolve("jsd", {}).build(facts).num_splits == 3


class Careless(torch.nn.Module):
    def __init__(self):
        self.k = 5

    def forward(self, logits, target):
        return F.cross_entropy(logits, target)


class Early(Careless):
    def __init__(self):
        self.scale = torch.nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Careless, "Careless.__init__ must call super().__init__()"),
        (Early, "AttributeError: cannot assign parameters before Module.__init__() call"),
        (lambda: None, "the factory returned None, expected a callable (logits, target)"),
        (lambda: Careless, "expected a callable (logits, target)"),
        (lambda: {}["k"], "KeyError: 'k' at FILE:"),
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero at"),
    ],
)
def test_a_plug_in_that_cannot_be_built_is_one_line(train, register, factory, reason):
    register("careless", factory)
    run = train("--loss", "careless")
    assert run.status == 2
    (line,) = run.err.splitlines()
    assert line.startswith("timm train: loss 'careless' with its default options: ")
    assert reason.replace("FILE", __file__) in line


def test_an_exception_without_a_message_is_named(train, register):
    def wordless(logits, target):
        raise AssertionError

    register("wordless", lambda: wordless)
    assert f"loss 'wordless': AssertionError at {__file__}:" in train("--loss", "wordless").err
