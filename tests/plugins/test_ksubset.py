"""The likelihood of label sets: against every subset, exact where it is nearly 0, and its options."""

from itertools import combinations

import mpmath
import pytest
import torch
from torch.nn import functional as F

from tests import oracles
from topk_registry import create_loss
from topk_registry.functional import topk_marginals

N = 7


def scores(rows: int = 5, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def k_hot(sizes: list[int], seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    target = torch.zeros(len(sizes), N, dtype=torch.float64)
    for row, size in zip(target, sizes, strict=True):
        row[torch.randperm(N, generator=g)[:size]] = 1
    return target


def brute_force(row: list[float], labels: set[int], theta: float) -> float:
    with mpmath.workdps(40):
        x = [mpmath.mpf(s) / theta for s in row]
        sets = [mpmath.exp(mpmath.fsum(x[i] for i in chosen)) for chosen in combinations(range(N), len(labels))]
        return float(mpmath.log(mpmath.fsum(sets)) - mpmath.fsum(x[i] for i in labels))


@pytest.mark.parametrize("theta", [0.2, 1.0, 5.0])
def test_is_the_sum_over_every_subset(theta):
    s, y = scores(8), k_hot([0, 1, 2, 3, 4, 5, 6, 7])
    s.requires_grad_()
    loss = create_loss("ksubset_nll", temperature=theta, reduction="none")(s, y)
    for row, labels, found in zip(s.tolist(), y, loss.tolist(), strict=True):
        wanted = brute_force(row, set(labels.nonzero()[:, 0].tolist()), theta)
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-13)


def test_the_gradient_is_the_marginals_less_the_labels():
    s, y = scores(8), k_hot([0, 1, 2, 3, 4, 5, 6, 7])
    leaf = s.clone().requires_grad_()
    create_loss("ksubset_nll", temperature=2.0, reduction="sum")(leaf, y).backward()
    assert leaf.grad is not None
    for i, k in enumerate(range(8)):
        odds = oracles.subset_log_odds((s[i] / 2).tolist(), k) if 0 < k < N else None
        pi = y[i] if odds is None else torch.tensor(odds, dtype=torch.float64).sigmoid()
        torch.testing.assert_close(leaf.grad[i], (pi - y[i]) / 2)


def test_near_certain_sets_keep_their_digits():
    """In single precision log sigma_k and the labels' scores are alike to every digit."""
    s = torch.zeros(1, N)
    s[0, :3] = 40.0
    leaf = s.clone().requires_grad_()
    y = (s > 0).to(torch.int64)
    found = create_loss("ksubset_nll")(leaf, y)
    found.backward()
    # twelve sets differ in one class from the label's; double precision holds 120 to 1.4e-14
    wanted = 12 * torch.tensor(-40.0, dtype=torch.float64).exp()
    assert abs(found.item() - wanted.item()) <= 4 * 1.4e-14
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[0, 3:], torch.full((4,), (wanted / 4).item()), rtol=1e-5, atol=1e-16)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.float16])
def test_targets_of_every_kind(kind):
    s, y = scores(), k_hot([1, 2, 2, 3, 6])
    for smoothing in (0.0, 0.1):
        loss = create_loss("ksubset_nll", label_smoothing=smoothing)
        torch.testing.assert_close(loss(s, y.to(kind)), loss(s, y), rtol=1e-14, atol=0)


def test_one_label_is_cross_entropy():
    s, y = scores(), torch.arange(5)
    for target in (y, F.one_hot(y, N), torch.softmax(scores(seed=2), -1)):
        soft = target if target.is_floating_point() else y
        for smoothing in (0.0, 0.1):
            found = create_loss("ksubset_nll", label_smoothing=smoothing)(s, target)
            torch.testing.assert_close(found, F.cross_entropy(s, soft, label_smoothing=smoothing))


