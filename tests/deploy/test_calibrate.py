"""Calibrated files: sets equal to NumPy's, coverage at five levels, wrong labels, and what the file states."""

import json
import shutil
from bisect import bisect

import numpy as np
import onnx
import pytest

from tests.deploy.files import NAMES, as_image, class_folders, labeled_colors, write_file
from tests.system_calls import Calls
from topk_export import ImageError, ModelFileError, Predictor
from topk_export.calibrate import Images, calibrate_file, open_folder, too_low
from topk_export.commands.calibrate import main
from topk_export.graph import head_model, without_nodes
from topk_export.nodes import PREFIX, THRESHOLDS, add_sets
from topk_export.runtime.session import open_session
from topk_registry.conformal import PredictionSets, Score, SetCounts, binomial_interval, log_probabilities, order_of
from topk_registry.errors import FolderError

PAIRS = [("lac", "marginal"), ("lac", "per-class"), ("aps", "per-class"), ("raps", "marginal")]
LEVELS = (0.02, 0.05, 0.1, 0.2, 0.3)


def batch_of(pixels):
    """The model's input for images of one color."""
    return np.broadcast_to((pixels / np.float32(255))[:, :, None, None], (*pixels.shape, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def fresh():
    pixels, labels = labeled_colors(20_000, seed=7)
    return batch_of(pixels), labels


@pytest.mark.parametrize(("score", "rule"), PAIRS)
def test_sets_of_the_file_equal_those_of_numpy(calibrated, fresh, score, rule):
    path, done = calibrated(score, rule)
    predictor, x, sets = Predictor(path, device="cpu", threads=1), fresh[0][:3000], done.sets
    assert (sets.rule, sets.score.name) == (rule, score)
    outputs = predictor.run(x)
    for alpha in (None, 0.005, 0.0737, 0.1, 0.5):
        out = predictor.run(x, alpha=alpha)
        expected = sets(out["logits"], alpha=alpha)
        differ = out["set"] != expected
        gap = sets.score(log_probabilities(out["logits"].astype(float), sets.temperature)) - sets.thresholds(alpha)
        assert np.abs(gap[differ]).max(initial=0) <= 1e-6  # only rounding moves a score across a threshold
        assert differ.mean() <= 1e-3
        np.testing.assert_array_equal(out["set_size"], out["set"].sum(-1))
        allowed = np.arange(len(NAMES)) % 3 > 0
        restricted = predictor.run(x, alpha=alpha, allowed=allowed)
        listed = out["set"] & allowed
        listed[np.arange(len(x)), np.where(allowed, out["logits"], -np.inf).argmax(-1)] = True
        np.testing.assert_array_equal(restricted["set"], listed)
        np.testing.assert_array_equal(restricted["logits"], outputs["logits"])
    assert outputs["set"][np.arange(len(x)), outputs["logits"].argmax(-1)].all()


@pytest.mark.parametrize(("score", "rule"), PAIRS)
def test_one_file_covers_at_five_levels(calibrated, fresh, score, rule):
    """Coverage on fresh images is as its Beta law says, on both sides unless the best class covers more.

    With one threshold per class it holds within a class list too, for each class on it.
    """
    path, done = calibrated(score, rule)
    predictor, (x, labels) = Predictor(path, device="cpu", threads=1), fresh
    accuracy = (predictor.run(x)["logits"].argmax(-1) == labels).mean()
    groups = [labels >= 0] if rule == "marginal" else [labels == y for y in range(len(NAMES))]
    counts = [done.facts["samples"]] if rule == "marginal" else done.calibration_counts
    listed = np.arange(len(NAMES)) % 2 == 0 if rule == "per-class" else np.ones(len(NAMES), bool)
    for alpha in LEVELS:
        inside = predictor.run(x, alpha=alpha, allowed=listed)["set"]
        for group, count in zip(groups, counts, strict=True):
            hit = inside[np.flatnonzero(group & listed[labels]), labels[group & listed[labels]]]
            if not len(hit):
                continue
            a = order_of(int(count), alpha)
            b = int(count) + 1 - a
            deviation = np.sqrt(a * b / (a + b) ** 2 / (a + b + 1) + alpha * (1 - alpha) / len(hit))
            assert hit.mean() >= a / (a + b) - 4 * deviation
            if rule == "marginal" and score == "lac" and accuracy < 1 - alpha:
                assert hit.mean() <= a / (a + b) + 4 * deviation


def test_alpha_per_row_and_outside_of_the_levels(predictor, fresh):
    x = fresh[0][:3]
    session = predictor.session
    feed = {"input": x, "alpha": np.array([0.004, 0.1, 0.6], np.float32)}
    sets, sizes = session.run(["set", "set_size"], feed)
    assert sets[0].all()
    assert sets[2].all()
    np.testing.assert_array_equal(sets[1], predictor.run(x)["set"][1])
    np.testing.assert_array_equal(sizes, sets.sum(-1))
    assert session.run(["set"], {"input": x, "alpha": np.array([np.nan], np.float32)})[0].all()
    for alpha in (0.004, 0.51):
        with pytest.raises(ValueError, match="alpha"):
            predictor.run(x, alpha=alpha)


def test_a_row_that_is_not_a_number_gets_all_classes(predictor, fresh):
    x = fresh[0][:2].copy()
    x[0, 0] = np.nan
    out = predictor.run(x)
    assert out["set"][0].all()
    assert out["set_size"].tolist()[0] == len(NAMES)
    np.testing.assert_array_equal(out["set"][1], predictor.run(x[1:])["set"][0])


def test_calibrating_again_replaces_the_nodes(calibrated):
    path, _ = calibrated("aps")
    model = onnx.load(path)
    bare = without_nodes(model, PREFIX)
    assert {o.name for o in bare.graph.output} == {"logits", "marginals", "probabilities"}
    assert not [node for node in bare.graph.node if node.name.startswith(PREFIX)]
    assert [value.name for value in bare.graph.input] == ["input", "allowed"]
    assert not {"set_alphas", THRESHOLDS, "alpha"} & {tensor.name for tensor in bare.graph.initializer}
    again = add_sets(model, PredictionSets(Score("aps"), (0.1,), np.zeros((1, 1))))
    onnx.checker.check_model(again, full_check=True)


def test_changed_thresholds_are_found(set_file, tmp_path):
    """As quantization changes them."""
    model = onnx.load(set_file)
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == THRESHOLDS)
    table = onnx.numpy_helper.to_array(tensor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(table * np.float32(0.5), THRESHOLDS))
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(ModelFileError, match="then calibrate it"):
        Predictor(tmp_path / "changed.onnx", device="cpu")


def test_a_file_without_class_lists_can_be_calibrated(tmp_path):
    pixels, labels = labeled_colors(300)
    data = Images("colors", [as_image(color) for color in pixels], labels)
    source = write_file(tmp_path / "bare.onnx", lists=False)
    calibrate_file(source, tmp_path / "sets.onnx", data, device="cpu")
    assert Predictor(tmp_path / "sets.onnx", device="cpu").run(batch_of(pixels[:5]))["set"].any(-1).all()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("data") / "photos", 600)


