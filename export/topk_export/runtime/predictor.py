"""Predictions from an exported file, without torch: numpy, onnxruntime and Pillow.

predictor = Predictor("model.onnx")
for prediction in predictor(["a.jpg", "b.jpg"]):
    print(prediction.top[0].name, prediction.top[0].marginal)
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from topk_export.errors import ImageError, PredictionError
from topk_export.runtime.metadata import GROUP, NO_GROUP, Metadata
from topk_export.runtime.preprocess import MAX_PIXELS, read_image
from topk_export.runtime.ranking import AnyPrediction, check_outputs, check_wanted, rank_rows
from topk_export.runtime.session import TYPES, BoundRunner, device_of, open_session
from topk_export.runtime.stream import read_ahead

ON_ERROR = ("raise", "skip", "yield")


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
        group: the group of all images, in a file with thresholds by group; None: not told, and the largest threshold
            serves, which covers every group.
        workers: threads that read images, a batch ahead of the model; 1 reads none ahead. Default: the number of CPUs,
            at most 8.

    A predictor pickles: a copy opens the file again. Where the file gives several labels an image
    (``metadata.several``), a prediction is a :class:`~topk_export.LabelPrediction`.
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
        workers: int | None = None,
        group: str | None = None,
    ) -> None:
        self._arguments = {
            "path": os.path.abspath(path),
            "device": device,
            "require_gpu": require_gpu,
            "threads": threads,
            "bound_batch": bound_batch,
            "cuda_graph": cuda_graph,
            "max_pixels": max_pixels,
            "exif": exif,
            "workers": workers,
            "group": group,
        }
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers!r}")
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
        self.workers: int = workers or min(8, os.cpu_count() or 1)
        self._input = self.session.get_inputs()[0]
        self._outputs = {output.name: output for output in self.session.get_outputs()}
        self._group = NO_GROUP if group is None else self.metadata.group_number(group)
        self.batch_size: int | None = self._fixed(bound_batch)
        self._bound = None if bound_batch is None else self._bind(bound_batch)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: [channels, height, width], or [height, width, channels] where the graph normalises."""
        c, h, w = self.metadata.preprocess.input_size
        return (h, w, c) if self.metadata.in_graph else (c, h, w)

    @property
    def input_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.metadata.in_graph else np.float32)

    @property
    def path(self) -> str:
        """The model file."""
        return self._arguments["path"]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.path).stem

    @property
    def input_name(self) -> str:
        return self._input.name

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self._outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._arguments,)

    def preprocess(self, images: Iterable[Any]) -> np.ndarray:
        """Return images (paths, bytes, uint8 arrays, Pillow images) as one input batch."""
        inputs = [self.input_of(image) for image in images]
        return np.stack(inputs) if inputs else np.zeros((0, *self.input_shape), self.input_type)

    def input_of(self, image: Any) -> np.ndarray:
        """Return one image (path, bytes, uint8 array, Pillow image) as an input, without the batch's dimension."""
        recipe = self.metadata.preprocess
        pixels = recipe.pixels(read_image(image, max_pixels=self.max_pixels, exif=self.exif))
        return pixels if self.metadata.in_graph else recipe.normalise(pixels[None])[0]

    def _read(self, image: Any) -> np.ndarray | ImageError:
        try:
            return self.input_of(image)
        except ImageError as error:
            return error

    def group_number(self, group: str | None) -> int | None:
        """Return the number that :meth:`run` takes for a group; None in a file without thresholds by group.

        Args:
            group: its name; None: the predictor's own ``group``.

        Raises:
            ModelFileError: the file has no threshold for it.
        """
        if group is not None:
            return self.metadata.group_number(group)
        return self._group if self.metadata.group_names else None

    def run(self, batch: np.ndarray, groups: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Run the model on an input batch as :meth:`preprocess` makes it, and return its outputs by name.

        Args:
            batch: the input.
            groups: the number of each image's group [batch], in a file with thresholds by group; see
                :meth:`group_number`. -1 is a group that is not told. None: the predictor's ``group`` for all.
        """
        if groups is None and (own := self.group_number(None)) is not None:
            groups = np.full(len(batch), own, np.int64)
        elif groups is not None:
            self._check_groups(groups, len(batch))
        if batch.shape[1:] != self.input_shape or batch.dtype != self.input_type:
            raise ValueError(
                f"the model takes {self.input_type} [batch, {', '.join(map(str, self.input_shape))}], "
                f"got {batch.dtype} {list(batch.shape)}"
            )
        size = self.batch_size or max(1, len(batch))
        parts = [
            self._run(batch[start : start + size], None if groups is None else groups[start : start + size])
            for start in range(0, len(batch), size)
        ]
        columns = zip(*parts, strict=True) if parts else ([_empty(output)] for output in self._outputs.values())
        return {name: np.concatenate(list(column)) for name, column in zip(self._outputs, columns, strict=True)}

    @overload
    def predict(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = ...,
        softmax_mass: float | None = ...,
        max_set: int | None = ...,
        on_error: Literal["raise", "skip"] = ...,
    ) -> list[AnyPrediction]: ...

    @overload
    def predict(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = ...,
        softmax_mass: float | None = ...,
        max_set: int | None = ...,
        on_error: Literal["yield"],
    ) -> list[AnyPrediction | ImageError | PredictionError]: ...

    def predict(self, images: Iterable[Any], **options: Any) -> Any:
        """Return a prediction for each image (paths, bytes, uint8 arrays, Pillow images).

        It is a :class:`~topk_export.Prediction`, or a :class:`~topk_export.LabelPrediction` of several labels.

        Args:
            images: what to look at.
            options: as of :meth:`stream`.
        """
        return list(self.stream(images, **options))

    __call__ = predict

    @overload
    def stream(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = ...,
        softmax_mass: float | None = ...,
        max_set: int | None = ...,
        on_error: Literal["raise", "skip"] = ...,
    ) -> Iterator[AnyPrediction]: ...

    @overload
    def stream(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = ...,
        softmax_mass: float | None = ...,
        max_set: int | None = ...,
        on_error: Literal["yield"],
    ) -> Iterator[AnyPrediction | ImageError | PredictionError]: ...

    def stream(
        self,
        images: Iterable[Any],
        *,
        batch_size: int = 32,
        softmax_mass: float | None = None,
        max_set: int | None = None,
        on_error: str = "raise",
    ) -> Iterator[Any]:
        """Yield a prediction for each image, in order, while threads read the next batch.

        It is a :class:`~topk_export.Prediction`, or a :class:`~topk_export.LabelPrediction` of several labels.

        Args:
            images: paths, bytes, uint8 arrays or Pillow images; may be endless.
            batch_size: images a run.
            softmax_mass: also give the fewest classes whose softmax shares sum to this much. It promises nothing: the
                sets of a calibrated file do.
            max_set: the most classes of a set that are given; ``set_size`` counts them all.
            on_error: for an image that cannot be read, or whose outputs are not numbers. ``"raise"`` the error, after
                the predictions of all images before it; ``"skip"`` the image; or ``"yield"`` the error in its place.
        """
        if isinstance(images, str | Path | bytes):
            raise TypeError(f"images must be a sequence of images, got one {type(images).__name__}: put it in a list")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size!r}")
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        check_wanted(softmax_mass, max_set, self.metadata)
        check_outputs(self._outputs, self.metadata)
        self.metadata.preprocess.check_known()
        return self._stream(images, batch_size, softmax_mass, max_set, on_error)

    def _stream(
        self, images: Iterable[Any], batch_size: int, softmax_mass: float | None, max_set: int | None, on_error: str
    ) -> Iterator[Any]:
        for batch in read_ahead(self._read, images, batch=batch_size, workers=self.workers):
            good = [x for x in batch if not isinstance(x, ImageError)]
            outputs = self.run(np.stack(good)) if good else None
            ranked = (
                rank_rows(outputs, self.metadata, softmax_mass=softmax_mass, max_set=max_set) if outputs else iter(())
            )
            for x in batch:
                result = x if isinstance(x, ImageError) else next(ranked)
                if not isinstance(result, Exception) or on_error == "yield":
                    yield result
                elif on_error == "raise":
                    raise result

    def rank(
        self, outputs: Mapping[str, np.ndarray], *, softmax_mass: float | None = None, max_set: int | None = None
    ) -> list[AnyPrediction]:
        """Return the predictions of a run's outputs; raise :class:`PredictionError` where a row is not finite."""
        rows: list[AnyPrediction] = []
        for row in rank_rows(outputs, self.metadata, softmax_mass=softmax_mass, max_set=max_set):
            if isinstance(row, Exception):
                raise row
            rows.append(row)
        return rows

    def _fixed(self, bound_batch: int | None) -> int | None:
        """The one size of all runs: the model's own, or the bound one; None where any will do."""
        own = self._input.shape[0]
        if not isinstance(own, int):
            return bound_batch
        if bound_batch not in (None, own):
            raise ValueError(f"the model has a fixed batch size of {own}, bound_batch is {bound_batch}")
        return own

    def _check_groups(self, groups: np.ndarray, count: int) -> None:
        names = self.metadata.group_names
        if not names:
            raise ValueError("groups are of files with thresholds by group, and this file has none")
        if groups.shape != (count,) or (groups < NO_GROUP).any() or (groups >= len(names)).any():
            raise ValueError(f"expected a group from 0 to {len(names) - 1}, or {NO_GROUP}, for each of {count} images")

    def _run(self, part: np.ndarray, groups: np.ndarray | None = None) -> list[np.ndarray]:
        """One run, the batch padded to its size where that is fixed."""
        n = len(part)
        if self.batch_size is not None and n < self.batch_size:
            part = np.concatenate((part, np.zeros((self.batch_size - n, *part.shape[1:]), part.dtype)))
        told = {}
        if groups is not None:
            told[GROUP] = np.append(groups, np.full(len(part) - n, NO_GROUP)).astype(np.int64)
        if self._bound is not None:
            return [value[:n].copy() for value in self._bound(part, **told)]
        return [value[:n] for value in self.session.run(list(self._outputs), {self._input.name: part, **told})]

    def _bind(self, size: int) -> BoundRunner:
        groups = {GROUP: np.full(size, NO_GROUP, np.int64)} if self.metadata.group_names else {}
        return BoundRunner(self.session, (size, *self.input_shape), groups)


def _open(arguments: dict[str, Any]) -> Predictor:
    return Predictor(**arguments)


def _empty(output: Any) -> np.ndarray:
    return np.zeros((0, *output.shape[1:]), TYPES[output.type])
