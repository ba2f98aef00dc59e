"""Smooth top-k SVM and top-k likelihood: against exact values, their limits, and what bad options are told."""

import argparse

import mpmath
import pytest
import torch
from torch.nn import functional as F

from tests import oracles
from topk_plugins._sizes import mixture_nll
from topk_registry import create_loss
from topk_registry.cli import ParseOptions


def logits_and_labels(rows=4, n=20, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=g).to(dtype), torch.randint(n, (rows,), generator=g)


@pytest.mark.parametrize("tau", [0.01, 5.0])
@pytest.mark.parametrize(("k", "alpha"), [(1, 1.0), (5, 0.3), (19, 1.0)])
def test_is_the_exact_loss(k, alpha, tau):
    s, y = logits_and_labels()
    s.requires_grad_()
    loss = create_loss("smooth_topk_svm", k=k, tau=tau, alpha=alpha, reduction="none")(s, y)
    loss.sum().backward()
    for row, label, found, gradient in zip(s.tolist(), y.tolist(), loss.tolist(), s.grad, strict=True):
        exact, slope = oracles.mp_smooth_svm(row, label, k, tau, alpha)
        assert found == pytest.approx(exact, rel=1e-6, abs=1e-30)
        slope = torch.tensor(slope, dtype=torch.float64)
        assert (gradient - slope).abs().max() <= 2e-6 * slope.abs().max()


@pytest.mark.parametrize("dense", [False, True])
def test_double_precision_keeps_its_digits(dense):
    """At every size of the violation, up to where the softplus is linear to rounding and beyond."""
    s, y = logits_and_labels(rows=1, n=8, dtype=torch.float64)
    for drop in range(0, 120, 5):  # in units of tau: losses of e^-20 tau to 100 tau
        s[0, y] = s[0].max() + 2 * (20 - drop) * 0.1
        target = F.one_hot(y, 8).double() if dense else y
        exact, _ = oracles.mp_smooth_svm(s[0].tolist(), int(y), 2, 0.1, 0.0)
        found = create_loss("topk_nll", k=2, tau=0.1)(s, target).item()
        assert found == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("tau", [1e-20, 1e-36, 1e-300])
def test_small_tau_is_the_hard_loss(tau):
    s, y = logits_and_labels(rows=32, n=50)
    s = 3 * s
    for dense in (False, True):
        target = F.one_hot(y, 50).float() if dense else y
        losses = []
        for name, options in (("smooth_topk_svm", {"tau": tau}), ("topk_svm", {})):
            x = s.clone().requires_grad_()
            loss = create_loss(name, k=5, **options)(x, target)
            loss.backward()
            losses.append((loss.detach(), x.grad))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)


def test_a_margin_for_each_class():
    s, y = logits_and_labels(dtype=torch.float64)
    alpha = torch.linspace(0, 2, 20, dtype=torch.float64)
    found = create_loss("smooth_topk_svm", alpha=alpha.tolist(), reduction="none")(s, y)
    one_hot = create_loss("smooth_topk_svm", alpha=alpha, reduction="none")(s, F.one_hot(y, 20).double())
    for i in range(len(y)):
        alone = create_loss("smooth_topk_svm", alpha=alpha[y[i]].item())(s[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(found[i], alone, rtol=1e-6, atol=0)  # alpha is held in single precision
        torch.testing.assert_close(one_hot[i], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["smooth_topk_svm", "topk_nll"])
def test_a_masked_class_without_mass_leaves_the_gradient_alone(name):
    s = torch.tensor([[1.0, 2.0, 0.0, -torch.inf, 0.5]])
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]])
    kept = torch.tensor([0, 1, 2, 4])
    loss = create_loss(name, k=[1, 2], combine="likelihood")
    found, wanted = s.clone().requires_grad_(), s[:, kept].clone().requires_grad_()
    value, of_kept = loss(found, q), loss(wanted, q[:, kept])
    torch.testing.assert_close(value, of_kept)
    value.backward()
    of_kept.backward()
    torch.testing.assert_close(found.grad[:, kept], wanted.grad)
    assert found.grad[0, 3] == 0


SEVERAL = [([1, 5], None), ([5, 1, 13], [0.5, 0.2, 0.3])]


@pytest.mark.parametrize(("k", "k_weights"), SEVERAL)
@pytest.mark.parametrize("dense", [False, True])
def test_several_k_as_a_mean_of_losses(k, k_weights, dense):
    s, y = logits_and_labels(dtype=torch.float64)
    target = torch.softmax(s.roll(1, 0), -1) if dense else y
    shares = k_weights or [1 / len(k)] * len(k)
    options = {"tau": 0.5, "alpha": 0.3, "weight": torch.linspace(0.5, 2, 20).tolist()}
    found = create_loss("smooth_topk_svm", k=k, k_weights=k_weights, **options)(s, target)
    alone = [create_loss("smooth_topk_svm", k=one, **options)(s, target) for one in k]
    torch.testing.assert_close(found, sum(w * loss for w, loss in zip(shares, alone, strict=True)))