@pytest.mark.parametrize(("score", "rule"), [("lac", "marginal"), ("raps", "per-class")])
def test_the_command_reports_coverage_with_its_interval(plain_file, folders, tmp_path, capsys, score, rule):
    output, report = tmp_path / "out.onnx", tmp_path / "report.json"
    flags = ["--data-dir", str(folders), "-o", str(output), "--json", str(report), "--score", score, "--rule", rule]
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        assert main([str(plain_file), *flags, "--alpha", "0.15", "--device", "cpu"]) == 0
    calls.check_written(report)
    calls.check_written(output)
    out, facts = capsys.readouterr().out, json.loads(report.read_text())
    written = Predictor(output, device="cpu").metadata.sets
    assert {key: facts[key] for key in written} == written
    assert (facts["alpha"], facts["rule"], facts["score"], facts["forced"]) == (0.15, rule, score, "")
    assert 0.15 in facts["alphas"]
    assert [facts[key] for key in ("temperature_samples", "samples", "report_samples")] == [120, 240, 240]
    covered = sum(entry["covered"] for entry in facts["classes"])
    assert facts["coverage"] == pytest.approx(covered / facts["report_samples"], abs=1e-6)
    assert facts["coverage_interval"] == pytest.approx(binomial_interval(covered, facts["report_samples"]), abs=1e-6)
    assert f"{facts['coverage']:.4f}" in out
    assert ("every class in the list" in facts["guarantee_lists"]) == (rule == "per-class")
    assert "0.85" in facts["guarantee"]
    assert str(folders.parent) not in output.read_bytes().decode("latin-1")
    assert facts["data"] == "photos"


def test_the_report_is_that_of_the_images(plain_file, folders, tmp_path):
    data, _ = open_folder(folders, NAMES)
    more = Images("photos", [*[b"broken"] * 50, *data.images], np.append([0] * 50, data.labels))
    with pytest.warns(UserWarning, match="skipped images: 50 of 650 images cannot be read, such as: the image is not"):
        done = calibrate_file(plain_file, tmp_path / "sets.onnx", more, device="cpu", report_share=0.4)
    predictor = Predictor(tmp_path / "sets.onnx", device="cpu")
    order = np.random.default_rng(0).permutation(600)[120 + 288 :]
    inside = predictor.run(predictor.preprocess([data.images[i] for i in order]))["set"]
    counts = SetCounts.of(inside, data.labels[order])
    assert counts.summary() == done.counts.summary()
    assert done.facts["top1"] > 0.7  # the labels still match the images
    broken = Images("photos", [b"broken"] * 3 + data.images[:2], data.labels[:5])
    with pytest.raises(ImageError, match="3 of 5 images cannot be read"):
        calibrate_file(plain_file, tmp_path / "none.onnx", broken, device="cpu")


