"""The loss over relaxed rankings: each class by a ranking of its own, compiled rows against the definition."""

import numpy as np
import pytest
import torch

from tests.ops.compiled import for_python
from tests.ops.cpu_rows import both, scores, targets
from topk_registry import use_backend
from topk_registry.rows import ranking_rows, row_losses

SIZES, SHARES = (1, 3, 5), (0.2, 0.3, 0.5)
LOSSES = {
    "neuralsort": ranking_rows(SIZES, SHARES, candidates=9),
    "neuralsort, first rank": ranking_rows(SIZES, SHARES, candidates=9, softmax=False, tau=3.0),
    "softsort": ranking_rows(SIZES, SHARES, candidates=9, relaxation="softsort", tau=0.5),
    "one size": ranking_rows((4,), (1.0,), candidates=5),
    "cross-entropy": ranking_rows((1,), (1.0,), candidates=16),
    "more candidates than classes": ranking_rows((5,), (1.0,), candidates=999, tau=30.0),
}


def of_one(s: torch.Tensor, y: int, sizes, shares, m: int, relaxation: str, tau: float, softmax: bool) -> torch.Tensor:
    """The loss of one row by its definition: P of the label and the m - 1 highest others, by equations 1 to 3."""
    others = torch.cat((s[:y], s[y + 1 :]))
    s = torch.cat((s[y : y + 1], others.topk(m - 1).values))
    x, rank = s / tau, torch.arange(1, m + 1)
    if relaxation == "neuralsort":
        logits = (m + 1 - 2 * rank[:, None]) * x - (x[:, None] - x).abs().sum(0)
    else:
        logits = -(x.sort(descending=True).values[:, None] - x).abs()
    P = logits.softmax(-1)[:, 0]
    chance = 0.0
    for k, share in zip(sizes, shares, strict=True):
        chance = chance + share * (s.softmax(-1)[0] if k == 1 and softmax else P[:k].sum())
    return -chance.log()


