"""Characters from fonts: splits by family, a common baseline, fonts that lack characters, and the page of results."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import ImageFont

from topk_studies import glyphs
from topk_studies.data.glyphs import CHARACTERS, Glyphs, faces_by_family
from topk_studies.glyphs import RATES

FAMILIES = 20


@pytest.fixture(scope="module")
def fonts(tmp_path_factory):
    """A folder with 20 families: Pillow's own font under other names of the same length."""
    data = ImageFont.load_default(20).font_bytes
    family = ImageFont.load_default(20).getname()[0]
    folder = tmp_path_factory.mktemp("fonts")
    for i in range(FAMILIES):
        name = f"{i:02d}{family[2:]}"
        renamed = data
        for encoding in ("utf-16-be", "ascii"):
            renamed = renamed.replace(family.encode(encoding), name.encode(encoding))
        (folder / f"{i}.ttf").write_bytes(renamed)
    (folder / "damaged.ttf").write_bytes(b"no font")
    return folder


def test_splits_share_no_family_and_hold_all(fonts):
    parts = {split: Glyphs(split, root=fonts) for split in ("train", "validation", "test")}
    families = {split: set(part.families) for split, part in parts.items()}
    assert sum(map(len, families.values())) == len(set.union(*families.values())) == FAMILIES
    assert [len(families[split]) for split in parts] == [12, 4, 4]
    assert set(Glyphs("test", root=fonts, seed=1).families) != families["test"]


