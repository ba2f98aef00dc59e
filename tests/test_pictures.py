"""Pictures of the pages: each is used, small and drawn by a program."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tests import needs

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = sorted((DOCS / "pictures").iterdir())
PAGES = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
PROGRAMS = [*DOCS.glob("draw_*.py"), DOCS.parent / "plugins/topk_studies/topk_studies/draw.py"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_on_a_page_and_a_program_draws_it(picture):
    assert any(f"pictures/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)
    names = (picture.name, f'"{picture.stem}"')  # a program can add the suffix
    assert any(name in program.read_text(encoding="utf-8") for program in PROGRAMS for name in names)
    assert picture.stat().st_size < 150_000
    if picture.suffix == ".svg":
        root = ElementTree.parse(picture).getroot()
        links = [element.get("href", "") for element in root.iter(f"{SVG}image")]
        assert all(link.startswith("data:") for link in links)  # pages of a site show no files from elsewhere
        assert not list(root.iter(f"{SVG}script"))


def test_the_picture_of_an_answer_names_the_set_and_credits_the_icon():
    needs.package("topk_studies")
    spec = importlib.util.spec_from_file_location("draw_icons", DOCS / "draw_icons.py")
    draw_icons = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_icons)
    top = [SimpleNamespace(name=name, probability=0.5, marginal=0.9) for name in ("a&b", "share", "c")]
    icon = {"body": '<path d="M0 0h4v4z"/>', "width": 8, "height": 8}
    svg = draw_icons.drawn(icon, SimpleNamespace(top=top, set=top[:2]), 100, "Icon: share, by whom")
    shown = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert shown[2:5] == ["a&b", "0.50", "0.90"]
    assert shown[-3:] == [
        "Prediction set for alpha = 0.1: a&b, share",
        "The true class is share. The marginals of all 100 classes sum to 5.",
        "Icon: share, by whom",
    ]
