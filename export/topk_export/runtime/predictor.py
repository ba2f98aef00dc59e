"""Predictions from an exported file, without torch: numpy, onnxruntime and Pillow.

predictor = Predictor("model.onnx")
for prediction in predictor(["a.jpg", "b.jpg"]):
    print(prediction.top[0].name, prediction.top[0].marginal)
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from topk_export.errors import ImageError, ModelFileError
from topk_export.runtime.metadata import ALLOWED, ALPHA, Metadata
from topk_export.runtime.preprocess import MAX_PIXELS, read_image
from topk_export.runtime.ranking import Prediction, check_outputs, rank_rows
from topk_export.runtime.session import TYPES, device_of, open_session
from topk_export.runtime.weights import check_digest, check_thresholds

ON_ERROR = ("raise", "skip", "yield")
Source = TypeVar("Source")
Read = TypeVar("Read")


class Predictor:
    """An exported model that predicts images.

    Args:
        path: ``model.onnx`` as written by :func:`topk_export.export_onnx`.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"tensorrt"``.
        require_gpu: raise :class:`~topk_export.DeviceError` if the model does not run on a GPU.
        threads: number of CPU threads per run.
        allowed: names of the allowed classes. Default: all classes. See :meth:`mask_of`.
        max_pixels: images with more pixels raise an error before they are decoded.
        workers: number of threads that read images, one batch ahead of the model. With 1, no batch is read ahead.
            Default: one per CPU, at most 8.

    A predictor can be pickled. The unpickled copy opens the file again.

    Raises:
        ModelFileError: the file is not an exported model, its external weights are missing or belong to another model,
            or the thresholds of its prediction sets changed after the calibration.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        require_gpu: bool = False,
        threads: int | None = None,
        allowed: Sequence[str] | None = None,
        max_pixels: int = MAX_PIXELS,
        workers: int | None = None,
    ) -> None:
        self.path: str = os.path.abspath(path)
        self._options = {
            "device": device,
            "require_gpu": require_gpu,
            "threads": threads,
            "allowed": None if allowed is None else tuple(allowed),
            "max_pixels": max_pixels,
            "workers": workers,
        }
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers!r}")
        self.session: Any = open_session(self.path, device=device, require_gpu=require_gpu, threads=threads)
        self.metadata: Metadata = Metadata.from_props(self.session.get_modelmeta().custom_metadata_map, str(path))
        check_digest(self.path, self.metadata.weights_sha256)
        check_thresholds(self.path, self.metadata.sets)
        self.device: str = device_of(self.session)
        self.max_pixels: int = max_pixels
        self.workers: int = workers or min(8, os.cpu_count() or 1)
        self._input = self.session.get_inputs()[0]
        self._optional = {value.name for value in self.session.get_overridable_initializers()}
        self._outputs = {output.name: output for output in self.session.get_outputs()}
        self.allowed: np.ndarray | None = None if allowed is None else self.mask_of(allowed)

    @property
    def name(self) -> str:
        """File name without its suffix."""
        return Path(self.path).stem

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: [channels, height, width]. If the graph normalizes images, [height, width, channels]."""
        c, h, w = self.metadata.preprocess.input_size
        return (h, w, c) if self.metadata.in_graph else (c, h, w)

    @property
    def input_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.metadata.in_graph else np.float32)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self._outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.path, **self._options), ()

    def mask_of(self, names: Iterable[str]) -> np.ndarray:
        """Return a class list as bool [num_classes].

        Raises:
            ValueError: the list is empty, or a name is not a class. The message has the closest names.
        """
        if isinstance(names, str):
            raise TypeError(f"a class list must be a sequence of names, got the text {names!r}")
        known, wanted = self.metadata.class_names, set(names)
        if not wanted:
            raise ValueError("the class list is empty: it must name at least one class")
        if unknown := sorted(map(str, wanted.difference(known))):
            close = dict.fromkeys(hint for name in unknown[:5] for hint in get_close_matches(name, known, n=3))
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            hints = f"; close names: {', '.join(map(repr, list(close)[:5]))}" if close else ""
            raise ValueError(f"the model has no classes {', '.join(map(repr, unknown[:5]))}{more}{hints}")
        return np.asarray([name in wanted for name in known])

    def preprocess(self, images: Iterable[Any]) -> np.ndarray:
        """Return images as one input batch. An image is a path, bytes, a uint8 array or a Pillow image."""
        inputs = [self.input_of(image) for image in images]
        return np.stack(inputs) if inputs else np.zeros((0, *self.input_shape), self.input_type)

    def input_of(self, image: Any) -> np.ndarray:
        """Return an image (a path, bytes, a uint8 array or a Pillow image) as an input without the batch axis."""
        recipe = self.metadata.preprocess
        pixels = recipe.pixels(read_image(image, max_pixels=self.max_pixels, exif=recipe.exif))
        return pixels if self.metadata.in_graph else recipe.normalize(pixels[None])[0]

    def run(
        self, batch: np.ndarray, *, allowed: np.ndarray | None = None, alpha: float | None = None
    ) -> dict[str, np.ndarray]:
        """Run the model on a batch from :meth:`preprocess`, and return the outputs by name.

        Args:
            batch: the input.
            allowed: class list, bool [num_classes] or [batch, num_classes]. Default: ``allowed`` of the predictor.
            alpha: miscoverage of prediction sets. Default: alpha of the calibration. The sets have the largest level of
                ``metadata.alphas`` that is at most alpha.

        Raises:
            ValueError: the batch or the class list has the wrong shape or type, or alpha is outside of the levels.
        """
        if batch.shape[1:] != self.input_shape or batch.dtype != self.input_type:
            raise ValueError(
                f"the model takes {self.input_type} [batch, {', '.join(map(str, self.input_shape))}], "
                f"got {batch.dtype} {list(batch.shape)}"
            )
        feed = {self._input.name: batch}
        allowed = self.allowed if allowed is None else allowed
        if allowed is not None:
            feed[ALLOWED] = self._check_mask(allowed, len(batch))
        if alpha is not None:
            feed[ALPHA] = np.asarray([self._check_alpha(alpha)], np.float32)
        if not len(batch):
            return {name: np.zeros((0, *o.shape[1:]), TYPES[o.type]) for name, o in self._outputs.items()}
        return dict(zip(self._outputs, self.session.run(list(self._outputs), feed), strict=True))

    def predict(self, images: Iterable[Any], **options: Any) -> list[Any]:
        """Return one :class:`~topk_export.Prediction` per image.

        Args:
            images: paths, bytes, uint8 arrays or Pillow images.
            options: options of :meth:`stream`.
        """
        return list(self.stream(images, **options))

    __call__ = predict

    def stream(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = 32,
        allowed: Sequence[str] | np.ndarray | None = None,
        alpha: float | None = None,
        max_set: int | None = None,
        on_error: str = "raise",
    ) -> Iterator[Any]:
        """Yield one :class:`~topk_export.Prediction` per image, in order. Meanwhile, threads read the next batch.

        Args:
            images: paths, bytes, uint8 arrays or Pillow images. The iterable may be infinite.
            batch_size: number of images per run.
            allowed: class list, as names or as bool [num_classes]. Default: ``allowed`` of the predictor.
            alpha: as in :meth:`run`.
            max_set: maximum number of classes to list per prediction set. ``set_size`` counts all classes.
            on_error: what to do if an image cannot be read or its outputs are not finite. ``"raise"`` raises the error
                after the predictions of all earlier images, ``"skip"`` skips the image, and ``"yield"`` yields the
                error.
        """
        one_array = isinstance(images, np.ndarray) and (
            images.ndim < 3 or (images.ndim == 3 and images.shape[2] in (1, 3))
        )
        if one_array or isinstance(images, str | Path | bytes | Image.Image):
            raise TypeError(f"images must be a sequence of images, got one {type(images).__name__}: put it in a list")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        if alpha is not None:
            self._check_alpha(alpha)
        mask = self.mask_of(allowed) if allowed is not None and not isinstance(allowed, np.ndarray) else allowed
        check_outputs(self._outputs, self.metadata)
        self.metadata.preprocess.check_known()
        return self._stream(images, batch_size, self.allowed if mask is None else mask, alpha, max_set, on_error)

    def rank(
        self, outputs: Mapping[str, np.ndarray], *, allowed: np.ndarray | None = None, max_set: int | None = None
    ) -> list[Prediction]:
        """Return the predictions for the outputs of a run. Raise :class:`PredictionError` if a row is not finite."""
        rows: list[Prediction] = []
        mask = self.allowed if allowed is None else allowed
        for row in rank_rows(outputs, self.metadata, allowed=mask, max_set=max_set):
            if isinstance(row, Exception):
                raise row
            rows.append(row)
        return rows

    def _stream(
        self,
        images: Iterable[Any],
        batch_size: int,
        mask: np.ndarray | None,
        alpha: float | None,
        max_set: int | None,
        on_error: str,
    ) -> Iterator[Any]:
        for batch in read_ahead(self._read, images, batch=batch_size, workers=self.workers):
            good = [x for x in batch if not isinstance(x, ImageError)]
            outputs = self.run(np.stack(good), allowed=mask, alpha=alpha) if good else None
            ranked = rank_rows(outputs, self.metadata, allowed=mask, max_set=max_set) if outputs else iter(())
            for x in batch:
                result = x if isinstance(x, ImageError) else next(ranked)
                if not isinstance(result, Exception) or on_error == "yield":
                    yield result
                elif on_error == "raise":
                    raise result

    def _read(self, image: Any) -> np.ndarray | ImageError:
        try:
            return self.input_of(image)
        except ImageError as error:
            return error

    def _check_mask(self, allowed: np.ndarray, batch: int) -> np.ndarray:
        if ALLOWED not in self._optional:
            raise ModelFileError(f"{self.path} has no input {ALLOWED!r} for class lists")
        mask, n = np.asarray(allowed), self.metadata.num_classes
        if mask.dtype != bool or mask.shape not in ((n,), (1, n), (batch, n)):
            raise ValueError(f"allowed must be bool [{n}] or [{batch}, {n}], got {mask.dtype} {list(mask.shape)}")
        if not mask.any(-1).all():
            raise ValueError("a class list is empty: it must have at least one class")
        return mask.reshape(-1, n)

    def _check_alpha(self, alpha: float) -> float:
        levels = self.metadata.alphas
        if not levels or ALPHA not in self._optional:
            raise ValueError("alpha needs a calibrated file: run `topk-registry calibrate`")
        if not np.float32(levels[0]) <= np.float32(alpha) <= np.float32(levels[-1]):  # also true for NaN
            raise ValueError(f"alpha must be from {levels[0]:g} to {levels[-1]:g}, got {alpha!r}")
        return alpha


def read_ahead(
    read: Callable[[Source], Read], sources: Iterable[Source], *, batch: int, workers: int
) -> Iterator[list[Read]]:
    """Yield lists of ``batch`` results in order, while threads work on the next list. One worker does not read ahead.

    If ``sources`` raises an error, the error is raised after the results of all earlier items.
    """
    failure: list[Exception] = []
    source = _until_failure(iter(sources), failure)
    if workers == 1:
        while results := [read(item) for item in islice(source, batch)]:
            yield results
    else:
        yield from _in_threads(read, source, batch, workers)
    if failure:
        raise failure[0]


def _in_threads(
    read: Callable[[Source], Read], source: Iterator[Source], batch: int, workers: int
) -> Iterator[list[Read]]:
    waiting: deque[Future[Read]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
    try:
        while True:
            waiting.extend(pool.submit(read, item) for item in islice(source, 2 * batch - len(waiting)))
            if not waiting:
                break
            yield [waiting.popleft().result() for _ in range(min(batch, len(waiting)))]
    finally:
        pool.shutdown(cancel_futures=True)


def _until_failure(source: Iterator[Source], failure: list[Exception]) -> Iterator[Source]:
    try:
        yield from source
    except Exception as error:
        failure.append(error)