def test_families_of_one_design_stay_in_one_split(monkeypatch):
    faces = {f"{design} {style}": ("", 0) for design in ("Abcd", "Efgh", "Ijkl", "Mnop", "Qrst") for style in "12"}
    monkeypatch.setattr("topk_studies.data.glyphs.faces_by_family", lambda root: faces)
    monkeypatch.setattr("topk_studies.data.glyphs.render", lambda path, index: np.zeros((62, 28, 28), np.uint8))
    parts = [set(Glyphs(split).families) for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == len(faces)
    assert all(name[:-1] + other in part for part in parts for name in part for other in "12")


def test_every_family_has_every_character_once(fonts):
    data = Glyphs("train", root=fonts)
    assert len(data) == len(data.targets) == 12 * 62
    assert data.classes == list(CHARACTERS)
    image, label = data[61]
    assert image.size == (28, 28)
    assert label == 61
    assert (np.bincount(data.targets) == 12).all()


def test_characters_stand_on_one_baseline(fonts):
    data = Glyphs("test", root=fonts)
    dark = data.images[:62, ..., 0] < 128
    bottom = {c: np.flatnonzero(dark[i].any(1)).max() for i, c in enumerate(CHARACTERS)}
    assert {bottom[c] for c in "EHIKLTxz17"} == {bottom["E"]}
    assert bottom["p"] > bottom["E"] + 2
    assert (
        np.flatnonzero(dark[CHARACTERS.index("x")].any(1)).min()
        > np.flatnonzero(dark[CHARACTERS.index("X")].any(1)).min()
    )


def test_a_font_without_a_character_is_left_out(fonts, monkeypatch):
    monkeypatch.setattr("topk_studies.data.glyphs.CHARACTERS", "ABC\U00012345")
    with pytest.raises(ValueError, match="train"):
        Glyphs("train", root=fonts)


def test_errors_name_what_is_wrong(fonts, tmp_path):
    assert "damaged" not in str(faces_by_family(fonts))
    with pytest.raises(ValueError, match="train"):
        Glyphs("tests", root=fonts)
    with pytest.raises(ValueError, match="fonts"):
        Glyphs("train", root=tmp_path)


def characters(families):
    """Images of constant brightness: one per character of each family."""
    labels = torch.arange(len(CHARACTERS)).repeat(families)
    return glyphs.Data(torch.arange(len(labels)).float()[:, None, None, None].expand(-1, 1, 28, 28) / 1000, labels)


def test_a_sample_has_all_characters_of_random_families():
    data = characters(5)
    sample = data.sample(2, seed=0)
    assert sample.labels.tolist() == [*range(62)] * 2
    numbers = (1000 * sample.images[:, 0, 0, 0]).round().long().view(2, 62)
    assert (numbers == numbers[:, :1] + torch.arange(62)).all()
    drawn = {frozenset((1000 * data.sample(2, seed).images[::62, 0, 0, 0]).round().tolist()) for seed in range(20)}
    assert len(drawn) > 1
    assert all(len(each) == 2 for each in drawn)
    with pytest.raises(ValueError, match="needs 6 training families, but only 5 are installed"):
        data.sample(6, seed=0)


@pytest.mark.parametrize(("loss", "options"), [("ce", {"label_smoothing": 0.1}), ("focal", {"gamma": 1.0})])
def test_a_network_learns_and_depends_on_its_seed_alone(loss, options, one_thread):
    data = characters(1)
    data = glyphs.Data(torch.eye(784)[: len(data.labels)].view(-1, 1, 28, 28), data.labels)
    run = {"seed": 3, "loss": loss, "loss_opt": options, "lr": 0.01, "steps": 6}
    model, again, longer = (glyphs.train(data, {**run, "steps": steps}) for steps in (6, 6, 40))
    assert not model.training
    with torch.no_grad():
        scores = [each(data.images) for each in (model, again, longer)]
    assert torch.equal(scores[0], scores[1])
    errors = [F.cross_entropy(each, data.labels).item() for each in scores]
    assert errors[2] < errors[0] < 1.1 * math.log(62)


class Trained:
    """In place of training: metrics that follow from the options, up to a number of runs."""

    most, calls = 0, 0

    def __init__(self, minutes):
        assert minutes == 5
        self.train = self.validation = self.test = SimpleNamespace(labels=range(7))

    def __call__(self, run):
        if Trained.calls == Trained.most:
            raise TimeoutError("the limit is reached")
        Trained.calls += 1
        quality = 10 * (run["loss"] == "smooth_topk_svm") - abs(run["lr"] - RATES[1])
        quality -= abs(run["loss_opt"].get("tau", 0.3) - 0.3)
        return {"validation_top5": quality, "test_top5": quality + run["seed"], "test_top1": 0.0}


def test_the_command_tunes_on_validation_images_and_continues(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(glyphs, "Trained", Trained)
    output, runs = tmp_path / "glyphs.json", tmp_path / "runs.jsonl"
    arguments = ["glyphs", "--output", str(output), "--runs", str(runs), "--minutes", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    for most in (100, 10_000):
        monkeypatch.setattr(Trained, "most", most)
        assert glyphs.main() == 0
        assert ("the limit is reached" in capsys.readouterr().err) == (most == 100)
    flags = [json.loads(line)["flags"] for line in runs.read_text().splitlines()]
    assert Trained.calls == len(flags) == len({json.dumps(each) for each in flags})
    found = json.loads(output.read_text())
    assert found["images"] == {"train": 7, "validation": 7, "test": 7}
    rows = {(row["families"], row["noise"], row["loss"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 3 * (4 + 2 * 3 + 6 + 2)
    assert {row["rate"] for row in rows.values()} == {RATES[1]}
    for families, seeds in ((20, 4), (60, 8), (150, 4)):
        row = rows[families, "clean", "smooth_topk_svm, k=5, tau=0.3"]  # the best tau on validation images
        assert row["n"] == seeds
        assert row["test_top5"]["mean"] == pytest.approx(10 + (seeds - 1) / 2)
        assert row["test_top5"]["sd"] == pytest.approx(np.std(range(seeds), ddof=1), abs=1e-3)
        assert row["test_top5"]["minus ce"] == [10.0, 0.0]
    assert rows[60, "clean", "smooth_topk_svm, k=5, tau=0.1"]["test_top5"]["minus ce"] == [9.8, 0.0]
    assert "minus ce" not in rows[60, "clean", "ce"]["test_top5"]


TUNED = "smooth_topk_svm, k=5, tuned"
PAGE = {  # row of docs/reference/results.md: loss in glyphs.json, metric, number of families
    "Top-5: cross-entropy with label smoothing 0.1": ("ce, label_smoothing=0.1", "test_top5", 60),
    "Top-5: `smooth_topk_svm` with the default tau, 0.1": ("smooth_topk_svm, k=5, tau=0.1", "test_top5", 60),
    "Top-5: `smooth_topk_svm` with tuned tau": (TUNED, "test_top5", 60),
    "Top-1: `smooth_topk_svm` with tuned tau": (TUNED, "test_top1", 60),
    "Top-5: cross-entropy with 120 steps instead of 240": ("ce, 120 steps", "test_top5", 60),
    "Top-5: `generalised_cross_entropy` with q = 0.3": ("generalised_cross_entropy, q=0.3", "test_top5", 60),
    "Top-5 with 20 families: `smooth_topk_svm` with tuned tau": (TUNED, "test_top5", 20),
    "Top-5 with 150 families: `smooth_topk_svm` with tuned tau": (TUNED, "test_top5", 150),
    "Top-5: `smooth_topk_svm` with k = 2": ("smooth_topk_svm, k=2, tuned", "test_top5", 60),
    "Top-5: `smooth_topk_svm` with k = 3": ("smooth_topk_svm, k=3, tuned", "test_top5", 60),
    "Top-5: `topk_nll`": ("topk_nll, k=5", "test_top5", 60),
    "Top-5: `noised_topk`": ("noised_topk, k=5", "test_top5", 60),
    "Top-1: `noised_topk`": ("noised_topk, k=5", "test_top1", 60),
    "Top-5: `focal`": ("focal", "test_top5", 60),
    "Top-1: `generalised_cross_entropy` with q = 0.3": ("generalised_cross_entropy, q=0.3", "test_top1", 60),
}


@pytest.mark.parametrize("row", PAGE)
def test_the_results_page_states_the_stored_results(row):
    docs, (loss, metric, families) = Path(__file__).parents[2] / "docs", PAGE[row]
    stored = json.loads((docs / "results" / "glyphs.json").read_text())["rows"]
    cells = re.search(rf"^\| {re.escape(row)} \|(.*)\|$", (docs / "reference" / "results.md").read_text(), re.M)[1]
    for noise, cell in zip(("confusion", "clean", "uniform"), cells.split("|"), strict=True):
        name = loss.replace("tuned", "tau=1" if noise == "uniform" else "tau=0.1")
        (result,) = (r for r in stored if (r["families"], r["noise"], r["loss"]) == (families, noise, name))
        stated = [float(number) for number in re.findall(r"[-+]?\d+\.\d", cell)[:2]]
        assert stated == pytest.approx(result[metric]["minus ce"], abs=0.0501)
