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

    A plug-in for another format registers a class that has this constructor, ``class_names``, :meth:`run` and, if the
    file records the data of training, ``trained_on``.

    Args:
        path: path of the ONNX file.
        running: object with the attributes ``device``, ``batch_size`` and ``workers``. ``workers`` is the number of
            threads that read images, or None for the default of :class:`~topk_export.Predictor`.

    Raises:
        ModelFileError: the file is a multilabel file.
    """

    def __init__(self, path: Path, running: Any) -> None:
        workers = running.workers
        workers = None if workers is None else max(1, workers)  # 0 stands for the main process of a DataLoader
        self.predictor, self.running = Predictor(path, device=running.device, workers=workers), running
        if self.predictor.metadata.multilabel:
            raise ModelFileError(f"expected a file with one label per image, {path} is a multilabel file")

    @property
    def class_names(self) -> Sequence[str]:
        return self.predictor.metadata.class_names

    @property
    def trained_on(self) -> Any:
        """Data of the training run, and which images it held out. None: unknown."""
        return self.predictor.metadata.trained_on

    def run(self, images: Any, keep: Callable[[np.ndarray, np.ndarray], object]) -> None:
        """For each batch of images, call ``keep(logits, labels)`` with arrays of the shapes [B, n] and [B].

        Args:
            images: object with the attributes ``dataset`` (pairs of image and label) and ``indexed``. If ``indexed`` is
                False, the data set has no indices and no length, and is read in order.
            keep: function of the logits and labels of a batch.
        """
        predictor, dataset = self.predictor, images.dataset

        def read(item: Any) -> tuple[np.ndarray, int]:
            image, label = dataset[item] if images.indexed else item
            return predictor.input_of(image), int(label)

        items: Iterator[Any] = iter(range(len(dataset))) if images.indexed else iter(dataset)
        dataset.transform = None
        for batch in read_ahead(read, items, batch=self.running.batch_size, workers=predictor.workers):
            inputs, labels = zip(*batch, strict=True)
            keep(predictor.run(np.stack(inputs))[LOGITS], np.asarray(labels, np.int64))
