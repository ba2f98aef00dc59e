"""The test of exchangeability: its level, what it finds, and the same martingale elsewhere."""

import math

import numpy as np
import pytest

from topk_registry.conformal import ExchangeabilityTest


def run(stream, reference=(), **options):
    test = ExchangeabilityTest(reference, **options)
    for value in stream:
        test.update(value)
    return test


@pytest.mark.slow
def test_its_level_holds_over_whole_streams():
    level, streams = 0.1, 300
    rng = np.random.default_rng(0)
    false = sum(run(rng.standard_normal(300), rng.standard_normal(50), level=level, seed=i).rejected
                for i in range(streams))  # fmt: skip
    # at most the level, and four standard deviations of a share of 300
    assert false / streams <= level + 4 * math.sqrt(level * (1 - level) / streams)
    capital = [math.exp(run(rng.random(40), level=level, seed=i).log_capital[-1]) for i in range(streams)]
    assert np.mean(capital) == pytest.approx(1, abs=4 * np.std(capital) / math.sqrt(streams))


def test_it_holds_for_values_that_repeat():
    rng = np.random.default_rng(1)
    false = sum(run(rng.integers(1, 4, 300), rng.integers(1, 4, 100), level=0.05, seed=i).rejected for i in range(100))
    assert false <= 5 + 4 * math.sqrt(100 * 0.05 * 0.95)


@pytest.mark.parametrize(
    "change",
    [lambda x: x + 1.0, lambda x: x - 1.0, lambda x: 3 * x, lambda x: 0.3 * x],
    ids=["larger", "smaller", "wider", "narrower"],
)
@pytest.mark.parametrize("after", [0, 500])
def test_it_finds_a_change(change, after):
    rng = np.random.default_rng(2)
    x = rng.standard_normal(after + 400)
    x[after:] = change(x[after:])
    test = run(x, rng.standard_normal(500), level=0.001)
    assert test.rejected_at is not None
    assert after < test.rejected_at < after + 400


@pytest.mark.slow
def test_the_jumper_is_the_published_one(monkeypatch):
    """With the bet on p alone, the capital is MAPIE's simple jumper's on the same p-values."""
    martingales = pytest.importorskip("mapie.exchangeability_testing")
    rng = np.random.default_rng(3)
    p_values = rng.random(200) ** 2
    theirs = martingales.OnlineMartingaleTest(test_level=0.01, task="classification", warn=False)
    ours = ExchangeabilityTest(level=0.01)
    ours._jumpers = [np.full(3, 1 / 3), np.zeros(3)]
    feed = iter(p_values)
    monkeypatch.setattr(ours, "_p_value", lambda value: next(feed))
    for p in p_values:
        ours.update(0.0)
        theirs.update_simple_jumper_martingale(p)
    assert ours.log_capital[-1] == pytest.approx(math.log(theirs.current_martingale_value), rel=1e-9)


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="probability of a false alarm"):
        ExchangeabilityTest(level=0)
    with pytest.raises(ValueError, match="reference holds NaN"):
        ExchangeabilityTest([math.nan])
    with pytest.raises(ValueError, match="stream is NaN"):
        ExchangeabilityTest().update(math.nan)


def test_years_of_data_do_not_overflow():
    test = run(np.arange(30_000.0) * 1.0, level=0.01)
    assert math.isfinite(test.log_capital[-1])
    assert test.rejected
