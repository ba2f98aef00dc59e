"""The distribution over k-sets against enumeration, exact sums and its own samples."""

import copy
import math

import pytest
import torch
from torch.distributions import kl_divergence

from tests.oracles import mp_marginals
from topk_registry import topk_marginals
from topk_registry.distributions import GumbelTopK, KSubset, tree

INF = math.inf


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def enumerated(distribution):
    """All sets, and their chances from the definition."""
    sets = distribution.enumerate_support()
    weights = torch.where(sets != 0, distribution.x, 0.0).double().sum(-1)
    return sets.double(), weights - weights.logsumexp(0)


CASES = [(n, k) for n in (2, 5, 8, 12) for k in {1, 2, n // 2, n - 1} if 0 < k < n]
KINDS = {
    "normal": lambda n: randn(2, n),
    "flat": lambda n: torch.zeros(2, n, dtype=torch.float64),
    "tied": lambda n: randn(2, n).round(),
    "wide": lambda n: 300 * randn(2, n),
    "shifted": lambda n: randn(2, n) + 5000,
    "outlier": lambda n: randn(2, n).index_fill(1, torch.tensor([0]), 200.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_quantity_is_that_of_the_enumeration(n, k, kind, dtype):
    distribution = KSubset(KINDS[kind](n).to(dtype), k, temperature=0.7)
    sets, logs = enumerated(distribution)
    # log_prob is a difference of sums of k scores: their rounding is what remains
    scale = torch.finfo(dtype).eps * (8 + 4 * k * float(distribution.x.abs().max()))
    assert (distribution.log_prob(distribution.enumerate_support()) - logs).abs().max() <= scale
    indices = sets.nonzero()[:, -1].view(*sets.shape[:-1], k)
    assert (distribution.log_prob(indices) - logs).abs().max() <= scale
    chances = logs.exp()
    marginals = (chances[..., None] * sets).sum(0)
    torch.testing.assert_close(distribution.marginals.double(), marginals, rtol=1e-5, atol=scale)
    entropy = -torch.where(chances == 0, 0.0, chances * logs).sum(0)
    assert (distribution.entropy() - entropy).abs().max() <= scale * (1 + n)
    covariance = torch.einsum("sb,sbi,sbj->bij", chances, sets, sets) - marginals[:, :, None] * marginals[:, None]
    v = randn(n, seed=1).to(dtype)
    found = distribution.covariance_vector_product(v).double()
    assert (found - covariance @ v.double()).abs().max() <= 40 * n * torch.finfo(dtype).eps + scale
    mode = distribution.log_prob(distribution.mode)
    assert torch.equal(distribution.mode.sum(-1), torch.full((2,), float(k), dtype=dtype))
    assert (mode.double() >= logs.amax(0) - scale).all()


def test_long_rows_against_exact_sums():
    x = randn(1000) * 2
    for k in (1, 5, 40):
        distribution = KSubset(x, k)
        exact = torch.tensor([float(p) for p in mp_marginals(x.tolist(), k)], dtype=torch.float64)
        torch.testing.assert_close(distribution.marginals, exact, rtol=1e-10, atol=1e-14)
        # log sigma_k by the recursion over classes, in logarithms
        logs = torch.full((k + 1,), -INF, dtype=torch.float64)
        logs[0] = 0.0
        for score in x:
            logs[1:] = torch.logaddexp(logs[1:], logs[:-1] + score)
        torch.testing.assert_close(distribution.log_partition(), logs[k], rtol=1e-13, atol=0)
        torch.testing.assert_close(KSubset(x.float(), k).log_partition(), logs[k].float(), rtol=1e-6, atol=0)


def test_gradients_are_the_marginals_and_the_covariance():
    x = randn(2, 6).requires_grad_()
    hot = torch.tensor([[1.0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(KSubset(x, 2, temperature=2.0).log_prob(hot).sum(), x)
    torch.testing.assert_close(gradient, (hot - topk_marginals(x, 2, temperature=2.0)) / 2)
    for quantity in (
        lambda x: KSubset(x, 3).log_partition(),
        lambda x: KSubset(x, 3).entropy(),
        lambda x: KSubset(x, 2).log_prob(hot),
        lambda x: KSubset(x, torch.tensor([1, 4])).log_partition(),
    ):
        assert torch.autograd.gradcheck(quantity, (x,))
    assert torch.autograd.gradgradcheck(lambda x: KSubset(x, 3).log_partition(), (x,))


def test_samples_have_the_law(threads):
    """A chi-square test at one in 10,000 of the counts of all sets, seed fixed."""
    scipy_bound = {19: 50.8, 9: 33.7}  # 0.9999 quantiles of chi-square with 19 and 9 degrees of freedom
    torch.manual_seed(0)
    for n, k in ((6, 3), (5, 2)):
        distribution = KSubset(randn(n), k)
        draws = distribution.sample((20_000,))
        support = distribution.enumerate_support()
        counts = (draws[:, None] == support).all(-1).sum(0)
        assert counts.sum() == len(draws)  # nothing else is ever drawn
        expected = distribution.log_prob(support).exp() * len(draws)
        assert ((counts - expected).square() / expected).sum() < scipy_bound[len(support) - 1]
        other = KSubset(randn(n) * 1.1, k).log_prob(support).exp() * len(draws)
        assert ((counts - other).square() / other).sum() > scipy_bound[len(support) - 1]  # the test can fail


@pytest.mark.slow
def test_samples_of_long_rows_with_a_k_of_their_own():
    torch.manual_seed(0)
    k = torch.tensor([1, 7, 30])
    x = torch.stack((randn(400), 50 * randn(400, seed=1), randn(400, seed=2)))
    x[1, :5] = -INF
    distribution = KSubset(x, k)
    draws = distribution.sample((4000,))
    assert torch.equal(draws.sum(-1), k.double().expand(4000, 3))
    assert not draws[:, 1, :5].any()
    pi = distribution.marginals
    torch.testing.assert_close(pi.sum(-1), k.double())
    for row, size in enumerate(k.tolist()):
        torch.testing.assert_close(pi[row], topk_marginals(x[row], size))
    # five deviations of a mean of 4000, among 1200 of them
    assert ((draws.mean(0) - pi).abs() <= 5 * (pi * (1 - pi) / 4000).sqrt() + 1e-9).all()
    assert distribution.log_prob(draws).isfinite().all()


def test_index_samples_and_straight_through_gradients():
    torch.manual_seed(0)
    x = randn(3, 9).requires_grad_()
    distribution = KSubset(x, 4)
    sets = distribution.sample_indices((5, 2))
    assert sets.shape == (5, 2, 3, 4)
    assert (sets[..., 1:] > sets[..., :-1]).all()
    hot = distribution.rsample((7,))
    assert ((hot.detach() - hot.detach().round()).abs() < 1e-12).all()
    v = randn(7, 3, 9, seed=3)
    (gradient,) = torch.autograd.grad((hot * v).sum(), x)
    torch.testing.assert_close(gradient, distribution.covariance_vector_product(v.sum(0)))


def test_kl_divergence_is_that_of_the_enumeration():
    p, q = KSubset(randn(2, 7), 3), KSubset(randn(2, 7, seed=1), 3, temperature=0.5)
    _, of_p = enumerated(p)
    _, of_q = enumerated(q)
    torch.testing.assert_close(kl_divergence(p, q), (of_p.exp() * (of_p - of_q)).sum(0))
    assert kl_divergence(p, p).abs().max() < 1e-12
    p, q = (KSubset(torch.tensor([1.0, 2.0, 0.0, -INF]), 2) for _ in range(2))
    assert kl_divergence(p, q) == 0
    with pytest.raises(ValueError, match="the same n and k"):
        kl_divergence(p, KSubset(torch.zeros(4), 1))


def test_shapes_expand_vmap_and_copies():
    distribution = KSubset(randn(3, 1, 5), 2)
    assert (distribution.batch_shape, distribution.event_shape) == ((3, 1), (5,))
    wide = distribution.expand((3, 4))
    assert wide.sample((6,)).shape == (6, 3, 4, 5)
    assert wide.entropy().shape == (3, 4)
    assert wide.enumerate_support().shape == (10, 3, 4, 5)
    assert wide.enumerate_support(expand=False).shape == (10, 1, 1, 5)
    x, hot = randn(3, 5), torch.tensor([0.0, 1, 0, 0, 1], dtype=torch.float64)
    rows = torch.func.vmap(lambda row: KSubset(row, 2, validate_args=False).log_prob(hot))(x)
    torch.testing.assert_close(rows, KSubset(x, 2).log_prob(hot))
    each = torch.func.vmap(torch.func.grad(lambda row: KSubset(row, 2, validate_args=False).log_prob(hot)))(x)
    torch.testing.assert_close(each, hot - topk_marginals(x, 2))
    assert torch.equal(copy.deepcopy(distribution).logits, distribution.logits)
    assert "KSubset" in repr(distribution)
    empty = KSubset(torch.zeros(0, 5), 2)
    assert empty.sample().shape == (0, 5)
    assert empty.entropy().shape == (0,)


def test_the_tilt_keeps_the_mean_between_half_and_all_of_k():
    for kind in KINDS.values():
        x, k = kind(60), torch.tensor([1, 9])
        mean = torch.sigmoid(x - tree.tilt(x, k)[:, None]).sum(-1)
        assert (mean >= k / 2 - 1e-9).all()
        assert (mean <= k + 1e-9).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KSubset(torch.zeros(4), 4), r"k must be from 1 to n - 1 = 3"),
        (lambda: KSubset(torch.zeros(4), 0), r"k must be from 1"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 4])), r"k must be from 1"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2, 3])), "one number, or one a row"),
        (lambda: KSubset(torch.zeros(4), torch.tensor(1.5)), "k must be an integer"),
        (lambda: KSubset(torch.zeros(4, dtype=torch.int64), 1), "floating point"),
        (lambda: KSubset(torch.zeros(4), 1, temperature=0.0), "temperature must be positive"),
        (lambda: KSubset(torch.tensor([0.0, -INF, -INF]), 2, validate_args=True), "k logits above -inf"),
        (lambda: KSubset(torch.tensor([0.0, math.nan, 0.0]), 2, validate_args=True), "none that is inf or NaN"),
        (lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.ones(4)), "within the support"),
        (lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.tensor([1, 1])), "names a class twice"),
        (lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.tensor([1, 4])), r"in \[0, 3\], got 4"),
        (lambda: KSubset(torch.zeros(40), 20).enumerate_support(), "more than 1000000"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2])).enumerate_support(), "give k as a number"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2])).sample_indices(), "one k for all rows"),
        (lambda: GumbelTopK(torch.zeros(4), 5), "from 1 to n = 4"),
        (lambda: GumbelTopK(torch.zeros(9), 8).set_log_prob(torch.arange(8)), "k may be up to 7"),
    ],
)
def test_misuse_is_an_error_that_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gumbel_topk_is_another_law():
    torch.manual_seed(0)
    x = torch.tensor([2.0, 1.0, 0.0, -1.0, -1.0], dtype=torch.float64)
    gumbel, ksubset = GumbelTopK(x, 2), KSubset(x, 2)
    sets = ksubset.enumerate_support()
    indices = sets.nonzero()[:, -1].view(-1, 2)
    chances = gumbel.set_log_prob(indices).exp()
    torch.testing.assert_close(chances.sum(), torch.tensor(1.0, dtype=torch.float64))
    marginals = (chances[:, None] * sets).sum(0)
    drawn = torch.zeros(20_000, 5, dtype=torch.float64).scatter_(1, gumbel.sample((20_000,)), 1.0).mean(0)
    assert ((drawn - marginals).abs() <= 5 * (marginals * (1 - marginals) / 20_000).sqrt()).all()
    assert 0.01 < (marginals - ksubset.marginals).abs().max() < 0.08
    order = torch.tensor([3, 0])
    direct = x.softmax(0)[3] * x.index_fill(0, torch.tensor([3]), -INF).softmax(0)[0]
    torch.testing.assert_close(gumbel.log_prob(order).exp(), direct)
