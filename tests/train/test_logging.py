"""``--log``: TensorBoard's own reader finds the rows of summary.csv, and a stand-in for wandb gets them too."""

import sys

import pytest

PLACE = "topk_registry.train.trainer.find_spec"


def floats(run, name):
    return [float(row[name]) for row in run.summary]


def test_tensorboard_holds_every_epoch_once_after_a_resume(train):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--log", "tensorboard", "--log-interval", "2")
    assert train(*flags, "--epochs", "1").status == 0
    run = train(*flags, "--epochs", "3", "--resume", "auto")
    assert run.status == 0, run.err
    events = EventAccumulator(str(run.folder)).Reload()
    for name in ("train_loss", "eval_top1"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [6, 12, 18]
        assert [scalar.value for scalar in scalars] == pytest.approx(floats(run, name), rel=1e-6)  # float32
    assert [scalar.step for scalar in events.Scalars("loss")] == [1, 3, 5, 6, 7, 9, 11, 12, 13, 15, 17, 18]


WANDB = """
calls = []
class Run:
    def log(self, row, step):
        calls.append((step, row))
    def finish(self):
        calls.append("finished")
def init(**settings):
    calls.append(settings)
    return Run()
"""


def test_wandb_gets_settings_rows_and_the_end(train, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = train("--log", "wandb", "--log-interval", "100")
    assert run.status == 0, run.err
    begin, *logged, end = sys.modules.pop("wandb").calls
    assert (begin["id"], begin["resume"], begin["config"]["lr"]) == ("run", "allow", 0.01)
    assert end == "finished"
    rows = {step: row for step, row in logged if "train_loss" in row}
    assert [rows[step]["train_loss"] for step in (6, 12)] == floats(run, "train_loss")


def test_a_logger_that_is_not_installed_is_named_before_training(train, monkeypatch):
    monkeypatch.setattr(PLACE, lambda name: None)
    run = train("--log", "tensorboard")
    assert run.status == 2
    assert "pip install tensorboard" in run.err
    assert not run.folder.exists()
