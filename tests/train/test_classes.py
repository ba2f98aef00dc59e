"""The classes of a run: evaluation has those of training, and the data decides how many there are."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from topk_registry.cli.main import main
from topk_registry.data.labels import labels_of
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.errors import DataError, TrainError
from topk_registry.train.setup.datasets import open_data
from topk_registry.train.setup.unreadable import report_unreadable

SMALL = (
    *("--model", "topk_convnet", "--model-kwargs", "width=8", "-b", "8", "-j", "0", "--no-aug", "--device", "cpu"),
    *("--epochs", "1", "--opt", "adamw", "--lr", "0.03", "--warmup-epochs", "0", "--smoothing", "0"),
)


@pytest.fixture
def images(tmp_path, image_folder):
    """A copy of the image folder, to change."""
    return shutil.copytree(image_folder, tmp_path / "images")


@pytest.fixture
def validate_folder(capsys):
    def run(run, root, *flags):
        capsys.readouterr()
        flags = ("--checkpoint", run.folder / "last.pth.tar", "--data-dir", root, "--device", "cpu", "-j", "0", *flags)
        status = main(["validate", *map(str, flags)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def opened(root, *flags):
    return open_data(parse_args(["--data-dir", str(root), *map(str, flags)]))


def evaluated(data):
    """The evaluated images by the name of their folder and of the class that their label stands for."""
    labels = labels_of(data.validation)
    dataset = data.validation
    indices = getattr(dataset, "indices", range(len(labels)))
    while not hasattr(dataset, "filenames"):
        dataset = dataset.dataset
    folders = [name.split("/")[0] for name in dataset.filenames()]
    assert [label for _, label in data.validation] == labels.tolist()
    return {(folders[index], data.class_names[label]) for index, label in zip(indices, labels, strict=True)}


def test_a_class_without_evaluation_images_shifts_no_label(images):
    shutil.rmtree(images / "validation" / "class1")
    data = opened(images)
    assert evaluated(data) == {(name, name) for name in ("class0", "class2", "class3")}
    assert "no evaluation images of 1 class: class1" in data.notes


def test_a_class_that_training_lacks_is_named_or_left_out(images):
    shutil.copytree(images / "validation" / "class0", images / "validation" / "class00")
    with pytest.raises(DataError, match="has the classes 'class00', and training has 4 classes: class0, class1"):
        opened(images)
    data = opened(images, "--ignore-unknown-classes")
    assert evaluated(data) == {(f"class{c}", f"class{c}") for c in range(4)}
    assert any("that training lacks are left out: class00" in note for note in data.notes)


def test_other_names_altogether_are_refused_in_training(images):
    for c in range(4):
        (images / "validation" / f"class{c}").rename(images / "validation" / f"other{c}")
    with pytest.raises(DataError, match="expected these names;"):
        opened(images)


def test_torchvisions_image_folder_too(images):
    shutil.rmtree(images / "validation" / "class1")
    shutil.copy(images / "train" / "class0" / "0.png", images / "train" / "class0" / "._0.png")
    data = opened(images, "--dataset", "torch/image_folder")
    assert data.class_names == [f"class{c}" for c in range(4)]
    assert len(data.train) == 48
    assert set(labels_of(data.validation).tolist()) == {0, 2, 3}
    assert {label for _, label in data.validation} == {0, 2, 3}


def test_a_class_map_joins_folders(images, tmp_path):
    (tmp_path / "map.txt").write_text("class3\nclass1\n")
    data = opened(images, "--class-map", tmp_path / "map.txt")
    assert data.class_names == ["class3", "class1"]
    assert evaluated(data) == {("class3", "class3"), ("class1", "class1")}
    assert any("are none of --class-map's are left out: class0, class2" in note for note in data.notes)


def test_folders_of_one_name_and_empty_ones_are_told(images):
    (images / "train" / "class9").mkdir()
    assert any("hold no images (.jpeg, .jpg, .png) are left out: class9" in note for note in opened(images).notes)
    shutil.copytree(images / "train" / "class0", images / "train" / "class9" / "class1")
    with pytest.raises(DataError, match="two class folders are called 'class1'"):
        opened(images)


def test_one_image_at_least_stays_in_training(images):
    for path in sorted((images / "train" / "class2").iterdir())[1:]:
        path.unlink()
    data = opened(images, "--val-split", "0.1")
    assert data.counts == [11, 11, 1, 11]
    assert evaluated(data) == {(f"class{c}", f"class{c}") for c in (0, 1, 3)}
    assert "no evaluation images of 1 class: class2" in data.notes


def test_the_data_decides_the_number_of_classes(train, images):
    run = train("--data-dir", images, tiny=SMALL)
    assert run.status == 0, run.err
    assert run.checkpoint()["args"].num_classes == 4
    assert "48 to train, 24 to evaluate, 4 classes" in run.out
    fewer = train("--data-dir", images, "--num-classes", "3", tiny=SMALL, name="fewer")
    assert fewer.status == 2
    assert "the data has label 3, expected labels in [0, 2]; see --num-classes" in fewer.err


def test_more_classes_are_said(train, validate_folder, images):
    run = train("--data-dir", images, "--num-classes", "6", tiny=SMALL)
    assert run.status == 0, run.err
    assert "the model predicts 6 classes, the data has 4: the others are never right" in run.out
    assert validate_folder(run, images)[0] == 0


def top1(printed):
    return float(re.search(r"^top-1 +([\d.]+)", printed, re.MULTILINE)[1])


def test_validate_maps_folders_by_the_names_of_training(train, validate_folder, images):
    run = train("--data-dir", images, "--epochs", "12", tiny=SMALL)
    status, out, err = validate_folder(run, images)
    assert status == 0, err
    assert "classes: 4 classes by name" in err
    assert top1(out) > 60
    shutil.rmtree(images / "validation" / "class0")
    status, out, err = validate_folder(run, images)
    assert status == 0, err
    assert "3 classes by name; without images: class0" in err
    assert top1(out) > 60
    (images / "validation" / "class1").rename(images / "validation" / "new")
    status, _, err = validate_folder(run, images)
    assert status == 2
    assert "has the classes 'new', and the model has 4 classes: class0, class1, class2, class3" in err
    status, out, err = validate_folder(run, images, "--ignore-unknown-classes")
    assert status == 0
    assert "left out, as the model has none of this name: new" in err


def test_validate_says_that_labels_look_wrong(train, validate_folder, images):
    run = train("--data-dir", images, "--epochs", "12", tiny=SMALL)
    for before, after in ((0, "b"), (1, "a"), (2, "d"), (3, "c")):
        (images / "validation" / f"class{before}").rename(images / "validation" / after)
    status, _, err = validate_folder(run, images)
    assert status == 0
    assert "4 classes in order, as no name is the same: a = class0, b = class1" in err
    assert "are mostly taken for" in err


def test_a_run_goes_on_with_its_own_classes_alone(train, images):
    run = train("--data-dir", images, tiny=SMALL)
    (images / "train" / "class0").rename(images / "train" / "zero")
    (images / "validation" / "class0").rename(images / "validation" / "zero")
    resumed = train("--data-dir", images, "--epochs", "2", "--resume", run.folder / "last.pth.tar", tiny=SMALL)
    assert resumed.status == 2
    assert "other classes than those of the data; gone: class0, new: zero" in resumed.err


def test_loaders_of_ones_own_are_compared(tmp_path):
    from topk_registry.train import TrainConfig, Trainer

    def loader(*names):
        dataset = torch.utils.data.TensorDataset(torch.zeros(8, 3, 8, 8), torch.arange(8) % 2)
        dataset.classes = list(names)
        return torch.utils.data.DataLoader(dataset, 4)

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    config = TrainConfig(epochs=1, device="cpu", num_classes=2, output=str(tmp_path))
    trainer = Trainer(config, model=model, train_loader=loader("a", "b"), eval_loader=loader("b", "c"), quiet=True)
    with pytest.raises(TrainError, match="other classes than the train_loader: b, c; expected a, b"):
        trainer.start()


def test_unreadable_images_are_named_where_they_are_met(images, capsys):
    for path in (images / "train" / "class1").iterdir():
        if path.name != "0.png":
            path.unlink()
    for name in ("class1/0.png", "class3/3.png"):
        (images / "train" / name).write_bytes(b"no image")
    data = opened(images)
    for index in range(len(data.train)):
        data.train[index]
    met = capsys.readouterr().err.splitlines()
    paths = [str(images / "train" / name) for name in ("class1/0.png", "class3/3.png")]
    assert [line.partition(": ")[0] for line in met] == [f"cannot read {path}" for path in paths]
    told = report_unreadable(data.train, "training")
    assert told.startswith("2 training images could not be read, and a neighbour was used instead: " + ", ".join(paths))
    assert "which are all 1 of class 'class1'" in told
    for index in range(len(data.train)):
        data.train[index]
    assert capsys.readouterr().err == ""  # said once; the epoch's line counts them again
    assert report_unreadable(data.train, "training") == told


def test_a_wholly_unreadable_class_is_named_before_the_run_ends(images):
    for path in (images / "train" / "class1").iterdir():
        path.write_bytes(b"no image")
    data = opened(images)
    with pytest.raises(DataError, match=r"10 images in a row cannot be read, .*class1/0.png to .*class1/9.png"):
        data.train[12]


def test_what_pillow_raises_is_unreadable(images):
    """A torn PNG is a SyntaxError of Pillow's, which timm's reader lets through."""
    path = images / "train" / "class0" / "0.png"
    content = bytearray(path.read_bytes())
    content[40:60] = b"x" * 20
    path.write_bytes(bytes(content))
    data = opened(images)
    assert np.asarray(data.train[0][0]).shape == (24, 24, 3)
    assert Image.open(images / "train" / "class0" / "1.png").tobytes() == data.train[0][0].tobytes()
