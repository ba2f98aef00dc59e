"""Exports side by side, refusals that say why, and models whose own float32 loses digits."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.export.conftest import DATA, tiny
from topk_export import ExportError, export_onnx, verify
from topk_export.conversion.convert import plain
from topk_export.verification.checks import Known, check_runs
from topk_export.verification.verify import REPORT, SAMPLE, beside


@pytest.mark.slow
def test_two_exports_share_a_folder(tmp_path):
    first = export_onnx(tiny(6), tmp_path / "a.onnx", k=2, data_config=DATA)
    second = export_onnx(tiny(9), tmp_path / "b.onnx", k=3, data_config=DATA)
    kinds = ("onnx", "labels.txt", "preprocess.json", "report.json", "sample.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{name}.{kind}" for name in "ab" for kind in kinds)
    for path in (first, second):
        report = verify(path)
        assert report["passed"]
        assert any(check["name"].startswith("logits against torch") for check in report["checks"])


class Changing(nn.Module):
    """A classifier that answers otherwise in the exported graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x):
        scale = 1.5 if torch.compiler.is_exporting() else 1.0
        return scale * self.fc(x.mean((2, 3)))


@pytest.mark.slow
def test_a_refused_export_keeps_its_report_and_prints_the_numbers(tmp_path):
    with pytest.raises(ExportError, match=r"failed its verification") as caught:
        export_onnx(Changing(), tmp_path / "wrong.onnx", k=2, data_config=DATA)
    message = str(caught.value)
    assert "FAIL logits against torch in float64, batch 5" in message
    assert "(limit 1e-05)" in message
    report = json.loads((tmp_path / "wrong.refused.json").read_text())
    assert report["passed"] is False
    assert [p.name for p in tmp_path.iterdir()] == ["wrong.refused.json"]


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x):
        if torch.compiler.is_exporting():
            raise KeyError("the table of positions")
        return self.fc(x.mean((2, 3)))


@pytest.mark.slow
def test_a_failed_conversion_names_its_cause_without_codes_for_a_terminal(tmp_path):
    with pytest.raises(ExportError, match=r"cannot convert the model: .*the table of positions") as caught:
        export_onnx(Untraceable(), tmp_path, k=2, data_config=DATA)
    assert "\x1b" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_codes_for_a_terminal_are_removed():
    assert plain(ValueError("\x1b[31mFailed to \x1b[1;96mexport\x1b[0m.\nmore")) == "Failed to export."
    assert plain(ValueError()) == "ValueError"


class Cancelling(nn.Module):
    """A classifier whose float32 loses four digits: it takes the difference of two large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 6)

    def forward(self, x):
        large = self.fc(x.mean((2, 3)))
        return (large + 4096.0).sin() + (large * 1024).sin()


@pytest.mark.slow
def test_a_model_whose_own_float32_is_off_is_judged_against_float64(tmp_path):
    torch.manual_seed(0)
    path = export_onnx(Cancelling(), tmp_path, k=2, data_config=DATA)
    with np.load(beside(path, SAMPLE)) as sample:
        assert sample["torch_logits"].dtype == np.float64
        assert 1e-5 < sample["torch_error"] < 1e-2
    report = json.loads(beside(path, REPORT).read_text())
    (check,) = (c for c in report["checks"] if c["name"] == "logits against torch in float64, batch 5")
    assert check["tolerance"] > 1e-5


def test_errors_beyond_those_of_float32_are_refused(predictor):
    x = predictor.preprocess([np.full((40, 40, 3), 90, np.uint8)] * 5)
    logits = predictor.run(x)["logits"].astype(np.float64)

    def passed(known: Known) -> bool:
        checks = check_runs(predictor.session, predictor.metadata, x, known, layers=1)
        return all(check.passed for check in checks if check.name.startswith("logits"))

    off = logits * (1 + 1e-3)
    assert passed(Known(logits))
    assert not passed(Known(off))
    assert passed(Known(off, error=1e-3))


class Attention(nn.Module):
    """Attention over windows: five axes, as in nest and hiera, which torch.onnx refuses when it is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn, self.fc = True, nn.Linear(3, 6)

    def forward(self, x):
        q = x.flatten(2).transpose(1, 2).unflatten(1, (2, 2, -1))  # [B, 2, 2, pixels, 3]
        if self.fused_attn:
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        else:
            q = (q @ q.transpose(-1, -2) / 3**0.5).softmax(-1) @ q
        return self.fc(q.mean((1, 2, 3)))


@pytest.mark.slow
def test_fused_attention_is_switched_off_in_the_exported_copy_alone(tmp_path):
    model = Attention()
    assert export_onnx(model, tmp_path, k=2, data_config=DATA).is_file()
    assert model.fused_attn
