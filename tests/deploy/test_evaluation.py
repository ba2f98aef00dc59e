"""An exported file in the commands that evaluate models."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.deploy.files import NAMES, as_image, labeled_colors, write_file
from topk_export import Predictor
from topk_export.evaluation import ExportedFile


class Pictures(list):
    """Pairs of image and label, with the transform that a data set for training would have."""

    transform = "of training"


@pytest.mark.parametrize("indexed", [True, False])
def test_logits_and_labels_of_all_images_in_order(tmp_path, indexed):
    colors, labels = labeled_colors(7)
    pictures = Pictures(zip(map(as_image, colors), labels.tolist(), strict=True))
    path = write_file(tmp_path / "m.onnx")
    file = ExportedFile(path, SimpleNamespace(device="cpu", batch_size=3, workers=0))
    assert (tuple(file.class_names), file.trained_on) == (NAMES, None)
    kept = []
    file.run(SimpleNamespace(dataset=pictures, indexed=indexed), lambda *batch: kept.append(batch))
    assert [len(each) for _, each in kept] == [3, 3, 1]
    assert np.concatenate([each for _, each in kept]).tolist() == labels.tolist()
    predictor = Predictor(path, device="cpu")
    expected = predictor.run(np.stack([predictor.input_of(image) for image, _ in pictures]))["logits"]
    np.testing.assert_allclose(np.concatenate([logits for logits, _ in kept]), expected, rtol=1e-5)
    assert pictures.transform is None
