"""Icons drawn by people: which sets and names count, splits by designer, pictures and their cache."""

import json

import numpy as np
import pytest

from tests import needs
from topk_registry.data import open_dataset
from topk_studies.data import icons
from topk_studies.data.icons import Icons, chosen_sets, designers, render, split_of, stem

NAMES = ("home", "trash", "x")


def about(author, category="UI 24px", license_name="MIT", **more):
    return {"author": {"name": author}, "license": {"title": license_name}, "category": category, **more}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Ten sets of ten designers with three names each, and a set whose license forbids commercial use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    (folder / "json").mkdir(parents=True)
    collections = {f"set{i}": about(f"designer {i}") for i in range(10)} | {"closed": about("x", license_name="BY-NC")}
    (folder / "collections.json").write_text(json.dumps(collections))
    for i, prefix in enumerate(collections):
        body = f'<rect x="{i}" y="4" width="6" height="{4 + i}" fill="currentColor"/>'
        drawings = {f"{name}-outline": {"body": body} for name in NAMES} | {f"rare-{i}": {"body": body}}
        document = {"prefix": prefix, "icons": drawings, "width": 24, "height": 24}
        (folder / "json" / f"{prefix}.json").write_text(json.dumps(document))
    return folder


def test_splits_share_no_set_and_hold_all_pictures_of_names_that_enough_sets_draw(package):
    needs.package("resvg_py")
    parts = [Icons(split, root=package, size=24, min_sets=10) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [18, 6, 6]
    assert [set(part.classes) for part in parts] == [set(NAMES)] * 3
    owners = [set(part.sets) for part in parts]
    assert set.union(*owners) == {f"set{i}" for i in range(10)}
    assert sum(map(len, owners)) == 10
    for part in parts:
        for i, prefix in enumerate(part.sets):
            left = int(prefix.removeprefix("set"))
            black = np.zeros((24, 24), bool)
            black[4 : 8 + left, left : left + 6] = True
            assert ((part.images[i, ..., 0] == 0) == black).all()
    other = Icons("test", root=package, size=24, min_sets=10, seed=1)
    assert set(other.sets) != owners[2]


def test_pictures_are_rendered_once_and_again_if_a_file_changes(package, monkeypatch):
    needs.package("resvg_py")
    first = open_dataset("topk/icons", "train", package, min_sets=10)
    assert first[0][0].size == (32, 32)
    calls = []
    monkeypatch.setattr(icons, "render", lambda icon, size: calls.append(icon) or render(icon, size))
    assert len(open_dataset("topk/icons", "test", package, min_sets=10)) == 6
    assert not calls
    file = package / "json" / "set0.json"
    file.write_text(file.read_text() + "\n")
    assert len(open_dataset("topk/icons", "test", package, min_sets=10)) == 6
    assert len(calls) == 30


def test_sets_of_emoji_flags_logos_and_non_commercial_licenses_are_left_out():
    sets = {
        "good": about("a"),
        "emoji": about("b", "Emoji"),
        "logos": about("c", "Logos"),
        "flag": about("d", "Flags / Maps"),
        "old-emoji": about("e"),
        "by-nc": about("f", license_name="CC BY-NC 4.0"),
        "gone": about("g", hidden=True),
    }
    assert list(chosen_sets(sets)) == ["good"]


def test_sets_of_one_author_prefix_or_category_material_have_one_designer():
    sets = {
        "one": about("a"),
        "two": about("b"),
        "two-bold": about("c"),
        "four": about("a"),
        "five": about("c"),
        "six": about("d", "Material"),
        "seven": about("e", "Material"),
    }
    found = designers(sets)
    groups = {frozenset(other for other in sets if found[other] == found[each]) for each in sets}
    assert groups == {frozenset(x.split()) for x in ("one four", "two two-bold five", "six seven")}
    part = split_of(sets, dict.fromkeys(sets, 1), 0)
    assert all(len({part[each] for each in group}) == 1 for group in groups)


@pytest.mark.parametrize(
    ("name", "document", "expected"),
    [
        ("home", {}, "home"),
        ("outline", {}, "outline"),
        ("home-outline", {}, "home"),
        ("home-bold-duotone", {}, "home"),
        ("home-24-filled", {}, "home"),
        ("home-2", {}, "home-2"),
        ("24", {}, "24"),
        ("home-outline", {"suffixes": {"": "Regular", "fill": "Fill"}}, "home-outline"),
        ("twotone-home", {"prefixes": {"twotone": "Two tone"}}, "home"),
        ("a-b-home", {"prefixes": {"a": "A", "b": "B"}}, "b-home"),
        ("home-x-fill", {"suffixes": {"x": "X", "fill": "Fill"}}, "home-x"),
    ],
)
def test_names_lose_their_style_and_size(name, document, expected):
    assert stem(name, document) == expected


def test_a_picture_is_square_and_centered_and_an_empty_one_is_none():
    needs.package("resvg_py")
    black = '<rect width="8" height="16" fill="currentColor"/>'
    picture = render({"body": black, "width": 8, "height": 16}, 16)
    assert (picture[:, 4:12] == 0).all()
    assert (picture[:, :4] == 255).all()
    assert (picture[:, 12:] == 255).all()
    assert render({"body": ""}, 16) is None


def test_errors_name_what_is_wrong(package):
    with pytest.raises(ValueError, match="split must be"):
        Icons("tests", root=package)
    with pytest.raises(ValueError, match=r"no collections\.json in None: pass --data-dir"):
        Icons()
    needs.package("resvg_py")
    with pytest.raises(ValueError, match="no name is drawn in 11 icon sets"):
        Icons(root=package, min_sets=11)
