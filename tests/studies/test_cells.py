"""Cells of a table, and that "best" is said only where the intervals allow it."""

import math

import pytest

from topk_studies.engine.study import Estimate, Median, Table
from topk_studies.report.cells import best_cells, text


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, ""),
        ("ce", "ce"),
        (3, "3"),
        (12345, "12\N{NARROW NO-BREAK SPACE}345"),
        (0.123456, "0.1235"),
        (1e-9, "1e-09"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (Estimate(91.256, 0.344, 3), "91.26 ± 0.34"),
        (Estimate(91.256, math.nan, 1), "91.26"),
        (Median(1234.5, 1200.0, 1300.0, 9), "1234 (1200 to 1300)"),
        (Median(0.01234, 0.01, 0.02, 1), "0.0123"),
    ],
)
def test_a_value_as_it_is_read(value, wanted: str) -> None:
    assert text(value) == wanted


def table(*rows: tuple, **options) -> Table:
    return Table("t", ("name", "a", "b"), rows, compared=("a", "b"), **options)


CLEAR = Estimate(9.0, 0.5, 3)
BELOW = Estimate(7.0, 0.5, 3)
NEAR = Estimate(8.2, 0.5, 3)


def test_the_best_is_marked_where_its_interval_is_apart_from_all() -> None:
    assert best_cells(table(("x", CLEAR, BELOW), ("y", BELOW, CLEAR))) == {(0, 1), (1, 2)}
    assert best_cells(table(("x", CLEAR, BELOW), ("y", BELOW, CLEAR), best="min")) == {(1, 1), (0, 2)}
    assert best_cells(table(("x", CLEAR, BELOW), ("y", BELOW, CLEAR), along="row")) == {(0, 1), (1, 2)}


def test_nothing_is_marked_where_intervals_overlap() -> None:
    assert best_cells(table(("x", CLEAR, None), ("y", NEAR, None), ("z", BELOW, None))) == set()


def test_a_single_run_has_no_interval_and_settles_nothing() -> None:
    alone = Estimate(50.0, math.nan, 1)
    assert best_cells(table(("x", alone, None), ("y", BELOW, None))) == set()
    assert best_cells(table(("x", CLEAR, None), ("y", Estimate(1.0, math.nan, 1), None))) == set()
    assert best_cells(table(("x", Median(1.0, 1.0, 1.0, 1), None), ("y", BELOW, None))) == set()


def test_exact_numbers_compete_as_they_are_and_ties_have_no_best() -> None:
    assert best_cells(table(("x", 2, 1.0), ("y", 1, 1.0))) == {(0, 1)}


def test_words_and_empty_cells_do_not_compete() -> None:
    assert best_cells(table(("x", CLEAR, None), ("y", "failed", None))) == set()
    assert best_cells(table(("x", CLEAR, None), ("y", "failed", None), ("z", BELOW, None))) == {(0, 1)}


def test_without_compared_columns_nothing_is_marked() -> None:
    assert best_cells(Table("t", ("name", "a"), (("x", CLEAR), ("y", BELOW)))) == set()
