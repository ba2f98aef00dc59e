"""The perturbed kernels on the CPU: their noise number by number, the hinge over masses, transforms."""

import pytest
import torch

from tests.ops.perturbed.noise import noise
from tests.ops.perturbed.quadrature import expected_kth
from tests.oracles import perturbed_kth
from topk_registry.functional import perturbed_hinge, perturbed_topk
from topk_registry.ops.backend import use_backend
from topk_registry.ops.masses import LabelMixture, Masses
from topk_registry.ops.perturbed import cpu

INF, NAN = float("inf"), float("nan")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS = {
    "gaussian": randn(3, 300),
    "many": randn(60, 120, seed=7),  # one draw in a hundred is repeated
    "short": randn(4, 9, seed=1),
    "tied": randn(3, 70, seed=2).round(),
    "one leader": torch.cat([randn(3, 99, seed=3), torch.full((3, 1), 50.0)], 1),
    "wide": randn(3, 2000, seed=4) * 1e3,
    "masked": randn(3, 200, seed=5).masked_fill(randn(3, 200, seed=6) > 0, -INF),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("k", "epsilon"), [(1, 1.0), (6, 1.0), (6, 0.01), (8, 1.0), (9, 30.0), (4, 1e-6)])
def test_numba_against_the_definition_on_its_own_noise(kind, k, epsilon):
    s, seed = ROWS[kind], 2**40 + 12345
    draws = 5
    value, index = cpu.kth(s, torch.tensor(seed), k, epsilon, draws)
    z = noise(seed, draws, *s.shape)
    x = s.double() + epsilon * z
    expected = perturbed_kth(s.double(), k, epsilon=epsilon, noise=z)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6 * epsilon)
    kth = x.sort(-1, descending=True).values[..., k - 1]  # [draws, rows]
    found = x.gather(2, index.T[..., None])[..., 0]
    torch.testing.assert_close(found, kth, rtol=1e-7, atol=1e-7 * epsilon)


def test_threads_and_other_rows_do_not_matter(threads):
    s = randn(64, 3000)
    many = cpu.kth(s, torch.tensor(3), 6, 1.0, 5)
    torch.set_num_threads(1)
    one = cpu.kth(s, torch.tensor(3), 6, 1.0, 5)
    part = cpu.kth(s[:10], torch.tensor(3), 6, 1.0, 5)
    for a, b, c in zip(many, one, part, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:10], c)


def test_the_kernel_is_unbiased():
    s, rows = [0.0, 0.3, -1.0, 0.3, 1.0], 40_000
    value, indicator = expected_kth(s, 2, 1.0)
    scores = torch.tensor(s).expand(rows, 5).clone().requires_grad_()
    torch.manual_seed(0)
    sample = perturbed_topk(scores, 2, num_samples=1)
    (grad,) = torch.autograd.grad(sample.sum(), scores)
    assert sample.mean().item() == pytest.approx(value, abs=5 * sample.std().item() / rows**0.5)
    for share, chance in zip(grad.mean(0).tolist(), indicator, strict=True):
        assert share == pytest.approx(chance, abs=5 * (chance * (1 - chance) / rows) ** 0.5 + 1e-9)


B, N = 12, 90


def targets() -> dict[str, Masses]:
    label = torch.arange(B) * 7 % N
    ignored = label.where(torch.arange(B) % 4 > 0, torch.tensor(-100))
    weight = randn(N, seed=8).exp()
    two = LabelMixture.mixed(label, label.flip(0), 0.7)
    s = torch.zeros(B, N)
    return {
        "labels": Masses.of(s, label),
        "ignored": Masses.of(s, ignored),
        "mixture": Masses.of(s, two),
        "smoothing": Masses.of(s, ignored, label_smoothing=0.2),
        "two and smoothing": Masses.of(s, two, label_smoothing=0.2),
        "weighted": Masses.of(s, label, weight=weight),
        "all": Masses.of(s, randn(B, N, seed=9).softmax(1).where(torch.arange(N) % 3 > 0, 0.0)),
    }


def plain_hinge(s: torch.Tensor, q: torch.Tensor, z: torch.Tensor, k: int, epsilon: float, alpha, scale: float):
    """Return the losses in double precision, from the noise [draws, B, n]."""
    threshold = perturbed_kth(s, k, epsilon=epsilon, noise=z)
    return (q * scale * (alpha + threshold[:, None] - s).clamp(min=0)).where(q != 0, 0.0).sum(1)


