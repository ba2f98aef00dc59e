"""The spherical family against the paper's formulas, written out in plain Python, and its bound against softmax."""

import math

import pytest
import torch
from mpmath import coth, mp, mpf

from topk_plugins.spherical import LogSphericalSoftmax, LogTaylorSoftmax, SphericalBound, half_of_xi

LOSSES = [LogSphericalSoftmax, LogTaylorSoftmax, SphericalBound]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def log_softmax_loss(logits: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1)


def bouchard(o: list[float], c: int, alpha: float, xi: float) -> float:
    """The bound as Bouchard wrote it, for any alpha and xi: the sum of D bounds on log(1 + exp(o_i - alpha))."""
    lam = math.tanh(xi / 2) / (4 * xi)
    terms = ((x - alpha - xi) / 2 + lam * ((x - alpha) ** 2 - xi**2) + math.log1p(math.exp(xi)) for x in o)
    return alpha + sum(terms) - o[c]


def best_alpha(o: list[float], xi: float) -> float:
    lam = math.tanh(xi / 2) / (4 * xi)
    return ((len(o) / 2 - 1) / 2 + lam * sum(o)) / (len(o) * lam)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.01, 1.0, 1e3])
def test_the_bound_of_two_classes_in_closed_form(scale):
    """There xi is half the difference d of the scores, and the bound 2 log(2 cosh(d / 4)) + mean - s_y."""
    logits = (scale * randn(20, 2)).requires_grad_()
    label = torch.arange(20) % 2
    found = SphericalBound(reduction="none")(logits, label)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    d = (logits[:, 0] - logits[:, 1]).detach()
    most = d.abs() / 2 + 2 * torch.log1p(torch.exp(-d.abs() / 2))
    wanted = most + logits.detach().mean(-1) - logits.detach().gather(1, label[:, None])[:, 0]
    slope = torch.tanh(d / 4) / 2
    of_wanted = torch.stack((slope, -slope), 1) + 0.5 - torch.nn.functional.one_hot(label, 2)
    torch.testing.assert_close(found.detach(), wanted, rtol=2e-15, atol=8 * 2.2e-16 * max(scale, 1.0))
    # below 1e-4 xi stays there, where tanh(xi / 2) / xi is 1/2 less xi^2 / 24
    torch.testing.assert_close(gradient, of_wanted, rtol=1e-13, atol=1e-15 + 1e-9 * min(scale, 1e-4))


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("D", [3, 4, 30])
def test_bound_is_bouchards_at_its_lowest(D, scale):
    logits = scale * randn(4, D)
    got = SphericalBound(reduction="none")(logits, torch.zeros(4, dtype=torch.long))
    rms = logits.std(-1, unbiased=False)
    for value, o, xi in zip(got.tolist(), logits.tolist(), (2 * half_of_xi(rms, D)).tolist(), strict=True):
        assert value == pytest.approx(bouchard(o, 0, best_alpha(o, xi), xi), rel=1e-12)
        lowest = min(
            bouchard(o, 0, best_alpha(o, xi * factor) + shift, xi * factor)
            for factor in (0.5, 0.9, 0.999, 1.0, 1.001, 1.1, 2.0)
            for shift in (-1.0, -0.01, 0.0, 0.01, 1.0)
        )
        assert value <= lowest + 1e-12 * abs(lowest)


@pytest.mark.parametrize("D", [2, 5, 1000])
def test_second_derivatives_of_the_bound_at_equal_scores(D):
    def hessian(gap: float) -> torch.Tensor:
        logits = torch.tensor([[gap] + [0.0] * (D - 1)], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(SphericalBound()(logits, torch.tensor([0])), logits, create_graph=True)
        return torch.autograd.grad(gradient[0, 0], logits)[0]

    torch.testing.assert_close(hessian(0.0), hessian(1e-4), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("D", [2, 3, 1000, 100_000])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.3, 3.0, 30.0, 1000.0])
def test_bound_is_above_log_softmax(D, scale):
    logits = scale * randn(3, D)
    bound, exact = SphericalBound().per_class(logits), log_softmax_loss(logits)
    assert (bound >= exact - 1e-14 * (1 + logits.abs().max())).all()
    if scale == 0:  # at alpha = xi = log(D-1) the bound is alpha + D log(1 + 1/(D-1))
        gap = (D - 1) * math.log(D / (D - 1))
        torch.testing.assert_close(bound - exact, torch.full_like(exact, gap), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("D", [3, 10, 1000, 10**6])
@pytest.mark.parametrize("rms", [0.0, 1e-9, 1e-3, 0.1, 1.0, 30.0, 1e10, 1e100])
def test_optimal_xi_solves_its_equation(D, rms):
    xi = 2 * half_of_xi(torch.tensor([rms], dtype=torch.float64), D).item()
    assert xi >= math.log(D - 1) * (1 - 1e-15)
    with mp.workdps(60):
        rho, v = 1 - mpf(2) / D, mpf(rms) ** 2
        # one part in 10^10 to either side of the root, the left side is on either side of v
        left, right = (
            x**2 * (1 - (rho * coth(x / 2)) ** 2) for x in (xi * (1 - mpf("1e-10")), xi * (1 + mpf("1e-10")))
        )
    assert left < v < right


@pytest.mark.parametrize("D", [3, 1000, 10**6])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 10.0])
def test_bound_in_fp32(D, scale):
    wide = scale * randn(2, D)
    logits, target = wide.float(), torch.tensor([0, D - 1])
    loss = SphericalBound(reduction="none")
    got, wanted = loss(logits, target), loss(logits.double(), target)
    # below 1e-4 where the loss is of the size of log D; a few units in the last place where it is larger
    assert (got.double() - wanted).abs().max() < max(1e-4, 4 * 2**-23 * wanted.max().item())


@pytest.mark.parametrize("magnitude", [1e4, 1e10, 1e19])
@pytest.mark.parametrize("build", LOSSES)
def test_huge_logits_in_fp32(build, magnitude):
    logits = (magnitude * randn(3, 50)).float().requires_grad_()
    target = torch.tensor([0, 1, 2])
    loss = build(reduction="none")(logits, target)
    wide = logits.detach().double().requires_grad_()
    wanted = build(reduction="none")(wide, target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-5)
    (grad,), (wanted_grad,) = torch.autograd.grad(loss.sum(), logits), torch.autograd.grad(wanted.sum(), wide)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-5, atol=1e-6 * wanted_grad.abs().max().item())


@pytest.mark.parametrize(
    ("loss", "weigh"),
    [
        (LogSphericalSoftmax(epsilon=0.5), lambda o: o * o + 0.5),
        (LogTaylorSoftmax(), lambda o: 1 + o + o * o / 2),
        (SphericalBound(), torch.exp),
    ],
)
def test_probabilities(loss, weigh):
    logits = 2 * randn(5, 8)
    p = loss.predictive_logits(logits).softmax(-1)
    torch.testing.assert_close(p, weigh(logits) / weigh(logits).sum(-1, keepdim=True))
    if not isinstance(loss, SphericalBound):
        torch.testing.assert_close(loss.per_class(logits), -p.log())


def test_the_most_probable_class_is_not_the_largest_logit():
    logits = torch.tensor([[1.0, -4.0]])
    assert LogSphericalSoftmax().predictive_logits(logits).argmax().item() == 1
    assert LogTaylorSoftmax().predictive_logits(logits).argmax().item() == 1
    assert SphericalBound().predictive_logits(logits).argmax().item() == 0
