"""The trainer as a notebook uses it: a configuration, hooks, and parts of one's own."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from topk_registry import create_loss
from topk_registry.train import TrainConfig, Trainer, TrainError, evaluate
from topk_registry.train.errors import Interrupted

from .conftest import SETTINGS, TINY, assert_same, rows, weights


def fit(config, **parts):
    return Trainer(config, quiet=True, **parts).fit()


def test_five_lines_train_as_the_command_line_does(train, config):
    result = fit(config(loss="smooth_topk_svm", experiment="python"))
    assert result.history == train("--loss", "smooth_topk_svm").summary
    assert result.metrics["eval_top1"] == max(row["eval_top1"] for row in result.history)
    assert (result.folder / "last.pth.tar").exists()


def test_a_seed_repeats_a_run_bit_for_bit(config):
    first, again, other = (fit(config(experiment=name, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first.history == again.history
    assert_same(weights(first.folder), weights(again.folder))
    assert first.history != other.history


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


def test_a_model_and_loaders_of_ones_own(tmp_path):
    data, model = linear_data(), torch.nn.Linear(8, 4)
    settings = {"loss": "smooth_topk_svm", "loss_opt": {"k": 2}, "num_classes": 4, "epochs": 8, "device": "cpu"}
    settings |= {"output": str(tmp_path), "warmup_epochs": 0, "lr": 0.5, "smoothing": 0.0, "eval_metric": "top1"}
    loader = DataLoader(data, 120)
    result = fit(TrainConfig(**settings), model=model, train_loader=DataLoader(data, 20), eval_loader=loader)
    assert result.history[-1]["train_loss"] < 0.5 * result.history[0]["train_loss"]
    x, y = data.tensors
    top1 = 100 * (model(x).argmax(1) == y).float().mean().item()
    assert result.history[-1]["eval_top1"] == pytest.approx(top1)
    assert top1 > 80


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
    result = fit(config(class_weight=",".join(["1"] + ["0.001"] * 11), epochs=3))
    images, _ = next(iter(Trainer(config(experiment="other"), quiet=True).run.loader))
    assert (result.model.eval()(images).argmax(1) == 0).all()


def test_the_average_of_weights_is_kept_and_measured(config):
    result = fit(config(model_ema=True, model_ema_decay=0.5))
    saved = torch.load(result.folder / "last.pth.tar", weights_only=False)
    assert "state_dict_ema" in saved
    assert any(not torch.equal(saved["state_dict"][name], ema) for name, ema in saved["state_dict_ema"].items())


def test_evaluate_is_the_definition(tmp_path):
    model, data = torch.nn.Linear(8, 4), linear_data()
    found = evaluate(model, DataLoader(data, 32), num_classes=4, k=(1, 2))
    x, y = data.tensors
    logits = model(x)
    rank = (logits > logits.gather(1, y[:, None])).sum(1)
    for k in (1, 2):
        assert found[f"top{k}"] == pytest.approx(100 * (rank < k).float().mean().item())
    assert found["nll"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)


def test_what_cannot_train_raises_before_anything_is_written(config, tmp_path):
    with pytest.raises(TrainError, match="k must be"):
        fit(config(loss="smooth_topk_svm", loss_opt={"k": 0}))
    with pytest.raises(TrainError, match="an eval_loader needs a train_loader"):
        Trainer(config(), eval_loader=[])
    assert not list(tmp_path.iterdir())


def test_several_labels_per_image(tmp_path):
    settings = {"task": "multilabel", "dataset": "topk/several", "dataset_opt": {"size": 200, "eval_size": 100}}
    settings |= {"epochs": 1, "device": "cpu", "workers": 0, "output": str(tmp_path), "warmup_epochs": 0, "lr": 0.01}
    settings |= {"loss": "bce", "no_aug": True, "smoothing": 0.0, "model": "topk_convnet", "model_kwargs": {"width": 4}}
    result = fit(TrainConfig(**settings))
    assert math.isfinite(result.history[0]["train_loss"])
    assert any(name.startswith("eval_") for name in result.history[0])


def test_an_interrupted_run_continues_as_if_it_had_not_been(config):
    whole = fit(config(experiment="whole", epochs=4))

    def interrupt(run, row):
        if row["epoch"] == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="resume"):
        fit(config(experiment="cut", epochs=4), on_epoch=interrupt)
    assert len(rows(Path(config().output, "cut", "summary.csv"))) == 2
    continued = fit(config(experiment="cut", epochs=4, resume="auto"))
    assert continued.history == whole.history
    assert_same(weights(continued.folder), weights(whole.folder))


def test_a_run_with_other_settings_is_not_continued(config):
    fit(config(epochs=1))
    with pytest.raises(TrainError, match=r"other settings.*loss"):
        fit(config(epochs=1, loss="focal", resume="auto"))


@pytest.mark.slow
@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_killed_process_leaves_a_checkpoint_that_continues(killed_by, tmp_path, train):
    flags = [*TINY, "--epochs", "40", "--output", str(tmp_path), "--experiment", "killed"]
    code = "import sys; from topk_registry.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", code, "train", *flags], stdout=subprocess.DEVNULL)
    last, deadline = tmp_path / "killed" / "last.pth.tar", time.time() + 120
    while not last.exists() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(killed_by)
    assert process.wait(120) != 0
    done = torch.load(last, weights_only=False)["epoch"]
    assert done < 40
    run = train("--epochs", "40", "--resume", "auto", name="killed")
    assert run.status == 0, run.err
    assert [row["epoch"] for row in run.summary] == list(range(1, 41))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Each of two has half of the batch; their gradients are averaged."""
    code = "import sys; from topk_registry.cli.main import main; sys.exit(main(sys.argv[1:]))"
    script = tmp_path / "train.py"
    script.write_text(code)
    flags = ["train", *TINY, "--epochs", "1", "--output", str(tmp_path), "--opt", "sgd", "--loss", "smooth_topk_svm"]
    base = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for name, ranks, batch in (("one", 1, 16), ("two", 2, 8)):
        command = [*base, f"--nproc-per-node={ranks}", str(script), *flags, "-b", str(batch), "--experiment", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (rows(tmp_path / name / "summary.csv") for name in ("one", "two"))
    assert two[0]["train_loss"] == pytest.approx(one[0]["train_loss"], rel=0.05)  # other batches of the same images
    assert len(one) == len(two) == 1


@pytest.mark.slow
def test_the_names_are_resolved_when_they_are_used():
    code = "import sys, topk_registry.train as t; t.TrainConfig(); assert 'torch' not in sys.modules; t.Trainer"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_settings_are_checked_where_they_are_made():
    with pytest.raises(TypeError, match="epochz"):
        TrainConfig(epochz=3)
    for wrong in ({"epochs": 0}, {"lr": -1.0}, {"opt": 3}, {"sampler": "other"}):
        with pytest.raises((TrainError, TypeError, ValueError), match=next(iter(wrong))):
            TrainConfig(**wrong)
    config = TrainConfig(**SETTINGS)
    assert TrainConfig.from_dict(config.to_dict()) == config
