"""Export of a trained classifier to one ONNX file.

For each image, the ONNX model computes the logits, the softmax probabilities, the top-k marginals, and the indices of
the k classes with the largest logits. The top-k marginal of a class is the probability that the class is in a random
set of k classes. The probability of a set is proportional to exp(s / temperature), where s is the sum of the logits of
the classes in the set.

The export writes the file to a temporary folder next to the destination, verifies the file there, and then moves the
file to the destination.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from topk_export import graph
from topk_export.detect import Graph, find_logits
from topk_export.errors import ExportError, first_line
from topk_export.head import add_head
from topk_export.runtime.inputs import SAMPLES, image_batch
from topk_export.runtime.metadata import LOGITS, TASKS, Metadata
from topk_export.source import Source, load_source
from topk_export.staging import Progress, described, staged_at, verify_staged
from topk_export.verify import SAMPLE, beside, is_distribution, largest_error, write_json, write_sample
from topk_registry.nn.classifier import find_classifier

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
OPSETS = range(18, 22)  # with opset 22 and above, onnxruntime's CUDA provider runs MaxPool on the CPU
LABELS, RECIPE = "labels.txt", "preprocess.json"
HOW_TO_EXPORT_SCORES = (
    "the export needs logits. Remove the last operation from the module, or write the module with torch.onnx.export "
    "and use `topk-registry attach`, which finds the logits in the graph"
)


def export_onnx(
    model: nn.Module | str | Path | Source,
    path: str | Path,
    *,
    k: int | None = None,
    temperature: float | None = None,
    task: str | None = None,
    dtype: str = "fp32",
    opset: int = 18,
    in_graph: bool = False,
    class_names: Sequence[str] | None = None,
    data_config: Mapping[str, Any] | None = None,
    marginals: bool = True,
    verify: bool = True,
    progress: Progress = lambda message: None,
) -> Path:
    """Export a classifier to an ONNX file, verify the file, and return the path of the file.

    From the logits, the ONNX model also computes softmax probabilities, the top-k classes and the top-k marginals. The
    top-k marginal of a class is the probability that the class is in a random set of k classes. The probability of a
    set is proportional to exp(sum of the logits of its k classes / temperature).

    Args:
        model: a PyTorch module, a checkpoint file, the folder of a training run, or the result of
            :func:`~topk_export.source.load_source`. ``load_source`` has more options, and also takes names of timm and
            torchvision models.
        path: the ONNX file to write. If ``path`` does not end in ``.onnx``, ``path`` is a folder, and the ONNX file is
            ``path/model.onnx``. Next to the ONNX file, the function writes the verification report, the class names,
            the preprocessing, and a sample: random images with PyTorch's logits.
        k: number of classes in the random set, from 1 to n - 1 for n classes. In a multilabel file, k is the number of
            classes that a prediction lists. Default: k of the training loss if k is known, else min(5, n - 1).
        temperature: number by which the logits are divided for the marginals, or for the sigmoid of a multilabel
            file. The softmax probabilities do not use the temperature. Default: temperature of the training loss if the
            temperature is known, else 1.
        task: ``"classification"`` for one label per image, or ``"multilabel"`` for any number of labels per image. With
            ``"multilabel"``, the probabilities are one sigmoid per class, and there are no marginals. Default: the task
            of the training run if the task is known, else ``"classification"``.
        dtype: precision of the backbone, which computes the logits: ``"fp32"`` or ``"fp16"``. All other outputs are
            computed from the logits in float32.
        opset: version of the ONNX operator set, 18 to 21.
        in_graph: if True, the input of the ONNX model is uint8 [batch, height, width, channels], and the model
            normalizes the images. If False, the input is normalized float32 [batch, channels, height, width].
        class_names: one name per class. Default: the names of the training run or of the published weights if the names
            are known, else ``"0"``, ``"1"``, and so on.
        data_config: preprocessing of evaluation images, with the keys of :func:`~topk_export.source.load_source`. If
            ``model`` is the result of ``load_source``, give ``data_config`` to ``load_source`` instead.
        marginals: whether the file computes the marginals.
        verify: check the file before the file is moved to ``path``. If a check fails, no ONNX file is written.
        progress: function that is called with one line of text per step of the export.

    Raises:
        ExportError: the model cannot be exported. If the file fails a check, the exception is ``VerificationError``, a
            subclass.
        ValueError: an argument is out of range.

    Example:
        >>> export_onnx("output/train/20260101-resnet50", "resnet50.onnx", k=5)  # doctest: +SKIP
        PosixPath('resnet50.onnx')
    """
    _check_options(task, dtype, opset)
    path = Path(path)
    path = path if path.suffix == ".onnx" else path / "model.onnx"
    progress("loading the model")
    if not isinstance(model, Source):
        model = load_source(model, data_config=data_config)
    elif data_config is not None:
        raise ValueError("give data_config to load_source, which made this source")
    source = model
    if in_graph:
        source.preprocess.check_known()
    backbone, n = _prepare(source)
    task = source.task if task is None else task
    if task not in TASKS:
        raise ExportError(f"the run has the task {task!r}, expected {' or '.join(TASKS)}: set task (--task)")
    metadata = described(
        n,
        k=source.k if k is None else k,
        temperature=(source.temperature or 1.0) if temperature is None else temperature,
        task=task,
        class_names=source.class_names if class_names is None else class_names,
        marginals=marginals,
        preprocess=source.preprocess,
        in_graph=in_graph,
        backbone=source.name,
        weights=source.weights,
        loss=source.loss,
        opset=opset,
        dtype=dtype,
        checkpoint_sha256=source.sha256,
        trained_on=source.trained_on,
        license=source.license,
    )
    with staged_at(path) as staged:
        _write(backbone, metadata, staged, progress)
        verify_staged(staged, path, metadata, verify, progress)
    progress(f"wrote {path}")
    return path


class Exported(nn.Module):
    """Module that the export converts to ONNX. The output is the logits in float32.

    If ``metadata.in_graph`` is True, the module first normalizes uint8 images. The backbone then computes the logits
    in the given ``dtype``, such as float16. :func:`~topk_export.head.add_head` adds all other outputs.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, backbone: nn.Module, metadata: Metadata, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_graph, self.dtype = metadata.in_graph, dtype
        self.backbone = backbone.to(dtype)
        if self.in_graph:
            recipe = metadata.images
            mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (recipe.mean, recipe.std))
            self.register_buffer("shift", 255 * mean, persistent=False)
            self.register_buffer("scale", 255 * std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).float()

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits [batch, n] of the images ``x``, in the dtype of the model's weights."""
        if self.in_graph:
            x = (x.permute(0, 3, 1, 2).float() - self.shift) / self.scale
        return self.backbone(x.to(self.dtype))


