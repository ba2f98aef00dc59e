"""The oracles agree with each other, and with mpmath where brute force cannot reach."""

import mpmath
import numpy as np
import pytest

from tests.oracles import mp_log_odds, mp_marginals, mp_smooth_svm, subset_log_odds


def scores(n: int, scale: float = 1.0, seed: int = 0) -> list[float]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).tolist()


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_exact_sums_equal_brute_force(k: int, scale: float) -> None:
    x = scores(9, scale)
    np.testing.assert_allclose(mp_log_odds(x, k), subset_log_odds(x, k), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(mp_marginals(x, k), 1 / (1 + np.exp(-np.array(subset_log_odds(x, k)))), rtol=1e-13)


def test_exact_sums_equal_mpmath_on_a_wide_row() -> None:
    x, k = scores(60, scale=3000.0), 7
    with mpmath.workdps(3000):  # this many digits survive the division of the product by one factor
        e = [mpmath.exp(v) for v in x]
        c = [mpmath.mpf(1)] + [mpmath.mpf(0)] * k
        for w in e:
            c = [c[0], *(c[j] + w * c[j - 1] for j in range(1, k + 1))]
        for i in np.argsort(x)[-9:-4]:
            d = [c[0]]
            for j in range(1, k + 1):
                d.append(c[j] - e[i] * d[-1])
            assert mp_log_odds(x, k)[i] == pytest.approx(float(mpmath.log(e[i] * d[k - 1] / d[k])), rel=1e-15)


@pytest.mark.parametrize(("k", "tau", "alpha"), [(1, 1.0, 0.0), (2, 0.5, 1.0), (5, 0.1, 1.0), (5, 10.0, 0.3)])
def test_smooth_svm_is_a_softplus_of_the_log_odds_and_its_gradient_its_slope(k: int, tau: float, alpha: float) -> None:
    s = scores(9)
    y = 4
    step = 1e-6
    loss, gradient = mp_smooth_svm(s, y, k, tau, alpha)
    odds = subset_log_odds([v / (k * tau) for v in s], k)[y]
    assert loss == pytest.approx(tau * np.logaddexp(0, alpha / tau - odds), rel=1e-13)
    for i in range(9):
        up, down = ([v + sign * step * (j == i) for j, v in enumerate(s)] for sign in (1, -1))
        slope = (mp_smooth_svm(up, y, k, tau, alpha)[0] - mp_smooth_svm(down, y, k, tau, alpha)[0]) / (2 * step)
        assert gradient[i] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert sum(gradient) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("y", [0, 3, 8])
def test_smooth_svm_at_a_vanishing_temperature_is_the_hinge_on_the_kth_best_other(y: int) -> None:
    s, k = scores(9), 3
    others = sorted(v for i, v in enumerate(s) if i != y)
    violation = 1 + (others[-k] - s[y]) / k
    loss, gradient = mp_smooth_svm(s, y, k, 1e-36)
    assert loss == pytest.approx(max(violation, 0), rel=1e-15)
    assert gradient[y] == pytest.approx(-(violation > 0) / k, rel=1e-15)
    assert gradient[s.index(others[-k])] == pytest.approx((violation > 0) / k, rel=1e-15)
    assert np.count_nonzero(np.abs(gradient) > 1e-30) == 2 * (violation > 0)