@pytest.mark.parametrize("kind", targets())
@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("k", [3, 80])
def test_hinge_over_masses(kind, per_class, k):
    masses, alpha = targets()[kind], torch.linspace(0, 1, N) if per_class else 0.5
    logits = randn(B, N)
    logits[:, 3] = -INF if masses.dense is not None else 0.0  # a mass of 0 times an infinite loss is 0
    logits.requires_grad_()
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(5)
    options = {"k": k, "epsilon": 0.7, "num_samples": 4, "alpha": alpha, "scale": 3.0}
    losses = perturbed_hinge(logits, masses, **options)
    cotangent = torch.linspace(0.5, 2, B)
    gradient, again = (torch.autograd.grad(losses, logits, cotangent, retain_graph=True)[0] for _ in range(2))
    (differentiable,) = torch.autograd.grad(losses, logits, cotangent, create_graph=True)
    z = noise(seed, 4, B, N)
    wide = logits.detach().double().requires_grad_()
    expected = plain_hinge(wide, masses.table(N, torch.float64), z, k, 0.7, torch.as_tensor(alpha).double(), 3.0)
    (slope,) = torch.autograd.grad(expected, wide, cotangent.double())
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=1e-6)
    for found in (gradient, again, differentiable):
        torch.testing.assert_close(found.double(), slope, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", targets())
def test_the_sum_is_that_of_the_losses(kind):
    logits = randn(B, N).requires_grad_()
    found = []
    for sums in (False, True):
        torch.manual_seed(5)
        losses = perturbed_hinge(logits, targets()[kind], k=3, sums=sums)
        found.append((losses.sum().detach(), torch.autograd.grad(losses.sum(), logits)[0]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_no_labels_give_no_loss():
    logits = randn(B, N).requires_grad_()
    masses = Masses(torch.zeros(B, 0, dtype=torch.int64), torch.ones(B, 0), None, None)
    losses = perturbed_hinge(logits, masses, k=3)
    assert losses.tolist() == [0] * B
    assert torch.autograd.grad(losses.sum(), logits)[0].count_nonzero() == 0


def test_labels_out_of_range_touch_no_other_memory():
    logits = randn(3, N).requires_grad_()
    for smoothing in (None, torch.full((3,), 0.1)):
        masses = Masses(torch.tensor([[2], [N], [-1]]), torch.ones(3, 1), smoothing, None)
        losses = perturbed_hinge(logits, masses, k=3)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert losses.isnan().tolist() == [False, True, True]
        assert gradient.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_rows_without_mass_may_hold_anything(backend):
    logits, label = randn(4, 9), torch.tensor([0, -100, -100, 3])
    logits[1], logits[3, 5] = NAN, NAN
    logits.requires_grad_()
    with use_backend(backend):
        masses = Masses.of(logits, label)
        losses = perturbed_hinge(logits, masses, k=3, alpha=10.0)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, False, False, True]
    assert gradient.isnan().any(1).tolist() == [False, False, False, True]
    assert losses[[1, 2]].tolist() == [0, 0]
    assert gradient[[1, 2]].count_nonzero() == 0


def test_masses_with_a_gradient():
    logits, shares = randn(B, N), torch.rand(B, 1, dtype=torch.float64).requires_grad_()
    labels = torch.arange(B)[:, None]
    torch.manual_seed(0)
    (gradient,) = torch.autograd.grad(perturbed_hinge(logits, Masses(labels, shares, None, None), k=3).sum(), shares)
    torch.manual_seed(0)
    one = perturbed_hinge(logits, Masses(labels, torch.ones(B, 1), None, None), k=3)
    torch.testing.assert_close(gradient[:, 0].float(), one, rtol=1e-3, atol=1e-4)


def test_transforms():
    logits, masses = randn(B, N), targets()["labels"]

    def loss(s):
        return perturbed_hinge(s, masses, k=3, num_samples=40).sum()

    torch.manual_seed(0)
    found = torch.func.grad(loss)(logits)
    leaf = logits.clone().requires_grad_()
    (plain,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(found.sum(0), plain.sum(0), atol=0.6, rtol=0)  # other draws
    rows = torch.func.vmap(lambda s: perturbed_topk(s, 3, epsilon=1e-6), randomness="different")(logits)
    torch.testing.assert_close(rows, logits.topk(3).values[:, -1])


@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_compiles_whole(backend):
    logits, masses = randn(B, N).requires_grad_(), targets()["ignored"]

    def loss(s):
        return perturbed_hinge(s, masses, k=3, epsilon=1e-6).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradient, plain = (torch.autograd.grad(f(logits), logits)[0] for f in (compiled, loss))
    torch.testing.assert_close(gradient, plain)
