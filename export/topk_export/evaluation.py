"""Evaluation of exported ONNX files with ``topk-registry validate`` and ``topk-registry compare``.

Both commands find :class:`ExportedFile` through the entry point ``onnx`` of the group ``topk_registry.model_files``.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import LOGITS
from topk_export.runtime.predictor import Predictor, read_ahead


class ExportedFile:
    """An ONNX file that ``topk-registry export`` wrote, for commands that evaluate models.

    Args:
        path: path of the ONNX file.
        running: object with the attributes ``device``, ``batch_size`` and ``workers``. ``workers`` is the number of
            threads that read images, or None for the default of :class:`~topk_export.Predictor`.
    """

    def __init__(self, path: Path, running: Any) -> None:
        self.path, self.running = path, running

    def open(self, images: Any) -> "_Opened":
        """Load the model. ``images`` has no effect: the method ``run`` of the returned object takes the images.

        Returns:
            An object with the attribute ``class_names`` and the method ``run(images, keep)``. For each batch, ``run``
            calls ``keep(logits, labels)`` with arrays of the shapes [B, n] and [B].

        Raises:
            ModelFileError: the file is a multilabel file.
        """
        workers = self.running.workers
        workers = None if workers is None else max(1, workers)  # 0 stands for the main process of a DataLoader
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
        predictor, dataset = self.predictor, images.dataset

        def read(item: Any) -> tuple[np.ndarray, int]:
            image, label = dataset[item] if images.indexed else item
            return predictor.input_of(image), int(label)

        items: Iterator[Any] = iter(range(len(dataset))) if images.indexed else iter(dataset)
        dataset.transform = None
        for batch in read_ahead(read, items, batch=self.running.batch_size, workers=predictor.workers):
            inputs, labels = zip(*batch, strict=True)
            keep(predictor.run(np.stack(inputs))[LOGITS], np.asarray(labels, np.int64))
