"""Tables of results on real pictures: statistics against SciPy, the tables, and pages against result files."""

import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from topk_registry.registry import get_loss_builder, list_losses
from topk_studies import networks, tables

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 1, "docs/choose.md": 2, "docs/reference/results.md": 11}  # number of tables from result files
DOCUMENTS = tables.read(ROOT / "docs" / "results")


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


def test_a_row_that_diverged_in_one_condition_has_the_figures_of_the_other(document):
    document["rows"] = [
        row for row in document["rows"] if (row["condition"], row["row"]) != ("clean", "aldr_kl, tuned")
    ]
    for table, cells in ((tables.ranked(document), 4), (tables.differences(document), 6)):
        (line,) = [line for line in table.splitlines() if "aldr_kl" in line]
        shown = line.strip("| ").split(" | ")[1:]
        assert len(shown) == cells
        assert shown[: cells // 2] == ["diverged"] * (cells // 2)
        assert "diverged" not in shown[cells // 2 :]


def figures(*names):
    """Return the absolute differences and the half-widths that the notes of result files state."""
    found = set()
    for name in names:
        for study in json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text()):
            for note in study.get("notes", ()):
                for gap, half in re.findall(r"([+-]\d+\.\d+) \u00b1 (\d+\.\d+)", note["evidence"]):
                    found.add((abs(float(gap)), float(half)))
    return found


def test_the_replications_on_the_page_are_in_their_files():
    page = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    table = page.partition("## Replications of the papers")[2].partition("| Network, epochs")[0]
    stated = 0
    for line in re.findall(r"^\| Top-.*$", table, re.M):
        for name, cell in zip(("features", "images"), line.split("|")[2:4], strict=True):
            known = figures(name)
            for gap, half in re.findall(r"([+-]\d+\.\d)(?: ± (\d+\.\d))?", cell):
                near = [each for each in known if each[0] == pytest.approx(abs(float(gap)), abs=0.0501)]
                assert not half or [each for each in near if each[1] == pytest.approx(float(half), abs=0.0501)], line
                assert near, (line, gap)
                stated += 1
    assert stated == 15


def bullets():
    """Return (loss, text) of the bullet on evidence of each loss of the project."""
    for name in list_losses("topk-registry:*"):
        text = inspect.getdoc(get_loss_builder(name)) or ""
        yield name, " ".join(text.partition("- Evidence:")[2].partition("\n\n")[0].split())


@pytest.mark.parametrize(("loss", "text"), [*bullets()])
def test_the_evidence_of_a_loss_is_in_the_result_files(loss, text):
    sentence = tables.evidence(loss, DOCUMENTS)
    assert sentence in text
    known = {gap for gap, _ in figures("features", "images", "rare_classes", "several_labels")}
    for figure in re.findall(r"(\d+\.\d) points", text.replace(sentence, "")):
        assert [gap for gap in known if gap == pytest.approx(float(figure), abs=0.0501)], figure


@pytest.mark.parametrize("name", tables.NETWORKS)
def test_a_study_from_scratch_has_the_same_seeds_in_all_rows_and_its_protocol(name):
    document = DOCUMENTS[name]
    assert document["command"] == f"topk-registry study {name} --data-dir DIR"
    assert document["protocol"] == networks.__doc__.splitlines()
    assert len({(row["seeds"], len(row["topk"])) for row in document["rows"]}) == 1
    assert [row["row"] for row in document["rows"] if row["row"] == "ce"] == ["ce", "ce"]
    assert len({(row["condition"], row["row"]) for row in document["rows"] if row["main"]}) == 24


@pytest.mark.parametrize("place", ["docs/choose.md", "docs/faq.md", "topk_registry/train/recipes/finetune.yaml"])
def test_the_figures_on_several_k_are_in_the_file(place):
    text = (ROOT / place).read_text(encoding="utf-8").replace("\n# ", "\n")
    assert tables.several_k(DOCUMENTS["icons"]) in " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_its_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.filled(text, DOCUMENTS) == text
    assert len(tables.PLACE.findall(text)) == PAGES[page]


@pytest.mark.parametrize("name", tables.TITLES)
def test_a_file_has_per_seed_values_of_cross_entropy_and_the_twelve(name):
    document = DOCUMENTS[name]
    main = [row for row in document["rows"] if row["main"]]
    assert len(main) == 24
    for each in main:
        assert len(each["topk"]) == each["seeds"] - each["diverged"] > 2
    assert document["command"].startswith(f"topk-registry study {name}")


def test_every_file_of_results_is_on_a_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    unused = [path.name for path in (ROOT / "docs" / "results").iterdir() if f"results/{path.name}" not in pages]
    assert not unused


def test_the_command_rewrites_tables_and_nothing_else(tmp_path, document):
    (tmp_path / "icons.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- icons: ranked -->\nold\n<!-- end -->\nafter\n")
    tables.main(tmp_path, page)
    text = page.read_text()
    assert text.startswith("before\n<!-- icons: ranked -->\n| Loss |")
    assert text.endswith("|\n<!-- end -->\nafter\n")
    assert "old" not in text
