"""Results agree with those of other packages, and the page has the differences that the file records."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.peers import COMPARISONS, table, version_of

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = json.loads((DOCS / "results" / "peers.json").read_text())["results"]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda each: f"{each.package}-{each.pairs.__name__}")
@pytest.mark.filterwarnings("ignore")
def test_results_agree_with_those_of_another_package(comparison):
    try:
        version_of(comparison.package)
    except PackageNotFoundError:
        pytest.skip(f"{comparison.package} is not installed")
    assert comparison.difference() <= comparison.bound


def test_the_page_has_the_table_of_the_file():
    assert [(row["package"], row["quantity"]) for row in RESULTS] == [(c.package, c.quantity) for c in COMPARISONS]
    assert all(row["difference"] <= row["bound"] for row in RESULTS)
    assert table(RESULTS) in (DOCS / "reference" / "how_checked.md").read_text()
