"""Exported files for the commands that evaluate models (entry point group ``topk_registry.model_files``)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import LOGITS
from topk_export.runtime.predictor import Predictor, read_ahead


class ExportedFile:
    """An ONNX file of ``topk-registry export``.

    Args:
        path: the file.
        running: object with ``device``, ``batch_size`` and ``workers``.
    """

    def __init__(self, path: Path, running: Any) -> None:
        self.path, self.running = path, running

    def open(self, images: Any) -> "_Opened":
        """Open the file. Images are read on demand."""
        workers = self.running.workers
        workers = None if workers is None else max(1, workers)  # 1: no reading ahead
        predictor = Predictor(self.path, device=self.running.device, workers=workers)
        if predictor.metadata.multilabel:
            raise ModelFileError(f"expected a file with one label per image, {self.path} is a multilabel file")
        return _Opened(predictor, self.running)


class _Opened:
    def __init__(self, predictor: Predictor, running: Any) -> None:
        self.predictor, self.running = predictor, running

    @property
    def class_names(self) -> Sequence[str]:
        return self.predictor.metadata.class_names

    def run(self, images: Any, keep: Callable[[np.ndarray, np.ndarray], object]) -> None:
        """Run the model over the images, and call ``keep`` with the logits and labels of each batch."""
        predictor, dataset = self.predictor, images.dataset

        def read(item: Any) -> tuple[np.ndarray, int]:
            image, label = dataset[item] if images.indexed else item
            return predictor.input_of(image), int(label)

        items: Iterator[Any] = iter(range(len(dataset))) if images.indexed else iter(dataset)
        dataset.transform = None
        for batch in read_ahead(read, items, batch=self.running.batch_size, workers=predictor.workers):
            inputs, labels = zip(*batch, strict=True)
            keep(predictor.run(np.stack(inputs))[LOGITS], np.asarray(labels, np.int64))
