"""Number of Python functions of the project, and of their files, in a warm call of a loss with class indices."""

import sys
from pathlib import Path

import pytest
import torch

import topk_plugins
import topk_registry
from tests import needs
from topk_registry import ClassificationLoss, Masses, create_loss

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (topk_registry, topk_plugins))
LABELS = torch.tensor([0, 5, 3, 7])


def calls_of(loss) -> list[tuple[str, str]]:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss(logits, LABELS).backward()
    calls = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS):
            calls.append((code.co_filename, code.co_name))

    sys.setprofile(profile)
    try:
        value = loss(logits, LABELS)
        value.backward()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(("name", "functions", "files"), [("smooth_topk_svm", 22, 7), ("focal", 14, 4)])
def test_a_warm_call_stays_below_its_limit(name, functions, files):
    needs.package("numba")
    calls = calls_of(create_loss(name))
    assert len(calls) <= functions, [f"{Path(file).name}: {function}" for file, function in calls]
    assert len({file for file, _ in calls}) <= files


class Weighted(ClassificationLoss):
    """The negative score of each label, by an operator for all rows."""

    def losses_of(self, logits, masses):
        assert isinstance(masses, Masses)
        return -(masses.table(logits.shape[1], logits.dtype) * logits).sum(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_an_override_of_losses_of_takes_every_target(smoothing):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    even = torch.full((4, 9), smoothing / 9, dtype=torch.float64)
    q = even.scatter_add(1, LABELS[:, None], torch.full((4, 1), 1 - smoothing, dtype=torch.float64))
    expected = -(q * logits).sum() / 4
    torch.testing.assert_close(Weighted(label_smoothing=smoothing)(logits, LABELS), expected)
    torch.testing.assert_close(Weighted()(logits, q), expected)
