"""Files of ``--class-map``: empty lines, marks and numbers that are none."""

import pickle

import pytest

from topk_registry.train.setup.class_maps import read_class_map


def written(folder, content, name="map.txt"):
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_without_a_file_there_is_none(tmp_path):
    assert read_class_map("", tmp_path) is None


@pytest.mark.parametrize("content", [b"car\ndog\n", b"\xef\xbb\xbfcar\r\ndog\r\n", b"car\ndog\n\n \n"])
def test_names_are_read_without_marks_and_empty_lines(tmp_path, content):
    assert read_class_map(written(tmp_path, content), tmp_path) == {"car": 0, "dog": 1}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"car": 0, "dog": -1}, "count from 0, got -1 for 'dog'"),
        ({"car": "0"}, "a dictionary from names to numbers"),
        ({"car": 0.5}, "a dictionary from names to numbers"),
        ([1], "expected a dict"),
    ],
)
def test_what_is_no_number_of_a_class_is_refused(tmp_path, content, told):
    with pytest.raises(ValueError, match=told):
        read_class_map(written(tmp_path, pickle.dumps(content), "map.pkl"), tmp_path)


@pytest.mark.parametrize("name", ["map.json", "map.txt", "map.pkl"])
def test_files_of_another_form_or_without_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"--class-map .*map"):
        read_class_map(written(tmp_path, b"", name), tmp_path)
    with pytest.raises(ValueError, match=r"--class-map nowhere\.txt: expected a \.txt"):
        read_class_map("nowhere.txt", tmp_path)
