"""LDR-KL and ALDR-KL: against the authors' iteration, exact sums, and cross-entropy."""

import math

import mpmath
import pytest
import torch
from torch.nn import functional as F

from topk_registry import create_loss

N = 7


def scores(rows: int = 8, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def differences(s: torch.Tensor, y: torch.Tensor, gap: float) -> torch.Tensor:
    return s - s.gather(1, y[:, None]) + gap * (1 - F.one_hot(y, N).to(s.dtype))


def robust(z: torch.Tensor, lam: torch.Tensor | float) -> torch.Tensor:
    """lambda log mean exp(z / lambda) over the last dimension."""
    lam = torch.as_tensor(lam, dtype=z.dtype)
    return lam * ((z / lam[..., None]).logsumexp(-1) - math.log(z.shape[-1]))


LABELS = torch.arange(8) % N


def test_far_from_the_label_and_at_it():
    """Where p rounds to 1 or to 0, in value and gradient, by the compiled and the plain form."""
    s = torch.tensor([[60.0, 0.0, -5.0], [-60.0, 0.0, -5.0]], dtype=torch.float64)
    loss = create_loss("ldr_kl", gap=0.0, reduction="none")
    wanted = F.cross_entropy(s, torch.zeros(2, dtype=torch.int64), reduction="none") - math.log(3)
    torch.testing.assert_close(loss(s, torch.zeros(2, dtype=torch.int64)), wanted, rtol=1e-12, atol=0)


def adapted(z: torch.Tensor, lam_0: float, alpha: float, steps: int = 400) -> torch.Tensor:
    """The authors' update, as often as it takes: lambda_0 - lambda_0 KL(softmax(z / lambda) || u) / (alpha log n)."""
    lam, n = torch.full_like(z[:, 0], lam_0), z.shape[1]
    for _ in range(steps):
        p = torch.softmax(z / lam[:, None], -1)
        lam = lam_0 - lam_0 * (p * (n * p).log()).sum(-1) / (alpha * math.log(n))
    return lam


@pytest.mark.parametrize("alpha", [1.2, 2.0, 8.0])
@pytest.mark.parametrize("lam_0", [0.5, 2.0])
def test_adapts_as_the_authors_code_does(alpha, lam_0):
    s = scores(scale=1.0)
    z = differences(s, LABELS, 1.3)
    lam = adapted(z, lam_0, alpha)
    wanted = robust(z, lam) - alpha * math.log(N) / (2 * lam_0) * (lam - lam_0) ** 2
    loss = create_loss("aldr_kl", temperature=lam_0, alpha=alpha, gap=1.3, reduction="none")
    for target in (LABELS, F.one_hot(LABELS, N).float()):
        torch.testing.assert_close(loss(s, target), wanted, rtol=1e-9, atol=1e-9)
    assert (lam >= lam_0 * (1 - 1 / alpha)).all()


def exact_ldr(s: list[float], q: list[float], lam: float, gap: float) -> mpmath.mpf:
    """The expectation over labels of lambda log mean exp(z / lambda)."""

    def at(y: int) -> mpmath.mpf:
        z = [mpmath.mpf(x) - s[y] + (gap if i != y else 0) for i, x in enumerate(s)]
        return lam * mpmath.log(mpmath.fsum(mpmath.exp(x / lam) for x in z) / len(z))

    return mpmath.fsum(mpmath.mpf(share) * at(y) for y, share in enumerate(q) if share)


def exact_aldr(s: list[float], q: list[float], lam_0: float, gap: float, alpha: float = 2.0) -> mpmath.mpf:
    """Equation 1 at the fixed point of equation 2, as often as it takes; q adds up to 1."""
    own = mpmath.fsum(mpmath.mpf(share) * x for share, x in zip(q, s, strict=True) if share)
    z = [mpmath.mpf(x) - own + gap * (1 - mpmath.mpf(share)) for share, x in zip(q, s, strict=True)]
    lam = mpmath.mpf(lam_0)
    before = mpmath.inf
    log_n = mpmath.log(len(z))
    while abs(lam - before) > mpmath.mpf(10) ** -30 * lam_0:
        e = [mpmath.exp((x - max(z)) / lam) for x in z]
        p = [x / mpmath.fsum(e) for x in e]
        divergence = mpmath.fsum(x * mpmath.log(x) for x in p) + log_n
        before, lam = lam, lam_0 * (1 - divergence / (alpha * log_n))
    most = lam * mpmath.log(mpmath.fsum(mpmath.exp(x / lam) for x in z) / len(z))
    return most - alpha * log_n / (2 * lam_0) * (lam - lam_0) ** 2


@pytest.mark.parametrize("temperature", [0.5, 10.0, 11.0, 1e4, 1e20])
@pytest.mark.parametrize(("name", "exact"), [("ldr_kl", exact_ldr), ("aldr_kl", exact_aldr)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_warm_losses_keep_their_digits(name, exact, temperature, dtype):
    """Towards a large temperature the loss is the mean of z, whatever the digits of log n."""
    s, hot = scores(3).to(dtype), F.one_hot(LABELS[:3], N).to(dtype)
    soft = torch.tensor([[1, 2, 0, 1, 3, 1, 0], [0, 4, 0, 0, 4, 0, 0], [2, 1, 1, 1, 1, 1, 1]], dtype=dtype) / 8
    loss = create_loss(name, temperature=temperature, gap=1.5, reduction="none")
    # a few roundings of the largest difference, and up to 10 those of log n times the temperature
    size = float(s.amax() - s.amin()) + 1.5 + (temperature * math.log(N) if temperature <= 10 else 0.0)
    tolerance = 8 * torch.finfo(dtype).eps * size
    with mpmath.workdps(50):
        for target, q in ((LABELS[:3], hot), (hot, hot), (soft, soft)):
            wanted = [
                float(exact(row, share, temperature, 1.5)) for row, share in zip(s.tolist(), q.tolist(), strict=True)
            ]
            found = loss(s, target).double()
            assert (found - torch.tensor(wanted, dtype=torch.float64)).abs().max() <= tolerance
        table = loss.per_class(s).double()
        torch.testing.assert_close(
            table.gather(1, LABELS[:3, None])[:, 0], loss(s, hot).double(), rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("temperature", [1.0, 1e4])
@pytest.mark.parametrize("name", ["ldr_kl", "aldr_kl"])
def test_classes_that_are_ruled_out(name, temperature):
    """They cost nothing without mass, and all with some; neither the loss nor a gradient is NaN."""
    s = torch.tensor([[1.0, -torch.inf, 0.5], [0.0, 2.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1])
    plain = create_loss(name, temperature=temperature, reduction="none")
    smoothed = create_loss(name, temperature=temperature, label_smoothing=0.1, reduction="none")
    far = torch.where(s.isinf(), -1e6, s.detach())  # below all others, and finite
    finite = plain(s, y)
    if temperature == 1.0:
        torch.testing.assert_close(finite.detach(), plain(far, y))
    assert finite.isfinite().all()
    assert torch.equal(smoothed(s, y), torch.full((2,), torch.inf, dtype=torch.float64))
    assert torch.equal(plain(s, torch.ones_like(y))[0], torch.tensor(torch.inf, dtype=torch.float64))
    for value in (finite, smoothed(s, y), smoothed(s, F.one_hot(y, 3).double())):
        (gradient,) = torch.autograd.grad(value.sum(), s)
        assert gradient.isfinite().all()
        assert not gradient.sum(-1).abs().max() > 1e-12


FOLD = 0.6983545476579197  # times the scores of one row: there the temperature jumps, as found by bisection


def test_where_the_temperature_jumps():
    """Two solutions meet and vanish: the largest is then another one far below, and the loss all but jumps, too.

    The authors' update never passes the largest solution, however slowly it comes near it.
    """
    s = torch.randn(300, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[276]
    away = torch.tensor([-0.1, -1e-3, -1e-6, 1e-6, 1e-3, 0.1], dtype=torch.float64)
    s, label = (FOLD + away[:, None]) * s, torch.zeros(6, dtype=torch.int64)
    z = s - s[:, :1] + (torch.arange(20) > 0)
    lam = adapted(z, 1.0, 1.2, steps=20000)
    assert lam[2] - lam[3] > 0.2
    wanted = robust(z, lam) - 0.6 * math.log(20) * (lam - 1.0) ** 2
    loss = create_loss("aldr_kl", alpha=1.2, reduction="none")
    torch.testing.assert_close(loss(s, label), wanted, rtol=1e-9, atol=1e-9)
    far = away.abs() > 1e-4  # single precision moves the scores by 1e-7 of themselves, and the jump with them
    torch.testing.assert_close(loss(s.float(), label)[far], wanted[far].float(), rtol=1e-5, atol=1e-5)
