"""An exported file beside the checkpoint it came from: ``validate`` and ``compare`` read both on the same images."""

import json

import pytest

from topk_registry.cli.main import main
from topk_registry.train.checkpoint import LAST

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the exporter
DATA = ("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=4", "fine=3")


@pytest.fixture(params=["smooth_topk_svm", "log_taylor_softmax"])  # the second does not predict by softmax
def files(train, tmp_path, request):
    """A checkpoint with EMA weights, and its export."""
    run = train("--model-ema", "--model-ema-decay", "0.9", "--loss", request.param, "--epochs", "4")
    checkpoint, file = str(run.folder / LAST), str(tmp_path / "model.onnx")
    assert main(["export", checkpoint, file]) == 0
    return checkpoint, file


def test_the_file_has_the_accuracy_of_its_checkpoint(files, tmp_path, capsys):
    found = []
    for path in files:
        report = tmp_path / "report.json"
        assert main(["validate", path, *DATA, "-j", "0", "--device", "cpu", "--json", str(report)]) == 0
        found.append(json.loads(report.read_text()))
    checkpoint, file = found
    assert (checkpoint["weights"], file["weights"]) == ("EMA", "ONNX")
    for name in ("top1", "top5", "macro_top1", "macro_top5"):
        assert file[name] == pytest.approx(checkpoint[name]), name
    for name in ("nll", "ece"):
        assert file[name] == pytest.approx(checkpoint[name], rel=1e-4), name  # two float32 runtimes

    report = tmp_path / "compared.json"
    capsys.readouterr()
    assert main(["compare", *files, "-j", "0", "--resamples", "50", "--json", str(report)]) == 0
    assert "EMA weights" in capsys.readouterr().out
    (comparison,) = json.loads(report.read_text())["comparisons"]
    for difference in comparison["differences"]:
        assert difference["difference"] == pytest.approx(0, abs=1e-4)
        assert difference["gained"] in (0, None)
        assert difference["p"] in (1.0, None)


def test_a_folder_of_images_is_prepared_as_in_training(train, folder, tmp_path, capsys):
    """The crop of 0.8 and the file's own preprocessing: nothing but the file names them. Other files are counted."""
    (folder / "validation" / "red" / "more.webp").touch()
    flags = ("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "8", "-j", "0", "--device", "cpu")
    flags += ("--epochs", "3", "--warmup-epochs", "0", "--opt", "adamw", "--lr", "0.01", "--crop-pct", "0.8")
    run = train(folder, *flags, "--input-size", "3", "32", "32", "--interpolation", "bicubic", tiny=())
    assert run.status == 0, run.err
    file = str(tmp_path / "model.onnx")
    assert main(["export", str(run.folder / LAST), file]) == 0
    report = tmp_path / "report.json"
    capsys.readouterr()
    assert main(["validate", file, str(folder), "-j", "0", "--device", "cpu", "--json", str(report)]) == 0
    assert "skipped 1 .webp files" in capsys.readouterr().err
    assert (
        main(["compare", str(run.folder / LAST), file, "--data-dir", str(folder), "-j", "0", "--resamples", "50"]) == 0
    )
    assert "skipped 1 .webp files" in capsys.readouterr().out
    metrics = json.loads(report.read_text())
    assert metrics["images"] == 12
    assert metrics["top1"] == pytest.approx(float(run.summary[-1]["eval_top1"]))
    assert metrics["nll"] == pytest.approx(float(run.summary[-1]["eval_nll"]), rel=1e-4)
