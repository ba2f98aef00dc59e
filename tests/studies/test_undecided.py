"""What open claims would take: the seeds at which the spread so far decides them, and the table of a page."""

from statistics import NormalDist, mean, stdev

import pytest

from topk_studies.engine.statistics import LOOKS, Claim, settle
from topk_studies.report import undecided


def with_moments(count, centre, spread):
    """Differences by seed with exactly this mean and standard deviation."""
    values = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    values = [(value - mean(values)) / stdev(values) for value in values]
    return {seed: centre + spread * value for seed, value in enumerate(values)}


def summary_of(differences, others=5):
    """A summary of a study whose first claim has these differences and whose others have nothing to say."""
    level = with_moments(len(differences), 9.0, 0.1)
    claims = [Claim("A beats B.", differences, "top-5 of a less b"), *[Claim("C.", level, "c less d")] * others]
    notes = [vars(note) for note in settle(claims)]
    return {"study": "noise", "seconds": 600.0, "runs": 60, "notes": notes}


@pytest.mark.parametrize(("centre", "spread"), [(2.0, 1.2), (0.05, 0.9), (-6.0, 9.0), (1.5, 2.0)])
def test_so_many_seeds_decide_and_fewer_do_not(centre, spread):
    (found,) = undecided.undecided([summary_of(with_moments(8, centre, spread))])
    assert (found.mean, found.spread, found.seeds) == pytest.approx((centre, spread, 8), abs=0.01)
    verdicts = {
        look: summary_of(with_moments(look, centre, spread))["notes"][0]["verdict"] for look in LOOKS if look >= 8
    }
    assert found.needed == min(look for look, verdict in verdicts.items() if verdict != "open")
    assert found.needed is not None
    assert found.minutes == pytest.approx((found.needed - 8) * 2 * 10 / 60)


def test_a_table_has_the_open_claims_alone():
    never = summary_of(with_moments(8, 0.3, 9.0))
    lines = undecided.table([never]).splitlines()
    assert lines[2:] == ["| noise, top-5 of a less b | +0.30 | 9.0 | 8 | more than 40 |  |"]
    assert undecided.table([summary_of(with_moments(8, 30.0, 1.0))]).count("\n") == 2
    text = "<!-- open -->\nold\n<!-- /open -->\n"
    assert undecided.BLOCK.sub(lambda _: undecided.table([never]), text).splitlines()[1:-1] == [
        "| what is compared | mean | spread | seeds so far | seeds that would decide | minutes of runs |",
        "| --- | --- | --- | --- | --- | --- |",
        *lines[2:],
    ]
