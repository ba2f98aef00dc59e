"""Label files of the form of CIFAR-10N's and CIFAR-100N's, written as theirs were."""

import os

import numpy as np
import pytest
import torch

from topk_registry.data.label_files import labels_from_file, read_label_file

RNG = np.random.default_rng(0)
CLEAN = RNG.integers(0, 10, 500)
WORSE, AGGREGATE = ((CLEAN + (RNG.random(500) < share) * RNG.integers(1, 10, 500)) % 10 for share in (0.4, 0.1))
TEN = {"clean_label": CLEAN, "worse_label": WORSE, "aggre_label": AGGREGATE}
TEN |= {f"random_label{i}": (CLEAN + (RNG.random(500) < 0.2)) % 10 for i in (1, 2, 3)}
HUNDRED = {"clean_label": CLEAN, "noisy_label": WORSE, "noisy_coarse_label": WORSE // 5}


def written(folder, content, name="labels.pt", **options):
    torch.save(content, folder / name, **options)
    return folder / name


FORMS = {
    "zip": {},
    "as before torch 1.6": {"_use_new_zipfile_serialization": False},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.float64])
def test_files_are_read_as_they_were_written(tmp_path, form, kind):
    file = written(tmp_path, {name: each.astype(kind) for name, each in TEN.items()}, **form)
    found = read_label_file(file)
    assert list(found) == list(TEN)
    assert all(np.array_equal(found[name], each) for name, each in TEN.items())
    assert {each.dtype for each in found.values()} == {np.dtype(np.int64)}


def test_names_of_numpy_1_are_read(tmp_path):
    """The published files were written before NumPy moved its modules."""
    file = written(tmp_path, TEN, **FORMS["as before torch 1.6"])
    content = file.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in content
    file.write_bytes(content)
    assert np.array_equal(read_label_file(file)["worse_label"], WORSE)


@pytest.mark.parametrize(("content", "column"), [(TEN, "worse_label"), (TEN, "aggre_label"), (HUNDRED, None)])
def test_a_column_is_taken(tmp_path, content, column):
    found = labels_from_file(written(tmp_path, content), column, CLEAN, 10)
    assert np.array_equal(found, content[column or "noisy_label"])


def test_tensors_and_lists_are_read_as_well(tmp_path):
    content = {"clean_label": torch.from_numpy(CLEAN), "noisy_label": WORSE.tolist()}
    assert np.array_equal(labels_from_file(written(tmp_path, content), None, CLEAN, 10), WORSE)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-label-file",)


@pytest.mark.parametrize(
    ("content", "column", "message"),
    [
        (TEN, None, "has the columns clean_label, worse_label, .*: name one with --label-column"),
        (TEN, "worst_label", "has no column 'worst_label'; there are clean_label, worse_label"),
        (HUNDRED, "noisy_coarse_label", "'noisy_coarse_label' are superclasses, expected one of noisy_label"),
        (TEN | {"worse_label": WORSE[:-1]}, "worse_label", "'worse_label' has 499 labels, the training split 500"),
        (TEN | {"worse_label": WORSE + 5}, "worse_label", r"has labels from 5 to 14, expected \[0, 10\)"),
        (TEN | {"clean_label": CLEAN[::-1].copy()}, "worse_label", r"'clean_label' agrees with \d+ of 500 labels"),
        (TEN | {"clean_label": CLEAN[1:]}, "worse_label", "'clean_label' agrees with 0 of 500 labels"),
        (TEN | {"worse_label": WORSE / 2}, "worse_label", "must be one whole number a sample, got float64"),
        (TEN | {"worse_label": WORSE[:, None]}, "worse_label", r"one whole number a sample, got int64 \[500, 1\]"),
        (WORSE, None, "expected names with an array of labels each, got ndarray"),
        ({}, None, "expected names with an array of labels each, got dict"),
        (TEN | {"more": Attack()}, "worse_label", "cannot be read: it holds something else than arrays"),
    ],
)
def test_other_files_are_refused(tmp_path, monkeypatch, content, column, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        labels_from_file(written(tmp_path, content), column, CLEAN, 10)
    assert not (tmp_path / "made-by-a-label-file").exists()


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "labels.pt").write_text("0 1 2")
    for name in ("labels.pt", "missing.pt"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read_label_file(tmp_path / name)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_half_a_file_is_told_of(tmp_path, form, share):
    file = written(tmp_path, TEN, **form)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"labels\.pt cannot be read: .*expected what torch\.save wrote"):
        read_label_file(file)


@pytest.mark.parametrize("content", [b"hello", b"1\n2\n", b"image,labels\na,b\n", b"."])
def test_a_text_is_told_of(tmp_path, content):
    (tmp_path / "labels.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"labels\.pt cannot be read: .*expected what torch\.save wrote"):
        read_label_file(tmp_path / "labels.pt")


@pytest.mark.parametrize(
    ("column", "got"),
    [
        (np.array([0.0, np.nan]), r"float64 \[2\]"),
        (np.array([1e30]), r"float64 \[1\]"),
        ([[1], [1, 2]], "list"),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "Tensor"),
        (None, "NoneType"),
    ],
    ids=["nan", "large", "ragged", "bfloat16", "none"],
)
def test_a_column_that_is_no_labels_is_told_of(tmp_path, column, got):
    file = written(tmp_path, {"clean_label": CLEAN, "worse_label": column})
    with pytest.raises(ValueError, match=rf"'worse_label' must be one whole number a sample, got {got}"):
        read_label_file(file)