def test_a_soft_target_costs_what_is_expected_of_sets_with_these_chances():
    s = scores(1)
    a, b = k_hot([3, 3])
    loss = create_loss("ksubset_nll")
    mixed = loss(s, (0.3 * a + 0.7 * b)[None])
    torch.testing.assert_close(mixed, 0.3 * loss(s, a[None]) + 0.7 * loss(s, b[None]))
    b = k_hot([4], seed=3)[0]  # of two sizes next to each other
    mixed = loss(s, (0.3 * a + 0.7 * b)[None])
    torch.testing.assert_close(mixed, 0.3 * loss(s, a[None]) + 0.7 * loss(s, b[None]))
    smoothed = create_loss("ksubset_nll", label_smoothing=0.2)(s, a[None])
    torch.testing.assert_close(smoothed, loss(s, (0.8 * a + 0.2 * 3 / N)[None]))


def test_class_weights_count_rows():
    s = scores()
    y = k_hot([1, 2, 2, 3, 0])
    w = torch.linspace(0.5, 2, N).double()
    plain = create_loss("ksubset_nll", reduction="none")(s, y)
    found = create_loss("ksubset_nll", weight=w.tolist(), reduction="none")(s, y)
    torch.testing.assert_close(found, plain * (y @ w) / y.sum(-1).clamp(min=1), rtol=1e-6, atol=0)


def test_scores_of_minus_infinity_rule_classes_out():
    s, y = scores(1), k_hot([2])
    out = (y[0] == 0).nonzero()[0]
    s[0, out] = -torch.inf
    leaf = s.clone().requires_grad_()
    found = create_loss("ksubset_nll")(leaf, y)
    found.backward()
    kept = s.isfinite()[0]
    pi = topk_marginals(s[:, kept], 2)
    torch.testing.assert_close(found, create_loss("ksubset_nll")(s[:, kept], y[:, kept]))
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[:, kept], pi - y[:, kept])
    assert leaf.grad[0, out] == 0


def test_bad_input():
    with pytest.raises(ValueError, match="must be in \\[0, 1\\], got numbers from 0 to 2"):
        create_loss("ksubset_nll")(scores(), 2 * k_hot([1, 2, 2, 3, 6]))
    with pytest.raises(ValueError, match="target must be class indices"):
        create_loss("ksubset_nll")(scores(), k_hot([1, 2, 2]))


# torch's own decompositions for forward mode are still written in it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": [1.0, 2.0, 0.5, 1.0, 0.0, 3.0]}], ids=str)
@pytest.mark.parametrize("kind", ["k-hot", "integers", "soft"])
def test_the_transforms_of_torch(kind, options):
    """Also over targets, whose sizes cannot be read then."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    y = torch.rand(4, 6, dtype=torch.float64, generator=generator)
    y = y if kind == "soft" else (y > 0.5).to(torch.float64 if kind == "k-hot" else torch.int64)
    direction, loss = x.roll(1, 0).cos(), create_loss("ksubset_nll", **options)
    leaf = x.clone().requires_grad_()
    value = loss(leaf, y)
    (gradient,) = torch.autograd.grad(value, leaf)
    close = {"rtol": 1e-11, "atol": 1e-13}
    models = torch.stack((x, x + 1))
    torch.testing.assert_close(torch.func.vmap(lambda s: loss(s, y))(models), value.detach().expand(2), **close)
    torch.testing.assert_close(torch.func.grad(lambda s: loss(s, y))(x), gradient, **close)
    _, along = torch.func.jvp(lambda s: loss(s, y), (x,), (direction,))
    torch.testing.assert_close(along, (gradient * direction).sum(), **close)

    def one(s, t):
        return loss(s[None], t[None])

    each = torch.func.vmap(torch.func.grad(one))(x, y)
    torch.testing.assert_close(each / len(x), gradient, **close)
    hessian = torch.func.hessian(lambda s: loss(s, y))(x)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda s: loss(s, y), x), **close)


def test_a_row_with_as_many_classes_as_labels_costs_nothing():
    x = torch.tensor([[1.0, -torch.inf, 2.0], [1.0, 0.0, 2.0]], requires_grad=True)
    y = torch.tensor([[1, 0, 1], [1, 0, 1]])
    loss = create_loss("ksubset_nll", reduction="none")(x, y)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss[0].abs() <= 1e-15
    assert torch.equal(gradient[0], torch.zeros(3))
    assert gradient[1].all()
