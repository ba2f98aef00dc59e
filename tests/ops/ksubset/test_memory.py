"""The loss needs memory for a few copies of the logits, whatever k is."""

import pytest
import torch

import topk_registry as tr
from topk_studies.timing.contest import Case
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import step


@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 1), (256, 1000, 5), (256, 1000, 50), (32, 10000, 5)])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_forward_and_backward_peak_at_five_times_the_logits(B: int, n: int, k: int, tau: float) -> None:
    logits, target = Case(B, n, k).inputs()
    run = step(tr.create_loss("smooth_topk_svm", k=k, tau=tau), logits, target)
    assert peak_bytes(run) <= 5 * logits.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["numba", "torch"])
@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 5), (256, 1000, 20), (256, 1000, 50), (32, 10000, 5)])
def test_margins_of_every_class_and_their_gradient(impl: str, B: int, n: int, k: int) -> None:
    logits, _ = Case(B, n, k).inputs()
    run = step(lambda s, _: tr.topk_margins(s, k, impl=impl).sum(), logits, None)
    assert peak_bytes(run) <= 5 * logits.nbytes


@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 5), (256, 1000, 50)])
def test_a_distribution_over_labels(B: int, n: int, k: int) -> None:
    logits, target = Case(B, n, k).inputs()
    q = torch.nn.functional.one_hot(target, n).float()
    run = step(tr.create_loss("smooth_topk_svm", k=k), logits, q)
    assert peak_bytes(run) <= 5 * logits.nbytes
