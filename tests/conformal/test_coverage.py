"""Intervals against 30-digit arithmetic and against the coverage that they promise."""

import mpmath
import pytest

from topk_registry.conformal import binomial_interval, coverage_interval, coverage_law
from topk_registry.conformal.coverage import beta_cdf, beta_quantile


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 40), (95, 10), (9001, 1000)])
@pytest.mark.parametrize("p", [0.005, 0.5, 0.975])
def test_beta_quantiles(a, b, p):
    with mpmath.workdps(30):
        x = beta_quantile(p, a, b)
        assert float(mpmath.betainc(a, b, 0, x, regularized=True)) == pytest.approx(p, rel=1e-8)
    assert beta_cdf(x, a, b) == pytest.approx(p, rel=1e-8)


def test_ends():
    assert beta_cdf(0.0, 2, 3) == 0
    assert beta_cdf(1.0, 2, 3) == 1
    assert binomial_interval(0, 10)[0] == 0
    assert binomial_interval(10, 10)[1] == 1
    # the rule of three, exactly: 1 - 0.025^(1/10)
    assert binomial_interval(0, 10)[1] == pytest.approx(1 - 0.025**0.1, rel=1e-12)


def test_the_law_of_coverage():
    assert coverage_law(104, 0.1) == (95, 10)
    low, high = coverage_interval(999, 0.1)
    assert 0.88 < low < 0.9 < high < 0.92
    with pytest.raises(ValueError, match="too few for alpha"):
        coverage_law(8, 0.1)
    with pytest.raises(ValueError, match="got 3 of 2"):
        binomial_interval(3, 2)
