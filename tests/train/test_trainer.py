"""The trainer as a notebook uses it: a configuration, hooks, and parts of one's own."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from topk_registry import create_loss
from topk_registry.train import TrainConfig, Trainer, TrainError, evaluate

SETTINGS = {
    "dataset": "topk/hierarchy",
    "dataset_opt": {"size": 96, "superclasses": 4, "fine": 3},
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
}


@pytest.fixture
def config(tmp_path):
    """``config(epochs=1)``: the settings of a tiny run in a folder of its own."""
    return lambda **changes: TrainConfig(**{**SETTINGS, "output": str(tmp_path), "experiment": "run", **changes})


def weights(folder, name="last.pth.tar"):
    return torch.load(Path(folder, name), map_location="cpu", weights_only=False)["state_dict"]


def fit(config, **parts):
    return Trainer(config, quiet=True, **parts).fit()


def test_five_lines_train_as_the_command_line_does(train, config):
    result = fit(config(loss="smooth_topk_svm", experiment="python"))
    printed = train("--loss", "smooth_topk_svm").summary
    assert [row["train_loss"] for row in result.history] == [float(row["train_loss"]) for row in printed]
    assert result.metrics["eval_top5"] == max(row["eval_top5"] for row in result.history)
    assert (result.folder / "last.pth.tar").exists()


def test_hooks_see_every_step_and_epoch(config):
    steps, epochs = [], []
    result = fit(
        config(loss="focal"),
        on_step=lambda run, loss: steps.append(loss.item()),
        on_epoch=lambda run, row: epochs.append(row["eval_top1"]),
    )
    assert len(steps) == 12
    assert epochs == [row["eval_top1"] for row in result.history]
    assert result.history[0]["train_loss"] == pytest.approx(sum(steps[:6]) / 6, rel=1e-5)


def test_quiet_says_nothing(config, capsys):
    fit(config(epochs=1))
    assert capsys.readouterr() == ("", "")


def linear_data(rows=120, classes=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    return TensorDataset(x, (x @ torch.randn(8, classes, generator=generator)).argmax(1))


@pytest.mark.parametrize(
    ("loss", "options"), [("smooth_topk_svm", {"k": 2}), ("balanced_softmax", {"class_counts": [30] * 4})]
)
def test_a_model_and_loaders_of_ones_own(tmp_path, loss, options):
    data, model = linear_data(), torch.nn.Linear(8, 4)
    settings = {"loss": loss, "loss_opt": options, "num_classes": 4, "epochs": 8, "device": "cpu"}
    settings |= {"output": str(tmp_path), "warmup_epochs": 0, "lr": 0.5, "smoothing": 0.0, "eval_metric": "top1"}
    loader = DataLoader(data, 120)
    result = fit(TrainConfig(**settings), model=model, train_loader=DataLoader(data, 20), eval_loader=loader)
    assert result.history[-1]["train_loss"] < 0.5 * result.history[0]["train_loss"]
    x, y = data.tensors
    top1 = 100 * (model(x).argmax(1) == y).float().mean().item()
    assert result.history[-1]["eval_top1"] == pytest.approx(top1)
    assert top1 > 80


def test_own_batches_have_timms_defaults(tmp_path):
    """Those of the built-in job (AdamW, 8 epochs) are for the built-in data."""
    batches = DataLoader(linear_data(), 24)
    config = TrainConfig(loss="focal", epochs=2, num_classes=4, output=str(tmp_path), device="cpu")
    trained = Trainer(config, model=torch.nn.Linear(8, 4), train_loader=batches, quiet=True).run.config
    timms = TrainConfig(dataset="torch/cifar100").to_dict()
    changed = {name for name, value in trained.to_dict().items() if value != timms[name]}
    settled = {"num_classes", "lr", "input_size", "crop_pct", "mean", "std", "interpolation"}
    expected = {"loss", "epochs", "output", "device", "dataset", "model", "batch_size", "smoothing", "eval_metric"}
    assert changed - settled == expected
    assert (trained.batch_size, trained.lr) == (24, pytest.approx(0.1 * 24 / 256))
    assert (config.opt, config.replace(lr=0.1).opt) == ("adamw", "adamw")
    with pytest.raises(TrainError, match="mix in the loader"):
        Trainer(config.replace(mixup=0.2), train_loader=batches)


def test_a_run_without_class_names_keeps_none_of_the_run_that_it_overwrites(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "classes.txt").write_text("cat\ndog\nowl\nyak\n")
    settings = {"epochs": 1, "num_classes": 4, "output": str(tmp_path), "experiment": "run", "device": "cpu"}
    batches = DataLoader(linear_data(), 120)
    fit(TrainConfig(**settings, overwrite=True), model=torch.nn.Linear(8, 4), train_loader=batches)
    assert (tmp_path / "run" / "last.pth.tar").exists()
    assert not (tmp_path / "run" / "classes.txt").exists()


def test_the_first_steps_are_those_of_plain_pytorch(tmp_path):
    """An epoch of gradient descent without momentum, written out, gives the same weights."""
    data = linear_data(40)
    model, plain = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    plain.load_state_dict(model.state_dict())
    settings = {"loss": "smooth_topk_svm", "loss_opt": {"k": 2}, "num_classes": 4, "epochs": 2, "device": "cpu"}
    settings |= {"output": str(tmp_path), "warmup_epochs": 0, "lr": 0.1, "smoothing": 0.0, "sched": "none"}
    settings |= {"opt": "momentum", "momentum": 0.0, "weight_decay": 0.0, "eval_metric": "top1"}
    fit(TrainConfig(**settings), model=model, train_loader=DataLoader(data, 10), eval_loader=DataLoader(data, 40))
    loss, optimizer = create_loss("smooth_topk_svm", k=2), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(data, 10):
            optimizer.zero_grad()
            loss(plain(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    found = []
    for batch, accumulated in ((40, 1), (10, 4)):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        settings = {"num_classes": 4, "epochs": 1, "device": "cpu", "output": str(tmp_path), "warmup_epochs": 0}
        settings |= {"lr": 0.1, "smoothing": 0.0, "sched": "none", "grad_accum_steps": accumulated}
        data = linear_data(40)
        fit(
            TrainConfig(**settings, eval_metric="top1"),
            model=model,
            train_loader=DataLoader(data, batch),
            eval_loader=DataLoader(data, 40),
        )
        found.append(model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_class_weights_reach_the_loss(config):
    """Without weight for all classes but one, the model learns that one."""
    result = fit(config(class_weight=",".join(["1"] + ["0.001"] * 10 + ["0"]), epochs=3))
    images, _ = next(iter(Trainer(config(experiment="other"), quiet=True).run.loader))
    assert (result.model.eval()(images).argmax(1) == 0).all()


def test_the_average_of_weights_is_kept_and_measured(config):
    result = fit(config(model_ema=True, model_ema_decay=0.5))
    saved = torch.load(result.folder / "last.pth.tar", weights_only=False)
    assert "state_dict_ema" in saved
    assert any(not torch.equal(saved["state_dict"][name], ema) for name, ema in saved["state_dict_ema"].items())


@pytest.mark.parametrize("ignored", [0, 70])
def test_evaluate_is_the_definition(ignored):
    model, data = torch.nn.Linear(8, 4), linear_data()
    data.tensors[1][:ignored] = -100
    found = evaluate(model, DataLoader(data, 32), num_classes=4, k=(1, 2))
    x, y = (part[ignored:] for part in data.tensors)
    logits = model(x)
    rank = (logits > logits.gather(1, y[:, None])).sum(1)
    for k in (1, 2):
        assert found[f"top{k}"] == pytest.approx(100 * (rank < k).float().mean().item())
    assert found["nll"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_fitted_nll_takes_the_temperature_from_the_other_half(scale):
    """An independent search on a fine grid; the scale of the scores does not matter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator)
    labels = (2 * x + torch.randn(400, 5, generator=generator)).argmax(1)
    model = torch.nn.Identity()
    batches = [(scale * x[i : i + 33], labels[i : i + 33]) for i in range(0, 400, 33)]
    found = evaluate(model, batches, num_classes=5, k=(1,), device="cpu")["nll_fitted"]
    total = 0.0
    for half in (0, 1):
        fit, use = slice(1 - half, None, 2), slice(half, None, 2)
        grid = torch.logspace(-3, 2, 2000).tolist()
        best = min(grid, key=lambda t: F.cross_entropy(x[fit] / t, labels[fit]).item())
        total += F.cross_entropy(x[use] / best, labels[use], reduction="sum").item()
    assert found == pytest.approx(total / 400, abs=0.01)


