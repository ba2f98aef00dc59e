"""The stability study measures what it says, against exact arithmetic that the tests compute for themselves."""

import html

import numpy as np
import pytest
import torch

from topk_studies.baselines.algorithms import ALGORITHM_2, AUTHORS, CONTESTANTS, LINEAR_SUMMATION, PLAIN, SUMMATION
from topk_studies.baselines.exact import mp_smooth_svm
from topk_studies.engine.study import Options, Record
from topk_studies.experiments import stability
from topk_studies.experiments.stability_findings import TAUS
from topk_studies.report import plots
from topk_studies.timing.contest import OURS, Case, Contestant, UnavailableError

SMALL = {"taus": [1.0, 1e-3, 1e-36], "B": 6, "n": 20, "k": 3, "exact_rows": 4, "device": "cpu"}


def measured(algorithm: str, dtype: str, **changes: object) -> dict[float, dict]:
    configuration = {"algorithm": algorithm, "dtype": dtype, **SMALL, **changes}
    result = stability.run(configuration, None, lambda share, words: None)
    return {one["tau"]: one for one in result["results"]}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [OURS, PLAIN])
def test_ours_is_finite_and_exact_at_every_temperature(name: str, dtype: str) -> None:
    eps = torch.finfo(getattr(torch, dtype)).eps
    for one in measured(name, dtype).values():
        assert one["finite_loss"]
        assert one["finite_gradient"]
        assert one["gradient_error"] <= 4 * eps
        # under half precision the loss itself is computed in single
        assert one["loss_error"] <= 4 * min(eps, torch.finfo(torch.float32).eps)


def test_the_error_is_that_of_the_gradient_against_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contestant that is wrong by a known amount is found wrong by that amount."""

    def build(case: Case):
        def loss(s: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            tau = case.options["tau"]
            rows = [mp_smooth_svm(row, int(c), case.k, tau) for row, c in zip(s.tolist(), y, strict=True)]
            gradient = torch.tensor([gradient for _, gradient in rows], dtype=torch.float64)
            wrong = gradient.clone()
            wrong[2, 5] += 1e-3 * gradient[2].abs().max()
            linear = (s * wrong).sum() / len(s)
            return linear - linear.item() + np.mean([value for value, _ in rows])

        return loss

    monkeypatch.setitem(CONTESTANTS, "wrong", Contestant("wrong", build))
    found = measured("wrong", "float64", taus=[0.5])[0.5]
    assert found["gradient_error"] == pytest.approx(1e-3, rel=1e-9)
    assert found["loss_error"] <= 1e-14


def test_a_sum_in_linear_space_overflows_as_the_temperature_falls() -> None:
    found = measured(LINEAR_SUMMATION, "float32")
    assert found[1.0]["finite_loss"]
    assert not found[1e-3]["finite_loss"]
    assert found[1e-3]["loss"] is None
    assert found[1e-3]["gradient_error"] is None


def test_the_scores_are_rounded_before_the_exact_loss_is_computed() -> None:
    """Rounding the scores to bfloat16 moves the loss by 1e-3; an algorithm is not charged with that."""
    assert measured(PLAIN, "bfloat16", taus=[1.0])[1.0]["loss_error"] < 1e-6


def test_a_contestant_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(case: Case):
        raise UnavailableError("cannot import it; try: pip install it")

    monkeypatch.setitem(CONTESTANTS, AUTHORS, Contestant(AUTHORS, absent))
    found = measured(AUTHORS, "float32")
    assert {one["problem"] for one in found.values()} == {"cannot import it; try: pip install it"}


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """All algorithms in two precisions, at the study's temperatures, on short rows."""
    wanted = [
        {**configuration, "B": 4, "n": 30, "k": 3, "exact_rows": 2}
        for configuration in stability.configurations(Options(), [])
        if configuration["dtype"] in ("float32", "float64")
    ]
    run = stability.run
    return [Record("stability", 1, c, run(c, None, lambda *_: None), 1.0, "2026-01-01T00:00:00", {}) for c in wanted]


def test_every_number_of_the_tables_is_one_that_was_measured(records: list[Record]) -> None:
    found = stability.report(records)
    finite, double, single = found.tables
    assert len(finite.rows) == len(records) == 2 * len(CONTESTANTS)
    row = next(row for row in finite.rows if row[:2] == (LINEAR_SUMMATION, "single"))
    row = dict(zip(finite.columns, row, strict=True))
    assert row["10"] == "yes"
    assert row["0.0001"] == "no"
    measured_here = {
        (r.configuration["dtype"], r.configuration["algorithm"], one["tau"]): one["gradient_error"]
        for r in records
        for one in r.result["results"]
    }
    for dtype, table in (("float64", double), ("float32", single)):
        for tau, row in zip(TAUS, table.rows, strict=True):
            for name, cell in zip(table.columns[1:], row[1:], strict=True):
                error = measured_here[dtype, name, tau]
                assert cell == (f"{error:.1e}" if error is not None else cell)
                assert cell in ("no", "loss") if error is None else float(cell) == pytest.approx(error, rel=0.05)


def test_what_the_runs_say_of_the_claims(records: list[Record]) -> None:
    overflow, approximation, ours = stability.report(records).notes
    assert overflow.verdict == "agrees"
    assert approximation.beyond
    assert ours.verdict == "agrees"
    assert ours.beyond
    # and the other way round: a kernel that is wrong somewhere does not hold
    asked = {(r.configuration["algorithm"], r.configuration["dtype"]): r for r in records}
    kept = asked[SUMMATION, "float32"]
    spoilt = [record for key, record in asked.items() if key != (OURS, "float32")]
    worse = {"results": [{**one, "gradient_error": 1e-3} for one in kept.result["results"]]}
    fake = Record("stability", 1, {**kept.configuration, "algorithm": OURS}, worse, 1.0, "2026-01-01", {})
    assert stability.report([*spoilt, fake]).notes[2].verdict == "differs"


def test_the_figure_has_a_panel_a_precision_and_every_algorithm(records: list[Record]) -> None:
    (figure,) = stability.report(records).figures
    drawn = plots.svg(figure, name="x")
    assert [
        name for name in ("double", "single", *CONTESTANTS) if f">{html.escape(name, quote=False)}<" not in drawn
    ] == []


def test_a_report_of_few_records_or_none(records: list[Record]) -> None:
    assert stability.report([]).notes == ()
    alone = [r for r in records if r.configuration["algorithm"] == ALGORITHM_2]
    assert len(stability.report(alone).tables) == 3
