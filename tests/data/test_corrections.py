import numpy as np
import pytest

from topk_registry.data.corrections import digest_of, read_corrections
from topk_registry.data.names import class_words, sample_names
from topk_registry.data.recipes import Selection

NAMES = ["train/cat/1.png", "train/cat/2.png", "train/dog/1.png"]
LABELS = np.asarray([0, 0, 1])
CLASSES = ["cat", "dog", "owl"]


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "labels.csv"
        path.write_bytes(text.encode())
        return path

    return write


def places(file, action="exclude"):
    return read_corrections(file, action).places(NAMES, LABELS, CLASSES, "/data").tolist()


def test_a_file_worked_through_is_read_by_its_actions(written):
    file = written(
        "image,label,suggested,rank,action\n"
        "train/dog/1.png,dog,owl,1,relabel\ntrain/cat/2.png,cat,dog,2, Exclude \ntrain/cat/1.png,cat,dog,3,keep\n"
    )
    assert places(file) == [1]
    relabel = read_corrections(file, "relabel")
    assert relabel.places(NAMES, LABELS, CLASSES, None).tolist() == [2]
    assert relabel.suggestions(CLASSES).tolist() == [2]


@pytest.mark.parametrize(
    "text",
    [
        "image\ntrain/cat/2.png\ntrain/dog/1.png\n",  # no column action: every row
        "\ufeffimage;action\r\ntrain/cat/2.png;exclude\r\n/data/train/dog/1.png;exclude\r\n;;\r\n",  # of a spreadsheet
        "action\timage\nexclude\ttrain/cat/2.png\nexclude\ttrain/dog/1.png\nexclude\ttrain/dog/1.png\n",
    ],
)
def test_files_of_other_programs_are_read(written, text):
    assert places(written(text)) == [1, 2]


def test_a_quoted_name_may_hold_commas(written):
    (row,) = read_corrections(written('image,action\n"train/cat/a, b.png",exclude\n'), "exclude").rows
    assert row.image == "train/cat/a, b.png"
    assert row.line == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image\ntrain/cat/9.png\n", r"line 2: there is no sample 'train/cat/9.png'; the nearest is 'train/cat/2.png'"),
        ("image\ncat/1.png\n", "the nearest is 'train/cat/1.png'"),
        ("image,label\ntrain/cat/1.png,dog\n", "has the label 'cat', the file says 'dog'"),
        ("image,action\ntrain/cat/1.png,\n", "no row has the action 'exclude'"),
        ("image,action\ntrain/cat/1.png,drop\n", "line 2: action 'drop' is not known; it is exclude, relabel, keep"),
        ("file\ntrain/cat/1.png\n", "expected a CSV file with the columns image, got file"),
        ("", "expected a CSV file with the columns image, got "),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(written, text, message):
    with pytest.raises(ValueError, match=r"labels\.csv") as caught:
        places(written(text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,suggested\ntrain/cat/1.png,dgo\n",
            "class 'dgo' is not known; classes are cat, dog, owl; the nearest",
        ),
        ("image,suggested\ntrain/cat/1.png,\n", "the column 'suggested' is empty"),
        ("image\ntrain/cat/1.png\n", "with the columns image and suggested"),
        (
            "image,suggested\ntrain/cat/1.png,dog\ntrain/cat/1.png,owl\n",
            "two labels, 'dog' in line 2 and 'owl'",
        ),
    ],
)
def test_new_labels_must_be_known_and_one(written, text, message):
    with pytest.raises(ValueError, match=r"labels\.csv") as caught:
        read_corrections(written(text), "relabel").suggestions(CLASSES)
    assert message in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"--relabel .*none\.csv"):
        read_corrections(tmp_path / "none.csv", "relabel")
    assert digest_of(tmp_path / "none.csv") == ""


class Folder:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)


def test_samples_are_named_by_their_paths_below_the_data_or_else_by_number(tmp_path):
    folder = Folder([(str(tmp_path / "train/a b/1.png"), 0), ("/elsewhere/2.png", 1)])
    assert sample_names(folder, tmp_path) == ["train/a b/1.png", "/elsewhere/2.png"]
    selection = Selection(folder, np.asarray([1]), np.asarray([0, 1]))
    assert sample_names(selection, tmp_path) == ["/elsewhere/2.png"]
    assert sample_names(Folder([(b"...", 0), (b"...", 1)]), tmp_path) == ["0", "1"]
    assert sample_names(Folder([("/a.png", 0), ("/a.png", 1)]), tmp_path) == ["0", "1"]
    assert sample_names([(None, 3)] * 2) == ["0", "1"]


def test_classes_of_one_name_are_called_by_number():
    assert class_words(["cat", "crane", "crane"], 4) == ["cat", "1", "2", "3"]
    assert class_words(None, 2) == ["0", "1"]