@pytest.mark.parametrize(("k", "k_weights"), SEVERAL)
@pytest.mark.parametrize("alpha", [0.0, 0.75])
@pytest.mark.parametrize("lead", [-30.0, 25.0])
def test_several_k_as_one_likelihood_are_exact(k, k_weights, alpha, lead):
    """Against 60 digits, from labels far behind to those for which pi rounds to 1."""
    n, tau = 20, 0.5
    s, y = logits_and_labels(rows=2, n=n, dtype=torch.float64)
    s[torch.arange(2), y] += lead
    shares = k_weights or [1 / len(k)] * len(k)
    found = create_loss(
        "smooth_topk_svm", k=k, k_weights=k_weights, combine="likelihood", tau=tau, alpha=alpha, reduction="none"
    )(s, y)
    for row, label, loss in zip(s.tolist(), y.tolist(), found.tolist(), strict=True):
        terms = []
        for one, share in zip(k, shares, strict=True):
            theta_over_k = max(k) * tau / one  # the tau with which one k alone has the common temperature
            hinge, _ = oracles.mp_smooth_svm(row, label, one, theta_over_k, alpha * max(k) / one)
            terms.append((share, mpmath.mpf(hinge) / theta_over_k))
        with mpmath.workdps(60):
            total = mpmath.fsum(mpmath.mpf(share) * mpmath.expm1(-a) for share, a in terms)
            wanted = float(-tau * mpmath.log1p(total))
        assert loss == pytest.approx(wanted, rel=1e-10)


def test_several_k_as_one_likelihood_is_the_papers_formula():
    """-log sum_j P_j pi_y^(j), with the marginals by brute force, for labels and for distributions."""
    s, y = logits_and_labels(n=9, dtype=torch.float64)
    x = s / 3
    pi = {k: torch.tensor([oracles.subset_log_odds(row, k) for row in x.tolist()]).double().sigmoid() for k in (1, 3)}
    table = -(0.4 * pi[1] + 0.6 * pi[3]).log()
    loss = create_loss("topk_nll", k=[1, 3], k_weights=[2, 3], combine="likelihood", reduction="none")
    torch.testing.assert_close(loss(s, y), table.gather(1, y[:, None])[:, 0])
    q = torch.softmax(s.roll(1, 0), -1)
    torch.testing.assert_close(loss(s, q), (q * table).sum(-1))


@pytest.mark.parametrize("combine", ["mean", "likelihood"])
def test_one_of_several_k_is_that_k_alone(combine):
    s, y = logits_and_labels(dtype=torch.float64)
    alone = create_loss("topk_nll", k=5, tau=0.3)(s, y)
    for k, k_weights in (([5], None), ([1, 5], [0.0, 2.0])):
        assert torch.equal(create_loss("topk_nll", k=k, k_weights=k_weights, combine=combine, tau=0.3)(s, y), alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": []}, "k must be an integer or a list of different integers, got \\[\\]"),
        ({"k": [1, 0]}, "k must be an integer of at least 1, got 0"),
        ({"k": [5, 5]}, "k must be an integer or a list of different integers, got \\[5, 5\\]"),
        ({"k": [1, 5], "k_weights": [1.0]}, "number for each value of k = \\[1, 5\\]"),
        ({"k": [1, 5], "k_weights": [0.0, 0.0]}, "not only zeros, got \\[0.0, 0.0\\]"),
        ({"k": [1, 5], "combine": "sum"}, "combine must be one of 'mean', 'likelihood', got 'sum'"),
    ],
)
def test_bad_options_of_several_k(options, message):
    with pytest.raises(ValueError, match=message):
        create_loss("topk_nll", **options)


def test_several_k_from_the_command_line():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss-opt", nargs="*", action=ParseOptions)
    options = parser.parse_args(["--loss-opt", "k=[1,5]", "k_weights=[.5,.5]", "combine=likelihood"]).loss_opt
    assert "k=[1, 5], tau=1.0, k_weights=[0.5, 0.5], combine='likelihood'" in repr(create_loss("topk_nll", **options))


def test_the_smallest_loss_of_a_mixture_keeps_its_digits():
    losses = torch.tensor([1e-12, 3e-12], dtype=torch.float64)
    assert mixture_nll(losses, [0.5, 0.5]).item() == pytest.approx(2e-12, rel=1e-9)
    assert mixture_nll(torch.tensor([torch.inf, torch.inf]), [0.5, 0.5]) == torch.inf
    assert mixture_nll(torch.tensor([torch.inf, 0.0]), [0.5, 0.5]).item() == pytest.approx(0.6931472)
