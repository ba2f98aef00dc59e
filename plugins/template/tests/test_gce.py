"""The conformance kit runs every check on the loss; what is particular to it is tested beside."""

import json

import pytest
import torch

from gce_loss import GeneralisedCrossEntropy
from topk_registry import create_loss, loss_info
from topk_registry.cli.main import main as topk_registry_main
from topk_registry.testing import parametrize_with_checks


@parametrize_with_checks([GeneralisedCrossEntropy])
def test_conformance(check):
    check()


def test_the_name_is_registered():
    assert loss_info("gce").distribution == "gce-loss"
    assert isinstance(create_loss("gce", q=0.5), GeneralisedCrossEntropy)


def test_small_q_is_cross_entropy():
    logits, target = torch.randn(8, 10, dtype=torch.float64), torch.arange(8)
    # (1 - p^q) / q = -log p - q (log p)^2 / 2 + ..., and -log p stays below 20 here
    torch.testing.assert_close(
        GeneralisedCrossEntropy(q=1e-6)(logits, target), torch.nn.CrossEntropyLoss()(logits, target), atol=2e-4, rtol=0
    )


def test_q_one_is_the_absolute_error():
    logits, target = torch.randn(8, 10, dtype=torch.float64), torch.arange(8)
    error = (logits.softmax(-1) - torch.nn.functional.one_hot(target, 10)).abs().sum(-1)
    torch.testing.assert_close(GeneralisedCrossEntropy(q=1.0)(logits, target), error.mean() / 2)


@pytest.mark.parametrize("q", [0.0, -1.0, 1.5])
def test_q_out_of_range(q):
    with pytest.raises(ValueError, match="q must be in"):
        GeneralisedCrossEntropy(q=q)


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
    # a run of two epochs and its continuation are logged into one file
    tiny = ["--dataset-opt", "size=48", "superclasses=4", "fine=3", "-b", "16", "--epochs", "2", "--device", "cpu"]
    argv = ["train", *tiny, "--logger", "json-lines", "--output", str(tmp_path), "--experiment", "run"]
    assert topk_registry_main(argv) == 0
    assert topk_registry_main([*argv, "--epochs", "3", "--resume", str(tmp_path / "run" / "last.pth.tar")]) == 0
    lines = map(json.loads, (tmp_path / "run" / "measurements.jsonl").read_text().splitlines())
    assert [line["update"] for line in lines if "train_loss" in line] == [3, 6, 9]