def test_what_cannot_train_raises_before_anything_is_written(config, tmp_path):
    with pytest.raises(TrainError, match="k must be"):
        fit(config(loss="smooth_topk_svm", loss_opt={"k": 0}))
    with pytest.raises(TrainError, match="an eval_loader needs a train_loader"):
        Trainer(config(), eval_loader=[])
    for loaders in ([], [None]), (iter([None]), [None]), ([None], []), ([None], iter([None])):
        with pytest.raises(TrainError, match=r"_loader must have a length of at least 1"):
            Trainer(config(), train_loader=loaders[0], eval_loader=loaders[1])
    assert not list(tmp_path.iterdir())


def test_several_labels_per_image(tmp_path):
    settings = {"task": "multilabel", "dataset": "topk/several", "dataset_opt": {"size": 200, "eval_size": 100}}
    settings |= {"epochs": 1, "device": "cpu", "workers": 0, "output": str(tmp_path), "warmup_epochs": 0, "lr": 0.01}
    settings |= {"loss": "bce", "no_aug": True, "smoothing": 0.0, "model": "topk_convnet", "model_kwargs": {"width": 4}}
    result = fit(TrainConfig(**settings))
    assert math.isfinite(result.history[0]["train_loss"])
    assert any(name.startswith("eval_") for name in result.history[0])


