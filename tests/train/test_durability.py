"""Writes of the trainer, as the operating system sees them; and settings that a resumed run compares."""

from dataclasses import fields

import pytest
import torch

from tests.system_calls import Calls
from topk_registry.errors import SaveError
from topk_registry.train import TrainConfig
from topk_registry.train.checkpoint import LAST, Saver, differences
from topk_registry.train.run import write_text


@pytest.fixture
def saver(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Saver(model=model, optimizer=optimizer, checkpoint_dir=str(tmp_path), max_history=2)


def test_a_checkpoint_reaches_the_disk_before_it_gets_its_name(saver, tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    for epoch, metric in enumerate((1.0, 3.0, 2.0, None)):
        saver.save(epoch, metric)
    moves = calls.moves_to("*.pth.tar")
    places = [calls[at].target for at in moves]
    assert places.count(str(tmp_path / LAST)) == 4
    assert places.count(str(tmp_path / "model_best.pth.tar")) == 2
    for at in moves:
        calls.check_synced(at)
    for at in calls.moves_to(LAST):
        calls.check_folder_synced(at)


def test_the_checkpoint_of_an_interrupted_evaluation_too(saver, tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    saver.save(0, None, evaluated=False)
    (at,) = calls.moves_to("*")
    assert calls[at].target == str(tmp_path / LAST)
    calls.check_synced(at)
    calls.check_folder_synced(at)


def test_an_old_checkpoint_goes_after_the_new_one_came(saver, tmp_path, monkeypatch):
    for epoch in range(2):
        saver.save(epoch, float(epoch))
    calls = Calls(monkeypatch)
    saver.save(2, 2.0)
    gone = [i for i, call in enumerate(calls) if call.name == "unlink" and not call.path.endswith(".tmp")]
    assert all(at < min(gone, default=len(calls)) for at in calls.moves_to(LAST))
    assert not (tmp_path / "checkpoint-1.pth.tar").exists()


def test_a_text_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    with pytest.raises(SaveError, match=r"none/summary\.csv"):
        write_text(tmp_path / "none" / "summary.csv", "after")


def test_every_file_of_a_run_is_put_in_place_whole(train, monkeypatch):
    calls = Calls(monkeypatch)
    run = train("--epochs", "1")
    assert run.status == 0, run.err
    final = {
        "args.yaml",
        "classes.txt",
        "summary.csv",
        "curves.svg",
        LAST,
        "model_best.pth.tar",
        "checkpoint-1.pth.tar",
    }
    assert {path.name for path in run.folder.iterdir()} == final
    moved = {call.target for call in calls if call.name == "replace"}
    assert {str(run.folder / name) for name in final} <= moved
    for at in calls.moves_to(f"{run.folder}/*"):
        calls.check_synced(at)
        calls.check_folder_synced(at)


# Settings that change where a run computes, what it prints, and for how long it goes on.
MAY_CHANGE = {
    *("resume", "epochs", "early_stop", "output", "experiment", "dry_run", "overwrite", "device", "workers", "pin_mem"),
    *("channels_last", "torchcompile", "grad_checkpointing", "log_interval", "val_interval", "validation_batch_size"),
    *("checkpoint_hist", "eval_metric", "multi_crop", "marginal_temperature", "dataset_download", "log"),
}
# Settings that a run fills in: an empty one means the value of the saved run.
FILLED = {"num_classes", "lr", "input_size", "mean", "std", "crop_pct", "interpolation"}
FIELDS = {setting.name: setting for setting in fields(TrainConfig)}


def flipped(name, value):
    """Return another value of the same type, which need not be in the setting's range."""
    choices = [choice for choice in FIELDS[name].metadata["choices"] or () if choice not in ("", value)]
    if choices:
        return [*value, choices[0]] if isinstance(value, list) else choices[0]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, dict):
        return {**value, "other": 1}
    return [*value, 1] if isinstance(value, list) else 1


class Settings:
    """Settings that no configuration need accept."""

    def __init__(self, settings):
        self.settings = settings

    def to_dict(self):
        return self.settings


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_setting_is_another_run(name):
    saved = TrainConfig().to_dict()
    other = flipped(name, saved[name])
    found = differences(saved, Settings({**saved, name: other}))
    assert found == ([] if name in MAY_CHANGE else [f"{name}: {saved[name]} -> {other}"])
    assert differences(saved, Settings(saved)) == []
    back = differences({**saved, name: other}, Settings(saved))  # the changed run continues as it was
    empty = saved[name] in (None, "")
    assert bool(back) == (name not in MAY_CHANGE and not (name in FILLED and empty))


@pytest.mark.parametrize("name", sorted(FILLED))
def test_a_filled_setting_is_compared_once_it_is_given(name):
    saved = TrainConfig().to_dict()
    filled = flipped(name, saved[name])
    assert differences({**saved, name: filled}, Settings({**saved, name: None})) == []
    assert differences({**saved, name: filled}, Settings({**saved, name: filled})) == []
    assert differences({**saved, name: filled}, Settings({**saved, name: flipped(name, filled)})) != []
