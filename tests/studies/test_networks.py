"""Studies of a small network from scratch, and of the recipe ``finetune``: data, rows, models and runs."""

import argparse
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from topk_registry.train.config import parse_args
from topk_studies import finetune, heads, networks
from topk_studies.command import main
from topk_studies.data.photographs import Pictures
from topk_studies.heads import MAIN, Trained, hits
from topk_studies.runner import Runs


def pictures(counts):
    """Return grey pictures: those of class c have the value 10 c + 5."""
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.broadcast_to((10 * labels + 5).astype(np.uint8)[:, None, None, None], (len(labels), 8, 8, 3))
    return Pictures(images, {"clean": labels})


def test_the_classes_with_the_most_pictures_are_kept_in_all_splits():
    found = networks.inputs_of({"train": pictures([3, 9, 1, 5]), "test": pictures([2, 2, 2, 2])}, 2)
    assert found["train"].labels["clean"].tolist() == [0] * 9 + [1] * 5
    assert found["test"].labels["clean"].tolist() == [0, 0, 1, 1]
    assert found["test"].x.shape == (4, 1, 8, 8)
    assert found["test"].x[:, 0, 0, 0].tolist() == pytest.approx([1 - (10 * c + 5) / 127.5 for c in (1, 1, 3, 3)])


def test_each_main_row_is_in_one_stage_and_the_first_row_is_cross_entropy():
    stages = networks.stages_of(5, 4)
    names = [row.name for rows, _ in stages for row in rows]
    assert names[0] == "ce"
    assert sorted(name.removesuffix(", tuned") for name in names) == sorted(["ce", *MAIN])
    assert {tuple(seeds) for _, seeds in stages} == {(0, 1, 2, 3)}


def test_only_a_cosine_network_returns_cosines():
    x = torch.randn(20, 1, 16, 16)
    scores = networks.network(x, 7, cosine=True)(x)
    assert scores.shape == (20, 7)
    assert 0.1 < scores.abs().max() <= 1.00001
    linear = networks.network(x, 7, cosine=False)
    linear[-1].layer.weight.data *= 1000  # a cosine does not depend on the length of the weights
    assert linear(x).abs().max() > 10


def test_a_network_is_evaluated_with_the_statistics_of_training():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (200,), generator=generator)
    x = torch.randn(200, 1, 16, 16, generator=generator) / 4
    x[range(200), 0, 5 * y] += 2  # a bright line whose place is the class
    regime = replace(networks.SMALL, samples=150, epochs=3, batch=25)
    torch.manual_seed(0)
    model, _ = heads.train(x, y, 3, {"loss": "ce", "loss_opt": {}, "lr": 1e-2}, (), 1, regime)
    assert not model.training
    assert hits(model(x), y, 1).mean() > 0.9
    torch.testing.assert_close(model(x[:1]), model(x)[:1])  # the batch has no influence


def test_the_wrong_answers_of_a_network_are_counted():
    labels = {"clean": torch.arange(4).repeat(20)}
    split = heads.Features(torch.randn(80, 1, 16, 16), labels)
    regime = replace(networks.SMALL, samples=40, epochs=1, batch=20)
    counts = Trained({"train": split, "validation": split}, 4, 2, regime=regime).wrong_answers()
    assert counts.shape == (4, 4)
    assert not counts.requires_grad


def test_a_signal_of_a_batch_system_stops_the_study_and_the_command_says_how_to_continue(monkeypatch, capsys):
    monkeypatch.setattr(networks, "main", lambda name, args: signal.raise_signal(signal.SIGTERM))
    assert main(["fashion-network", "--data-dir", "somewhere"]) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("reading somewhere")
    assert shown.endswith("continue with\n  topk-registry study fashion-network --data-dir somewhere\n")


def icons(seed, per_name):
    random = np.random.default_rng(seed)
    targets = np.repeat(np.arange(6), per_name)
    return SimpleNamespace(
        classes=list("abcdef"),
        targets=targets.tolist(),
        images=random.integers(0, 255, (len(targets), 16, 16, 3), np.uint8),
    )


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(finetune, "NAMES", 4)
    monkeypatch.setattr(finetune, "PICTURES", 5)
    return {"train": icons(0, 8), "test": icons(1, 3)}


def test_a_seed_has_the_same_names_in_both_splits_and_few_training_pictures(few, tmp_path):
    finetune.write_pictures(tmp_path / "a", few, 10)
    finetune.write_pictures(tmp_path / "b", few, 11)
    names = {split: sorted(each.name for each in (tmp_path / "a" / split).iterdir()) for split in few}
    assert names["train"] == names["test"]
    assert len(names["train"]) == 4
    for split, count in (("train", 5), ("test", 3)):
        for name in names[split]:
            files = list((tmp_path / "a" / split / name).iterdir())
            assert len(files) == count
            for file in files:
                assert few[split].targets[int(file.stem)] == few[split].classes.index(name)
                assert (np.asarray(Image.open(file)) == few[split].images[int(file.stem)]).all()
    files = [sorted(str(each.relative_to(tmp_path / a)) for each in (tmp_path / a).rglob("*.png")) for a in "ab"]
    assert files[0] != files[1]


def test_both_recipes_have_the_same_loss_model_epochs_and_seed():
    plain, tuned = (parse_args(["DIR", *finetune.flags_of(recipe, 10)]) for recipe in finetune.RECIPES)
    same = ("loss", "loss_opt", "model", "epochs", "seed", "img_size", "smoothing")
    assert [getattr(plain, name) for name in same] == [getattr(tuned, name) for name in same]
    assert (plain.opt, tuned.opt) == ("sgd", "adamw")
    assert finetune.run_of("defaults", 10)["lr"] == pytest.approx(0.05)
    assert finetune.run_of("finetune", 10)["lr"] == 1e-3


@pytest.mark.slow
def test_the_study_of_the_recipe_writes_a_file_with_the_values_of_each_seed(few, monkeypatch, tmp_path):
    monkeypatch.setattr(finetune, "MODEL", "test_resnet")
    monkeypatch.setattr(finetune, "INPUT", 32)
    monkeypatch.setattr(finetune, "EPOCHS", 2)
    monkeypatch.setattr(finetune, "PICTURES", 40)  # 160 pictures: one batch of the defaults
    few["train"] = icons(0, 45)
    monkeypatch.setattr(finetune, "OPTIONS", {"k": 2, "tau": 1})
    monkeypatch.setattr(finetune, "METRICS", ("top1", "top2"))
    monkeypatch.setattr(finetune, "network", lambda: timm.create_model("test_resnet"))
    monkeypatch.setattr(finetune, "Icons", lambda split, **_: few[split])
    args = argparse.Namespace(data_dir=tmp_path, output=tmp_path / "found.json", seeds=2, jobs=1, minutes=60)
    finetune.main("finetune", args)
    found = json.loads(args.output.read_text())
    assert found["command"] == "topk-registry study finetune --data-dir DIR"
    assert [row["recipe"] for row in found["rows"]] == ["defaults", "finetune"]
    for row in found["rows"]:
        assert row["seeds"] == [10, 11]
        assert len(row["top1"]) == len(row["top2"]) == 2
        assert 0 <= row["top1"][0] <= row["top2"][0] <= 100
    stored = Runs(tmp_path / "found.runs.jsonl", None, data=str(sum(int(each.images.sum()) for each in few.values())))
    assert [stored(finetune.run_of("finetune", 11))[metric] for metric in finetune.METRICS] == [
        row[metric][1] for metric in finetune.METRICS
    ]
