"""Tables of groups: what they say of images, and what is wrong with them."""

import pytest

from topk_registry.folders.groups import numbered, read_groups


@pytest.fixture
def table(tmp_path):
    def write(text):
        (tmp_path / "groups.csv").write_text(text, encoding="utf-8")
        return tmp_path / "groups.csv"

    return write


def test_names_are_what_the_cells_hold(table):
    """Quotes, commas, marks of byte order and spaces around a name are of the table; what is within is the name's."""
    found = read_groups(table('\ufeffgroup,file\n"a, ""b""",x.png\n =1+1 ,y.png\n"ü\n<i>",z.png\n'))
    assert found.groups == ['a, "b"', "=1+1", "ü\n<i>"]
    assert found.images == ["x.png", "y.png", "z.png"]
    assert found.in_order(3) == ('a, "b"', "=1+1", "ü\n<i>")


def test_images_are_named_by_paths_below_a_folder(table, tmp_path, monkeypatch):
    found = read_groups(table("image,day\nx/1.png,a\nx//2.png,b\n./3.png,c\n"), column="day")
    paths = [tmp_path / name for name in ("3.png", "x/2.png", "x/1.png")]
    assert found.below(paths, tmp_path) == ("c", "b", "a")
    monkeypatch.chdir(tmp_path.parent)
    assert found.below([path.relative_to(tmp_path.parent) for path in paths], tmp_path.name) == ("c", "b", "a")
    with pytest.raises(ValueError, match=r"1 of 2 images have no row: y\.png"):
        found.below([paths[0], tmp_path / "y.png"], tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column 'group', got no columns"),
        ("image,camera\nx,a\n", "expected a column 'group', got image, camera"),
        ("image,group\nx,a\ny,\nz, \n", "2 rows have no group, the first is line 3"),
        ("image,group\nx\n", "1 rows have no group, the first is line 2"),  # a row that is cut off
    ],
)
def test_a_table_without_groups_says_so(table, text, message):
    with pytest.raises(ValueError, match=message):
        read_groups(table(text))


def test_a_table_that_contradicts_itself_or_is_too_short_says_so(table):
    found = read_groups(table("image,group\nx,a\nx,b\n"))
    with pytest.raises(ValueError, match="x is in two groups, a and b"):
        found.by_image(str, where="of the images")
    with pytest.raises(ValueError, match="expected a row for each of 3 samples, got 2"):
        found.in_order(3)
    with pytest.raises(ValueError, match="expected a row for each image, got none"):
        read_groups(table("image,group\n")).by_image(str, where="of the images")
    with pytest.raises(ValueError, match="expected a column image or file with paths of the images, got group"):
        read_groups(table("group\na\n")).by_image(str, where="of the images")


def test_groups_have_numbers_in_the_order_of_their_names():
    names, numbers = numbered(["b", "a", "b", "10", "9"], 5)
    assert names == ("10", "9", "a", "b")
    assert numbers is not None
    assert numbers.tolist() == [3, 2, 3, 0, 1]
    assert numbered(None, 5) == ((), None)
    with pytest.raises(ValueError, match="expected a group for each of 2 samples, got 1"):
        numbered(["a"], 2)
