"""``topk-registry score --column gce_lead``: a column beside the scores of each image."""

from collections.abc import Mapping

import numpy as np

from topk_export.runtime.metadata import Metadata


class Lead:
    """How far the best logit of an image is ahead of the second.

    Args:
        metadata: of the model file: classes, k, preprocessing.
    """

    type = "float32"  # Arrow's name

    def __init__(self, metadata: Metadata) -> None:
        self.num_classes = metadata.num_classes

    def __call__(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        second, first = np.partition(outputs["logits"], self.num_classes - 2, axis=-1)[:, -2:].T
        return first - second
