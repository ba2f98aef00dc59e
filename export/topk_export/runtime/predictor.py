"""Prediction of the classes of images with an exported ONNX file.

This module needs numpy, onnxruntime and Pillow, but not torch.

Example::

    predictor = Predictor("model.onnx")
    for prediction in predictor(["a.jpg", "b.jpg"]):
        print(prediction.top[0].name, prediction.top[0].probability)
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from topk_export.errors import ImageError, ModelFileError
from topk_export.runtime.inputs import check_feed, image_shape, takes_images
from topk_export.runtime.metadata import ALLOWED, ALPHA, LOGITS, SET_OUTPUTS, Metadata
from topk_export.runtime.preprocess import MAX_PIXELS, read_image
from topk_export.runtime.ranking import check_outputs, rank_rows
from topk_export.runtime.session import TYPES, device_of, open_session
from topk_export.runtime.weights import check_thresholds, check_weights

ON_ERROR = ("raise", "skip", "yield")
Source = TypeVar("Source")
Read = TypeVar("Read")


class Predictor:
    """An exported ONNX model that predicts the classes of images.

    Args:
        path: ONNX file that :func:`topk_export.export_onnx` or a calibration wrote.
        device: ``"cpu"``, ``"cuda"``, ``"tensorrt"``, ``"webgpu"`` or ``"auto"``. ``"auto"`` selects CUDA if there is
            an NVIDIA GPU, else the CPU. If the model cannot run on the GPU that ``"auto"`` selected, the model runs on
            the CPU, with a warning.
        require_gpu: raise :class:`~topk_export.DeviceError` if the model does not run on a GPU.
        threads: number of CPU threads for one run of the model. Default: the default of onnxruntime.
        max_pixels: maximum number of pixels per image. A larger file raises an exception and is not decoded.
        workers: number of threads that read images. The threads read the next batch while the model runs. Default: the
            number of CPUs, at most 8.

    A predictor can be pickled. The unpickled copy opens the file again.

    Raises:
        ModelFileError: the file is not an exported model, its external weights are missing or belong to another model,
            or the thresholds of its prediction sets changed after the calibration.
        DeviceError: the model cannot run on the named device, or ``require_gpu`` is True and the model does not run on
            a GPU.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        require_gpu: bool = False,
        threads: int | None = None,
        max_pixels: int = MAX_PIXELS,
        workers: int | None = None,
    ) -> None:
        self.path: str = os.path.abspath(path)
        self._options = {
            "device": device,
            "require_gpu": require_gpu,
            "threads": threads,
            "max_pixels": max_pixels,
            "workers": workers,
        }
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers!r}")
        self.session: Any = open_session(self.path, device=device, require_gpu=require_gpu, threads=threads)
        self.metadata: Metadata = Metadata.from_props(self.session.get_modelmeta().custom_metadata_map, str(path))
        check_weights(self.path, self.metadata.external_weights)
        check_thresholds(self.path, self.metadata.sets)
        self.device: str = device_of(self.session)
        self.max_pixels: int = max_pixels
        self.workers: int = workers or min(8, os.cpu_count() or 1)
        self._inputs = {value.name: value for value in self.session.get_inputs()}
        self._check_recipe(path)
        self._optional = {value.name for value in self.session.get_overridable_initializers()}
        # a file of `attach` may have other outputs, such as the maps of scikit-learn, which are not tensors
        self._outputs = {value.name: value for value in self.session.get_outputs() if value.type in TYPES}

    def _check_recipe(self, path: object) -> None:
        """Raise ModelFileError if the preprocessing in the metadata gives images of another shape than the input."""
        if self.metadata.preprocess is None:
            return
        shape = list(next(iter(self._inputs.values())).shape[1:])
        if not takes_images(shape, self.metadata.preprocess, in_graph=self.metadata.in_graph):
            raise ModelFileError(
                f"the metadata of {path} is broken: its preprocessing gives images of the shape "
                f"{list(self.input_shape)}, but the model takes {shape}"
            )

    @property
    def name(self) -> str:
        """Name of the ONNX file without its suffix."""
        return Path(self.path).stem

    @property
    def inputs(self) -> dict[str, tuple[str, list[Any]]]:
        """Type and shape of each input, by name, such as ``{"input": ("tensor(float)", ["batch", 3, 224, 224])}``."""
        return {name: (value.type, list(value.shape)) for name, value in self._inputs.items()}

    @property
    def positions(self) -> bool:
        """Whether the model computes logits for several positions per row: [B, T, n] in place of [B, n]."""
        return len(self._outputs[LOGITS].shape) == 3

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input for one image, without the batch axis.

        If the ONNX graph normalizes images, the shape is [height, width, channels], else [channels, height, width].

        Raises:
            ModelFileError: the file takes arrays, not images.
        """
        return image_shape(self.metadata.preprocess or self.metadata.images, in_graph=self.metadata.in_graph)

    @property
    def input_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.metadata.in_graph else np.float32)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self._outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.path, **self._options), ()

    def mask_of(self, names: Iterable[str]) -> np.ndarray:
        """Return a mask for the model input ``allowed``: bool [num_classes], True for the classes in ``names``.

        Raises:
            ValueError: ``names`` is empty, or a name is not a class of the model.
            ModelFileError: the ONNX file has no input ``allowed``.
        """
        if ALLOWED not in self._optional:
            raise ModelFileError(f"{self.name} has no input {ALLOWED!r}, so it does not support class lists")
        if isinstance(names, str):
            raise TypeError(f"the class list must be a sequence of names, got the text {names!r}")
        known, wanted = self.metadata.class_names, set(names)
        if not wanted:
            raise ValueError("the class list is empty, but at least one class must be allowed")
        if unknown := sorted(map(str, wanted.difference(known))):
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            named = ", ".join(repr(name[:100]) for name in unknown[:5])
            raise ValueError(f"the model has no classes {named}{more}")
        return np.asarray([name in wanted for name in known])

    def preprocess(self, images: Iterable[Any]) -> np.ndarray:
        """Read images, and return one batch for :meth:`run`. :meth:`stream` describes ``images``."""
        inputs = [self.input_of(image) for image in images]
        return np.stack(inputs) if inputs else np.zeros((0, *self.input_shape), self.input_type)

    def input_of(self, image: Any) -> np.ndarray:
        """Read one image, and return it in the input format of the model, without the batch axis.

        Args:
            image: a path, encoded bytes, a uint8 array [height, width, channels], or a Pillow image.

        Raises:
            ImageError: the image cannot be read.
        """
        recipe = self.metadata.images
        pixels = recipe.pixels(read_image(image, max_pixels=self.max_pixels, exif=recipe.exif))
        return pixels if self.metadata.in_graph else recipe.normalize(pixels[None])[0]

    def try_input_of(self, image: Any) -> np.ndarray | ImageError:
        """Return the result of :meth:`input_of`. If the image cannot be read, return the exception."""
        try:
            return self.input_of(image)
        except ImageError as error:
            return error

    def run(
        self,
        batch: np.ndarray | Mapping[str, np.ndarray],
        *,
        allowed: np.ndarray | None = None,
        alpha: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the model on one batch, and return a dictionary from the names of the outputs to arrays.

        ``metadata.outputs`` describes the outputs.

        Args:
            batch: the input, as :meth:`preprocess` returns it, or one array per input of the model, by name. If the
                model takes a fixed number of rows per run, the method cuts and pads the batch.
            allowed: mask of the allowed classes, bool [num_classes] for all images, or [batch, num_classes]. Default:
                all classes.
            alpha: probability with which a prediction set may miss the true class. Only a calibrated file has
                prediction sets. If ``alpha`` is not in ``metadata.alphas``, the next smaller value in
                ``metadata.alphas`` is used. Default: the alpha of the calibration.

        Raises:
            ValueError: the batch or the mask has the wrong shape or dtype, a row of the mask allows no class, or
                ``alpha`` is outside of the range of ``metadata.alphas``.
        """
        feed = self._check_feed(batch)
        count = len(next(iter(feed.values())))
        mask = None if allowed is None else self._check_mask(allowed, count)
        options = {} if alpha is None else {ALPHA: np.asarray([self._check_alpha(alpha)], np.float32)}
        if not count:
            return {name: np.zeros((0, *_lengths(o.shape[1:])), TYPES[o.type]) for name, o in self._outputs.items()}
        size = self.metadata.batch
        if size is None:
            return self._run(feed if mask is None else {**feed, ALLOWED: self._axes(mask)}, options)
        parts = []
        for start in range(0, count, max(size, 1)):
            rows = np.minimum(np.arange(start, start + max(size, 1)), count - 1)  # the last row pads the last part
            part = {name: values[rows] if size else values[start] for name, values in feed.items()}
            if mask is not None:
                part[ALLOWED] = self._axes(mask if len(mask) == 1 else mask[rows])
            parts.append({name: x[: count - start] for name, x in self._run(part, options).items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _run(self, feed: dict[str, np.ndarray], options: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self.session.run(list(self._outputs), {**feed, **options})
        if self.metadata.batch == 0:  # outputs of the original model may lack the batch axis, too
            ours = {*self.metadata.outputs, *SET_OUTPUTS}
            pairs = zip(self._outputs, outputs, strict=True)
            return {name: x if name in ours else np.asarray(x)[None] for name, x in pairs}
        return dict(zip(self._outputs, outputs, strict=True))

    def _axes(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask of the allowed classes with as many axes as the logits."""
        return mask[:, None] if self.positions else mask

    def check_inputs(self, inputs: Any) -> dict[str, np.ndarray]:
        """Convert nested lists or arrays for the inputs of the model, by name, to arrays of the model's types.

        Raises:
            ValueError: an input is missing or unknown, or a value does not fit.
        """
        if not isinstance(inputs, Mapping):
            raise ValueError(f"the inputs must be given by name: {', '.join(self._inputs)}")
        return self._check_feed(inputs)

    def _check_feed(self, batch: np.ndarray | Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if isinstance(batch, Mapping):
            return check_feed(self.session, batch, batched=self.metadata.batch != 0)
        if self.metadata.preprocess is None:
            takes = ", ".join(f"{name}: {kind} {shape}" for name, (kind, shape) in self.inputs.items())
            raise ValueError(f"pass one array per input, by name; the model takes {takes}")
        if batch.shape[1:] != self.input_shape or batch.dtype != self.input_type:
            raise ValueError(
                f"the model takes {self.input_type} [batch, {', '.join(map(str, self.input_shape))}], "
                f"got {batch.dtype} {list(batch.shape)}"
            )
        return {next(iter(self._inputs)): batch}

    def rows(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        batch_size: int = 32,
        allowed: Sequence[str] | np.ndarray | None = None,
        alpha: float | None = None,
        max_set: int | None = None,
    ) -> Iterator[Any]:
        """Yield one :class:`~topk_export.Prediction` per row of arrays, for files that take no images.

        If the model computes NaN or plus infinity for a row, the method yields a
        :class:`~topk_export.errors.PredictionError` for this row.

        Args:
            inputs: one array per input of the model, by name, all with the same number of rows.
            batch_size: number of rows per run of the model.
            allowed, alpha, max_set: as in :meth:`stream`.
        """
        check_outputs(self._outputs, self.metadata)
        if self.positions:
            raise ModelFileError("the logits have several positions per row: use Predictor.run")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
        if alpha is not None:
            self._check_alpha(alpha)
        mask = self.mask_of(allowed) if allowed is not None and not isinstance(allowed, np.ndarray) else allowed
        return self._rows(self._check_feed(inputs), batch_size, mask, alpha, max_set)

    def _rows(
        self,
        feed: dict[str, np.ndarray],
        batch_size: int,
        mask: np.ndarray | None,
        alpha: float | None,
        max_set: int | None,
    ) -> Iterator[Any]:
        for start in range(0, len(next(iter(feed.values()))), batch_size):
            part = {name: values[start : start + batch_size] for name, values in feed.items()}
            outputs = self.run(part, allowed=mask, alpha=alpha)
            yield from rank_rows(outputs, self.metadata, allowed=mask, max_set=max_set)

    def predict(self, images: Iterable[Any], **options: Any) -> list[Any]:
        """Return a list with one :class:`~topk_export.Prediction` per image. :meth:`stream` describes the arguments."""
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
        """Yield one :class:`~topk_export.Prediction` per image, in the order of the images.

        While the model runs on one batch, threads read the images of the next batch.

        Args:
            images: paths, encoded bytes, uint8 arrays [height, width, channels], or Pillow images. The iterable may be
                infinite.
            batch_size: number of images per run of the model.
            allowed: the allowed classes, as names or as a mask, bool [num_classes]. Default: all classes.
            alpha: probability with which a prediction set may miss the true class, as in :meth:`run`.
            max_set: maximum number of classes that a prediction lists in ``set``. ``set_size`` counts all classes of
                the prediction set.
            on_error: what to do if an image cannot be read, or if the model computes NaN or plus infinity for the
                image. ``"raise"`` raises the exception after the predictions of all earlier images. ``"skip"`` skips
                the image. ``"yield"`` yields the exception in place of a prediction.
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
        self.metadata.images  # noqa: B018 - raises an error if the file takes no images
        return self._stream(images, batch_size, mask, alpha, max_set, on_error)

    def _stream(
        self,
        images: Iterable[Any],
        batch_size: int,
        mask: np.ndarray | None,
        alpha: float | None,
        max_set: int | None,
        on_error: str,
    ) -> Iterator[Any]:
        for batch in read_ahead(self.try_input_of, images, batch=batch_size, workers=self.workers):
            good = [x for x in batch if not isinstance(x, ImageError)]
            outputs = self.run(np.stack(good), allowed=mask, alpha=alpha) if good else None
            ranked = rank_rows(outputs, self.metadata, allowed=mask, max_set=max_set) if outputs else iter(())
            for x in batch:
                result = x if isinstance(x, ImageError) else next(ranked)
                if not isinstance(result, Exception) or on_error == "yield":
                    yield result
                elif on_error == "raise":
                    raise result

    def _check_mask(self, allowed: np.ndarray, batch: int) -> np.ndarray:
        mask, n = np.asarray(allowed), self.metadata.num_classes
        if mask.dtype != bool or mask.shape not in ((n,), (1, n), (batch, n)):
            raise ValueError(f"allowed must be bool [{n}] or [{batch}, {n}], got {mask.dtype} {list(mask.shape)}")
        if not mask.any(-1).all():
            raise ValueError("a row of the class list is empty, but at least one class must be allowed")
        return mask.reshape(-1, n)

    def _check_alpha(self, alpha: float) -> float:
        levels = self.metadata.alphas
        if not levels or ALPHA not in self._optional:
            raise ValueError("alpha needs a calibrated file: run `topk-registry calibrate`")
        if not np.float32(levels[0]) <= np.float32(alpha) <= np.float32(levels[-1]):  # NaN raises, too
            raise ValueError(f"alpha must be from {levels[0]:g} to {levels[-1]:g}, got {alpha!r}")
        return alpha


def _lengths(shape: Sequence[Any]) -> list[int]:
    return [length if isinstance(length, int) else 0 for length in shape]


def read_ahead(
    read: Callable[[Source], Read], sources: Iterable[Source], *, batch: int, workers: int
) -> Iterator[list[Read]]:
    """Call ``read`` for each item of ``sources`` in ``workers`` threads, and yield lists of ``batch`` results.

    The results have the order of the items. The last list may be shorter. While the caller uses one list, the threads
    compute the next list.

    If the iterator over ``sources`` raises an exception, this function first yields the results of all earlier items,
    and then raises the exception.
    """
    failure: list[Exception] = []
    source = _until_failure(iter(sources), failure)
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
    if failure:
        raise failure[0]


def _until_failure(source: Iterator[Source], failure: list[Exception]) -> Iterator[Source]:
    try:
        yield from source
    except Exception as error:
        failure.append(error)
