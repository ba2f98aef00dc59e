"""Predictions from an exported file, without torch: numpy, onnxruntime and Pillow.

predictor = Predictor("model.onnx")
for prediction in predictor(["a.jpg", "b.jpg"]):
    print(prediction.top[0].name, prediction.top[0].marginal)
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import MAX_PIXELS, read_image
from topk_export.runtime.session import TYPES, BoundRunner, device_of, open_session


@dataclass(frozen=True)
class Ranked:
    """One class of a prediction: its chance of being in the top-k set, and its softmax share."""

    index: int
    name: str
    marginal: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What the model says of one image.

    Args:
        top: the k classes of the largest scores, best first.
        set: the fewest classes whose softmax shares reach the wanted coverage, best first; None when none was wanted.
    """

    top: tuple[Ranked, ...]
    set: tuple[Ranked, ...] | None = None


class Predictor:
    """An exported model, ready to predict.

    Args:
        path: ``model.onnx`` as written by :func:`topk_export.export_onnx`.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"tensorrt"``.
        require_gpu: raise :class:`~topk_export.DeviceError` rather than run on the CPU.
        threads: CPU threads of one run.
        bound_batch: run everything in batches of this one size, padded, through buffers that stay on the device
            (onnxruntime's IOBinding); such a predictor serves one thread at a time.
        cuda_graph: on a GPU, capture the model as a CUDA graph; needs ``bound_batch``.
        max_pixels: images with more pixels are refused before they are decoded.
        exif: turn images as their EXIF orientation says. timm's evaluation does not, so the default is off.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        require_gpu: bool = False,
        threads: int | None = None,
        bound_batch: int | None = None,
        cuda_graph: bool = False,
        max_pixels: int = MAX_PIXELS,
        exif: bool = False,
    ) -> None:
        if cuda_graph and bound_batch is None:
            raise ValueError("cuda_graph needs bound_batch: a CUDA graph has one batch size")
        self.session: Any = open_session(
            path, device=device, require_gpu=require_gpu, threads=threads, cuda_graph=cuda_graph
        )
        self.metadata: Metadata = Metadata.from_props(self.session.get_modelmeta().custom_metadata_map, str(path))
        self.device: str = device_of(self.session)
        if cuda_graph and self.device == "cpu":
            warnings.warn("cuda_graph has no effect on the CPU", RuntimeWarning, stacklevel=2)
        self.max_pixels: int = max_pixels
        self.exif: bool = exif
        self._input = self.session.get_inputs()[0]
        self._outputs = {output.name: output for output in self.session.get_outputs()}
        self.batch_size: int | None = self._fixed(bound_batch)
        self._bound = None if bound_batch is None else BoundRunner(self.session, (bound_batch, *self.input_shape))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: [channels, height, width], or [height, width, channels] where the graph normalises."""
        c, h, w = self.metadata.preprocess.input_size
        return (h, w, c) if self.metadata.in_graph else (c, h, w)

    def preprocess(self, images: Iterable[Any]) -> np.ndarray:
        """Images (paths, bytes, uint8 arrays, Pillow images) as one input batch."""
        recipe = self.metadata.preprocess
        read = [recipe.pixels(read_image(image, max_pixels=self.max_pixels, exif=self.exif)) for image in images]
        pixels = np.stack(read) if read else np.zeros((0, *recipe.input_size[1:], recipe.input_size[0]), np.uint8)
        return pixels if self.metadata.in_graph else recipe.normalise(pixels)

    def run(self, batch: np.ndarray) -> dict[str, np.ndarray]:
        """The model's outputs by name, for an input batch as :meth:`preprocess` makes it."""
        wanted = np.uint8 if self.metadata.in_graph else np.float32
        if batch.shape[1:] != self.input_shape or batch.dtype != wanted:
            raise ValueError(
                f"the model takes {np.dtype(wanted)} [batch, {', '.join(map(str, self.input_shape))}], "
                f"got {batch.dtype} {list(batch.shape)}"
            )
        size = self.batch_size or max(1, len(batch))
        parts = [self._run(batch[start : start + size]) for start in range(0, len(batch), size)]
        columns = zip(*parts, strict=True) if parts else ([_empty(output)] for output in self._outputs.values())
        return {name: np.concatenate(list(column)) for name, column in zip(self._outputs, columns, strict=True)}

    def predict(
        self, images: Iterable[Any], *, batch_size: int = 32, coverage: float | None = None
    ) -> list[Prediction]:
        """A :class:`Prediction` for each image (paths, bytes, uint8 arrays, Pillow images).

        Args:
            images: what to look at.
            batch_size: images a run.
            coverage: also give the fewest classes whose softmax shares sum to this much. It covers as often as the
                softmax is calibrated, no more.
        """
        return list(self.stream(images, batch_size=batch_size, coverage=coverage))

    __call__ = predict

    def stream(
        self, images: Iterable[Any], *, batch_size: int = 32, coverage: float | None = None
    ) -> Iterator[Prediction]:
        """As :meth:`predict`, one by one, holding a batch at a time."""
        if isinstance(images, str | Path | bytes):
            raise TypeError(f"images must be a sequence of images, got one {type(images).__name__}: put it in a list")
        if coverage is not None and not 0 < coverage <= 1:
            raise ValueError(f"coverage must be above 0 and at most 1, got {coverage!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
        waiting = iter(images)
        while batch := list(islice(waiting, batch_size)):
            yield from self.rank(self.run(self.preprocess(batch)), coverage=coverage)

    def rank(self, outputs: dict[str, np.ndarray], *, coverage: float | None = None) -> list[Prediction]:
        """Predictions from a run's outputs."""
        missing = {"logits", "marginals"} - outputs.keys()
        if missing:
            raise ModelFileError(
                f"predictions need the outputs logits and marginals; this model was exported without "
                f"{' and '.join(sorted(missing))}: use Predictor.run"
            )
        return [self._rank(*row, coverage) for row in zip(outputs["logits"], outputs["marginals"], strict=True)]

    def _rank(self, logits: np.ndarray, marginals: np.ndarray, coverage: float | None) -> Prediction:
        share = softmax(logits)
        order = np.argsort(-logits, kind="stable")
        ranked = [self._ranked(i, marginals, share) for i in order[: self.metadata.k]]
        if coverage is None:
            return Prediction(tuple(ranked))
        reached = int(np.searchsorted(np.cumsum(share[order]), coverage)) + 1
        chosen = tuple(self._ranked(i, marginals, share) for i in order[:reached])
        return Prediction(tuple(ranked), chosen)

    def _ranked(self, i: Any, marginals: np.ndarray, share: np.ndarray) -> Ranked:
        return Ranked(int(i), self.metadata.class_names[i], float(marginals[i]), float(share[i]))

    def _fixed(self, bound_batch: int | None) -> int | None:
        """The one size of all runs: the model's own, or the bound one; None where any will do."""
        own = self._input.shape[0]
        if not isinstance(own, int):
            return bound_batch
        if bound_batch not in (None, own):
            raise ValueError(f"the model has a fixed batch size of {own}, bound_batch is {bound_batch}")
        return own

    def _run(self, part: np.ndarray) -> list[np.ndarray]:
        """One run, the batch padded to its size where that is fixed."""
        n = len(part)
        if self.batch_size is not None and n < self.batch_size:
            part = np.concatenate((part, np.zeros((self.batch_size - n, *part.shape[1:]), part.dtype)))
        if self._bound is not None:
            return [value[:n].copy() for value in self._bound(part)]
        return [value[:n] for value in self.session.run(list(self._outputs), {self._input.name: part})]


def _empty(output: Any) -> np.ndarray:
    return np.zeros((0, *output.shape[1:]), TYPES[output.type])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in float64."""
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
