"""The trainer as a notebook uses it: a configuration, hooks, and parts of one's own."""

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from topk_registry.data.hierarchy import Hierarchy
from topk_registry.train import TrainConfig, Trainer, TrainError
from topk_registry.train.engine.epochs import how_to_resume

TINY = {
    "dataset": "topk/hierarchy",
    "dataset_opt": {"size": 96, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    "model": "topk_convnet",
    "model_kwargs": {"width": 4},
    "batch_size": 16,
    "workers": 0,
    "no_aug": True,
    "device": "cpu",
    "epochs": 2,
    "opt": "adamw",
    "lr": 0.01,
    "warmup_epochs": 0,
    "smoothing": 0.0,
    "experiment": "run",
}


def test_no_worker_outlives_a_run(tmp_path):
    """At the interpreter's exit those that ignore SIGTERM would be waited for without an end."""
    trainer = Trainer(TrainConfig(loss="ce", output=str(tmp_path), **{**TINY, "workers": 1, "epochs": 1}))
    before = multiprocessing.active_children()  # of other tests
    trainer.fit()
    assert trainer.run.evaluator is not None  # its loader is still there, and so is the one that trained
    assert set(multiprocessing.active_children()) <= set(before)


def test_five_lines_train_as_the_command_line_does(train, tmp_path):
    trainer = Trainer(TrainConfig(loss="smooth_topk_svm", output=str(tmp_path / "python"), **TINY))
    result = trainer.fit()
    same = train("--loss", "smooth_topk_svm")
    assert result.history == same.summary
    assert result.metrics["eval_top1"] == max(row["eval_top1"] for row in result.history)
    assert (result.folder / "last.pth.tar").exists()
    assert result.model is trainer.run.model


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/guide/train.md").read_text(encoding="utf-8")
    code = re.search(r"<!-- train from Python -->\n```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("epochs=2", 'epochs=2, dataset_opt={"size": 128}, device="cpu"'))
    assert "epoch 2/2" in capsys.readouterr().out


def test_hooks_see_every_step_epoch_and_evaluation(tmp_path):
    steps, epochs = [], []
    trainer = Trainer(
        TrainConfig(loss="focal", output=str(tmp_path), **TINY),
        on_step=lambda run, loss: steps.append((run.progress.step, loss)),
        on_epoch=lambda run, row: epochs.append((run.progress.epoch, row["eval_norm"])),
        on_evaluate=lambda run, model, metrics: {"norm": sum(p.norm().item() for p in model.parameters())},
        quiet=True,
    )
    result = trainer.fit()
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6] * 2
    assert epochs == [(1, result.history[0]["eval_norm"]), (2, result.history[1]["eval_norm"])]


def test_quiet_says_nothing(tmp_path, capsys):
    Trainer(TrainConfig(output=str(tmp_path), **{**TINY, "epochs": 1}), quiet=True).fit()
    assert capsys.readouterr() == ("", "")


def test_a_model_loaders_and_an_optimizer_of_ones_own(tmp_path):
    class Pixels(Hierarchy):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255 - 0.5, label

    data = [Pixels(split, **TINY["dataset_opt"]) for split in ("train", "validation")]
    model = torch.nn.Sequential(torch.nn.Linear(32 * 32 * 3, 12))
    before = model[0].weight.detach().clone()
    trainer = Trainer(
        TrainConfig(loss="ldam", num_classes=12, epochs=3, device="cpu", output=str(tmp_path), warmup_epochs=0),
        model=model,
        train_loader=DataLoader(data[0], 16, shuffle=True),
        eval_loader=DataLoader(data[1], 32),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.003),
    )
    result = trainer.fit()
    assert not torch.equal(model[0].weight, before)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert 0 <= result.metrics["eval_top1"] <= 100
    assert trainer.run.data.counts == [8] * 12  # from the labels of the loader's data
    # the command line could not bring these parts
    assert "with the same parts and TrainConfig(resume=" in how_to_resume(trainer.run)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"eval_loader": []}, "an eval_loader needs a train_loader"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, "an optimizer needs the model"),
    ],
    ids=["eval", "optimizer"],
)
def test_parts_that_do_not_go_together_are_refused(parts, message):
    with pytest.raises(TrainError, match=message):
        Trainer(**parts)


def test_what_cannot_train_raises_before_anything_is_written(tmp_path):
    trainer = Trainer(TrainConfig(loss="smooth_topk_svm", loss_opt={"k": 0}, output=str(tmp_path), **TINY))
    with pytest.raises(TrainError, match="k must be an integer of at least 1"):
        trainer.fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_names_are_resolved_when_they_are_used():
    code = "import sys, topk_registry.train as t; t.TrainConfig(); assert 'torch' not in sys.modules; t.Trainer"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
