"""The prediction head, around real classifiers, over crops, and its temperature."""

import itertools
import math

import pytest
import torch

from tests.nn.reference import log_odds_by_recursion
from topk_registry import TopKHead, create_loss


def test_head_gives_scores_probabilities_and_classes():
    s = torch.randn(3, 12, dtype=torch.float64)
    out = TopKHead(4, temperature=0.5)(s)
    assert out.logits is s
    torch.testing.assert_close(out.marginals, torch.sigmoid(log_odds_by_recursion(s / 0.5, 4)))
    assert torch.equal(out.indices, out.marginals.topk(4).indices)
    assert "k=4, temperature=0.5" in repr(TopKHead(4, temperature=0.5))


@pytest.mark.parametrize("n", [3, 5])
def test_a_k_that_is_too_large_is_an_error_that_names_k(n):
    with pytest.raises(ValueError, match=f"k must be an integer from 1 to n - 1 = {n - 1}, got 5"):
        TopKHead(5)(torch.zeros(2, n))


@pytest.mark.parametrize(("k", "tau"), [(1, 1.0), (3, 0.2), (5, 2.0)])
def test_the_head_of_a_loss_predicts_what_the_loss_is_the_likelihood_of(k, tau):
    s, y = torch.randn(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    loss = create_loss("topk_nll", k=k, tau=tau, reduction="none")
    head = TopKHead.of_loss(loss)
    assert (head.k, head.temperature) == (k, k * tau)
    chance = head(s).marginals.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(loss(s, y), -tau * chance.log())
    assert TopKHead.of_loss(create_loss("smooth_topk_svm", k=[1, 4], tau=tau)).temperature == 4 * tau
    for other in ("focal", "ldr_kl", "ksubset_nll", "topk_hinge"):
        with pytest.raises(ValueError, match="expected a loss of top-k marginals, such as topk_nll"):
            TopKHead.of_loss(create_loss(other))


def by_enumeration(logits, k, allowed):
    """Marginals of the sets of k allowed classes, in double precision; all allowed classes if they are fewer."""
    rows = []
    for row, mask in zip(logits.double(), allowed, strict=True):
        classes = mask.nonzero()[:, 0].tolist()
        sets = [list(S) for S in itertools.combinations(classes, min(k, len(classes)))]
        weights = torch.stack([row[S].sum() for S in sets]).softmax(0)
        hot = torch.stack([torch.zeros_like(row).index_fill(0, torch.tensor(S, dtype=torch.int64), 1.0) for S in sets])
        rows.append((weights[:, None] * hot).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_list_of_allowed_classes(k, dtype):
    s = (3 * torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
    allowed = torch.arange(8) < torch.arange(9)[:, None]  # from none to all
    out = TopKHead(k, temperature=2.0)(s, allowed=allowed)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(out.marginals.double(), by_enumeration(s / 2, k, allowed), rtol=0, atol=tolerance)
    assert not out.marginals[~allowed].any()
    for row, (indices, logits) in enumerate(zip(out.indices.tolist(), out.logits, strict=True)):
        best = logits.topk(min(k, row)).indices.tolist()
        assert indices == best + [-1] * (k - len(best))
    one_list = TopKHead(k)(s, allowed=allowed[5])
    torch.testing.assert_close(one_list.marginals, TopKHead(k)(s, allowed=allowed[5].expand(9, 8)).marginals)


@pytest.mark.parametrize("out", [-math.inf, -1e9, -1e30])
@pytest.mark.parametrize(("n", "k"), [(1000, 50), (1000, 5), (21_841, 20), (30, 20)])
@pytest.mark.parametrize("exporting", [False, True])
def test_fewer_than_k_classes_above_the_rest(n, k, out, exporting, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    s = torch.randn(2, n).index_fill(1, torch.arange(k // 2, n), out)
    marginals = TopKHead(k)(s).marginals
    torch.testing.assert_close(marginals[:, : k // 2], torch.ones(2, k // 2))
    if out == -math.inf:
        assert not marginals[:, k // 2 :].any()
    else:  # equal scores share what is left
        rest = torch.full((2, n - k // 2), (k - k // 2) / (n - k // 2))
        torch.testing.assert_close(marginals[:, k // 2 :], rest, rtol=1e-4, atol=0)


def test_gradients_reach_the_allowed_classes_alone():
    s = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    allowed = torch.arange(8) < torch.tensor([8, 6, 3, 1])[:, None]
    weights = torch.randn(4, 8, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((TopKHead(3)(s, allowed=allowed).marginals * weights).sum(), s)
    (expected,) = torch.autograd.grad((by_enumeration(s, 3, allowed) * weights).sum(), s)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("k", "with_list"), [(5, False), (5, True), *(pytest.param(k, True, marks=pytest.mark.slow) for k in (1, 20))]
)
def test_it_exports_with_any_batch(k, with_list):
    def inputs(rows):
        s = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows))
        return (s, s > s.median()) if with_list else (s,)

    head, batch = TopKHead(k, temperature=0.5), torch.export.Dim("batch")
    shapes = ({0: batch},) * (1 + with_list)
    exported = torch.export.export(head, inputs(2), dynamic_shapes=shapes).module()
    for rows in (1, 2, 7):
        for found, expected in zip(exported(*inputs(rows)), head(*inputs(rows)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_classes_are_ordered_where_marginals_saturate():
    s = torch.tensor([[900.0, 1000.0, 800.0, 0.0]])
    assert TopKHead(2)(s).indices.tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_get_single_precision_marginals(dtype):
    out = TopKHead(5)(torch.randn(2, 30).to(dtype))
    assert out.marginals.dtype == torch.float32
    torch.testing.assert_close(out.marginals.sum(-1), torch.full((2,), 5.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TopKHead(0), "k must be"),
        (lambda: TopKHead(2, temperature=-1.0), "temperature"),
        (lambda: TopKHead(5)(torch.zeros(2, 5)), "k"),
        (lambda: TopKHead(2)(torch.zeros(2, 5), allowed=torch.ones(2, 4).bool()), "allowed"),
        (lambda: TopKHead(2)(torch.zeros(2, 5), allowed=torch.ones(5)), "allowed"),
    ],
)
def test_bad_input(make, word):
    with pytest.raises((ValueError, RuntimeError), match=word):
        make()
