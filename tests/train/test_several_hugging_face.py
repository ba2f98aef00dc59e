"""Several labels from columns of a Hugging Face data set: numbers of classes, k-hot rows, a column for each class."""

import io

import numpy as np
import pytest
from PIL import Image

from topk_registry.data.labels import k_hot_of
from topk_registry.train import Trainer
from topk_registry.train.config.arguments import parse_args

from .conftest import unclosed_files

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
NAMES = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set in Parquet files with the same labels in four columns."""
    root = tmp_path_factory.mktemp("hugging") / "pictures"
    (root / "data").mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 12)):
        has = np.random.default_rng(count).random((count, 3)) < 0.5
        image = [{"bytes": _png(i), "path": None} for i in range(count)]
        indices = [np.flatnonzero(row).tolist() for row in has]
        columns = {"image": image, "labels": indices, "numbers": indices, "k_hot": has.astype(int).tolist()}
        columns |= {name: has[:, c].astype(int).tolist() for c, name in enumerate(NAMES)}
        features = {
            "image": datasets.Image(),
            "labels": datasets.Sequence(datasets.ClassLabel(names=NAMES)),
            "numbers": datasets.Sequence(datasets.Value("int64")),
            "k_hot": datasets.Sequence(datasets.Value("int64")),
            **{name: datasets.Value("int64") for name in NAMES},
        }
        table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        table.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")
    return root


def _png(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def run_of(folder, tmp_path, *flags):
    given = ("--task", "multilabel", "--dataset", f"hfds/{folder}", "--data-dir", tmp_path, "--model", "topk_convnet")
    more = ("-b", 8, "-j", 0, "--no-aug", "--device", "cpu", "--epochs", 1, "--img-size", 16, "--output", tmp_path)
    return Trainer(parse_args([*map(str, given), *map(str, more), *flags]), quiet=True)


@unclosed_files
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--target-key", "labels"), NAMES),
        (("--target-key", "numbers"), None),
        (("--target-key", "k_hot", "--target-format", "multihot"), None),
        (("--target-key", "red,green,blue"), NAMES),
    ],
    ids=["named", "numbers", "k-hot", "columns"],
)
def test_columns_become_targets(folder, tmp_path, flags, names):
    trainer = run_of(folder, tmp_path, *flags)
    data = trainer.run.data
    wanted = np.random.default_rng(24).random((24, 3)) < 0.5
    np.testing.assert_array_equal(k_hot_of(data.train), wanted)
    assert data.class_names == names
    assert data.counts == wanted.sum(0).tolist()
    assert trainer.run.config.num_classes == 3
    assert 0 <= trainer.fit().history[-1]["eval_map"] <= 100


def test_labels_without_a_class_are_refused(folder, tmp_path):
    from topk_registry.train.errors import TrainError

    with pytest.raises(TrainError, match=r"Multi-label class indices must be in \[0, 2\)"):
        run_of(folder, tmp_path, "--target-key", "numbers", "--num-classes", "2").fit()
