"""The form of the operator that is exported: held against the exact sums, on rows where a careless one fails."""

import numpy as np
import pytest
import torch

from tests.ops.ksubset.static_rows import RTOL, assert_near, rows
from tests.oracles import mp_marginals, spot_log_odds
from topk_registry import TopKHead
from topk_registry.ops.ksubset.fixed_graph import static_marginals

SHAPES = [(2, 1), (3, 2), (6, 5), (9, 4), (12, 1), (40, 3), (40, 20), (60, 50), (300, 5)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_agrees_with_the_definition(n, k, temperature):
    named = rows(n, k)
    s = torch.stack(list(named.values()))
    got = static_marginals(s, k, temperature).numpy()
    for name, row, row_got in zip(named, s.double() / temperature, got, strict=True):
        wanted = np.array(mp_marginals(row.tolist(), k))
        assert_near(row_got, wanted, name)
    np.testing.assert_allclose(got.sum(-1), k, rtol=RTOL)


@pytest.mark.parametrize(("n", "k"), [(21841, 5), (21841, 50), (1000, 1)])
def test_agrees_on_long_rows(n, k):
    s = 3 * torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    classes = [*s[0].topk(2 * k).indices.tolist()[:: max(1, k // 3)], 0, n // 2, n - 1]
    wanted = 1 / (1 + np.exp(-np.array(spot_log_odds(s[0].tolist(), k, classes))))
    got = static_marginals(s, k)
    order = {c: i for i, c in enumerate(dict.fromkeys(classes))}
    np.testing.assert_allclose(got[0, list(order)].numpy(), wanted, rtol=RTOL)
    assert float(got.double().sum()) == pytest.approx(k, rel=RTOL)


@pytest.mark.parametrize(("n", "k"), [(100, 65), (300, 110), (1000, 120), (1000, 200), (700, 500)])
def test_agrees_for_large_k(n, k):
    """The chance of k classes, which all is relative to, is 2^-k at a careless tilt: below the numbers of fp32."""
    high = torch.arange(n) < k
    normal = torch.randn(n, generator=torch.Generator().manual_seed(k))
    gaps = [torch.where(high, gap, 0.0) for gap in (1.0, 5.0, 10.0, 12.0, 14.0, 20.0, 100.0)]
    s = torch.stack([*gaps, gaps[3] + normal, normal, 10 * normal, torch.zeros(n), torch.linspace(40, -40, n)])
    classes = [0, k - 1, k, n - 1]
    got = static_marginals(s, k)
    for row, row_got in zip(s, got, strict=True):
        wanted = 1 / (1 + np.exp(-np.array(spot_log_odds(row.tolist(), k, classes))))
        assert_near(row_got[classes].numpy(), wanted, "")
    np.testing.assert_allclose(got.double().sum(-1).numpy(), k, rtol=RTOL)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (9, 4), (40, 3), (300, 5)])
def test_classes_that_cannot_be_chosen_have_no_chance_and_do_not_matter(n, k):
    s = torch.randn(3, n, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(n) % 3 != 1
    got = static_marginals(s.masked_fill(~keep, -torch.inf), k)
    assert (got[:, ~keep] == 0).all()
    wanted = [mp_marginals(row.tolist(), k) for row in s[:, keep].double()]
    np.testing.assert_allclose(got[:, keep], wanted, rtol=RTOL)


def test_rows_do_not_depend_on_each_other():
    s = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    spoilt = s.clone()
    spoilt[1, 3] = torch.nan
    got = static_marginals(spoilt, 4)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2, 3]], static_marginals(s, 4)[[0, 2, 3]], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 3, 12)])
def test_the_head_takes_this_form_while_it_is_exported(shape):
    s = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    head = TopKHead(4, temperature=0.5)
    program = torch.export.export(head, (s,))
    assert not [node for node in program.graph.nodes if "sigmoid" in str(node.target)]
    exported, eager = program.module()(s), head(s)
    torch.testing.assert_close(exported.marginals, eager.marginals, rtol=RTOL, atol=0)
    assert torch.equal(exported.indices, eager.indices)
