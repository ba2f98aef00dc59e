"""A calibrated file is served, its log is watched, and a change of the images is found."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.export.colours import COLOURS
from tests.export.serve.service import Service, predict
from topk_export import Predictor
from topk_export.calibration.monitor import read_log, reference_of, watch
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.runtime.weights import digest_of
from topk_export.samples import open_folder
from topk_registry.cli.main import main


@pytest.fixture(scope="module")
def calibrated(colours_file, held_out, tmp_path_factory):
    output = tmp_path_factory.mktemp("calibrated") / "model.onnx"
    calibrate_file(colours_file, output, open_folder(held_out, tuple(COLOURS)), Plan("lac"), device="cpu")
    return output


@pytest.fixture
def monitor(capsys, tmp_path):
    def run(log, *flags):
        capsys.readouterr()
        status = main(["monitor", str(log), *map(str, flags)])
        return status, capsys.readouterr()

    return run


def entries(probabilities, sizes):
    return [
        {"time": f"t{i}", "probability": p, "size": s}
        for i, (p, s) in enumerate(zip(probabilities, sizes, strict=True))
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_the_service_logs_what_the_monitor_reads(calibrated, held_out, tmp_path):
    log = tmp_path / "answers.jsonl"
    images = sorted(held_out.rglob("*.png"))[:5]
    with Service(calibrated, tmp_path / "service.log", "--log", str(log)) as service:
        answers = [predict(service.port, image.read_bytes())[1] for image in images]
    rows = read_log(log)
    predictor = Predictor(calibrated, device="cpu")
    expected = predictor(images)
    assert [row["size"] for row in rows] == [prediction.set_size for prediction in expected]
    assert [len(answer["set"]) for answer in answers] == [prediction.set_size for prediction in expected]
    for row, prediction in zip(rows, expected, strict=True):
        assert row["probability"] == pytest.approx(prediction.top[0].softmax, rel=1e-5)
        assert row["class"] == prediction.top[0].index


def test_the_images_of_the_calibration_raise_no_alarm_and_others_do(calibrated, held_out, tmp_path, monitor):
    predictor = Predictor(calibrated, device="cpu")
    rng = np.random.default_rng(1)
    same = predictor([path for i, path in enumerate(rng.permutation(sorted(held_out.rglob("*.png")))) if i < 150])
    mixed = predictor([noise(rng) for _ in range(150)])
    rows = entries([p.top[0].softmax for p in same], [p.set_size for p in same])
    log = write(tmp_path / "log", rows)
    status, printed = monitor(log, "--model", calibrated, "--report", tmp_path / "monitor.html")
    assert status == 0
    assert printed.out == "no change found in 150 predictions, at level 0.01, over all looks together\n"
    assert "<svg" in (tmp_path / "monitor.html").read_text()
    rows += entries([p.top[0].softmax for p in mixed], [p.set_size for p in mixed])
    status, printed = monitor(write(log, rows), "--model", calibrated, "--json")
    assert status == 3
    found = json.loads(printed.out)
    assert found["rejected"]
    assert min(at for at in found["rejected_at"].values() if at is not None) >= 150
    status, printed = monitor(log)  # within the log alone
    assert status == 3
    assert "the images have changed" in printed.out


def noise(rng):
    """An image between all colours."""
    data = io.BytesIO()
    Image.fromarray(rng.integers(90, 166, (8, 10, 3), np.uint8)).save(data, "png")
    return data.getvalue()


def test_the_level_is_shared_by_the_tests():
    rng = np.random.default_rng(0)
    reference = {"probability": rng.random(300), "size": rng.integers(1, 5, 300)}
    false = 0
    for seed in range(60):
        rows = entries(rng.random(200), rng.integers(1, 5, 200).tolist())
        false += watch(rows, reference, level=0.05, seed=seed).rejected
    # a level of 0.05 and four standard deviations of 60 draws
    assert false <= 60 * 0.05 + 4 * (60 * 0.05 * 0.95) ** 0.5


def test_the_reference_is_in_the_file(calibrated):
    reference = reference_of(calibrated)
    assert len(reference["probability"]) == len(reference["size"]) == 180
    assert 0 < min(reference["probability"]) <= max(reference["probability"]) <= 1


def test_logs_that_cannot_be_read_are_told(monitor, tmp_path, colours_file):
    for text, message in (
        ("hello\n", "line 1 is no line of"),
        ('{"size": 1}\n', "line 1 is no line of"),
        ("", "the log is empty"),
    ):
        (tmp_path / "log").write_text(text)
        status, printed = monitor(tmp_path / "log")
        assert status == 1
        assert message in printed.err
    good = write(tmp_path / "log", entries([0.5] * 3, [1, 1, 2]))
    with good.open("a") as file:
        file.write('{"time": "now", "si')  # a line that is being written
    assert monitor(good)[0] == 0
    status, printed = monitor(good, "--model", colours_file)
    assert status == 1
    assert "was not calibrated" in printed.err
    assert monitor(tmp_path / "none")[0] == 1
    with pytest.raises(ValueError, match="level, the probability of a false alarm, must be above 0 and below 1, got 2"):
        watch(entries([0.5] * 3, [1, 1, 2]), {}, level=2)


@pytest.mark.slow
def test_predictions_of_another_model_are_left_out(calibrated, monitor, tmp_path):
    digest = digest_of(calibrated)
    rows = entries([0.9] * 6, [1] * 6)
    for row, sha256 in zip(rows, [digest, "another", digest, "another", "another"], strict=False):
        row["sha256"] = sha256  # the last one is of a service that did not tell it
    status, (out, err) = monitor(write(tmp_path / "log", rows), "--model", calibrated, "--json")
    assert (status, json.loads(out)["predictions"]) == (0, 3)
    assert err == "left out 3 of 6 predictions: another model made them\n"
