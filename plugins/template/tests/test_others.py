"""The other plug-ins, each by the check that the registry has for its kind."""

import json

import pytest
import torch

from gce_loss.column import Lead
from gce_loss.dataset import Stripes
from gce_loss.logger import JsonLines
from gce_loss.score import Gap
from topk_export import check_column, check_score_nodes
from topk_registry.cli.main import main as topk_registry_main
from topk_registry.oldsets import calibrate
from topk_registry.testing import check_dataset, check_score
from topk_registry.train import check_logger


def test_the_data_set():
    check_dataset(Stripes, options={"size": 64})
    assert topk_registry_main(["check-dataset", "gce_stripes", "--dataset-opt", "size=64"]) == 0


def test_classes_are_directions():
    data = Stripes(size=8, directions=4, noise=0.0)
    assert data.classes == ["0 degrees", "45 degrees", "90 degrees", "135 degrees"]
    upright, flat = data[0][0].convert("L"), data[2][0].convert("L")  # one row, one column of pixels
    assert len(set(upright.crop((0, 0, 1, 32)).tobytes())) == 1
    assert len(set(flat.crop((0, 0, 32, 1)).tobytes())) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [({"split": "test"}, "split must be one of train, validation"), ({"size": 0}, "at least 1 image")],
)
def test_the_data_set_refuses(options, said):
    with pytest.raises(ValueError, match=said):
        Stripes(**options)


def test_the_command(capsys):
    # the command line finds it by its entry point, and it has a line in --help
    assert topk_registry_main(["gce-weights", "--q", "0", "1"]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["p", "q=0", "q=1"]
    assert [[float(cell) for cell in row] for row in rows] == [[p, 1.0, p] for p in (0.01, 0.1, 0.5, 0.9)]
    assert topk_registry_main(["--help"]) == 0
    assert "gce-weights Print how strongly" in " ".join(capsys.readouterr().out.split())


def test_the_command_refuses_a_negative_q(capsys):
    with pytest.raises(SystemExit, match="2"):
        topk_registry_main(["gce-weights", "--q", "-1"])
    assert "must be at least 0, got -1" in capsys.readouterr().err


def test_the_logger(tmp_path):
    check_logger(JsonLines, tmp_path)
    lines = map(json.loads, (tmp_path / "measurements.jsonl").read_text().splitlines())
    assert [line["update"] for line in lines if "train_loss" in line] == [10, 20, 30]


def test_the_score():
    check_score("gce_gap")
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0]]).repeat(20, 1)
    sets = calibrate(logits, torch.tensor([0, 2]).repeat(20), alpha=0.1, score=Gap())
    assert sets(logits[:2]).tolist() == [[True, False, False], [False, True, True]]


def test_the_score_in_a_file():
    check_score_nodes("gce_gap")


def test_the_column():
    check_column(Lead)


def test_a_run_with_all_of_them(tmp_path):
    options = ["size=48", "directions=4"]
    argv = ["train", "--dataset", "topk/gce_stripes", "--dataset-opt", *options, "--loss", "gce_kernel"]
    argv += ["--model", "resnet10t", "--img-size", "64", "-b", "16", "-j", "0", "--epochs", "2", "--device", "cpu"]
    argv += ["--logger", "gce-json-lines", "--output", str(tmp_path), "--experiment", "run"]
    assert topk_registry_main(argv) == 0
    assert topk_registry_main([*argv, "--epochs", "3", "--resume", str(tmp_path / "run" / "last.pth.tar")]) == 0
    lines = map(json.loads, (tmp_path / "run" / "measurements.jsonl").read_text().splitlines())
    assert [line["update"] for line in lines if "train_loss" in line] == [3, 6, 9]
