"""Tables of results on real pictures: statistics against SciPy, and the tables."""

import json

import numpy as np
import pytest
from scipy import stats

from topk_studies import tables


def row(condition, name, topk, main=False):
    about = {"condition": condition, "row": name, "main": main, "seeds": len(topk), "diverged": 0}
    return {**about, "top1": [value - 10 for value in topk], "topk": topk, "set_size": [value / 100 for value in topk]}


@pytest.fixture
def document():
    rows = []
    for condition, gain in (("clean", 0.0), ("noisy", 3.0)):
        rows.append(row(condition, "ce", [80.0, 81.0, 82.0, 80.5]))
        rows.append(row(condition, "smooth_topk_svm, k = [1, k], tuned", [80.1 + gain, 81 + gain, 82 + gain, 80], True))
        rows.append(row(condition, "aldr_kl, tuned", [80.1 + gain, 81.2 + gain, 82 + gain, 80.6 + gain], True))
        rows.append(row(condition, "focal", [81.0, 82.0]))
    return {"k": 5, "rows": rows}


@pytest.mark.parametrize("degrees", [1, 2, 11, 19])
@pytest.mark.parametrize("t", [0.0, -0.7, 2.2, 9.0])
def test_p_values_equal_scipy(t, degrees):
    assert tables.p_value(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), rel=1e-5, abs=1e-12)


def test_holm_equals_its_definition():
    random = np.random.default_rng(0)
    for _ in range(50):
        values = random.uniform(0, 0.05, 6) ** 1.5
        order = np.sort(values)
        adjusted = [
            max(min(1, (6 - j) * order[j]) for j in range(np.searchsorted(order, value) + 1)) for value in values
        ]
        assert tables.holm(list(values)) == [value <= 0.05 for value in adjusted]


def test_the_ranking_uses_the_seeds_of_all_rows_and_marks_the_best(document):
    lines = tables.ranked(document).splitlines()
    assert lines[0] == "| Loss | clean: top-1 | clean: top-5 | noisy: top-1 | noisy: top-5 |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `aldr_kl`, tuned",
        "| `smooth_topk_svm`, k = [1, 5], tuned",
        "| `focal`",
        "| cross-entropy",
    ]
    assert "| cross-entropy | 70.5 ± 0.5 | 80.5 ± 0.5 |" in lines[-1]
    assert "**81.5** ± 0.5" in lines[4]


def test_differences_are_paired_by_seed_and_marked_by_holm(document):
    lines = tables.differences(document).splitlines()
    assert "| cross-entropy | 70.9 | 80.9 | 0.81 |" in lines[2]
    gaps = np.array([0.1, 0.2, 0.0, 0.1])
    half = stats.t.ppf(0.975, 3) * gaps.std(ddof=1) / 2
    cells = lines[4].split(" | ")
    assert cells[2] == f"+0.1 ± {half:.1f}"
    assert cells[5] == f"+3.1 ± {half:.1f}\\*"
    assert "\\*" not in lines[3]


def test_the_command_rewrites_tables_and_nothing_else(tmp_path, document):
    (tmp_path / "small.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- small: ranked -->\nold\n<!-- end -->\nafter\n")
    tables.main(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before\n<!-- small: ranked -->\n| Loss |")
    assert text.endswith("|\n<!-- end -->\nafter\n")
    assert "old" not in text
