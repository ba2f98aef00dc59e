"""Arrays for the inputs of a model: which types and shapes are accepted, and what they become."""

from types import SimpleNamespace

import numpy as np
import pytest

from topk_export import ModelFileError
from topk_export.arrays import read_array, read_arrays
from topk_export.runtime.inputs import check_feed

SESSION = SimpleNamespace(
    get_inputs=lambda: [
        SimpleNamespace(name="x", type="tensor(float)", shape=["batch", 2]),
        SimpleNamespace(name="count", type="tensor(int64)", shape=["batch"]),
    ]
)
COUNT = np.arange(3)


@pytest.mark.parametrize(
    ("x", "count"),
    [
        (np.full((3, 2), 0.1), COUNT),  # 0.1 is rounded
        (np.ones((3, 2), np.int64), COUNT.astype(np.uint8)),
        (np.ones((3, 2), bool), COUNT.astype(float)),  # the floats are whole numbers
    ],
)
def test_numbers_are_converted(x, count):
    fed = check_feed(SESSION, {"x": x.tolist(), "count": count})
    assert (fed["x"].dtype, fed["count"].dtype) == (np.float32, np.int64)
    assert np.array_equal(fed["x"], x.astype(np.float32))
    assert np.array_equal(fed["count"], COUNT)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"x": np.ones((3, 2))}, "takes the inputs x, count, got x"),
        ({"x": np.ones((3, 2)), "count": COUNT + 0.5}, "count takes"),
        ({"x": np.full((3, 2), "1"), "count": COUNT}, "x takes"),
        ({"x": np.ones((3, 3)), "count": COUNT}, r"\[3, 3\]"),
        ({"x": np.ones((4, 2)), "count": COUNT}, "x: 4, count: 3"),
    ],
)
def test_other_arrays_are_errors(feed, message):
    with pytest.raises(ValueError, match=message):
        check_feed(SESSION, feed)


def test_files_with_other_content_are_errors_that_name_the_file(tmp_path):
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=np.arange(10_000))
    content = bytearray(file.read_bytes())
    content[200:240] = b"\xff" * 40
    for broken in (b"", bytes(content)):
        file.write_bytes(broken)
        for read in (read_arrays, read_array):
            with pytest.raises(ModelFileError, match=r"x\.npz"):
                read(file)
    np.savez(file, x=np.ones(2), count=3)
    with pytest.raises(ModelFileError, match=r"count in .* is a number"):
        read_arrays(file)
