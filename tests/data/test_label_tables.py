"""CSV files of several labels: both forms, splits, and what is said of files that are wrong."""

import numpy as np
import pytest

from topk_registry.data.label_tables import TableReader, has_splits, read_label_table

NAMES = "image,labels\na.jpg,car;person\nb.jpg,\nc.jpg,person\n"
FLAGS = "file,car,dog,person\na.jpg,1,0,1\nb.jpg,0,0,0\nc.jpg,0.0,false,1.0\n"


@pytest.fixture
def table(tmp_path):
    """Read a CSV file of this text."""

    def read(text, **options):
        (tmp_path / "labels.csv").write_text(text)
        return read_label_table(tmp_path / "labels.csv", **options)

    return read


def test_names_in_one_column(table):
    found = table(NAMES)
    assert (found.images, found.lines, found.classes) == (["a.jpg", "b.jpg", "c.jpg"], [2, 3, 4], ["car", "person"])
    np.testing.assert_array_equal(found.targets, [[1, 1], [0, 0], [0, 1]])
    assert "';'" in found.told


def test_a_column_for_each_class_keeps_the_order_of_columns(table):
    found = table(FLAGS)
    assert found.classes == ["car", "dog", "person"]
    np.testing.assert_array_equal(found.targets, [[1, 0, 1], [0, 0, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("header", "cells", "classes"),
    [
        ("image,labels", ["traffic light|car", "car"], ["car", "traffic light"]),
        ("image_name,tags", ["haze primary", "agriculture clear"], ["agriculture", "clear", "haze", "primary"]),
        ("image;labels", ["c10,c2", "c2"], ["c2", "c10"]),
        ("label\tpath", None, None),
    ],
    ids=["bars", "spaces", "commas", "tabs"],
)
def test_separators_and_names_of_columns(table, header, cells, classes):
    if cells is None:
        found = table("label\tpath\nx;y\ta.jpg\n")
        assert (found.images, found.classes) == (["a.jpg"], ["x", "y"])
        return
    mark = ";" if ";" in header else ","
    found = table("\n".join([header, *(f"{i}.jpg{mark}{cell}" for i, cell in enumerate(cells))]))
    assert found.classes == classes


def test_a_byte_order_mark_quotes_and_empty_lines_are_read(table, tmp_path):
    (tmp_path / "x.csv").write_bytes('\ufeffimage,labels\r\n\r\n"a, b.jpg","car, dog"\r\n'.encode())
    found = read_label_table(tmp_path / "x.csv")
    assert (found.images, found.classes, found.lines) == (["a, b.jpg"], ["car", "dog"], [3])


def test_splits_share_the_classes(table, tmp_path):
    text = "image,labels,split\na.jpg,car,train\nb.jpg,dog,val\na.jpg,owl,test\n"
    found = table(text, split="validation")
    assert (found.images, found.classes) == (["b.jpg"], ["car", "dog", "owl"])
    assert has_splits(tmp_path / "labels.csv")
    with pytest.raises(ValueError, match="has no row of split 'dev'; column 'split' has train, val, test"):
        table(text, split="dev")
    table(NAMES)
    assert not has_splits(tmp_path / "labels.csv")


def test_a_class_map_numbers_the_classes(table):
    found = table(NAMES, class_map={"person": 0, "dog": 1, "car": 2})
    assert found.classes == ["person", "dog", "car"]
    np.testing.assert_array_equal(found.targets[0], [1, 0, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,labels\n", "a row for each image, got 0 rows"),
        ("image\na.jpg\n", "expected a column `labels` of names"),
        ("image,car,car\na.jpg,1,0\n", "line 1: expected a name for each column, got 'car' twice"),
        ("image,car\na.jpg,1\nb.jpg,2\n", "line 3: expected 0 or 1 in column 'car', got '2'"),
        ("image,car\na.jpg,1\nb.jpg,1,0\n", "line 3: expected 2 cells as in line 1, got 3"),
        ("image,labels\n,car\n", "line 2: expected the name of an image in column 'image', got nothing"),
        ("image,labels\na.jpg,car\na.jpg,dog\n", "line 3: expected each image once, got 'a.jpg' again, as in line 2"),
        ("image,labels\na.jpg,\n", "expected a label in some row, got none"),
    ],
)
def test_wrong_files_are_told_by_line(table, text, message):
    with pytest.raises(ValueError, match=message):
        table(text)


def test_a_label_outside_the_class_map_is_told_by_line(table):
    with pytest.raises(ValueError, match="line 4: label 'person' is none of --class-map's: car"):
        table(NAMES.replace("car;person", "car"), class_map={"car": 0})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        read_label_table(tmp_path / "none.csv")


def test_images_that_are_missing_are_listed(table, tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of 3 images are not in .*: line 2: a.jpg, line 4: c.jpg"):
        TableReader(table(NAMES), tmp_path, [".jpg"])


def test_endings_may_be_left_out(table, tmp_path):
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_bytes(b"x")
    reader = TableReader(table("image,labels\na,car\nb,dog\n"), tmp_path, [".jpg", ".png"])
    assert reader.filenames() == ["a.jpg", "b.png"]
    file, target = reader[1]
    with file:
        assert (file.read(), target.tolist()) == (b"x", [0, 1])


def test_the_image_is_named_by_the_column_that_says_so_best(table):
    assert table("id,filename,labels\n1,a.jpg,car\n2,b.jpg,dog\n").images == ["a.jpg", "b.jpg"]


def test_a_column_without_a_name_is_no_class(table):
    with pytest.raises(ValueError, match=r"line 1: expected a name for each column, got none for column 1; pandas"):
        table(",image,car,dog\n0,a.jpg,1,0\n1,b.jpg,0,1\n")
    assert table(",image,labels\n0,a.jpg,car\n").classes == ["car"]


@pytest.mark.parametrize("text", ["a.jpg,1,0\nb.jpg,0,1\n", "a.PNG,car;dog\nb.png,dog\n"])
def test_a_file_without_a_line_of_names_is_refused(table, text):
    with pytest.raises(ValueError, match=r"line 1: expected the names of columns, got 'a\.(jpg|PNG)'"):
        table(text)


@pytest.mark.parametrize("cell", ["\"['car', 'dog']\"", '"[""car"", ""dog""]"', '"(1, 2)"', "[]", "{}"])
def test_lists_as_programs_write_them_are_refused(table, cell):
    with pytest.raises(
        ValueError, match=r"line 3: expected names with ; between them in column 'labels', got the list"
    ):
        table(f"image,labels\na.jpg,car\nb.jpg,{cell}\n")


@pytest.mark.parametrize("class_map", [None, {"cafe\u0301": 0, "bar": 1}])
def test_a_letter_written_in_two_ways_is_one_class(table, class_map):
    found = table("image,labels\na.jpg,caf\u00e9;bar\nb.jpg,cafe\u0301\n", class_map=class_map)
    assert sorted(found.classes) == ["bar", "caf\u00e9"]
    assert found.targets[:, found.classes.index("caf\u00e9")].tolist() == [1, 1]
    assert table("image,cafe\u0301\na.jpg,1\n").classes == ["caf\u00e9"]


@pytest.mark.parametrize("again", ["a.jpg", "./a.jpg", "sub/../a.jpg"])
def test_one_file_under_two_names_is_refused(table, tmp_path, again):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ValueError, match=r"line 3: expected each image once, got '.*', the file of line 2"):
        TableReader(table(f"image,labels\na,car\n{again},dog\n"), tmp_path, [".jpg"])


def test_a_name_longer_than_any_file_is_missing(table, tmp_path):
    with pytest.raises(ValueError, match=r"1 of 1 images are not in .*: line 2: a{200}\.\.\.$"):
        TableReader(table(f"image,labels\n{'a' * 5000},car\n"), tmp_path, [".jpg"])