def _check_options(task: str | None, dtype: str, opset: int) -> None:
    if opset not in OPSETS:
        raise ValueError(f"opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def _prepare(source: Source) -> tuple[nn.Module, int]:
    backbone = copy.deepcopy(source.model).cpu().float().eval().requires_grad_(False)
    for module in backbone.modules():
        if getattr(module, "fused_attn", False) is True:  # torch.onnx converts fused attention of 4-axis tensors only
            module.fused_attn = False  # type: ignore[assignment]
    _check_has_classifier(source)
    size = tuple(source.preprocess.input_size)
    try:
        with torch.no_grad():
            out = backbone(torch.zeros(2, *size))
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{source.name} does not run on an input of size {list(size)}: {first_line(error)}; give the size "
            "(data_config={'input_size': ...}, on the command line --input-size C H W)"
        ) from error
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[1] < 2 or not out.is_floating_point():
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ExportError(f"{source.name} is not a classifier: expected logits [batch, classes], got {got}")
    return backbone, out.shape[1]


def _check_has_classifier(source: Source) -> None:
    model = source.model
    if hasattr(model, "get_classifier") or type(model).__module__.startswith("torchvision."):
        try:
            find_classifier(model)
        except ValueError as error:
            raise ExportError(f"{source.name} has no classifier (was it built with num_classes=0?): {error}") from error


def _write(backbone: nn.Module, metadata: Metadata, file: Path, progress: Progress) -> None:
    assert metadata.preprocess is not None
    inputs = image_batch(metadata.preprocess, in_graph=metadata.in_graph, batch=SAMPLES)
    logits, error = _reference(backbone, metadata, torch.from_numpy(inputs))
    if is_distribution(logits):
        raise ExportError(f"the outputs of {metadata.backbone} are probabilities: {HOW_TO_EXPORT_SCORES}")
    progress("tracing and converting")
    module = Exported(backbone, metadata, DTYPES[metadata.dtype]).eval()
    model = _convert(module, inputs[:2], metadata.opset)
    end = find_logits(model.graph).end
    last = Graph(model.graph)
    if last.operator(last.back(LOGITS, frozenset({"Cast"}))) == "HardSigmoid":  # its input cannot be used as logits
        end = "hard sigmoid"
    if end:
        raise ExportError(f"{metadata.backbone} ends in a {end}: {HOW_TO_EXPORT_SCORES}")
    graph.strip(model)
    add_head(model, metadata)
    graph.set_metadata(model, metadata.to_props())
    graph.save(model, file)
    write_sample(beside(file, SAMPLE), {"input": inputs}, {LOGITS: logits}, error)
    beside(file, LABELS).write_text("\n".join(metadata.class_names) + "\n", encoding="utf-8")
    recipe = metadata.preprocess
    write_json({**asdict(recipe), "scale_size": recipe.scale_size, "in_graph": metadata.in_graph}, beside(file, RECIPE))


def _convert(module: nn.Module, inputs: np.ndarray, opset: int) -> Any:
    try:
        program = torch.onnx.export(
            module,
            (torch.from_numpy(inputs),),
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["input"],
            output_names=[LOGITS],
            verbose=False,
        )
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        reason = first_line(error)
        reason += "" if root is error else f": {type(root).__name__}: {first_line(root)}"
        raise ExportError(f"torch.onnx cannot convert the model: {reason}") from error
    assert program is not None
    return program.model_proto


def _reference(backbone: nn.Module, metadata: Metadata, x: Tensor) -> tuple[np.ndarray, float]:
    """Return PyTorch's float64 logits for the batch ``x``, and the error of PyTorch's float32 logits.

    :func:`largest_error` computes the error from the float32 and the float64 logits. If the model does not run in
    float64, return the float32 logits and the error 0.
    """
    with torch.no_grad():
        single = Exported(backbone, metadata, torch.float32).eval().scores(x).numpy()
        try:
            double = Exported(copy.deepcopy(backbone), metadata, torch.float64).eval().scores(x).numpy()
        except RuntimeError:  # for example, the model itself creates float32 tensors
            return single, 0.0
    return double, largest_error(single, double)
