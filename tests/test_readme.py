"""README and docs are true: tables are the registry's and the reports', the plug-in installs, examples run.

``python tests/test_readme.py`` writes the tables anew.
"""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench import first_use
from tests.bench import large_k as large_k_bench
from tests.bench.gate import is_green
from topk_registry import get_loss_builder, registry, use_backend

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOSSES, SPEED_PAGE = DOCS / "losses.md", DOCS / "speed.md"
TABLE = re.compile(r"(?<=<!-- losses -->\n).*?(?=<!-- /losses -->)", re.DOTALL)
COSTS = ROOT / "docs" / "results" / "losses.json"
SPEED = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- /speed -->)", re.DOTALL)
SPEEDS = ROOT / "docs" / "results" / "ksubset.json"
FIRST_USE = re.compile(r"(?<=<!-- first use -->\n).*?(?=<!-- /first use -->)", re.DOTALL)
FIRST_CALLS = ROOT / "docs" / "results" / "first_use.json"
LARGE_K = re.compile(r"(?<=<!-- large k -->\n).*?(?=<!-- /large k -->)", re.DOTALL)
LARGE_K_TIMES = ROOT / "docs" / "results" / "large_k.json"
GPU_SPEED = re.compile(r"(?<=<!-- gpu speed -->\n).*?(?=<!-- /gpu speed -->)", re.DOTALL)
GPU_SPEEDS = ROOT / "docs" / "results" / "ksubset_gpu.json"
FOUND = re.compile(r"(?<=<!-- found labels -->\n).*?(?=<!-- /found labels -->)", re.DOTALL)
FOUND_PAGE, FOUND_LABELS = DOCS / "guide" / "labels.md", DOCS / "results" / "labels.json"
COMPARED = {  # contestants of the bench, and what docs/speed.md calls them
    "F.cross_entropy": "cross-entropy",
    "topk_registry": "ours",
    "topk_registry: torch": "ours, plain torch",
    "published: divide and conquer": "as published",
    "authors' code": "authors' code",
    "pytopk balanced": "pytopk",
    "difftopk neuralsort": "NeuralSort",
}
TAU = inspect.signature(get_loss_builder("smooth_topk_svm")).parameters["tau"].default  # of the tables
COMMON = {"weight", "reduction", "label_smoothing", "ignore_index"}
CONTEXT = {"class_counts", "num_classes", "total_epochs", "smoothing", "soft_targets"}


def written() -> dict[str, list[str]]:
    """The table of docs/losses.md: the cells of each loss's row."""
    found = TABLE.search(LOSSES.read_text())
    assert found
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()[2:]]
    return {cells[0].strip("`"): cells for cells in rows}


def options(name: str) -> str:
    """The options of a loss beyond the common ones, with their defaults."""
    parameters = inspect.signature(registry.get_loss_builder(name)).parameters.values()
    own = [p for p in parameters if p.name not in COMMON | CONTEXT]
    return " ".join(f"`{p.name}={p.default}`" for p in own)


KINDS = {"cost": (0.0, 0.0), "smoothed": (0.1, 0.0), "mixed": (0.0, 0.3)}  # label smoothing and mixup of each column


def kinds() -> dict[str, dict[str, float]]:
    """Median times of the bench report at 256 x 1000, k = 5, with warm caches, by the kinds of target that it has."""
    results = [row for row in json.loads(COSTS.read_text())["results"] if row["both"] and not row.get("cold")]
    rows = [row for row in results if (row["B"], row["n"], row["k"]) == (256, 1000, 5)]
    found = {
        name: [r for r in rows if (r.get("smoothing", 0), r.get("mixup", 0)) == kind] for name, kind in KINDS.items()
    }
    return {name: {r["contestant"]: r["both"]["median"] for r in rows} for name, rows in found.items() if rows}


def cost(name: str) -> str:
    """Those times of a loss relative to cross-entropy's, to two digits; a dash where it was not measured."""
    columns = kinds().values()
    return " | ".join(f"{times[name] / times['F.cross_entropy']:.2g}" if name in times else "-" for times in columns)


def table() -> str:
    """The table with the options and costs as they are; papers and purposes as they were written."""
    cells = written()
    names = [info.name for info in registry.losses.infos("topk-registry:*")]
    header = ["name", "paper", "for", "options", *kinds()]
    rows = [f"| `{name}` | {' | '.join(cells[name][1:3])} | {options(name)} | {cost(name)} |" for name in names]
    return "\n".join([f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *rows]) + "\n"


