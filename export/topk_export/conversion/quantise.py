"""Integer arithmetic for the backbone of an exported graph; the classifier's last layer and the head stay in float32.

Dynamic quantisation finds the range of activations at each run. Static quantisation finds it once, on images, and
writes it into the graph as pairs of QuantizeLinear and DequantizeLinear (QDQ), which runtimes fuse with the layers
between them.
"""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from topk_export.errors import ExportError, ImageError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import SUFFIXES, read_image
from topk_export.runtime.session import import_onnxruntime, open_session
from topk_export.samples import open_folder
from topk_export.verification import graph, storage
from topk_registry.folders.agreement import agreement
from topk_registry.folders.errors import FolderError
from topk_registry.folders.images import images_below

LAYERS = ("Conv", "MatMul", "Gemm")
BATCH = 16


def quantise_dynamic(model: Any) -> Any:
    """Return the model with onnxruntime's dynamic quantisation; the head has no matrix product and stays as it is."""
    import_onnxruntime()  # before its parts: without telemetry
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quiet():
        graph.forget_constants(model)
        before, after = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        large = storage.size_of(model) > storage.LIMIT
        storage.save(model, before)
        quantize_dynamic(
            before,
            after,
            op_types_to_quantize=["MatMul", "Conv"],
            weight_type=QuantType.QUInt8,
            use_external_data_format=large,
        )
        return onnx.load(str(after))


def quantise_static(model: Any, images: "Images", k: int, *, force: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the model with QDQ nodes around its convolutions and matrix products, and its agreement with float32.

    Args:
        model: a ModelProto in float32; above 2 GiB its weights are removed from it.
        images: one half gives the ranges of activations, agreement is measured on the other half.
        k: size of the set.
        force: go on where the labels of the images look wrong.

    Raises:
        WrongLabelsError: accuracy is near chance, or folders seem to stand for other classes.
    """
    import_onnxruntime()  # before its parts: without telemetry
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with tempfile.TemporaryDirectory() as folder, _quiet():
        graph.forget_constants(model)
        before, after = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        large, kept = storage.size_of(model) > storage.LIMIT, _kept(model)
        storage.save(model, before)
        logits = _logits(before, images.measured)
        if images.labels is not None:
            agreement(logits.argmax(-1), images.labels, images.class_names).check(force=force)
        quantize_static(
            before,
            after,
            cast(Any, _Batches(model, images.ranges)),  # it has the methods of a CalibrationDataReader
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(LAYERS),
            nodes_to_exclude=kept,
            use_external_data_format=large,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )
        comparison = compare(logits, _logits(after, images.measured), images, k)
        quantised = onnx.load(str(after))
    used = {node.domain for node in quantised.graph.node}
    opsets = [entry for entry in quantised.opset_import if entry.domain in ("", "ai.onnx") or entry.domain in used]
    del quantised.opset_import[:]
    quantised.opset_import.extend(opsets)
    return quantised, comparison


def _kept(model: Any) -> list[str]:
    """Return the names of the nodes that stay in float32: the classifier's last layer and everything after it.

    Logits rounded to 8 bits would tie.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    kept, left = {node.name for node in graph.head_nodes(model.graph)}, [graph.LOGITS]
    while left:
        node = makers.get(left.pop())
        if node is None or node.name in kept:
            continue
        kept.add(node.name)
        if node.op_type not in LAYERS:
            left += node.input
    return sorted(kept)


class _Batches:
    """Images in batches, as onnxruntime's calibration asks for them."""

    def __init__(self, model: Any, images: np.ndarray) -> None:
        (source,) = model.graph.input
        fixed = source.type.tensor_type.shape.dim[0].dim_value
        size = fixed or BATCH
        whole = len(images) - len(images) % size if fixed else len(images)
        if not whole:
            raise ExportError(f"calibration needs at least {size} images, a batch of the file; got {len(images)}")
        self._left = iter([{source.name: images[i : i + size]} for i in range(0, whole, size)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._left)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Do nothing: all batches are taken."""


class Images:
    """Images of a folder as inputs of a model, with their labels if there is one subfolder for each class."""

    def __init__(self, folder: str | Path, metadata: Metadata, most: int) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise ImageError(f"the folder {root} does not exist")
        labels = None
        try:
            if metadata.several:
                raise FolderError("folders tell one label an image, and the model has several")
            paths, labels, self.told = open_folder(root, metadata.class_names)[1:4]
        except FolderError as error:
            paths = images_below(root, SUFFIXES)
            self.told = f"images without labels, so that accuracy is not measured: {error}"
        if len(paths) < 2:
            raise ImageError(f"calibration needs at least 2 images, {root} holds {len(paths)}")
        chosen = np.unique(np.linspace(0, len(paths) - 1, min(most, len(paths))).astype(int))
        recipe = metadata.preprocess
        pixels = np.stack([recipe.pixels(read_image(paths[i])) for i in chosen])
        inputs = pixels if metadata.in_graph else recipe.normalise(pixels)
        # agreement is measured on images that did not set the ranges
        self.ranges, self.measured = inputs[::2], inputs[1::2]
        self.labels = None if labels is None else labels[chosen][1::2]
        self.class_names = metadata.class_names


def compare(before: np.ndarray, after: np.ndarray, images: Images, k: int) -> dict[str, Any]:
    """Return how often the logits of two models agree on images, and the accuracy of both where labels are known."""
    ranked = [np.argsort(-logits, axis=-1, kind="stable")[:, :k] for logits in (before, after)]
    shared = [len(set(a) & set(b)) / k for a, b in zip(*map(np.ndarray.tolist, ranked), strict=True)]
    comparison: dict[str, Any] = {
        "calibrated_on": len(images.ranges),
        "measured_on": len(images.measured),
        "same_best_class": float((ranked[0][:, 0] == ranked[1][:, 0]).mean()),
        "shared_top_k": float(np.mean(shared)),
    }
    if images.labels is not None:
        for name, best in zip(("fp32", "int8"), ranked, strict=True):
            hits = best == images.labels[:, None]
            comparison[name] = {"top1": float(hits[:, 0].mean()), f"top{k}": float(hits.any(-1).mean())}
    return comparison


def comparison_line(found: dict[str, Any]) -> str:
    """Format a comparison as one line of text."""
    line = (
        f"int8 against fp32 on {found['measured_on']} images (ranges from {found['calibrated_on']} others): the same "
        f"best class on {found['same_best_class']:.1%}, {found['shared_top_k']:.1%} of the top k shared"
    )
    if "fp32" in found:
        pairs = (f"{name} {value:.1%} -> {found['int8'][name]:.1%}" for name, value in found["fp32"].items())
        line += f"; accuracy {', '.join(pairs)}"
    return line


def _logits(model: Path, images: np.ndarray) -> np.ndarray:
    session = open_session(model, device="cpu")
    (source,) = session.get_inputs()
    fixed = source.shape[0] if isinstance(source.shape[0], int) else None
    return np.concatenate([_run(session, source.name, batch, fixed) for batch in _batches(images, fixed or BATCH)])


def _batches(images: np.ndarray, size: int) -> Sequence[np.ndarray]:
    return [images[i : i + size] for i in range(0, len(images), size)]


def _run(session: Any, name: str, batch: np.ndarray, fixed: int | None) -> np.ndarray:
    full = batch if fixed is None else np.resize(batch, (fixed, *batch.shape[1:]))
    return session.run([graph.LOGITS], {name: full})[0][: len(batch)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the root logger, through which the quantiser gives advice."""
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger().setLevel(level)
