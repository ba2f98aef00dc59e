"""Rows of a CSV file leave samples out of training, or give them other labels."""

import numpy as np
import pytest
from PIL import Image

from topk_registry.data.labels import labels_of
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.setup.datasets import open_data

from .conftest import TINY, unclosed_files

FOLDER = ("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "4", "-j", "0", "--no-aug", "--device", "cpu")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(
        "image,label,suggested,action\n3,field 03-0,field 02-1,relabel\n"
        "5,field 01-1,,exclude\n17,field 01-1,,exclude\n6,field 02-1,field 01-0,\n"
    )
    return str(path)


def opened(*flags):
    return open_data(parse_args([*TINY, *flags]))


def test_rows_leave_samples_out_and_give_them_other_labels(file):
    plain, data = opened(), opened("--exclude", file, "--relabel", file)
    assert data.train.indices.tolist() == [i for i in range(96) if i not in (5, 17)]
    assert data.train.targets[3] == 6
    assert data.train[3][1] == 6
    assert np.delete(labels_of(plain.train), (3, 5, 17)).tolist() == np.delete(data.train.targets, 3).tolist()
    assert labels_of(data.validation).tolist() == labels_of(plain.validation).tolist()
    assert data.counts == np.bincount(data.train.targets, minlength=12).tolist()
    assert data.notes == [
        f"relabelled 1 of 96 training images by {file}",
        f"excluded 2 of 96 training images by {file}",
    ]


def test_rows_of_the_other_flag_are_told(file):
    note = f"{file} has {{}} rows with the action {{}}, which --{{}} leaves: give it to --{{}}, too"
    for action, other in (("relabel", "exclude"), ("exclude", "relabel")):
        notes = opened(f"--{action}", file).notes
        assert [one for one in notes if "leaves" in one] == [
            note.format({"exclude": 2, "relabel": 1}[other], other, action, other)
        ]
    assert not [one for one in opened("--exclude", file, "--relabel", file).notes if "leaves" in one]


def test_what_is_held_out_is_the_same_with_and_without(file):
    flags = ("--val-split", "0.25")
    plain = opened(*flags)
    held = set(plain.validation.indices.tolist())
    data = opened(*flags, "--exclude", file)
    assert data.validation.indices.tolist() == plain.validation.indices.tolist()
    assert [label for _, label in data.validation] == [label for _, label in plain.validation]
    idle = len(held & {5, 17})
    assert len(data.train) == len(plain.train) - 2 + idle
    assert len([note for note in data.notes if "change nothing" in note]) == bool(idle)


def test_labels_made_noisy_are_those_the_file_is_compared_with(file, train):
    noisy = opened("--label-noise", "1")
    assert noisy.train.targets[5] != 5  # by this seed
    run = train("--label-noise", "1", "--exclude", file)
    assert run.status == 2
    assert "is the file of another split, data set or seed?" in run.err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("image\n96\n", "there is no sample '96'; the nearest is"),
        ("image\n" + "".join(f"{i}\n" for i in range(96)), "leaves no training image"),
        ("image,action\n3,\n", "no row has the action 'exclude'"),
    ],
)
def test_rows_that_cannot_be_meant_refuse_the_run(rows, message, train, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text(rows)
    run = train("--exclude", path)
    assert run.status == 2
    assert message in run.err
    assert not run.folder.exists()


def test_a_stream_is_refused(train, file):
    run = train("--dataset", "wds/x", "--data-dir", "/no/such/place", "--relabel", file)
    assert run.status == 2
    assert "--relabel" in run.err
    assert "is a stream" in run.err


@unclosed_files
def test_images_of_a_folder_are_named_by_their_paths(tmp_path, train):
    for split, count in (("train", 4), ("val", 2)):
        for c, name in enumerate(("cat", "dog")):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                grey = np.full((8, 8, 3), 100 * c + i, np.uint8)
                Image.fromarray(grey).save(tmp_path / "data" / split / name / f"{i}.png")
    rows = tmp_path / "rows.csv"
    rows.write_text(
        f"image,label,suggested,action\ntrain/cat/1.png,cat,dog,relabel\n{tmp_path}/data/train/dog/0.png,dog,,exclude\n"
    )
    flags = ("--dataset", "", "--data-dir", tmp_path / "data", "--epochs", "1", "--exclude", rows, "--relabel", rows)
    run = train(*flags, tiny=FOLDER)
    assert run.status == 0, run.err
    assert f"relabelled 1 of 8 training images by {rows}" in run.out
    assert f"excluded 1 of 8 training images by {rows}" in run.out
    data = open_data(parse_args([str(word) for word in (*FOLDER, *flags)]))
    assert data.train.targets.tolist() == [0, 1, 0, 0, 1, 1, 1]


@pytest.mark.slow
def test_a_file_that_changed_since_is_another_setting(train, file):
    first = train("--exclude", file, "--epochs", "1", name="run")
    assert first.status == 0
    same = train("--exclude", file, "--resume", "auto", name="run")
    assert same.status == 0
    assert "other settings" not in same.out
    with open(file, "a") as stream:
        stream.write("8,,,exclude\n")
    changed = train("--exclude", file, "--resume", "auto", "--epochs", "3", name="run")
    assert changed.status == 2
    assert "other settings (corrections:" in changed.err
    forced = train("--exclude", file, "--resume", first.folder / "last.pth.tar", "--epochs", "3", name="run")
    assert forced.status == 0
    assert "other settings than the checkpoint's: corrections:" in forced.out