@pytest.mark.parametrize("tau", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("relaxation", ["neuralsort", "softsort"])
@pytest.mark.parametrize(("m", "softmax"), [(6, True), (9, False), (30, True)])
def test_is_the_ranking_of_every_class_among_its_candidates(relaxation, m, softmax, tau):
    s = torch.randn(3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = torch.softmax(s.detach().flip(0), -1)
    loss = ranking_rows(SIZES, SHARES, candidates=m, relaxation=relaxation, tau=tau, softmax=softmax)
    each = [[of_one(row, y, SIZES, SHARES, m, relaxation, tau, softmax) for y in range(30)] for row in s]
    wanted = torch.stack([torch.stack(row) for row in each])
    (gradient,) = torch.autograd.grad((q * wanted).sum(), s)
    for name in ("torch", "numba"):
        with use_backend(name):
            found = row_losses(loss, s, q)
            torch.testing.assert_close(found, (q * wanted).sum(-1))
            torch.testing.assert_close(torch.autograd.grad(found.sum(), s)[0], gradient)
            label = torch.tensor([3, 29, int(s[2].argmax())])
            torch.testing.assert_close(row_losses(loss, s, label), wanted.gather(1, label[:, None])[:, 0])
    torch.testing.assert_close(loss.definition(s, None), wanted)


def over_equal(gradient: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The gradient summed over the classes of equal scores, which share it in no particular way."""
    return torch.stack([g.new_zeros(len(g)).index_add(0, row.unique(return_inverse=True)[1], g)
                        for g, row in zip(gradient, s, strict=True)])  # fmt: skip


@pytest.mark.parametrize("kind", ["gaussian", "flat", "tied", "leaders", "ruled out"])
@pytest.mark.parametrize("name", LOSSES)
def test_compiled_rows_agree_with_the_definition(name, kind):
    pytest.importorskip("numba")
    loss = LOSSES[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        s = scores(kind).to(dtype)
        # offsets and slopes are in double precision; a class costs exponentials of t, which is rounded as it is large
        eps = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
        spread = float(s[s.isfinite()].double().max() - s[s.isfinite()].double().min())
        for target in targets(s):
            target = target.to(dtype) if target.is_floating_point() else target
            value, gradient = both(loss, s, target)
            with use_backend("torch"):
                wanted = both(loss, s.double(), target.double() if target.is_floating_point() else target)
            allowed = 16 * eps * (1 + spread)
            torch.testing.assert_close(value, wanted[0], rtol=allowed, atol=allowed)
            stored = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
            found, right = over_equal(gradient, s), over_equal(wanted[1], s)
            largest = max(1.0, float(wanted[1].abs().max()))
            rounding = stored * float(wanted[1].abs().sum(-1).max())  # of each entry of a sum
            torch.testing.assert_close(found, right, rtol=0, atol=allowed * largest + rounding)


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("k", [7, 20, 50])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("relaxation", ["neuralsort", "softsort"])
def test_few_ranks_count_for_a_class_and_few_classes_in_a_rank(scale, k, softmax, relaxation):
    """Many ranks and many classes below the candidates: masses on all of them, on few, and on the lowest alone."""
    pytest.importorskip("numba")
    loss = ranking_rows((1, k), (0.3, 0.7), candidates=2 * k + 2, softmax=softmax, relaxation=relaxation)
    s = scale * torch.randn(3, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    s[2, s[2].argsort()[:9]] = -torch.inf
    all_classes = torch.full_like(s, 1 / 400).masked_fill(s.isinf(), 0.0)
    lowest = torch.zeros_like(s).scatter(1, s[:2].argsort(1)[:, 9:13], 0.25)
    few = torch.zeros_like(s).scatter(1, s.argsort(1)[:, [300, 399]], torch.tensor([0.3, 0.7]).double().expand(3, 2))
    for target in (all_classes, lowest, few):
        for dtype in (torch.float64, torch.float32):
            x = s.to(dtype)
            with use_backend("torch"):
                wanted = both(loss, x.double(), target)
            value, gradient = both(loss, x, target.to(dtype))
            # the exponents are of up to 2 k scores, and rounded as they are large; so are those of the definition
            eps = torch.finfo(dtype).eps * (1 + float(x[x.isfinite()].abs().max()))
            torch.testing.assert_close(value.double(), wanted[0], rtol=16 * eps, atol=16 * eps)
            largest = max(1.0, float(wanted[1].abs().max()))
            torch.testing.assert_close(gradient.double(), wanted[1], rtol=0, atol=max(16, 2 * k) * eps * largest)


@pytest.mark.parametrize("name", ["torch", "numba"])
def test_classes_that_are_ruled_out_take_no_part(name):
    """Of 30 classes 24 are left: the loss is that of these alone, and infinite for the others."""
    s = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s[:, ::5] = -torch.inf
    kept = s[0].isfinite()
    label, few = torch.tensor([1, 2]), s[:, kept]
    q = torch.where(s.isfinite(), 1.0, 0.0).double() / kept.sum()
    with use_backend(name):
        for m in (9, 28):
            for relaxation in ("neuralsort", "softsort"):
                loss = ranking_rows((3,), (1.0,), candidates=m, relaxation=relaxation)
                for target, alone in ((label, label - 1), (q, q[:, kept])):
                    (value, gradient), wanted = both(loss, s, target), both(loss, few, alone)
                    torch.testing.assert_close(value, wanted[0])
                    torch.testing.assert_close(gradient[:, kept], wanted[1])
                    assert not gradient[:, ~kept].any()
                assert row_losses(loss, s, torch.tensor([0, 5])).isinf().all()
        too_few = torch.full((1, 9), -torch.inf)
        too_few[0, :3] = 0.0
        assert row_losses(ranking_rows((3,), (1.0,), candidates=5), too_few, torch.tensor([0])).isnan().all()


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("steps", ["neuralsort", "softsort"])
@pytest.mark.parametrize("masses", ["all", "few", "ruled out"])
def test_points_give_the_cost_that_ranks_give(masses, steps, spread):
    """Equation 10 against equation 6, and refused where the cost is not smooth enough."""
    kernel = pytest.importorskip("topk_registry.ops.ranking.numba.kernel")
    R, generator = 20, np.random.default_rng(0)
    s = (-spread * np.abs(generator.standard_normal(700))).astype(np.float32)
    m = generator.random(700).astype(np.float32)
    s[::7] = -np.inf
    if masses != "ruled out":
        m[::7] = 0
    if masses == "few":
        m[np.arange(700) % 100 != 50] = 0
    weights = np.where(np.arange(R + 1) > 0, 1.0, 0.0)
    rank = np.arange(R + 1.0)
    distances = 2 * (R - rank) + 1 if steps == "neuralsort" else np.ones(R + 1)
    results = []
    for way in (kernel.cost_by_points, kernel.cost_by_ranks):
        g, sums = np.zeros_like(s), np.zeros(R + 1)
        value = for_python(way)(s, m, np.float32(0), 1.0, 0.3 * (R - rank), distances, weights, R, sums, g)
        results.append((value, sums, g))
    (value, sums, g), (wanted, of_ranks, gradient) = results
    eps, some = float(np.finfo(np.float32).eps), s > -np.inf
    assert value == wanted == np.inf or value == pytest.approx(wanted, rel=4 * eps)
    rounding = 16 * eps
    np.testing.assert_allclose(g[some], gradient[some], atol=rounding * distances.max(), rtol=rounding)
    assert not g[~some].any()
    if wanted < np.inf:
        np.testing.assert_allclose(sums, of_ranks, atol=rounding * m.sum())


def test_points_are_refused_where_the_cost_is_not_smooth_enough():
    """With equal scores each of many ranks is as likely, and a class close below loses them one after another."""
    kernel = pytest.importorskip("topk_registry.ops.ranking.numba.kernel")
    R = 300
    s, m = np.linspace(-5, 0, 64, dtype=np.float32), np.ones(64, np.float32)
    sums = np.zeros(R + 1)
    value = for_python(kernel.cost_by_points)(
        s, m, np.float32(0), 1.0, np.zeros(R + 1), 2.0 * (R - np.arange(R + 1)) + 1, np.ones(R + 1), R, sums,
        np.empty_like(s),
    )  # fmt: skip
    assert np.isnan(value)
    assert not sums.any()


@pytest.mark.parametrize("relaxation", ["neuralsort", "softsort"])
@pytest.mark.parametrize("lead", [300.0, 700.0, 720.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_label_far_above_its_rivals_costs_nothing(dtype, lead, relaxation):
    """Softmax of scores relative to the best rival would be beyond the range of an exponential."""
    loss = ranking_rows((1, 5), (0.5, 0.5), candidates=16, relaxation=relaxation)
    s = torch.zeros(2, 20, dtype=dtype)
    s[:, 3] = lead
    s.requires_grad_()
    few = torch.zeros(2, 20, dtype=dtype)
    few[:, 3] = 1.0
    for target in (torch.tensor([3, 3]), few):
        with use_backend("numba"):
            value = row_losses(loss, s, target)
        assert (value == 0).all()
        assert torch.autograd.grad(value.sum(), s)[0].abs().max() <= 1e-100
