"""``topk-registry check``: a table for people and a status for scripts."""

import pytest

from topk_registry import ClassificationLoss, register_loss, registry
from topk_registry.cli import main as cli
from topk_registry.testing import CHECKS


class Scaled(ClassificationLoss):
    """Cross-entropy times a factor that may have the wrong sign."""

    def __init__(self, *, scale: float = 1.0, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.scale = scale

    def per_class(self, logits):
        return self.scale * (logits.logsumexp(-1, keepdim=True) - logits)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry.losses, "_registered", {})
    monkeypatch.delitem(CHECKS, "compiles")  # takes most of the time, and tests/plugins/test_contract.py runs it
    register_loss("scaled")(Scaled)


def test_a_conforming_loss(capsys):
    assert cli.main(["check", "scaled", "--loss-opt", "scale=2.0", "--num-classes", "7"]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["returns_differentiable_scalar", "passed"]
    assert "weights_scale_rows                    skipped   takes no option weight" in lines
    assert {line.split()[1] for line in lines} == {"passed", "skipped"}
    assert summary == f"{sum(' passed' in x for x in lines)} passed, {sum(' skipped' in x for x in lines)} skipped"


def test_failures_give_status_1_and_say_what_came(capsys):
    assert cli.main(["check", "scaled", "--loss-opt", "scale=-1.0"]) == 1
    out = capsys.readouterr().out
    assert "prefers_the_label                     failed    expected less loss with the label first (-" in out
    assert f"at {__file__}:" in out
    assert "1 failed" in out.splitlines()[-1]


def test_expected_failures_are_no_failures_and_must_fail(capsys):
    assert cli.main(["check", "scaled", "--loss-opt", "scale=-1", "--expect", "prefers_the_label"]) == 0
    assert "prefers_the_label                     expected" in capsys.readouterr().out
    assert cli.main(["check", "scaled", "--expect", "prefers_the_label"]) == 1
    assert "but passes: remove it from the list" in capsys.readouterr().out


def test_unknown_names_and_options(capsys):
    assert cli.main(["check", "scalde"]) == 2
    assert "scaled" in capsys.readouterr().err
    assert cli.main(["check", "scaled", "--loss-opt", "size=3"]) == 2
    assert "loss 'scaled' takes no option 'size' (it takes scale, reduction)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["check", "scaled", "--loss-opt", "scale"])
    assert "--loss-opt takes key=value, got 'scale'" in capsys.readouterr().err
    assert cli.main(["check", "scaled", "--expect", "nothing"]) == 2
    assert "names no check nothing" in capsys.readouterr().err


def test_context_need_not_be_given_and_other_options_must(capsys):
    register_loss("counted")(lambda class_counts, *, scale: Scaled(scale=scale))
    assert cli.main(["check", "counted"]) == 2
    assert "loss 'counted' needs scale (it takes class_counts, scale)" in capsys.readouterr().err
    assert cli.main(["check", "counted", "--loss-opt", "scale=1.0"]) != 2
