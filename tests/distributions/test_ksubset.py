"""The distribution over k-sets against enumeration, exact sums and its own samples."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.distributions import kl_divergence

from tests.oracles import mp_marginals
from topk_registry.distributions import KSubset
from topk_registry.functional import topk_marginals

INF = math.inf


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def enumerated(distribution):
    """All sets, and the logarithms of their chances from the definition, in double precision."""
    sets, logits = distribution.enumerate_support(), distribution.logits.double()
    weights = torch.where(sets != 0, (logits - logits.amax(-1, keepdim=True)) / distribution.temperature, 0.0).sum(-1)
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
    x = distribution.logits / 0.7
    # in double precision n factors are rounded, and k scores in the sums of the enumeration; the result once more
    spread = float((x - x.amax(-1, keepdim=True)).abs().max())
    double = torch.finfo(torch.float64).eps * (8 + n + 4 * k * spread)
    rounding = double + torch.finfo(dtype).eps * logs.abs()
    assert ((distribution.log_prob(distribution.enumerate_support()) - logs).abs() <= rounding).all()
    indices = sets.nonzero()[:, -1].view(*sets.shape[:-1], k)
    assert ((distribution.log_prob(indices) - logs).abs() <= rounding).all()
    chances = logs.exp()
    marginals = (chances[..., None] * sets).sum(0)
    scale = torch.finfo(dtype).eps * (8 + 4 * k * float(x.abs().max()))
    torch.testing.assert_close(distribution.marginals.double(), marginals, rtol=1e-5, atol=scale)
    entropy = -torch.where(chances == 0, 0.0, chances * logs).sum(0)
    assert ((distribution.entropy() - entropy).abs() <= double * (1 + n) + torch.finfo(dtype).eps * entropy).all()
    mode = distribution.log_prob(distribution.mode)
    assert torch.equal(distribution.mode.sum(-1), torch.full((2,), float(k), dtype=dtype))
    assert (mode.double() >= logs.amax(0) - rounding.amax(0)).all()


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
    assert torch.autograd.gradgradcheck(lambda x: KSubset(x, 3).log_partition(), (x[:1, :4].detach().requires_grad_(),))


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
    x = randn(3, 9).requires_grad_()
    distribution = KSubset(x, 4)
    sets = distribution.sample_indices((5, 2))
    assert sets.shape == (5, 2, 3, 4)
    assert (sets[..., 1:] > sets[..., :-1]).all()
    hot = distribution.rsample((7,))
    assert ((hot.detach() - hot.detach().round()).abs() < 1e-12).all()
    v = randn(7, 3, 9, seed=3)
    (gradient,) = torch.autograd.grad((hot * v).sum(), x)
    (of_marginals,) = torch.autograd.grad(distribution.marginals, x, v.sum(0))
    torch.testing.assert_close(gradient, of_marginals)


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


HALVES = {
    "apart": torch.tensor([[6e4, -6e4, 0.0, 1.0]]),
    "shifted": randn(3, 30, dtype=torch.float32) * 5 + 20,
    "ruled out": torch.tensor([[3.0, -INF, 1.0, 0.5, 2.0, -INF]]) + 300,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", HALVES)
def test_narrow_logits_lose_no_digits(kind, dtype):
    """Against double precision on the same logits: the result is rounded once, to single precision."""
    logits = HALVES[kind].to(dtype)
    p, wide = KSubset(logits, 2, temperature=0.9), KSubset(logits.double(), 2, temperature=0.9)
    q, wide_q = KSubset(logits.flip(0) * 0.5, 2), KSubset(logits.flip(0).double() * 0.5, 2)
    hot = p.mode
    pairs = {
        "entropy": (p.entropy(), wide.entropy()),
        "log_prob": (p.log_prob(hot), wide.log_prob(hot.double())),
        "kl": (kl_divergence(p, q), kl_divergence(wide, wide_q)),
        "log_partition": (p.log_partition(), wide.log_partition()),
    }
    for name, (narrow, exact) in pairs.items():
        assert narrow.dtype == torch.float32, name
        torch.testing.assert_close(narrow.double(), exact, rtol=torch.finfo(torch.float32).eps, atol=1e-30, msg=name)
    assert (wide.entropy() >= 0).all()


QUANTITIES = {
    "entropy": lambda d, q: d.entropy(),
    "kl": lambda d, q: kl_divergence(d, q),
    "kl of the other": lambda d, q: kl_divergence(q, d),
    "log_prob": lambda d, q: d.log_prob(q.mode),
    "log_partition": lambda d, q: d.log_partition(),
    "marginals": lambda d, q: d.marginals.square().sum(-1),
}


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("k", [2, torch.tensor([2, 2, 2])], ids=["one", "each"])
def test_gradients_of_rows_with_classes_that_are_ruled_out(name, k):
    """They are those of the rows without these classes, and 0 at them."""
    kept = torch.tensor([0, 2, 3, 5])
    inside = randn(3, 4).requires_grad_()
    whole = torch.full((3, 6), -INF, dtype=torch.float64).index_copy(1, kept, inside.detach()).requires_grad_()
    other = randn(3, 4, seed=1)
    value = QUANTITIES[name](KSubset(inside, k), KSubset(other, k))
    found = QUANTITIES[name](KSubset(whole, k), KSubset(torch.full_like(whole, -INF).index_copy(1, kept, other), k))
    torch.testing.assert_close(found, value, rtol=1e-13, atol=1e-14)
    wanted = torch.zeros(3, 6, dtype=torch.float64).index_copy(1, kept, torch.autograd.grad(value.sum(), inside)[0])
    torch.testing.assert_close(torch.autograd.grad(found.sum(), whole)[0], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [2, torch.tensor([2, 2])], ids=["one", "each"])
def test_a_row_with_only_k_classes_has_one_set(k):
    x = torch.tensor([[1.0, -INF, 2.0, -INF], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    distribution = KSubset(x, k, temperature=0.5)
    certain = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(distribution.marginals[0], certain)
    assert torch.equal(distribution.variance[0], torch.zeros(4, dtype=torch.float64))
    assert distribution.entropy()[0].abs() <= 1e-15
    assert distribution.log_prob(torch.stack((certain, certain)))[0].abs() <= 1e-15
    assert distribution.log_prob(torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]))[0] == -INF
    torch.testing.assert_close(distribution.log_partition()[0], torch.tensor(6.0, dtype=torch.float64))
    draws = distribution.rsample((5,))
    assert (draws[:, 0] == certain).all()
    for value in (distribution.entropy(), draws.square(), distribution.log_prob(draws.detach())):
        (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        assert torch.equal(gradient[0], torch.zeros(4, dtype=torch.float64))
        assert gradient[1].isfinite().all()
    of_partition = torch.autograd.grad(distribution.log_partition().sum(), x)[0]
    torch.testing.assert_close(of_partition[0], certain / 0.5)


# torch's own decompositions for forward mode are still written in it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_the_transforms_of_torch():
    """log_prob, the entropy and the marginals under vmap, in forward mode and twice."""
    x, direction = randn(3, 6), randn(3, 6, seed=2)
    x[0, 1] = -INF
    hot = torch.zeros(3, 6, dtype=torch.float64)
    hot[:, [0, 4]] = 1.0

    def quantities(x, k):
        d = KSubset(x, k, validate_args=False)
        return torch.stack((d.log_prob(hot[0]), d.entropy(), d.log_partition()))

    for k in (1, 2, 5):
        wanted = torch.stack([quantities(row, k) for row in x])
        torch.testing.assert_close(torch.func.vmap(lambda row, k=k: quantities(row, k))(x), wanted)
        value, along = torch.func.jvp(lambda row, k=k: quantities(row, k), (x[1],), (direction[1],))
        jacobian = torch.func.jacrev(lambda row, k=k: quantities(row, k))(x[1])
        torch.testing.assert_close(value, wanted[1])
        torch.testing.assert_close(along, jacobian @ direction[1], rtol=1e-11, atol=1e-13)
        second = torch.func.hessian(lambda row, k=k: quantities(row, k).sum())(x[1])
        by_autograd = torch.autograd.functional.hessian(lambda row, k=k: quantities(row, k).sum(), x[1])
        torch.testing.assert_close(second, by_autograd, rtol=1e-10, atol=1e-12)
    sizes = torch.tensor([1, 2, 4])
    each = torch.func.vmap(lambda row, k: KSubset(row, k, validate_args=False).log_partition())(x, sizes)
    torch.testing.assert_close(each, KSubset(x, sizes).log_partition())


LARGE = {
    "normal": lambda n, k: randn(n),
    "flat": lambda n, k: torch.zeros(n, dtype=torch.float64),
    "ties": lambda n, k: randn(n).round(),
    "outliers": lambda n, k: randn(n).index_fill(0, torch.tensor([0, 3]), 1e4),
    "far apart": lambda n, k: 300 * randn(n),
    "k above all others": lambda n, k: torch.where(torch.arange(n) < k, 50.0, 0.0).double(),
    "one left": lambda n, k: torch.where(torch.arange(n) <= k, randn(n), -INF),
    "none left": lambda n, k: torch.where(torch.arange(n) < k, randn(n), -INF),
}


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        *((1100, 1098, kind) for kind in LARGE),
        *((2300, 1150, kind) for kind in ("normal", "far apart", "one left")),
        (2300, 501, "k above all others"),
        *(pytest.param(20000, 10000, kind, marks=pytest.mark.nightly) for kind in ("normal", "ties", "outliers")),
    ],
)
def test_large_k_against_the_recursion_in_logarithms(n, k, kind):
    x = LARGE[kind](n, k)
    distribution = KSubset(x, k)
    logs = np.full(k + 1, -INF)
    logs[0] = 0.0
    for score in x.tolist():
        if score > -INF:
            logs[1:] = np.logaddexp(logs[1:], logs[:-1] + score)
    log_partition = distribution.log_partition()
    torch.testing.assert_close(log_partition.item(), float(logs[k]), rtol=1e-13, atol=1e-8)
    drawn = distribution.sample((3,))
    assert (drawn.sum(-1) == k).all()
    assert (drawn[:, x == -INF] == 0).all()
    torch.testing.assert_close(
        distribution.log_prob(drawn), torch.where(drawn > 0, x, 0.0).sum(-1) - logs[k], rtol=1e-12, atol=1e-7
    )
    if n < 20000:
        pi = distribution.marginals
        assert abs(pi.sum() - k) < 1e-9 * k
        entropy = logs[k] - (pi * x.masked_fill(x == -INF, 0.0)).sum()
        torch.testing.assert_close(distribution.entropy(), entropy, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KSubset(torch.zeros(4), 4), r"k must be from 1 to n - 1 = 3"),
        (lambda: KSubset(torch.zeros(4), 0), r"k must be from 1"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 4])), r"k must be from 1"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2, 3])), "one number, or one per row"),
        (lambda: KSubset(torch.zeros(4), torch.tensor(1.5)), "k must be an integer"),
        (lambda: KSubset(torch.zeros(4, dtype=torch.int64), 1), "floating point"),
        (lambda: KSubset(torch.zeros(4), 1, temperature=0.0), "temperature must be a finite number above 0"),
        (lambda: KSubset(torch.tensor([0.0, -INF, -INF]), 2, validate_args=True), "k logits above -inf"),
        (lambda: KSubset(torch.tensor([0.0, math.nan, 0.0]), 2, validate_args=True), "no logit that is inf or NaN"),
        (lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.ones(4)), "within the support"),
        (
            lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.tensor([1, 1])),
            "contains a class twice",
        ),
        (lambda: KSubset(torch.zeros(4), 2, validate_args=True).log_prob(torch.tensor([1, 4])), r"in \[0, 3\], got 4"),
        (lambda: KSubset(torch.zeros(40), 20).enumerate_support(), "more than 1000000"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2])).enumerate_support(), "pass k as a number"),
        (lambda: KSubset(torch.zeros(2, 4), torch.tensor([1, 2])).sample_indices(), "same k for all rows"),
    ],
)
def test_misuse_is_an_error_that_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
