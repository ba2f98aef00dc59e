"""From ``timm train --task multilabel`` to a calibrated file: the commands, as a user types them."""

import csv
import json

import numpy as np
import pytest

from topk_export import Predictor, verify
from topk_registry.cli.main import main
from topk_registry.conformal import LabelCounts
from topk_registry.data.several import Several

SIZES = ("size=320", "things=6", "noise=0.5")
CALIBRATION = {"size": 160, "things": 6, "noise": 0.5}
TRAIN = ["train", "--task", "multilabel", "--dataset", "topk/several", "--dataset-opt", *SIZES, "--model",
         "topk_convnet", "--model-kwargs", "width=8", "-b", "16", "-j", "0", "--no-aug", "--device", "cpu", "--epochs",
         "8", "--opt", "adamw", "--lr", "0.01", "--warmup-epochs", "0", "--experiment", "several"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trip")
    assert main([*TRAIN, "--output", str(folder)]) == 0
    assert main(["export", str(folder / "several"), str(folder / "photos.onnx")]) == 0
    return folder


@pytest.fixture(scope="module")
def pictures(run):
    """The test split as files and a table of their labels."""
    data = Several("test", **CALIBRATION)
    folder = run / "pictures"
    folder.mkdir()
    with open(folder / "labels.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "labels"])
        for i in range(len(data)):
            image, target = data[i]
            image.save(folder / f"{i}.png")
            table.writerow([f"{i}.png", ";".join(data.classes[c] for c in np.flatnonzero(target))])
    return folder


@pytest.mark.slow
def test_the_file_of_a_run_knows_its_task_and_its_classes(run):
    metadata = Predictor(run / "photos.onnx", device="cpu").metadata
    assert (metadata.task, metadata.loss, metadata.k) == ("multilabel", "bce", 5)
    assert metadata.class_names == tuple(Several("train", size=1, things=6).classes)


@pytest.mark.slow
def test_it_is_calibrated_on_a_data_set(run, capsys):
    output = run / "a.onnx"
    options = [f"{name}={value}" for name, value in CALIBRATION.items()]
    argv = ["calibrate", str(run / "photos.onnx"), "-o", str(output), "--dataset", "topk/several", "--split", "test",
            "--dataset-opt", *options, "--alpha", "0.2", "--device", "cpu"]  # fmt: skip
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "160 images of topk/several test" in err
    assert "promised    the share of an image's labels that the set misses is at most 0.2 in expectation" in out
    for name in ("missed", "mean size", "mAP", "F1"):
        assert f"\n{name}  " in out
    assert verify(output)["passed"]
    facts = Predictor(output, device="cpu").metadata.sets
    assert f"missed      {facts['report_false_negative_rate']:.4f} (" in out
    assert f"mAP         {facts['report_map']:.4f}" in out
    page = output.with_suffix(".html").read_text()
    assert "<h2>Missed labels</h2>" in page


@pytest.mark.slow
def test_it_is_calibrated_on_a_table_of_labels(run, pictures, capsys):
    """The table gives what the data set gives, and the report what the file does on the images."""
    output = run / "b.onnx"
    argv = ["calibrate", str(run / "photos.onnx"), "-o", str(output), "--labels-csv", str(pictures / "labels.csv"),
            "--alpha", "0.2", "--device", "cpu", "--json"]  # fmt: skip
    assert main(argv) == 0
    facts = json.loads(capsys.readouterr().out)
    data = Several("test", **CALIBRATION)
    predictor = Predictor(output, device="cpu")
    out = predictor.run(predictor.preprocess([pictures / f"{i}.png" for i in range(len(data))]))
    report = np.sort(np.random.default_rng(0).permutation(160)[:80])
    counts = LabelCounts.of(out["set"][report], data.targets[report]).summary()
    assert facts["report_false_negative_rate"] == pytest.approx(counts["false_negative_rate"], abs=1e-6)
    assert facts["report_mean_size"] == pytest.approx(counts["mean_size"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-dir", "{}"], "the folders of --data-dir tell one: give --labels-csv FILE with a row for each image"),
        (["--dataset", "topk/ambiguous"], "one label"),
        (["--labels-csv", "{}/labels.csv", "--score", "lac"], "--score are of files with one: it takes --alpha"),
        (["--labels-csv", "{}/none.csv"], "none.csv"),
    ],
)
def test_what_does_not_fit_is_refused(run, pictures, capsys, flags, message):
    flags = [flag.format(pictures) for flag in flags]
    assert main(["calibrate", str(run / "photos.onnx"), "-o", str(run / "c.onnx"), "--device", "cpu", *flags]) == 1
    err = capsys.readouterr().err
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert message in err
    assert not (run / "c.onnx").exists()


def test_flags_of_several_labels_need_such_a_file(several_file, export, tmp_path, capsys):
    argv = ["calibrate", str(export(12, k=3)), "-o", str(tmp_path / "a.onnx"), "--labels-csv", "labels.csv"]
    assert main(argv) == 1
    assert "gives one label an image, and --labels-csv are of files with several" in capsys.readouterr().err


def test_a_file_of_one_label_takes_no_data_of_several(export, tmp_path, capsys):
    argv = ["calibrate", str(export(12, k=3)), "-o", str(tmp_path / "a.onnx"), "--dataset", "topk/several"]
    assert main([*argv, "--dataset-opt", "size=20"]) == 1
    assert "several labels" in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_with_sets(run, capsys):
    options = [f"{name}={value}" for name, value in CALIBRATION.items()]
    argv = ["validate", "--checkpoint", str(run / "several" / "model_best.pth.tar"), "--dataset-opt", *options,
            "--device", "cpu", "-j", "0", "--sets", "risk-control", "--alpha", "0.2"]  # fmt: skip
    assert main(argv) == 0
    out = capsys.readouterr().out
    found = json.loads(out.partition("--result\n")[2])
    assert 0 <= found["set_false_negative_rate_low"] <= found["set_false_negative_rate"] <= 40
    assert 0 < found["set_mean_size"] <= 6
    assert found["map"] > 0
    assert main([*argv, "--sets-opt", "k=3"]) == 2
    assert "--sets-opt is of scores, and --task multilabel has none: got k" in capsys.readouterr().err
