"""Scores out of sample: each image is scored by a model that was not trained on it, and an interrupt loses nothing."""

import numpy as np
import pytest
import torch

from tests.train.conftest import stops_at, unclosed_files
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.evaluation import folds as module
from topk_registry.evaluation.folds import fold_numbers, folds_of, open_folds
from topk_registry.evaluation.models import Running
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.errors import Interrupted, TrainError
from topk_registry.train.setup.datasets import open_data

RUNNING = Running("cpu", 32, 0)
SMALL = {
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
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with noisy labels and a part held out."""
    output = tmp_path_factory.mktemp("runs")
    config = TrainConfig(**SMALL, label_noise=0.3, val_split="0.25", early_stop=1, output=str(output), experiment="run")
    return Trainer(config, quiet=True).fit()


def test_folds_spread_each_class():
    labels = np.repeat(np.arange(5), (10, 3, 1, 7, 9))
    numbers = fold_numbers(labels, 4, seed=0)
    for fold_counts in (np.bincount(numbers[labels == c], minlength=4) for c in range(5)):
        assert fold_counts.max() - fold_counts.min() <= 1
    assert np.ptp(np.bincount(numbers)) <= 1
    assert (fold_numbers(labels, 4, seed=1) != numbers).any()


def trained_on(config):
    return open_data(config).train.indices.tolist()


@pytest.mark.slow
def test_no_image_is_scored_by_a_model_that_was_trained_on_it(run, tmp_path, monkeypatch):
    configs = []
    train = module._train
    monkeypatch.setattr(module, "_train", lambda config, *rest: configs.append(config) or train(config, *rest))
    folds = open_folds(run.folder, 3, folder=tmp_path)
    found = folds.predictions(RUNNING)
    assert found.logits.shape == (96, 12)
    assert [sorted(trained_on(config)) for config in configs] == [
        np.flatnonzero(folds.number != fold).tolist() for fold in range(3)
    ]
    whole = open_data(configs[0].replace(exclude=""))
    assert found.labels.tolist() == whole.train.targets.tolist()  # the noisy ones, what the run had held out included
    model = torch.load(tmp_path / "fold-2" / "last.pth.tar", weights_only=False)["state_dict"]
    network = run.model
    network.load_state_dict(model)
    network.eval()
    images = folds.images()
    index = int(np.flatnonzero(folds.number == 1)[0])
    pixels = torch.from_numpy(np.array(images.picture(index))).permute(2, 0, 1)[None].float() / 255
    mean, std = (torch.tensor(network.default_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = network((pixels - mean) / std)[0].numpy()
    np.testing.assert_allclose(found.logits[index], expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 14])  # batches, 4 an epoch and 8 a fold: in the first fold, and in the second
def test_an_interrupted_search_goes_on_where_it_stopped(run, tmp_path, monkeypatch, at):
    whole = open_folds(run.folder, 3, folder=tmp_path / "whole").predictions(RUNNING)
    parts = open_folds(run.folder, 3, folder=tmp_path / "parts")
    with monkeypatch.context() as patch:
        stops_at(patch, at)
        with pytest.raises(Interrupted):
            parts.predictions(RUNNING)
    epochs = []
    found = open_folds(run.folder, 3, folder=tmp_path / "parts").predictions(
        RUNNING, on_epoch=lambda *place: epochs.append(place)
    )
    np.testing.assert_array_equal(found.logits, whole.logits)
    assert len(epochs) == (6 if at == 4 else 4)
    again = []
    open_folds(run.folder, 3, folder=tmp_path / "parts").predictions(RUNNING, on_epoch=lambda *each: again.append(each))
    assert again == []


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused(run, tmp_path):
    open_folds(run.folder, 2, folder=tmp_path).predictions(RUNNING)
    with pytest.raises(TrainError, match="other settings"):
        open_folds(run.folder, 2, folder=tmp_path, settings={"lr": 0.02}).predictions(RUNNING)


@unclosed_files
@pytest.mark.slow
def test_rows_that_the_run_excluded_stay_out(tmp_path):
    data = Hierarchy(size=48, superclasses=4, fine=1)
    for i, (image, label) in enumerate(data[i] for i in range(48)):
        place = tmp_path / "data" / "train" / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{i // 4}.png")
    rows = tmp_path / "rows.csv"
    rows.write_text("image,label,suggested,action\ntrain/class0/3.png,class0,,exclude\n"
                    "train/class1/5.png,class1,class2,relabel\n")  # fmt: skip
    config = TrainConfig(
        **{**SMALL, "dataset": "", "dataset_opt": {}, "epochs": 1},
        data_dir=str(tmp_path / "data"),
        exclude=str(rows),
        relabel=str(rows),
    )
    folds = folds_of(config, 2, tmp_path / "folds")
    assert len(folds.number) == 47
    assert len(folds.predictions(RUNNING).logits) == 47
    held = (tmp_path / "folds" / "fold-1" / "held_out.csv").read_text().splitlines()
    assert "train/class0/3.png,class0" in held
    assert len(held) == 2 + int((folds.number == 0).sum())
    relabelled = folds.labels.tolist()
    assert relabelled.count(1) == 11
    assert relabelled.count(2) == 13


def test_what_cannot_be_divided_is_refused(run, tmp_path):
    for count in (1, 97):
        with pytest.raises(TrainError, match=f"--folds must be between 2 and the number of images, 96, got {count}"):
            open_folds(run.folder, count)
    exported = tmp_path / "model.onnx"
    exported.touch()
    with pytest.raises(TrainError, match="needs a checkpoint of timm train"):
        open_folds(exported, 3)
    torch.save({"state_dict": {}}, tmp_path / "other.pth")
    with pytest.raises(TrainError, match="holds no settings of timm train"):
        open_folds(tmp_path / "other.pth", 3)
