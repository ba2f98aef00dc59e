"""Thresholds and sets of several labels in a file: what they are, what the file says of them, what is refused."""

import json

import numpy as np
import onnx
import pytest

from tests.export.several.channels import NAMES, exported, pictures
from topk_export import ModelFileError, Predictor, verify
from topk_export.calibration.label_report import label_report_page
from topk_export.calibration.label_run import calibrate_label_file
from topk_export.calibration.monitor import reference_of
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_registry.conformal import LabelCounts, best_f1, false_negative_control
from topk_registry.folders.errors import WrongLabelsError


@pytest.fixture(scope="module")
def outputs(calibrated_labels, held_out):
    predictor = Predictor(calibrated_labels[0], device="cpu")
    return predictor.run(predictor.preprocess(held_out.images))


def parts(count, seed=3):
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[: count // 2]), np.sort(order[count // 2 :])


def test_the_file_gives_what_the_functions_give(calibrated_labels, held_out, outputs):
    _, found = calibrated_labels
    report, rows = parts(400)
    p, targets = outputs["probabilities"], held_out.labels.astype(bool)
    sets, thresholds = false_negative_control(p[rows], targets[rows], 0.1), best_f1(p[rows], targets[rows])
    assert found.sets == sets
    np.testing.assert_array_equal(outputs["set"], sets(p))
    np.testing.assert_array_equal(outputs["labels"], thresholds(p))
    np.testing.assert_array_equal(outputs["set_size"], outputs["set"].sum(-1))
    assert (outputs["set"].dtype, outputs["labels"].dtype, outputs["set_size"].dtype) == (bool, bool, np.int64)
    counts = LabelCounts.of(outputs["set"][report], targets[report]).summary()
    assert {name: found.facts[f"report_{name}"] for name in counts} == pytest.approx(counts, abs=1e-6)
    metrics = pytest.importorskip("sklearn.metrics")
    present = targets[report].any(0)
    expected = metrics.average_precision_score(targets[report][:, present], p[report][:, present], average="macro")
    assert found.facts["report_map"] == pytest.approx(expected, abs=1e-6)


def test_the_file_says_what_it_promises(calibrated_labels):
    path, found = calibrated_labels
    metadata = Predictor(path, device="cpu").metadata
    assert metadata.sets == found.facts
    facts = metadata.sets
    assert (facts["rule"], facts["risk"], facts["alpha"]) == ("risk_control", "false_negative_rate", 0.1)
    assert (facts["samples"], facts["report_samples"]) == (200, 200)
    assert facts["guarantee"].startswith("the share of an image's labels that the set misses is at most 0.1 in exp")
    assert facts["threshold"] == found.sets.threshold
    assert facts["samples_without_labels"] == found.sets.without_labels > 0
    assert metadata.labels is not None
    assert metadata.labels["thresholds"] == found.thresholds.values.tolist()
    assert metadata.labels["without_labels"] == [NAMES.index("never")]
    assert metadata.labels["f1"][-1] is None
    assert set(metadata.outputs) == {"logits", "probabilities", "labels", "set", "set_size"}
    for prop in onnx.load(str(path)).metadata_props:
        json.loads(prop.value, parse_constant=pytest.fail)
    reference = reference_of(path)
    assert len(reference["size"]) == len(reference["probability"]) == 200


def test_it_is_verified(calibrated_labels):
    report = verify(calibrated_labels[0], device="cpu")
    assert report["passed"]
    names = [check["name"] for check in report["checks"]]
    for output in ("labels", "set"):
        assert f"{output}: where probabilities reach their thresholds (head alone, ties)" in names


def test_verification_sees_another_threshold(calibrated_labels, tmp_path):
    model = onnx.load(str(calibrated_labels[0]))
    (threshold,) = (tensor for tensor in model.graph.initializer if tensor.name == "sets/threshold")
    threshold.CopyFrom(onnx.numpy_helper.from_array(np.array([0.75], np.float32), threshold.name))
    onnx.save(model, str(tmp_path / "changed.onnx"))
    failed = [check["name"] for check in verify(tmp_path / "changed.onnx")["checks"] if check["passed"] is False]
    assert failed
    assert all(name.startswith("set: where probabilities reach their thresholds") for name in failed)


def test_it_is_calibrated_again(calibrated_labels, tmp_path, held_out):
    """The thresholds of the first calibration leave no trace."""
    again = calibrate_label_file(calibrated_labels[0], tmp_path / "b.onnx", held_out, alpha=0.3, seed=3, device="cpu")
    assert again.sets.threshold > calibrated_labels[1].sets.threshold
    assert verify(tmp_path / "b.onnx")["passed"]
    assert len(onnx.load(str(tmp_path / "b.onnx")).graph.output) == 5


def test_the_promise_holds_over_calibrations_of_the_file(calibrated_labels, outputs, held_out):
    """The mean rate over 300 splits of one pool is within alpha - 2 / (n + 1) and alpha, but for its error."""
    p, targets, rng = outputs["probabilities"], held_out.labels.astype(bool), np.random.default_rng(0)
    rates = []
    for _ in range(300):
        order = rng.permutation(400)
        sets = false_negative_control(p[order[:200]], targets[order[:200]], 0.1)
        rates.append(LabelCounts.of(sets(p[order[200:]]), targets[order[200:]]).summary()["false_negative_rate"])
    # splits of one pool: each is exchangeable, and their mean is that of an image and 200 others of this pool
    margin = 3.29 * np.std(rates) / np.sqrt(300)
    assert 0.1 - 2 / 201 - margin <= np.mean(rates) <= 0.1 + margin


def test_the_report(calibrated_labels):
    page = label_report_page(calibrated_labels[1])
    for heading in ("Missed labels", "Sizes", "Chosen labels", "By class", "Facts"):
        assert f"<h2>{heading}</h2>" in page
    assert "1 classes are the label of no calibration sample and have the threshold 0.5: never." in page
    assert page.count("<svg") == 1


def test_a_fixed_batch(tmp_path, held_out):
    path = exported(tmp_path, batch=3)
    found = calibrate_label_file(path, tmp_path / "b.onnx", held_out, alpha=0.2, device="cpu")
    predictor = Predictor(tmp_path / "b.onnx", device="cpu")
    out = predictor.run(predictor.preprocess(held_out.images[:7]))
    np.testing.assert_array_equal(out["set"], found.sets(out["probabilities"]))


def test_each_kind_of_labels_has_its_kind_of_file(several_file, export, held_out, tmp_path):
    one = replace_labels(held_out, np.zeros(400, np.int64))
    with pytest.raises(ModelFileError, match=r"expected a file with one label an image, .* gives several: it takes"):
        calibrate_file(several_file, tmp_path / "a.onnx", one, Plan(), device="cpu")
    with pytest.raises(ValueError, match=r"expected targets of 0 and 1 for each of the 7 classes .* \[N, 7\], got int"):
        calibrate_label_file(several_file, tmp_path / "a.onnx", one, device="cpu")
    with pytest.raises(ModelFileError, match=r"expected a file of several labels, .* gives one label an image"):
        calibrate_label_file(export(12, k=3), tmp_path / "a.onnx", held_out, device="cpu")
    with pytest.raises(ValueError, match=r"labels must be class indices \[N\], integer, got float32 \[400, 7\]"):
        calibrate_file(export(12, k=3), tmp_path / "a.onnx", held_out, Plan(), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_what_else_is_refused(several_file, held_out, tmp_path):
    soft = replace_labels(held_out, held_out.labels / 2)
    with pytest.raises(ValueError, match=r"expected targets of 0 and 1, made-up colours has 0\.5"):
        calibrate_label_file(several_file, tmp_path / "a.onnx", soft, device="cpu")
    with pytest.raises(ValueError, match=r"8 calibration samples are too few for alpha = 0\.1: it takes 9"):
        calibrate_label_file(several_file, tmp_path / "a.onnx", pictures(16), device="cpu")
    with pytest.raises(ValueError, match="calibration writes a new file"):
        calibrate_label_file(several_file, several_file, held_out, device="cpu")


def test_labels_of_other_images_look_wrong(several_file, held_out, tmp_path):
    moved = replace_labels(held_out, np.roll(held_out.labels, 1, 0))
    with pytest.raises(WrongLabelsError, match=r"larger probability of it than images without in [45].* of pairs"):
        calibrate_label_file(several_file, tmp_path / "a.onnx", moved, device="cpu")
    found = calibrate_label_file(several_file, tmp_path / "a.onnx", moved, device="cpu", force=True)
    assert 0.4 < found.facts["area_under_curve"] < 0.6
    right = calibrate_label_file(several_file, tmp_path / "b.onnx", held_out, device="cpu")
    metrics = pytest.importorskip("sklearn.metrics")
    predictor = Predictor(several_file, device="cpu")
    p = predictor.run(predictor.preprocess(held_out.images))["probabilities"][:, :-1]
    expected = metrics.roc_auc_score(held_out.labels[:, :-1], p, average="macro")
    assert right.facts["area_under_curve"] == pytest.approx(expected, abs=1e-6)


def replace_labels(samples, labels):
    return samples._replace(labels=labels)
