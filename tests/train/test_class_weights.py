"""Class weights by name: timm's numbers from the training labels, for every loss that takes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from timm.loss import CLASS_WEIGHT_METHOD_KINDS, compute_class_weights

from topk_registry import BatchLoss, registry
from topk_registry.cli.main import main
from topk_registry.data.labels import labels_of
from topk_registry.registry.options import accepts
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.config.weights import METHODS, POSITIVE_METHODS, SETTINGS
from topk_registry.train.errors import ConfigError, TrainError
from topk_registry.train.setup.class_weights import ClassWeights
from topk_registry.train.setup.loss import Context, LossSpec

from .conftest import TINY, unclosed_files
from .ranked import assert_same

SCRIPTS = Path(__file__).with_name("scripts")
CURRENT = str(SCRIPTS / "timm_current.py")
OLD = str(SCRIPTS / "timm_before_tasks.py")
TORCHVISION = str(SCRIPTS / "torchvision_reference.py")
COUNTS = [500, 100, 20, 1, 0]
LOSS = ("--loss", "topk_nll", "--loss-opt", "k=1")
TAIL = ("--long-tail", "exp", "--imbalance-factor", "4")


def timms(counts, method, **settings):
    _, weights = compute_class_weights(torch.tensor(counts), sum(counts), method=method, **settings)
    return weights.tolist()


def trained_with(*flags):
    """The class weights of the loss of a run of these flags, and the run."""
    trainer = Trainer(parse_args([*TINY, *map(str, flags)]), quiet=True)
    run = trainer.run
    return run.task.criterion.weight.tolist(), run


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("inv_freq", {}),
        ("inv_freq", {"power": 0.5}),
        ("inv_freq", {"max_weight": 1.5}),
        ("effective_num", {}),
        ("effective_num", {"beta": 0.9}),
    ],
)
def test_values_are_timms(method, settings):
    assert list(ClassWeights(method, **settings).values(COUNTS, 5)) == timms(COUNTS, method, **settings)


def test_positive_weights_are_timms():
    asked = ClassWeights("neg_pos", power=0.5, max_weight=3.0, setting="loss_pos_weight")
    assert list(asked.values(COUNTS, 5)) == timms(COUNTS, "neg_pos", power=0.5, max_weight=3.0)
    assert ClassWeights("2.5", setting="loss_pos_weight").values(None, 3) == (2.5, 2.5, 2.5)
    assert [name for name, kind in CLASS_WEIGHT_METHOD_KINDS.items() if kind == "pos_weight"] == list(POSITIVE_METHODS)


def test_methods_and_defaults_are_timms():
    assert [name for name, kind in CLASS_WEIGHT_METHOD_KINDS.items() if kind == "class_weight"] == list(METHODS)
    usual = ClassWeights("inv_freq")
    assert [usual.power, usual.beta, usual.max_weight] == [default for default, _ in SETTINGS.values()]
    assert list(usual.values(COUNTS, 5)) == timms(COUNTS, "inv_freq")
    assert parse_args(["--loss-class-weight", "inv_freq"]).class_weight == "inv_freq"
    assert TrainConfig.from_dict({"loss_class_weight": "inv_freq"}).class_weight == "inv_freq"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.json", "[1, 2, 0.5]"),
        ("w.json", '{"class_weight": [1, 2, 0.5]}'),
        ("w.txt", "1 2\n0.5\n"),
        ("w.csv", "1,2,0.5"),
    ],
)
def test_a_file_or_a_list(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert ClassWeights(str(tmp_path / name)).values(None, 3) == (1.0, 2.0, 0.5)
    assert ClassWeights("1, 2,0.5").values(None, 3) == (1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class-weight", "1,2,3"], "expected 12 weights, one for each class, got 3"),
        (["--class-weight=-1,2,3"], "must be finite and non-negative"),
        (["--class-weight", "1,nan,3"], "must be finite and non-negative"),
        (["--class-weight", "inv_frq"], "expected inv_freq, effective_num, a file, or numbers with commas"),
        (["--class-weight", "inv_frq"], "did you mean inv_freq?"),
        (["--class-weight", "neg_pos"], "class_weight methods are"),
        (["--class-weight", "effective_num", "--loss-weight-beta", "1"], "beta must be in (0, 1)"),
        (["--class-weight", "inv_freq", "--loss-opt", f"weight={[1.0] * 12}"], "both say how classes are weighted"),
        (["--class-weight", "inv_freq", "--loss", "ce"], "loss 'ce' takes no class weights"),
        (["--class-weight", "inv_freq", "--loss", "jsd"], "loss 'jsd' takes no class weights"),
        (["--loss-pos-weight", "neg_pos"], "loss 'topk_nll' has no positive term to weigh"),
        (["--loss-pos-weight", "inv_freq", "--loss", "bce"], "pos_weight methods are ['neg_pos']"),
        (["--loss-pos-weight", "2", "--loss", "bce", "--bce-pos-weight", "2"], "leave one out"),
        (["--class-stats", "stats.json"], "--class-stats stats.json has no effect"),
        (["--class-stats", "/no/stats.json", "--class-weight", "inv_freq"], "No such file"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(flags, message, train):
    run = train(*(flags if "--loss" in flags else (*LOSS, *flags)))
    assert run.status == 2
    assert message in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.json", "[1, 2", "the file is not JSON, as its name says"),
        ("w.json", '{"pos_weight": [1, 2]}', "no 'class_weight' entry"),
        ("w.txt", "1 two", "the file must hold numbers alone"),
    ],
)
def test_a_file_of_something_else_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(TrainError, match=message):
        ClassWeights(str(tmp_path / name)).example(2)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_weight_power": 0.5},
        {"loss_weight_power": 0.5, "class_weight": "effective_num"},
        {"loss_weight_beta": 0.9, "class_weight": "inv_freq"},
        {"loss_weight_max": 2.0, "class_weight": "1,2"},
        {"loss_weight_beta": 0.9, "loss_pos_weight": "neg_pos"},
        {"loss_weight_power": 0.5, "loss_pos_weight": "2"},
    ],
)
def test_a_setting_without_its_method_is_refused(settings):
    with pytest.raises(ConfigError, match="has no effect: it is for --class-weight"):
        TrainConfig(**settings)


def test_every_registered_loss_that_takes_weights_gets_them():
    weights = (3.0, 1.0, 0.5, 0.5, 2.0, 1.0)
    context = Context(6, 0.0, False, 4, [10, 20, 30, 40, 50, 60], weights)
    ours = registry.list_losses("topk-registry:*")
    assert len(ours) > 20
    for name in ours:
        spec = LossSpec.resolve(name, {})
        if isinstance(spec.factory, type) and issubclass(spec.factory, BatchLoss):
            with pytest.raises(TrainError, match="takes no class weights"):
                spec.check_weights("inv_freq")
            continue
        spec.check_weights("inv_freq")
        assert spec.build(context).weight.tolist() == list(weights), name
    bce = LossSpec.resolve("bce", {})
    bce.check_weights("inv_freq")
    assert bce.build(context).weight.tolist() == list(weights)
    for name in ("ce", "asl", "poly", "jsd", "twoway", "zlpr", "db"):
        assert not accepts(registry.get_loss_builder(name), "class_weight")


def test_a_third_partys_loss_gets_a_tensor(register):
    register("theirs", torch.nn.CrossEntropyLoss)
    built = LossSpec.resolve("theirs", {}).build(Context(3, 0.0, False, 1, None, (1.0, 2.0, 3.0)))
    assert built.weight.tolist() == [1.0, 2.0, 3.0]


def test_they_are_counted_on_the_labels_that_training_has(tmp_path):
    rows = tmp_path / "labels.csv"
    rows.write_text(
        "image,label,suggested,action\n3,field 03-0,field 02-1,relabel\n5,field 01-1,,exclude\n17,field 01-1,,exclude\n"
    )
    flags = (*LOSS, "--class-weight", "inv_freq")
    plain, run = trained_with(*flags)
    assert plain == timms([8] * 12, "inv_freq")
    labels = np.delete(labels_of(run.data.train), (3, 5, 17))
    counts = np.bincount([*labels, run.data.class_names.index("field 02-1")], minlength=12).tolist()
    found, run = trained_with(*flags, "--exclude", rows, "--relabel", rows)
    assert run.data.counts == counts
    assert found == timms(counts, "inv_freq") != plain


def test_classes_without_images_weigh_as_those_with_one():
    found, run = trained_with(*LOSS, "--class-weight", "inv_freq", "--num-classes", "14")
    assert run.data.counts[12:] == [0, 0]
    assert found == timms(run.data.counts, "inv_freq")
    assert found[12] == found[13] > max(found[:12])


@pytest.mark.parametrize(
    "loss", [LOSS, ("--loss", "topk_hinge"), ("--loss", "bce", "--smoothing", "0.1")], ids=lambda loss: loss[1]
)
@pytest.mark.parametrize("mixup", [(), ("--mixup", "0.4")], ids=["labels", "mixup"])
def test_a_run_trains_with_them_and_records_them(train, loss, mixup):
    run = train(*loss, *TAIL, *mixup, "--class-weight", "inv_freq", "--loss-weight-power", "0.5", "--epochs", "1")
    assert run.status == 0, run.err
    args = yaml.safe_load((run.folder / "args.yaml").read_text())
    assert (args["class_weight"], args["loss_weight_power"]) == ("inv_freq", 0.5)
    weights = args["loss_record"]["class_weight"]
    assert (
        f"--class-weight inv_freq: from {min(weights):.4g} (field 00-0) to {max(weights):.4g} (field 02-2)" in run.out
    )
    assert weights == timms([8, 7, 6, 5, 5, 4, 4, 3, 3, 3, 2, 2], "inv_freq", power=0.5)
    checkpoint = run.checkpoint()
    assert checkpoint["args"].loss_record["class_weight"] == weights
    assert checkpoint["task_state"]["loss"]["class_weight"] == weights
    assert checkpoint["task_state"]["criterion"]["weight"].tolist() == weights
    plain = train(*loss, *TAIL, *mixup, "--epochs", "1", name="plain")
    assert "class_weight" not in plain.checkpoint()["task_state"]["loss"]
    assert plain.summary[0]["train_loss"] != run.summary[0]["train_loss"]


def test_a_resumed_run_is_the_uninterrupted_one(train):
    flags = (*LOSS, *TAIL, "--class-weight", "effective_num", "--loss-weight-beta", "0.9", "--sched", "none")
    whole = train(*flags, name="whole")
    half = train(*flags, "--epochs", "1", name="half")
    assert whole.status == half.status == 0
    resumed = train(*flags, "--resume", "auto", name="half")
    assert resumed.status == 0, resumed.err
    assert "other class weights" not in resumed.out.partition("resumed")[2]
    a, b = whole.checkpoint(), resumed.checkpoint()
    assert_same(a["state_dict"], b["state_dict"])
    assert a["task_state"]["criterion"]["weight"].tolist() == b["task_state"]["criterion"]["weight"].tolist()


def test_a_run_resumed_with_other_weights_trains_with_those(train, tmp_path):
    file = tmp_path / "weights.json"
    file.write_text(json.dumps([1.0] * 12))
    first = train(*LOSS, "--class-weight", file, "--epochs", "1")
    last = first.folder / "last.pth.tar"
    file.write_text(json.dumps([1.0] * 11 + [5.0]))
    refused = train(*LOSS, "--class-weight", file, "--resume", "auto")
    assert refused.status == 2
    assert "other settings (class_weight_file:" in refused.err
    for flags, weight in ((("--class-weight", file), [1.0] * 11 + [5.0]), ((), None)):
        resumed = train(*LOSS, *flags, "--resume", last, name=f"again{len(flags)}")
        assert resumed.status == 0, resumed.err
        assert "the checkpoint was trained with other class weights" in resumed.out
        found = resumed.checkpoint()["task_state"]["criterion"].get("weight")
        assert (found if found is None else found.tolist()) == weight


def test_a_run_trains_with_positive_weights_and_records_them(train):
    run = train("--loss", "bce", *TAIL, "--loss-pos-weight", "neg_pos", "--loss-weight-max", "20", "--epochs", "1")
    assert run.status == 0, run.err
    weights = timms([8, 7, 6, 5, 5, 4, 4, 3, 3, 3, 2, 2], "neg_pos", max_weight=20.0)
    assert run.checkpoint()["task_state"]["loss"]["pos_weight"] == weights
    assert yaml.safe_load((run.folder / "args.yaml").read_text())["loss_record"]["pos_weight"] == weights
    assert "--loss-pos-weight neg_pos: from 5.5 (field 00-0) to 20 (field " in run.out
    plain = train("--loss", "bce", *TAIL, "--epochs", "1", name="plain")
    assert plain.summary[0]["train_loss"] != run.summary[0]["train_loss"]
    other = train("--loss", "bce", *TAIL, "--resume", run.folder / "last.pth.tar", name="other")
    assert "the checkpoint was trained with other class weights" in other.out


def test_counts_may_come_from_a_file(tmp_path, train):
    file, counts = tmp_path / "stats.json", [*range(20, 8, -1)]
    file.write_text(json.dumps({"pos_counts": counts, "num_samples": 500, "class_names": None}))
    found, run = trained_with(*LOSS, "--class-weight", "inv_freq", "--class-stats", file)
    _, weights = compute_class_weights(torch.tensor(counts), 500, method="inv_freq")
    assert found == weights.tolist()
    assert run.data.counts == [8] * 12  # which of the classes are rare is measured on the data
    flags = [*TINY, "--loss", "logit_adjustment"]
    losses = [Trainer(parse_args(each), quiet=True).run.task.criterion
              for each in ([*flags, "--class-stats", str(file)], flags)]  # fmt: skip
    logits, target = torch.zeros(1, 12), torch.tensor([3])
    assert losses[0](logits, target) == pytest.approx(-np.log(counts[3] / sum(counts)))
    assert losses[1](logits, target) == pytest.approx(np.log(12))
    file.write_text(json.dumps({"pos_counts": counts[:5], "num_samples": 500}))
    refused = train(*LOSS, "--class-weight", "inv_freq", "--class-stats", file)
    assert refused.status == 2
    assert "expected counts of 12 classes, got 5" in refused.err


@pytest.mark.parametrize("loss", ["ldam", "logit_adjustment", "noised_topk_imbalanced"])
def test_the_plan_says_that_rare_classes_count_twice(loss, train):
    run = train("--loss", loss, *TAIL, "--class-weight", "inv_freq", "--dry-run")
    assert run.status == 0, run.err
    twice = f"rare classes count more than once: loss '{loss}' by its class counts, --class-weight inv_freq by weights"
    assert run.out.count("rare classes count") == 1
    assert twice in run.out
    for flags in (["--loss", loss], [*LOSS, "--class-weight", "inv_freq"]):
        assert "rare classes count" not in train(*flags, *TAIL, "--dry-run").out


def test_a_callers_own_loader_must_show_its_labels():
    images, labels = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
    about = {"loss": "focal", "num_classes": 4, "smoothing": 0.0}

    def run(how, loader):
        return Trainer(TrainConfig(class_weight=how, **about), model=model, train_loader=loader, quiet=True).run

    with pytest.raises(TrainError, match=r"--class-weight inv_freq needs the class counts: .* must have `targets`"):
        run("inv_freq", batches)
    assert run("1,2,3,4", batches).task.criterion.weight.tolist() == [1, 2, 3, 4]
    batches.dataset.targets = labels[:30]
    assert run("inv_freq", batches).task.criterion.weight.tolist() == timms([8, 8, 7, 7], "inv_freq")


def test_a_stream_does_not_tell_its_counts():
    with pytest.raises(TrainError, match="needs the class counts, which this data does not tell"):
        ClassWeights("inv_freq").values(None, 4)


class Weighted(torch.nn.CrossEntropyLoss):
    """A loss that remembers its weights."""

    last: "Weighted"

    def __init__(self, weight=None):
        super().__init__(weight)
        Weighted.last = self


class Binary(torch.nn.Module):
    """A binary loss over classes that remembers its positive weights."""

    last: "Binary"

    def __init__(self, pos_weight=None):
        super().__init__()
        self.pos_weight = pos_weight
        Binary.last = self

    def forward(self, logits, target):
        hot = torch.nn.functional.one_hot(target, logits.shape[1]).to(logits)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, hot, pos_weight=self.pos_weight)


@unclosed_files
@pytest.mark.parametrize("script", [CURRENT, OLD])
def test_timms_script_trains_with_them(script, image_folder, tmp_path, capsys, register):
    register("weighted", Weighted)
    flags = ["--data-dir", str(image_folder), "--num-classes", "5", "--epochs", "1"]
    flags += ["--args-file", str(tmp_path / "args.yaml")] * (script == CURRENT)
    weights = ["--loss-class-weight", "effective_num", "--loss-weight-beta", "0.5"]
    assert main(["train", "--train-script", script, "--loss", "weighted", *weights, *flags]) == 0
    assert Weighted.last.weight.tolist() == timms([12] * 4 + [0], "effective_num", beta=0.5)
    assert "--class-weight effective_num: from" in capsys.readouterr().err
    if script == CURRENT:
        args = yaml.safe_load((tmp_path / "args.yaml").read_text())
        assert (args["class_weight"], args["loss_weight_beta"]) == ("effective_num", 0.5)


@unclosed_files
def test_a_script_takes_positive_weights_and_counts_of_a_file(image_folder, tmp_path, register):
    stats = tmp_path / "stats.json"
    stats.write_text(json.dumps({"pos_counts": [40, 30, 20, 10], "num_samples": 100}))
    flags = ["--script", TORCHVISION, "--data-path", str(image_folder), "--class-stats", str(stats)]
    register("weighted", Weighted)
    assert main(["torchvision-train", *flags, "--loss", "weighted", "--class-weight", "inv_freq"]) == 0
    assert Weighted.last.weight.tolist() == timms([40, 30, 20, 10], "inv_freq")
    register("binary", Binary)
    assert main(["torchvision-train", *flags, "--loss", "binary", "--loss-pos-weight", "neg_pos"]) == 0
    assert Binary.last.pos_weight.tolist() == timms([40, 30, 20, 10], "neg_pos")


def test_torchvisions_script_trains_with_them(image_folder, register):
    register("weighted", Weighted)
    flags = ["--script", TORCHVISION, "--loss", "weighted", "--data-path", str(image_folder)]
    assert main(["torchvision-train", *flags, "--class-weight", "1,2,3,4"]) == 0
    assert Weighted.last.weight.tolist() == [1, 2, 3, 4]
    assert main(["torchvision-train", *flags, "--class-weight", "inv_freq"]) == 0
    assert Weighted.last.weight.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "ce", "--class-weight", "inv_freq"], "loss 'ce' takes no class weights"),
        (["--loss", "focal", "--class-weight", "1,2"], "expected 4 weights, one for each class, got 2"),
        (["--loss", "focal", "--class-weight", "rare"], "expected inv_freq, effective_num, a file"),
    ],
)
def test_a_script_with_weights_that_cannot_be_stops(flags, message, image_folder, capsys):
    assert main(["torchvision-train", "--script", TORCHVISION, "--data-path", str(image_folder), *flags]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "trained" not in printed.out


def test_a_setting_may_come_with_the_method_of_a_file(tmp_path, train):
    (tmp_path / "args.yaml").write_text("class_weight: inv_freq\n")
    run = train(*LOSS, "--config", tmp_path / "args.yaml", "--loss-weight-power", "2", "--dry-run")
    assert run.status == 0, run.err
    assert "--class-weight inv_freq" in run.out


def test_a_scripts_setting_without_its_method_is_refused(capsys):
    argv = ["torchvision-train", "--script", TORCHVISION, "--loss", "focal", "--loss-weight-max", "2"]
    assert main(argv) == 2
    assert "--loss-weight-max 2.0 has no effect" in capsys.readouterr().err


def test_a_long_list_is_cut_where_it_is_shown():
    with pytest.raises(TrainError, match=r"--class-weight (1,){30}\.\.\.: expected 3 weights, .* got 900"):
        ClassWeights(",".join("1" * 900)).values(None, 3)
