"""LDR-KL and ALDR-KL: against the maximum that defines them, the authors' iteration, and cross-entropy."""

import math

import pytest
import torch
from torch.nn import functional as F

from topk_registry import backend, create_loss

N = 7


def scores(rows: int = 8, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def differences(s: torch.Tensor, y: torch.Tensor, gap: float) -> torch.Tensor:
    return s - s.gather(1, y[:, None]) + gap * (1 - F.one_hot(y, N))


def robust(z: torch.Tensor, lam: torch.Tensor | float) -> torch.Tensor:
    """lambda log mean exp(z / lambda) over the last dimension."""
    lam = torch.as_tensor(lam, dtype=z.dtype)
    return lam * ((z / lam[..., None]).logsumexp(-1) - math.log(z.shape[-1]))


LABELS = torch.arange(8) % N


@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("gap", [0.0, 1.5])
def test_is_the_papers_formula(temperature, gap):
    s = scores()
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        loss = create_loss("ldr_kl", temperature=temperature, gap=gap, reduction="none")
        wanted = robust(differences(s, LABELS, gap), temperature)
        torch.testing.assert_close(loss(s.to(dtype), LABELS).double(), wanted, rtol=rtol, atol=rtol)


def test_is_the_worst_case_over_distributions():
    """max_p p z - lambda KL(p || uniform): no distribution gives more, softmax(z / lambda) gives as much."""
    s = scores(1)
    z, loss = differences(s, LABELS[:1], 1.0)[0], create_loss("ldr_kl", temperature=0.7)(s, LABELS[:1])
    g = torch.Generator().manual_seed(1)
    candidates = torch.softmax(4 * torch.randn(2000, N, dtype=torch.float64, generator=g), -1)
    best = torch.softmax(z / 0.7, -1)
    for p in (candidates, best[None]):
        value = p @ z - 0.7 * ((p * p.log()).sum(-1) + math.log(N))
        assert value.max() <= loss + 1e-12
    torch.testing.assert_close(value[0], loss)


def test_cross_entropy_and_the_hinge_are_special_cases():
    s = scores()
    plain = create_loss("ldr_kl", gap=0.0)(s, LABELS)
    torch.testing.assert_close(plain, F.cross_entropy(s, LABELS) - math.log(N))
    hinge = differences(s, LABELS, 1.0).amax(-1).mean()
    torch.testing.assert_close(create_loss("ldr_kl", temperature=1e-9)(s, LABELS), hinge, rtol=1e-7, atol=1e-7)


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
    z = differences(s, LABELS, 1.0)
    lam = adapted(z, lam_0, alpha)
    wanted = robust(z, lam) - alpha * math.log(N) / (2 * lam_0) * (lam - lam_0) ** 2
    found = create_loss("aldr_kl", temperature=lam_0, alpha=alpha, reduction="none")(s, LABELS)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert (lam >= lam_0 * (1 - 1 / alpha)).all()


def test_the_temperature_is_the_best_one_nearby():
    """A scan over lambda finds no more around it, from the largest stationary point to lambda_0."""
    s = scores(scale=1.0)
    z = differences(s, LABELS, 1.0)
    lam = adapted(z, 1.0, 2.0)
    grid = lam + (1.0 - lam) * torch.linspace(0, 1, 500, dtype=torch.float64)[:, None]
    values = torch.stack([robust(z, row) - math.log(N) * (row - 1.0) ** 2 for row in grid])
    found = create_loss("aldr_kl", reduction="none")(s, LABELS)
    torch.testing.assert_close(values.amax(0), found)


def test_without_adaptation_it_is_ldr():
    s = scores()
    found = create_loss("aldr_kl", alpha=1e9, temperature=0.5)(s, LABELS)
    torch.testing.assert_close(found, create_loss("ldr_kl", temperature=0.5)(s, LABELS), rtol=1e-7, atol=1e-7)


def test_soft_targets_of_aldr():
    s, q = scores(), torch.softmax(scores().flip(0), -1)
    z = s - (q * s).sum(-1, keepdim=True) + 1 - q
    lam = adapted(z, 1.0, 3.0)
    wanted = robust(z, lam) - 3.0 * math.log(N) / 2 * (lam - 1.0) ** 2
    torch.testing.assert_close(create_loss("aldr_kl", alpha=3.0, reduction="none")(s, q), wanted, rtol=1e-8, atol=1e-8)
    table = create_loss("aldr_kl", alpha=3.0).per_class(s)
    found = create_loss("aldr_kl", alpha=3.0, reduction="none")(s, LABELS)
    torch.testing.assert_close(table.gather(1, LABELS[:, None])[:, 0], found)


@pytest.mark.parametrize("name", ["ldr_kl", "aldr_kl"])
def test_derivatives(name):
    s = scores(4, scale=1.0).requires_grad_()
    loss = create_loss(name, temperature=1.5)
    assert torch.autograd.gradcheck(lambda s: loss(s, LABELS[:4]), s)
    assert torch.autograd.gradgradcheck(lambda s: loss(s, LABELS[:4]), s)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ldr_kl", {"temperature": 0}, "temperature must be positive and finite, got 0"),
        ("ldr_kl", {"gap": -1}, "gap must be finite and at least 0, got -1"),
        ("aldr_kl", {"alpha": 1.0}, "alpha must be finite and above 1, got 1.0"),
        ("aldr_kl", {"temperature": math.inf}, "temperature must be positive and finite, got inf"),
        ("aldr_kl", {"gap": math.nan}, "gap must be finite and at least 0, got nan"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_loss(name, **options)


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
    for name in ("torch", "numba"):
        with backend(name):
            torch.testing.assert_close(loss(s, label), wanted, rtol=1e-9, atol=1e-9)
            far = away.abs() > 1e-4  # single precision moves the scores by 1e-7 of themselves, and the jump with them
            torch.testing.assert_close(loss(s.float(), label)[far], wanted[far].float(), rtol=1e-5, atol=1e-5)


def test_kernel_and_definition_take_the_same_solution():
    g = torch.Generator().manual_seed(0)
    s = torch.randn(3000, 20, dtype=torch.float64, generator=g)
    s *= 8 * torch.rand(3000, 1, dtype=torch.float64, generator=g)
    label = torch.randint(20, (3000,), generator=g)
    loss = create_loss("aldr_kl", alpha=1.2, reduction="none")
    with backend("torch"):
        wanted = loss(s, label)
    torch.testing.assert_close(loss(s, label), wanted, rtol=1e-9, atol=1e-9)
