"""A study's run keeps small data in memory, and is the trainer's bit for bit."""

# values of tables and attributes of studies are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import pytest

from topk_studies.engine import memory, training
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import run_of

from .conftest import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

VECTORS = {
    "dataset": "topk/ambiguous",
    "dataset_opt": {"size": 130, "families": 3, "fine": 2, "side": 4},
    "model_kwargs": {"side": 4, "width": 8},
    "epochs": 3,
    "val_interval": 1,
    "batch_size": 32,
    "warmup_epochs": 0,
}


def quiet(share, words):
    pass


def trained(flags, work, **setting):
    options = Options(flags=flags, device="cpu")
    return training.train(run_of(options, seed=0, lr=1e-2, **setting), work, quiet)


@pytest.mark.parametrize(
    ("flags", "loss"), [(VECTORS, "noised_topk"), (TINY, "ce")], ids=["vectors, a loss that draws", "images"]
)
def test_a_run_is_the_same_bit_for_bit(flags, loss, tmp_path, monkeypatch):
    setting = {"loss": loss, "label_noise": 0.5, **({"loss_opt": {"k": 2}} if loss != "ce" else {})}
    kept = trained(flags, tmp_path / "kept", **setting)
    assert isinstance(kept.loader, memory.KeptSamples)
    assert isinstance(kept.evaluator.loader, memory.KeptBatches)
    monkeypatch.setattr(memory, "LARGEST", 0)
    read = trained(flags, tmp_path / "read", **setting)
    assert not isinstance(read.loader, memory.KeptSamples)
    assert kept.progress.history == read.progress.history
    assert all(a.equal(b) for a, b in zip(kept.model.parameters(), read.model.parameters(), strict=True))


def test_what_is_augmented_is_made_anew_in_every_epoch(tmp_path):
    flags = {**TINY, "no_aug": False, "hflip": 0.5, "epochs": 1}
    run = trained(flags, tmp_path, loss="ce")
    assert not isinstance(run.loader, memory.KeptSamples)
    assert isinstance(run.evaluator.loader, memory.KeptBatches)


def test_an_evaluation_that_was_stopped_keeps_nothing():
    class Loader(list):
        dataset = ()

    made = memory.KeptBatches(Loader([1, 2, 3]))
    assert next(iter(made)) == 1
    made._made.append(4)
    assert list(made) == [1, 2, 3, 4]
    made._made.append(5)
    assert list(made) == [1, 2, 3, 4]


def test_weights_are_saved_where_they_are_wanted(tiny, tmp_path):
    configuration = run_of(tiny, loss="ce", seed=0, lr=1e-3)
    training.run(configuration, tmp_path / "run", quiet)
    assert not list((tmp_path / "run").rglob("*.pth.tar"))
    training.train(configuration, tmp_path / "train", quiet)
    assert list((tmp_path / "train").rglob("model_best.pth.tar"))


def test_a_run_that_takes_long_is_saved_to_go_on_from(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "BETWEEN_CHECKPOINTS", 0.0)
    training.run(run_of(tiny, loss="ce", seed=0, lr=1e-3), tmp_path, quiet)
    assert list(tmp_path.rglob("last.pth.tar"))