@pytest.mark.parametrize(("samples", "total"), [(99, 99), (500, 5000), (5000, 500)])
def test_a_warning_of_low_coverage_is_rarely_false(samples, total):
    order = order_of(samples, 0.1)
    coverage = np.random.default_rng(0).beta(order, samples + 1 - order, 20_000)
    limit = bisect(range(total), False, key=lambda hits: not too_low(hits, total, samples, 0.1)) - 1
    drawn = np.random.default_rng(1).binomial(total, coverage)
    assert (drawn <= limit).mean() <= 0.012  # 3 standard deviations of the simulation above 0.01
    assert (drawn <= limit + 0.02 * total).mean() > 0.01


def test_splits_and_the_sets_that_the_input_had(set_file, folders, tmp_path, capsys):
    """The folder of the split is read; calibrating again reports the coverage of the old sets on the new images.

    Images of training, or of the choice of the model, are read only if they are named.
    """
    class_folders(tmp_path / "data" / "train", 30, seed=9)
    with pytest.raises(FolderError, match="none does not exist"):
        open_folder(tmp_path / "none", NAMES)
    for split, word in ((None, "--split NAME"), ("nosuch", "'nosuch'")):
        with pytest.raises(FolderError, match=word):
            open_folder(tmp_path / "data", NAMES, split=split)
    assert len(open_folder(tmp_path / "data", NAMES, split="training")[0].labels) == 30
    shutil.copytree(folders, tmp_path / "data" / "calibration")
    output, report = tmp_path / "again.onnx", tmp_path / "report.json"
    flags = ["--data-dir", str(tmp_path / "data"), "-o", str(output), "--json", str(report), "--device", "cpu"]
    assert main([str(set_file), *flags]) == 0
    facts = json.loads(report.read_text())
    assert [facts[key] for key in ("temperature_samples", "samples", "report_samples")] == [120, 240, 240]
    data, _ = open_folder(folders, NAMES)
    old = Predictor(set_file, device="cpu")
    counts = SetCounts.of(old.run(old.preprocess(data.images))["set"], data.labels)
    assert facts["earlier"] == counts.summary()
    assert f"{counts.summary()['coverage']:.4f}" in capsys.readouterr().out


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    class_folders(tmp_path, 30, names=("train", *NAMES[1:]))
    assert len(open_folder(tmp_path, ("train", *NAMES[1:]))[0].labels) == 30


@pytest.fixture
def swapped(folders, tmp_path):
    """Class folders of which two have changed their names."""
    copy = tmp_path / "swapped"
    shutil.copytree(folders, copy)
    (copy / "red").rename(copy / "x")
    (copy / "blue").rename(copy / "red")
    (copy / "x").rename(copy / "blue")
    return copy


def test_swapped_folders_stop_calibration_and_are_named(plain_file, swapped, tmp_path, capsys):
    output = tmp_path / "out.onnx"
    flags = [str(plain_file), "--data-dir", str(swapped), "-o", str(output), "--device", "cpu"]
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert "'red'" in error
    assert "'blue'" in error
    assert not output.exists()
    assert main([*flags, "--force"]) == 0
    assert "FORCED" in capsys.readouterr().out
    facts = Predictor(output, device="cpu").metadata.sets
    assert "'red'" in facts["forced"]
    assert facts["guarantee"].startswith("none")
    assert facts["guarantee_lists"] == "none"


def test_one_folder_with_images_of_another_class_is_a_note(plain_file, folders, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(folders, copy)
    shutil.rmtree(copy / "red")
    shutil.copytree(copy / "blue", copy / "red")
    assert main([str(plain_file), "--data-dir", str(copy), "-o", str(tmp_path / "out.onnx"), "--device", "cpu"]) == 0
    assert "note        images of these folders are mostly predicted as another class: 'red' as 'blue'" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"alpha": 0.001}, "too few"), ({"rule": "clustered"}, "per-class"), ({"report_share": 0.0}, "report")],
)
def test_wrong_arguments_are_errors(plain_file, folders, tmp_path, change, message):
    data, _ = open_folder(folders, NAMES)
    with pytest.raises(ValueError, match=message):
        calibrate_file(plain_file, tmp_path / "out.onnx", data, device="cpu", **change)
    assert list(tmp_path.iterdir()) == []


def test_the_input_is_not_overwritten(plain_file, folders):
    data, _ = open_folder(folders, NAMES)
    with pytest.raises(ValueError, match="another file"):
        calibrate_file(plain_file, plain_file, data, device="cpu")


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_the_best_class_of_a_list_is_in_the_set_although_its_probability_is_0(calibrated, score):
    """In single precision, a softmax rounds to 0 from 104 below the largest logit."""
    head = head_model(onnx.load(str(calibrated(score)[0])))
    session = open_session(head.SerializeToString(), device="cpu")
    n = len(NAMES)
    logits = np.float32([[300.0, 0.0, 150.0, 100.0, *[-np.inf] * (n - 4)]])
    for listed, best in (([1, 2, 3], 2), ([1, 3], 3), ([1, 5], 1), ([5, 6], 5)):
        allowed = np.isin(np.arange(n), listed)[None]
        (inside,) = session.run(["set"], {"logits": logits, "allowed": allowed})
        assert np.flatnonzero(inside).tolist() == [best]