def speeds() -> str:
    """The bench report of the smooth top-k SVM at its own tau as a table; nothing where there is no report."""
    if not SPEEDS.exists():
        return ""
    report = json.loads(SPEEDS.read_text())
    rows = [row for row in report["results"] if row["tau"] == TAU]
    cases = {(row["B"], row["n"], row["k"]): {} for row in rows}
    for row in rows:
        cases[row["B"], row["n"], row["k"]][row["contestant"]] = row
    names = [name for name in COMPARED if any(name in case for case in cases.values())]
    header = ["B x n, k", *(f"{COMPARED[name]}, ms" for name in names), "ours / cross-entropy", "ours, of the floor"]
    lines = [header, ["---"] * len(header), *(_speeds(*case, names, found) for case, found in cases.items())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _speeds(B: int, n: int, k: int, names: list[str], found: dict[str, dict]) -> list[str]:
    times = {name: row["both"]["median"] * 1000 for name, row in found.items() if row["both"]}
    ours, base = times["topk_registry"], times["F.cross_entropy"]
    floor = found["topk_registry"]["floor"] * 1000
    measured = [f"{times[name]:.3g}" if name in times else "-" for name in names]
    return [f"{B} x {n}, {k}", *measured, f"{ours / base:.2g}", f"{floor / ours:.0%}"]


def found_labels() -> str:
    """The report of found labels as a table: precision among the first; length, precision and recall of the list."""
    report = json.loads(FOUND_LABELS.read_text())
    header = ["data, labels made wrong", "list", "first 50", "first 100", "first 200", "found", "precision", "recall"]
    lines, before = [header, ["---"] * len(header)], ""
    for row in report["results"]:
        about = f"{row['data']}, {row['wrong']} of {row['images']} {row['flips']}"
        shares = ["-" if row[name] is None else f"{row[name]:.0%}" for name in ("first_50", "first_100", "first_200")]
        whole = [str(row["found"]), f"{row['precision']:.0%}", f"{row['recall']:.0%}"]
        lines.append(["" if about == before else about, row["list"], *shares, *whole])
        before = about
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def gpu_speeds() -> str:
    """The report of a GPU at its own tau as a table; nothing where there is no report, or its tests failed."""
    if not GPU_SPEEDS.exists():
        return ""
    report = json.loads(GPU_SPEEDS.read_text())
    assert is_green(report["tests"]), f"{GPU_SPEEDS.name} is of kernels whose tests do not pass"
    cases: dict[tuple, dict[tuple, dict]] = {}
    for row in report["results"]:
        if row["both"] and row["tau"] == TAU:
            key = row["B"], row["n"], row["k"], row["dtype"], "distributions" if row["mixup"] else "indices"
            cases.setdefault(key, {})[row["contestant"], bool(row["graph"])] = row
    names = ("F.cross_entropy", "F.cross_entropy, compiled", "topk_registry")
    header = ["B x n, k", "precision", "targets", "cross-entropy, us", "compiled, us", "ours, us", "of the bandwidth"]
    header += ["launched: cross-entropy, us", "ours, us"]
    lines = [header, ["---"] * len(header)]
    for (B, n, k, dtype, target), found in cases.items():
        cells = [f"{B} x {n}, {k}", dtype, target, *(_us(found, name, True) for name in names)]
        ours = found.get(("topk_registry", True))
        cells.append(f"{ours['floor'] / ours['both']['median']:.0%}" if ours else "-")
        lines.append([*cells, _us(found, names[0], False), _us(found, names[2], False)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _us(found: dict[tuple, dict], contestant: str, graph: bool) -> str:
    row = found.get((contestant, graph))
    return f"{1e6 * row['both']['median']:.3g}" if row else "-"


def block(page: str, marker: str) -> str:
    """The fenced block after the marker in a page of the repository."""
    found = re.search(rf"<!-- {re.escape(marker)} -->\n```\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found, f"{page} has no block marked {marker}"
    return found[1]


def test_the_table_tells_of_every_loss_its_paper_purpose_options_and_cost():
    found = TABLE.search(LOSSES.read_text())
    assert found
    assert found[0] == table(), "run python tests/test_readme.py"
    assert all(cell for cells in written().values() for cell in [*cells[:3], cells[4]])


def test_the_table_of_speeds_is_the_report_s():
    found = SPEED.search(SPEED_PAGE.read_text())
    assert found
    assert found[0] == speeds(), "run python tests/test_readme.py"


def first_calls() -> str:
    """The report of first calls as a table; nothing where there is no report."""
    return first_use.table(json.loads(FIRST_CALLS.read_text())) if FIRST_CALLS.exists() else ""


@pytest.mark.parametrize(("page", "report"), [(LOSSES, COSTS), (SPEED_PAGE, SPEEDS)], ids=["costs", "speeds"])
def test_a_page_tells_the_day_of_its_report(page, report):
    made = json.loads(report.read_text())["environment"]
    assert f"(results/{report.name}), of {made['date'][:10]}" in page.read_text()
    assert page != SPEED_PAGE or f"on an {made['cpu']};" in page.read_text()


def test_the_table_of_first_calls_is_the_report_s():
    found = FIRST_USE.search(SPEED_PAGE.read_text())
    assert found
    assert found[0] == first_calls(), "run python tests/test_readme.py"


def large_k() -> str:
    """The report of losses at large k as a table; nothing where there is no report."""
    return large_k_bench.table(json.loads(LARGE_K_TIMES.read_text())) if LARGE_K_TIMES.exists() else ""


def test_the_table_of_large_k_is_the_report_s():
    found = LARGE_K.search(SPEED_PAGE.read_text())
    assert found
    assert found[0] == large_k(), "run python tests/test_readme.py"


def test_losses_at_large_k_are_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(large_k_bench, "CASES", ((3, 12, 2),))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # other tests follow in this process
    with use_backend("torch"):
        assert large_k_bench.main(["--rounds", "3", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: len(times) for name, times in report["results"][0]["seconds"].items()} == dict.fromkeys(
        ("F.cross_entropy", *large_k_bench.NAMES), 3
    )
    assert large_k_bench.table(report) in capsys.readouterr().out


def test_first_calls_are_timed(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert first_use.main(["--only", "focal", "--ways", "torch", "--repeat", "1", "--json", str(report)]) == 0
    found = json.loads(report.read_text())["focal"]["torch"]
    assert 0 < found["wall"] < 60
    assert capsys.readouterr().out.endswith(
        f"| loss | torch operations, s |\n| --- | --- |\n| `focal` | {found['wall']:.2f} |\n"
    )


def test_the_table_of_found_labels_is_the_report_s():
    found = FOUND.search(FOUND_PAGE.read_text())
    assert found
    assert found[0] == found_labels(), "run python tests/test_readme.py"


def test_what_is_said_of_found_labels_is_so():
    rows = {(row["data"], row["flips"], row["list"]): row for row in json.loads(FOUND_LABELS.read_text())["results"]}
    for data in ("feature vectors", "images"):
        one, five, theirs = (
            rows[data, "anywhere", name] for name in ("log-odds, k = 1", "log-odds, k = 5", "cleanlab")
        )
        assert min(row["first_50"] for row in (one, five, theirs)) >= 0.98
        assert min(row["first_200"] for row in (one, five, theirs)) >= 0.95
        assert abs(one["first_200"] - theirs["first_200"]) < 0.001
        assert five["found"] < 0.51 * theirs["found"]
        assert 0.85 < five["recall"] > theirs["recall"] - 0.06
        assert five["precision"] > 1.9 * theirs["precision"]
        near, few = (rows[data, "within look-alikes", name] for name in ("log-odds, k = 1", "log-odds, k = 5"))
        assert few["recall"] < 0.27 < 0.74 < near["recall"]
    assert rows["images", "within look-alikes", "cleanlab"]["first_50"] <= 0.18
    assert rows["feature vectors", "within look-alikes", "exact posterior, k = 1"]["first_50"] == 1.0


def test_a_table_of_speeds(monkeypatch, tmp_path):
    shape = {"B": 2, "n": 3, "k": 1, "bandwidth": 1e9, "floor": 1e-4}
    row = {**shape, "tau": TAU, "contestant": "F.cross_entropy", "both": {"median": 4e-4}}
    slow = {**row, "contestant": "authors' code", "both": None, "problem": "over the limit"}
    ours = {**row, "contestant": "topk_registry", "both": {"median": 5e-4}}
    other = {**ours, "tau": 1.0, "both": {"median": 7.0}}
    report = tmp_path / "ksubset.json"
    report.write_text(json.dumps({"results": [row, ours, slow, other]}))
    monkeypatch.setattr(sys.modules[__name__], "SPEEDS", report)
    assert speeds().splitlines() == [
        "| B x n, k | cross-entropy, ms | ours, ms | authors' code, ms | ours / cross-entropy | ours, of the floor |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 2 x 3, 1 | 0.4 | 0.5 | - | 1.2 | 20% |",
    ]


def test_the_table_of_a_gpu_is_the_report_s():
    found = GPU_SPEED.search(SPEED_PAGE.read_text())
    assert found
    assert found[0] == gpu_speeds(), "run python tests/test_readme.py"


def test_a_table_of_a_gpu_needs_tests_that_pass(monkeypatch, tmp_path):
    row = {"B": 2, "n": 3, "k": 1, "tau": TAU, "dtype": "bfloat16", "mixup": 0.3, "floor": 1e-6, "graph": 1.0}
    row = {**row, "contestant": "topk_registry", "both": {"median": 2e-6}}
    launched = {**row, "graph": 0.0, "both": {"median": 9e-6}}
    rows = [row, launched, {**row, "contestant": "F.cross_entropy", "both": {"median": 4e-6}}]
    tests = {"passed": 2, "failed": [], "skipped": 0}
    report = tmp_path / "ksubset_gpu.json"
    report.write_text(json.dumps({"tests": tests, "results": rows}))
    monkeypatch.setattr(sys.modules[__name__], "GPU_SPEEDS", report)
    assert gpu_speeds().splitlines()[2] == "| 2 x 3, 1 | bfloat16 | distributions | 4 | - | 2 | 50% | - | 9 |"
    for bad in ({"passed": 0}, {"failed": ["one"]}):
        report.write_text(json.dumps({"tests": {**tests, **bad}, "results": rows}))
        with pytest.raises(AssertionError, match="tests do not pass"):
            gpu_speeds()


@pytest.mark.slow
def test_its_plugin_has_fifteen_lines_installs_and_works(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    lines = 0
    for name in ("pyproject.toml", "brier_loss.py"):
        text = block("docs/guide/plugins.md", f"plug-in: {name}")
        lines += sum(bool(line.strip()) for line in text.splitlines())
        (source / name).write_text(text)
    assert lines <= 15
    target = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    code = (
        "import json, torch, topk_registry as tr\n"
        "info = tr.loss_info('brier')\n"
        "value = tr.create_loss('brier')(torch.zeros(2, 4), torch.tensor([0, 3]))\n"
        "print(json.dumps([info.distribution, info.status, info.summary, float(value)]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    # uniform over four classes: (3/4)^2 + 3 (1/4)^2 = 3/4
    assert json.loads(result.stdout) == ["brier-loss", "available", "Squared error of the softmax probabilities.", 0.75]


def test_the_five_lines_of_the_front_page_run():
    scope = {}
    exec(block("README.md", "five lines"), scope)
    assert scope["logits"].grad.any()
    torch.testing.assert_close(scope["marginals"].sum(1), torch.full((8,), 5.0))


def test_the_python_example_of_the_losses_runs():
    scope = {}
    exec(block("docs/losses.md", "losses from Python"), scope)
    assert callable(scope["loss"])
    assert callable(scope["head"])


@pytest.mark.slow
def test_the_example_of_very_many_classes_runs():
    scope = {}
    exec(block("docs/guide/many_classes.md", "very many classes"), scope)
    assert [part.shape for part in scope["best"]] == [(4, 5)] * 3
    assert scope["head"].weight.grad.any()
    exec(block("docs/guide/many_classes.md", "chunked update"), scope)
    assert scope["head"].weight.grad is None
    exec(block("docs/guide/many_classes.md", "spherical output layer"), scope)


def test_the_picture_of_the_front_page_is_current():
    spec = importlib.util.spec_from_file_location("draw_front", DOCS / "draw_front.py")
    draw_front = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_front)
    number = re.compile(r"-?\d+\.\d")  # coordinates are rounded to tenths of a pixel, which may fall either way
    drawn, kept = draw_front.picture(), draw_front.PICTURE.read_text()
    assert number.sub("", drawn) == number.sub("", kept), "run python docs/draw_front.py"
    assert [float(x) for x in number.findall(drawn)] == pytest.approx(
        [float(x) for x in number.findall(kept)], abs=0.11
    )


def test_the_front_page_fits_a_screen_and_a_half():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 75


if __name__ == "__main__":
    LOSSES.write_text(TABLE.sub(lambda _: table(), LOSSES.read_text()))
    FOUND_PAGE.write_text(FOUND.sub(lambda _: found_labels(), FOUND_PAGE.read_text()))
    page = SPEED.sub(lambda _: speeds(), SPEED_PAGE.read_text())
    page = FIRST_USE.sub(lambda _: first_calls(), page)
    page = LARGE_K.sub(lambda _: large_k(), page)
    SPEED_PAGE.write_text(GPU_SPEED.sub(lambda _: gpu_speeds(), page))