@pytest.mark.parametrize("target", [torch.tensor([0, 2]), torch.eye(2, 3).bool()])
def test_targets_that_are_no_k_hot_vectors_are_refused(tmp_path, target):
    """timm's bce would convert labels to vectors and train."""
    settings = TrainConfig(task="multilabel", loss="bce", num_classes=3, epochs=1, output=str(tmp_path), device="cpu")
    trainer = Trainer(settings, model=torch.nn.Linear(8, 3), train_loader=[(torch.ones(2, 8), target)])
    found = re.escape(f"got {target.dtype} {list(target.shape)}")
    with pytest.raises(TrainError, match=f"multilabel needs floating-point targets .*, {found}"):
        trainer.fit()


def test_labels_in_an_evaluation_of_several_labels_are_refused():
    with pytest.raises(ValueError, match=r"expected logits and targets \[batch, 3\]"):
        evaluate(torch.nn.Linear(8, 3), [(torch.ones(2, 8), torch.tensor([0, 2]))], num_classes=3, multilabel=True)


@pytest.mark.slow
def test_a_process_ends_although_a_worker_is_left():
    """Workers ignore SIGTERM, with which multiprocessing ends them at exit. A traceback may keep their iterator."""
    code = "from topk_registry.train.data import _without_signals; from torch.utils.data import DataLoader"
    code += "; kept = iter(_without_signals(DataLoader([0, 1, 2], num_workers=1))); print(next(kept))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "tensor([0])\n", "")


@pytest.mark.slow
def test_the_names_are_resolved_when_they_are_used():
    code = "import sys, topk_registry.train as t; t.TrainConfig(); assert 'torch' not in sys.modules; t.Trainer"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"image": torch.ones(2, 8), "label": torch.ones(2)}, "a dict with the keys 'image', 'label'"),
        (torch.ones(2, 8), "a Tensor"),
        ((torch.ones(2, 8),), "a tuple of Tensor"),
        ((torch.ones(2, 8), [0, 1]), "a tuple of Tensor, list"),
    ],
)
def test_batches_of_another_form_are_described(tmp_path, batch, found):
    message = re.escape(f"expected batches (images, targets) of tensors from the loader, got {found}")
    good = [(torch.ones(2, 8), torch.tensor([0, 1]))]
    settings = {"num_classes": 4, "output": str(tmp_path), "device": "cpu", "epochs": 1}
    for loaders in ([batch], good), (good, [batch]):
        trainer = Trainer(
            TrainConfig(**settings),
            model=torch.nn.Linear(8, 4),
            train_loader=loaders[0],
            eval_loader=loaders[1],
            quiet=True,
        )
        with pytest.raises(TrainError, match=message):
            trainer.fit()
