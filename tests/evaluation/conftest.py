"""Small trained checkpoints, one exported, and a folder of images."""

import pytest

from topk_registry.data.hierarchy import Hierarchy
from topk_registry.train import TrainConfig, Trainer

DATA = {"superclasses": 2, "fine": 3, "noise": 1.0, "size": 240, "eval_size": 90}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of two training runs on the same data, by the name of the loss."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for loss, epochs in (("ce", 2), ("smooth_topk_svm", 1)):
        options = {"k": 2} if loss != "ce" else {}
        config = TrainConfig(
            loss=loss, loss_opt=options, epochs=epochs, dataset_opt=DATA, output=str(folder), experiment=loss
        )
        Trainer(config, quiet=True).fit()
        found[loss] = folder / loss
    return found


@pytest.fixture(scope="session")
def exported(runs, tmp_path_factory):
    """The first run as an exported file."""
    pytest.importorskip("onnxruntime")
    from topk_registry.cli.main import main

    file = tmp_path_factory.mktemp("exported") / "model.onnx"
    assert main(["export", str(runs["ce"]), str(file)]) == 0
    return file


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """The images of the validation split as a folder of classes."""
    root = tmp_path_factory.mktemp("images")
    data = Hierarchy("validation", **DATA)
    for i, (image, label) in enumerate(data[j] for j in range(len(data))):
        place = root / data.classes[label]
        place.mkdir(exist_ok=True)
        image.save(place / f"{i}.png")
    return root
