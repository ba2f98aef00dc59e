"""The published algorithms against brute force over subsets and against exact losses and gradients."""

from itertools import combinations
from math import prod

import numpy as np
import pytest
import torch

from tests.oracles import mp_smooth_svm
from topk_studies.baselines import ALGORITHMS, LINEAR, LOG, LogSigmas, divide_and_conquer, smooth_topk_svm, summation

EXACT_GRADIENT = [name for name in ALGORITHMS if name != "algorithm 2"]
EPS = torch.finfo(torch.float64).eps


def scores(n: int, scale: float = 1.0, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * scale


def exact(s: torch.Tensor, y: torch.Tensor, k: int, tau: float) -> tuple[float, np.ndarray]:
    rows = [mp_smooth_svm(row.tolist(), int(label), k, tau, 1.0) for row, label in zip(s, y, strict=True)]
    return float(np.mean([loss for loss, _ in rows])), np.array([gradient for _, gradient in rows]) / len(rows)


def published(s: torch.Tensor, y: torch.Tensor, k: int, tau: float, algorithm: str) -> tuple[float, np.ndarray]:
    s = s.clone().requires_grad_()
    loss = smooth_topk_svm(s, y, k=k, tau=tau, algorithm=algorithm)
    loss.backward()
    return loss.item(), s.grad.numpy()


@pytest.mark.parametrize("expand", [summation, divide_and_conquer])
@pytest.mark.parametrize("semiring", [LOG, LINEAR], ids=["log", "linear"])
@pytest.mark.parametrize("n", [2, 7, 8, 11])
def test_sigma_equals_the_sum_over_subsets(expand, semiring, n: int) -> None:
    x = scores(n)
    for k in range(1, n + 1):
        found = expand(x, k, semiring=semiring)
        subsets = [[sum(map(prod, combinations(row, j))) for row in x.exp().tolist()] for j in range(k + 1)]
        np.testing.assert_allclose(found, np.log(subsets), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("algorithm", EXACT_GRADIENT)
@pytest.mark.parametrize(("n", "k", "tau"), [(9, 1, 1.0), (9, 2, 0.1), (9, 8, 1.0), (100, 5, 0.1), (150, 20, 1.0)])
def test_loss_and_gradient_are_exact_through_autograd(algorithm: str, n: int, k: int, tau: float) -> None:
    s, y = scores(n), torch.tensor([0, n - 1])
    loss, gradient = published(s, y, k, tau, algorithm)
    wanted_loss, wanted_gradient = exact(s, y, k, tau)
    assert loss == pytest.approx(wanted_loss, rel=1e-13)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-13 * abs(wanted_gradient).max())


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize(("n", "k", "tau"), [(9, 1, 1.0), (100, 5, 1.0), (100, 5, 0.1), (150, 20, 1.0)])
def test_algorithm_2_stays_within_its_approximation(n: int, k: int, tau: float, scale: float) -> None:
    s, y, p = scores(n, scale), torch.tensor([0, n - 1]), 1 + k // 5
    loss, gradient = published(s, y, k, tau, "algorithm 2")
    wanted_loss, wanted_gradient = exact(s, y, k, tau)
    assert loss == pytest.approx(wanted_loss, rel=1e-13)
    # where recursion and series meet each is off by eps^(p/(p+1)), up to the constants of p + 1 terms
    tolerance = 10 * (p + 1) * (10 * EPS) ** (p / (p + 1))
    np.testing.assert_allclose(gradient, wanted_gradient, atol=tolerance * abs(wanted_gradient).max())


def test_the_series_rescues_a_class_that_outweighs_the_rest() -> None:
    x = scores(50)
    x[:, 7] += 60.0  # e_7 is 1e26 times the others: the recursion alone has no digit left
    leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.stack(LogSigmas.apply(leaf, 5, 2)).sum().backward()
    summation(twin, 5)[4:].sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad, rtol=0, atol=1e-9)


def test_linear_space_overflows_where_log_space_holds() -> None:
    s, y = torch.full((2, 1000), 30.0), torch.tensor([0, 1])
    assert published(s, y, 5, 0.1, "divide and conquer")[0] == pytest.approx(exact(s, y, 5, 0.1)[0], rel=1e-4)
    assert not np.isfinite(published(s, y, 5, 0.1, "divide and conquer in linear space")[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_single_precision_is_kept(algorithm: str) -> None:
    s, y = scores(40).float(), torch.tensor([3, 4])
    loss, gradient = published(s, y, 5, 1.0, algorithm)
    wanted_loss, wanted_gradient = exact(s, y, 5, 1.0)
    assert gradient.dtype == np.float32
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-3 * abs(wanted_gradient).max())
