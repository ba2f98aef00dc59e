"""Plots: colours that stand out and stay with their loss, intervals and gaps, and SVG that belongs to the page."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from topk_registry import list_losses
from topk_studies.engine.study import Estimate, Figure, Median
from topk_studies.report import plots
from topk_studies.report.plots import COLOURS, LOOKS, looks

SHEETS = ("#ffffff", "#1f2126")  # of the page, in light and in dark


def channels(colour: str) -> list[float]:
    """Linear red, green and blue."""
    found = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in found]


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted(sum(w * c for w, c in zip(weights, channels(x), strict=True)) for x in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("sheet", SHEETS)
def test_every_colour_stands_out_in_light_and_in_dark(sheet: str) -> None:
    """3 is what the guidelines ask of graphics."""
    assert {colour: contrast(colour, sheet) for colour in {*COLOURS, "#808080"} if contrast(colour, sheet) < 3} == {}


def test_every_loss_of_ours_has_a_look_of_its_own() -> None:
    ours = [name for name in list_losses() if name in LOOKS]
    assert {"ce", "smooth_topk_svm", "noised_topk", "ldam", "focal"} <= set(ours)
    seen = {(LOOKS[name].colour, str(LOOKS[name].dashes), LOOKS[name].marker) for name in ours}
    assert len(seen) == len(ours)


def test_the_papers_losses_are_told_apart_without_their_colour() -> None:
    names = ("ce", "smooth_topk_svm", "noised_topk", "topk_hinge_calibrated", "ldam", "focal")
    for one, other in combinations(names, 2):
        assert LOOKS[one].colour != LOOKS[other].colour
        assert LOOKS[one].marker != LOOKS[other].marker


def test_a_loss_looks_the_same_in_every_plot() -> None:
    alone, together = looks(["ce"]), looks(["their_loss", "ce", "smooth_topk_svm tau=0.1"])
    assert alone["ce"] == together["ce"]
    assert together["smooth_topk_svm tau=0.1"] == LOOKS["smooth_topk_svm"]
    assert looks(["their_loss"]) == looks(["their_loss"])


def test_names_in_one_plot_do_not_share_a_colour_while_there_are_any() -> None:
    names = [f"variant {i}" for i in range(len(COLOURS))]
    assert len({look.colour for look in looks(names).values()}) == len(COLOURS)
    twice = looks(["ce tau=1", "ce tau=2"])
    assert twice["ce tau=1"].colour != twice["ce tau=2"].colour


def figure(draw, title: str = "t") -> Figure:
    return Figure(title, "c", draw, (4.0, 3.0))


def axes_of(series: dict, **options):
    found = []

    def draw(canvas):
        axes = canvas.subplots()
        plots.lines(axes, series, **options)
        found.append(axes)

    plots.svg(figure(draw), name="x")
    return found[0]


def test_an_interval_is_a_band_or_a_bar_of_its_size() -> None:
    series = {"ce": [(1, Estimate(10.0, 2.0, 3)), (2, Estimate(12.0, 1.0, 3))]}
    band = axes_of(series).collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (8.0, 13.0)
    bars = axes_of({"ce": [(1, Median(10.0, 9.0, 13.0, 5))]}, band=False).collections[0].get_segments()[0]
    assert bars[:, 1].tolist() == [9.0, 13.0]


def test_a_line_has_a_gap_where_there_is_no_number() -> None:
    (line,) = axes_of({"ce": [(1, 1.0), (2, None), (3, "failed"), (4, math.inf), (5, 2.0)]}).lines
    assert [math.isfinite(y) for y in line.get_ydata()] == [True, False, False, False, True]


def test_a_name_without_any_number_is_not_drawn() -> None:
    assert axes_of({"ce": [(1, None)], "ldam": []}).lines[:] == []


def test_the_svg_is_well_formed_takes_the_pages_ink_and_needs_nothing_else() -> None:
    def draw(canvas):
        axes = canvas.subplots()
        plots.lines(axes, {"a <b> & 'c'": [(1, 1.0), (2, 2.0)]})
        axes.set_title("one & two")
        plots.legend(canvas, axes)

    text = plots.svg(figure(draw), name="x")
    root = ET.fromstring(text)
    assert root.get("viewBox")
    assert root.get("width") is None
    words = "".join(root.itertext())
    assert "one & two" in words
    assert "a <b> & 'c'" in words
    assert "var(--ink" in text
    assert plots.INK not in text.replace("var(--ink, #1c1d20)", "")
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert [link for link in links if not link.startswith("#")] == []


def test_ids_of_two_figures_on_a_page_differ() -> None:
    def draw(canvas):
        plots.lines(canvas.subplots(), {"ce": [(1, 1.0), (2, 2.0)]})

    def ids(name: str) -> set[str]:
        return set(re.findall(r'<(?:clipPath|path) id="([^"]+)"', plots.svg(figure(draw), name=name)))

    assert ids("one")
    assert not ids("one") & ids("two")


def test_the_same_figure_is_the_same_text() -> None:
    def draw(canvas):
        plots.lines(canvas.subplots(), {"ce": [(1, 1.0), (2, 2.0)]})

    assert plots.svg(figure(draw), name="x") == plots.svg(figure(draw), name="x")


@pytest.mark.parametrize(
    ("path", "compact"),
    [
        ("M 10.04 20.5 \nL 9.5 0.26 \nL 9.52 0.3 \nL 110.5 0.3 \nz\n", "M10 20.5l-.5-20.2l101 0z"),
        ("M 1 2 \nL 1 2 \nM 3 4 \nL 3.5 4 \nz\nL 4 4 \n", "M1 2l0 0M3 4l.5 0zl1 0"),
        ("M 0 2.756 \nC 0.7312 2.75 1 2 3 -0.125 \nz", "M 0 2.75 \nC 0.73 2.75 1 2 3 -0.12 \nz"),
        ("", ""),
    ],
)
def test_paths_are_the_same_in_fewer_letters(path: str, compact: str) -> None:
    assert plots._compact(path) == compact


def test_png_for_what_is_too_intricate() -> None:
    assert plots.png(figure(lambda canvas: canvas.subplots().plot([1, 2]))).startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(plots.MissingExtraError, match=r"pip install 'topk-registry\[study\]'"):
        plots.svg(figure(lambda canvas: None), name="x")
