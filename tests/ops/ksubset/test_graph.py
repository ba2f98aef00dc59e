"""The operator in PyTorch operations: against its definition, for every k, far scores, and in chunks."""

import math
from decimal import Decimal

import pytest
import torch

from tests.ops.ksubset.scores import KINDS, scores
from tests.oracles import mp_log_odds, subset_log_odds
from topk_registry.functional import topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.ksubset import chunks, graph

SIZES = [(2, 1), (3, 2), (7, 3), (9, 4), (9, 5), (9, 8), (10, 1)]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_log_odds_are_those_of_the_enumeration(n, k):
    x = torch.randn(4, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) * 3
    expected = torch.tensor([subset_log_odds(row, k) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(graph.log_odds(x, k), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(graph.marginals(x, k), torch.sigmoid(expected), rtol=1e-12, atol=0)
    torch.testing.assert_close(graph.marginals(x.float(), k).double(), torch.sigmoid(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(60, 5), (60, 40), (40, 20)])
def test_margins_have_all_digits_on_every_kind_of_row(kind, n, k):
    s = scores(kind, n, rows=1)
    for theta in (1e-3, 0.5, 50.0):
        found = topk_margins(s.double(), k, temperature=theta)
        in_single = graph.margins(s, k, theta)
        log_odds = mp_log_odds([Decimal(v) / Decimal(theta) for v in s[0].tolist()], k)
        for y in (0, n // 2, n - 1, int(s.argmax())):
            margin = theta * log_odds[y]
            size = max(abs(margin), theta)
            assert abs(float(found[0, y]) - margin) <= 1e-11 * size
            assert abs(float(in_single[0, y]) - margin) <= 2e-6 * size + 1e-7 * abs(margin)


@pytest.mark.parametrize(("n", "k"), [(400, 100), (1400, 600)])
def test_large_k_in_double_precision(n, k):
    x = torch.randn(1, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    pi = topk_marginals(x, k)
    assert abs(float(pi.sum()) - k) < 1e-9 * k
    torch.testing.assert_close(torch.sigmoid(topk_log_odds(x, k)), pi, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [5, 50])
def test_flat_rows_far_from_zero(k):
    pi = graph.marginals(torch.full((1, 1000), 1.8e7), k)
    torch.testing.assert_close(pi, torch.full((1, 1000), k / 1000), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mask", [-1e9, -3e38, -math.inf])
def test_fewer_than_k_classes_left(mask):
    s = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    s[:, 20:] = mask
    pi = graph.marginals(s, 50)
    torch.testing.assert_close(pi[:, :20], torch.ones(2, 20))
    rest = 0.0 if math.isinf(mask) else 30 / 980
    torch.testing.assert_close(pi[:, 20:], torch.full((2, 980), rest), rtol=1e-4, atol=0)


def test_at_most_k_finite_scores_are_certain_and_have_no_gradient():
    for k, n in ((3, 8), (6, 8)):
        s = torch.tensor([[1.0, 2.0, 3.0] + [-math.inf] * (n - 3)], requires_grad=True)
        pi = topk_marginals(s, k)
        assert pi.tolist() == [[1.0] * 3 + [0.0] * (n - 3)]
        assert not torch.autograd.grad(pi.sum(), s)[0].any()
        assert topk_margins(s, k)[0].tolist() == [math.inf] * 3 + [-math.inf] * (n - 3)


def test_excluded_classes_have_probability_0_exactly():
    s = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    s[0, 9:] = -math.inf
    for k in (2, 7):
        pi = topk_marginals(s, k)
        assert not pi[0, 9:].any()
        torch.testing.assert_close(pi[:, :9], topk_marginals(s[:, :9], k))


def test_nan_stays_in_its_row():
    s = torch.randn(3, 30)
    s[1, 4] = math.nan
    for function in (topk_margins, topk_marginals):
        out = function(s, 5)
        assert out[1].isnan().any()
        torch.testing.assert_close(out[[0, 2]], function(s[[0, 2]], 5))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_derivatives_of_first_and_second_order(k):
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k), requires_grad=True)
    for function in (graph.margins, graph.marginals):
        assert torch.autograd.gradcheck(lambda s, f=function: f(s, k, 0.7), x)
        assert torch.autograd.gradgradcheck(lambda s, f=function: f(s, k, 0.7), x)


def test_gradients_in_single_precision():
    s, g = torch.randn(4, 500) * 5, torch.randn(4, 500)
    for k in (5, 50):
        exact = s.double().requires_grad_()
        expected = torch.autograd.grad(graph.margins(exact, k, 1.0), exact, g.double())[0]
        single = s.clone().requires_grad_()
        found = torch.autograd.grad(graph.margins(single, k, 1.0), single, g)[0]
        assert (found - expected).abs().max() < 2e-6 * expected.abs().max()


def test_transforms():
    s = torch.randn(3, 9)
    expected = topk_margins(s, 2)
    torch.testing.assert_close(torch.func.vmap(lambda x: topk_margins(x, 2))(s), expected)
    jacobian = torch.func.jacrev(lambda x: topk_marginals(x, 2))(s[0])
    torch.testing.assert_close(jacobian, jacobian.T)


def test_a_large_table_in_blocks_of_rows(monkeypatch):
    from topk_registry.ops.ksubset import api

    s = torch.randn(7, 30, dtype=torch.float64, requires_grad=True)
    results = []
    for block in (1 << 24, 3000):
        monkeypatch.setattr(api, "BLOCK", block)
        margins = topk_margins(s, 4)
        results.append((margins, *torch.autograd.grad(margins.square().sum(), s)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_arguments_are_checked():
    s = torch.zeros(2, 5)
    for k in (0, 5, 2.0, True):
        with pytest.raises(ValueError, match="k must be"):
            topk_margins(s, k)
    with pytest.raises(ValueError, match="temperature"):
        topk_margins(s, 2, temperature=0.0)
    with pytest.raises(ValueError, match="floating point"):
        topk_margins(s.long(), 2)
    with pytest.raises(ValueError, match="dense"):
        topk_margins(s.to_sparse(), 2)


@pytest.mark.parametrize("sizes", [(50, 50, 50, 50), (3, 197), (200,)])
def test_states_of_chunks_give_margins_and_gradient(sizes):
    s, y, k, theta = torch.randn(4, 200) * 3, torch.tensor([0, 5, 100, 199]), 5, 0.7
    without = s.scatter(1, y[:, None], -math.inf)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def state(scores, k):
        parts = zip(scores.split(sizes, 1), starts, strict=True)
        return chunks.merge([chunks.summarize(part, k, theta, first) for part, first in parts], theta)

    exact = s.double().requires_grad_()
    margins = graph.margins(exact, k, theta)
    at_labels = margins.gather(1, y[:, None])
    f = chunks.finish(state(without, k), theta)
    found = s.gather(1, y[:, None]).double() - f.a.double() + f.shift
    torch.testing.assert_close(found, at_labels, rtol=1e-6, atol=1e-6)
    parts = zip(without.split(sizes, 1), starts, strict=True)
    gradient = torch.cat([chunks.label_gradient(part, f, theta, first) for part, first in parts], 1)
    (expected,) = torch.autograd.grad(at_labels.sum(), exact)
    torch.testing.assert_close(gradient.scatter(1, y[:, None], 1.0), expected.float(), rtol=1e-5, atol=1e-7)

    top = state(s, k + 1)
    torch.testing.assert_close(
        chunks.top_margins(top, theta), margins.gather(1, top.classes[:, :k]), rtol=1e-6, atol=1e-6
    )
