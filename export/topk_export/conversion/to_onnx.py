"""A trained classifier as one ONNX file: logits, exact top-k marginals and the top-k classes.

The file is built in a temporary folder beside its destination, verified there, and only then moved into place.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from topk_export.conversion.convert import convert, plain
from topk_export.conversion.head import run_and_find
from topk_export.conversion.pooling import unfold_padded_maxima
from topk_export.conversion.quantise import Images, comparison_line, quantise_dynamic, quantise_static
from topk_export.conversion.recipe import check_class_names
from topk_export.conversion.sigmoid import SigmoidHead
from topk_export.conversion.source import CLASSIFICATION, MULTILABEL, K, Source, load_source
from topk_export.errors import ExportError, ModelFileError, naming
from topk_export.runtime.metadata import PROBABILITY_SEMANTICS, SEMANTICS, Metadata
from topk_export.runtime.preprocess import Preprocess
from topk_export.runtime.weights import files_of, move_into_place
from topk_export.verification import graph, storage
from topk_export.verification.checks import largest_error
from topk_export.verification.verify import (
    LABELS,
    RECIPE,
    REPORT,
    SAMPLE,
    Progress,
    beside,
    report_lines,
    sample_input,
    verify,
    versions,
    write_report,
)
from topk_registry.nn.head import TopKHead

TASKS = {CLASSIFICATION: SEMANTICS, MULTILABEL: PROBABILITY_SEMANTICS}  # the outputs of each, and what they mean
DTYPES = ("fp32", "fp16-backbone", "int8-dynamic", "int8-static")
PREPROCESS = ("metadata", "in-graph")
OPSETS = range(18, 24)
PORTABLE_OPSET = 21  # from 22 on, onnxruntime's CUDA provider leaves MaxPool to the CPU


def export_onnx(
    model_or_checkpoint: nn.Module | str | Path,
    path: str | Path,
    *,
    task: str | None = None,
    k: int | None = None,
    temperature: float | None = None,
    opset: int = 18,
    batch: str | int = "dynamic",
    dtype: str = "fp32",
    outputs: Sequence[str] | None = None,
    preprocess: str = "metadata",
    class_names: Sequence[str] | None = None,
    verify: bool = True,
    model: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    pretrained: bool = False,
    use_ema: bool = True,
    data_config: Mapping[str, Any] | None = None,
    head: str | None = None,
    calibration_data: str | Path | None = None,
    calibration_images: int = 512,
    force: bool = False,
    external_data: bool = False,
    triton: str | Path | None = None,
    progress: Progress = lambda message: None,
) -> Path:
    """Export a classifier with its head, and return the path of the file.

    Args:
        model_or_checkpoint: a module, a timm or torchvision model name, a checkpoint, or a training run's folder.
        path: the file to write, or a folder for ``model.onnx``; its report, labels and sample go beside it.
        task: ``"classification"``, one label an image: the head gives marginals and the top k. ``"multilabel"``,
            several labels: it gives the probability of each class, a sigmoid. Default: the training run's, else
            ``"classification"``.
        k: size of the set, or how many classes a prediction of several labels shows; default: the training run's, else
            5, or one below the number of classes.
        temperature: divides the logits before the marginals or probabilities; default: k tau of the run's loss where
            there is one label an image, else 1.
        opset: ONNX operator set, 18 to 23.
        batch: ``"dynamic"`` or a fixed batch size.
        dtype: ``"fp32"``; ``"fp16-backbone"``: half precision up to the logits; ``"int8-dynamic"``: onnxruntime's
            dynamic quantisation of the backbone's matrix products; ``"int8-static"``: its convolutions and matrix
            products in 8 bits, with ranges from ``calibration_data``. The head is float32 always.
        outputs: which of logits, marginals and indices the file has as outputs; of logits and probabilities where it
            gives several labels. Default: all.
        preprocess: ``"metadata"``: the input is normalised float32 [B, C, H, W], and the file says how to make it;
            ``"in-graph"``: the input is uint8 [B, H, W, C] of the right size, and the graph normalises it.
        class_names: one name a class; default: those of the run or of the published weights, else numbers.
        verify: check the file, and refuse to write one that fails.
        model, model_kwargs, num_classes, pretrained, use_ema, data_config: see
            :func:`topk_export.conversion.source.load_source`.
        head: the name of the module that gives the scores, for a model whose last layer is not linear.
        calibration_data: a folder of images for ``"int8-static"``, at best one folder a class: then the report compares
            accuracies. Half of the images give the ranges, the other half measures agreement.
        calibration_images: the most images to take from there, evenly spaced.
        force: go on where their labels look wrong: where accuracy is near chance, or the images of folders are taken
            for classes that are not theirs.
        external_data: put the weights into a file beside the model, ``PATH.data``. A model above 2 GiB, which one ONNX
            file cannot hold, is always written so. Move the two files together, and keep their names.
        triton: also write a Triton Inference Server repository into this folder.
        progress: called with a line of text at each step.

    Example:
        >>> export_onnx("output/train/20260101-resnet50", "resnet50.onnx", k=5)  # doctest: +SKIP
        PosixPath('resnet50.onnx')
    """
    _check_options(opset, batch, dtype, preprocess, task)
    if (dtype == "int8-static") != (calibration_data is not None):
        raise ValueError("dtype int8-static needs calibration_data (--calibration-data), and no other dtype takes it")
    path = Path(path)
    path = path if path.suffix == ".onnx" else path / "model.onnx"
    progress("loading the model")
    source = load_source(
        model_or_checkpoint,
        model=model,
        model_kwargs=model_kwargs,
        num_classes=num_classes,
        pretrained=pretrained,
        use_ema=use_ema,
        data_config=data_config,
    )
    if preprocess == "in-graph":
        source.preprocess.check_known()
    task = source.task if task is None else task
    chosen = _check_outputs(outputs, task)
    backbone, n = _prepare(source, head)
    k = _check_k(next(size for size in (k, source.k, min(K, n - 1)) if size is not None), n)
    temperature = _check_temperature(source.temperature or 1.0 if temperature is None else temperature)
    metadata = Metadata(
        k=k,
        temperature=temperature,
        num_classes=n,
        class_names=check_class_names(class_names if class_names is not None else source.class_names, n),
        preprocess=source.preprocess,
        in_graph=preprocess == "in-graph",
        outputs=chosen,
        task=MULTILABEL if task == MULTILABEL else Metadata.task,
        backbone=source.name,
        opset=opset,
        dtype=dtype,
        torch=torch.__version__,
        timm=versions().get("timm", ""),
        checkpoint_sha256=source.sha256,
        licence=source.licence,
        loss=source.loss,
        versions=versions(),
    )
    images = None if calibration_data is None else Images(calibration_data, metadata, calibration_images)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
        staged = Path(folder) / path.name
        entries = _write(backbone, metadata, batch, staged, images, external_data, progress, force=force)
        _verify(staged, path, metadata, verify, entries, progress)
        if triton is not None:
            from topk_export.serve.triton import write_repository

            write_repository(staged, triton)
        own = files_of(staged)
        move_into_place(staged, path, [file for file in staged.parent.iterdir() if file not in own])
    progress(f"wrote {path}")
    return path


class Exported(nn.Module):
    """The module that is traced: normalisation if the graph does it, the backbone, the head in float32.

    Its outputs are those of the task, in the order of :data:`TASKS`.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, backbone: nn.Module, metadata: Metadata, dtype: torch.dtype) -> None:
        super().__init__()
        recipe = metadata.preprocess
        self.in_graph, self.dtype = metadata.in_graph, dtype
        self.backbone = backbone.to(dtype)
        temperature = metadata.temperature
        self.head = SigmoidHead(temperature) if metadata.several else TopKHead(metadata.k, temperature=temperature)
        if not self.in_graph:
            return
        low, high = recipe.range
        mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (recipe.mean, recipe.std))
        self.register_buffer("shift", (mean - low) * 255 / (high - low), persistent=False)
        self.register_buffer("scale", 255 * std / (high - low), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.head(self.scores(x).float()))

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits in the backbone's precision."""
        if self.in_graph:
            x = (x.permute(0, 3, 1, 2).float() - self.shift) / self.scale
        return self.backbone(x.to(self.dtype))


def _check_options(opset: int, batch: str | int, dtype: str, preprocess: str, task: str | None) -> None:
    if opset not in OPSETS:
        raise ValueError(f"opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset!r}")
    if opset > PORTABLE_OPSET:
        warnings.warn(f"opset {opset}: onnxruntime's CUDA provider leaves MaxPool to the CPU from 22 on", stacklevel=3)
    if batch != "dynamic" and (isinstance(batch, (str, bool)) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or a number of at least 1, got {batch!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if preprocess not in PREPROCESS:
        raise ValueError(f"preprocess must be one of {', '.join(PREPROCESS)}, got {preprocess!r}")
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def _check_outputs(outputs: Sequence[str] | None, task: str) -> dict[str, str]:
    """Return the wanted outputs of a task, and what each means."""
    if task not in TASKS:
        raise ExportError(
            f"the run trained for the task {task!r}, and {' and '.join(TASKS)} can be exported: say by task (on the "
            "command line --task) which it is"
        )
    known = TASKS[task]
    wanted = tuple(known) if outputs is None else outputs
    if isinstance(wanted, str) or not wanted or not set(wanted) <= set(known) or len(set(wanted)) < len(wanted):
        several = " of a model of several labels" if task == MULTILABEL else ""
        raise ValueError(f"outputs{several} must be some of {', '.join(known)}, each once, got {outputs!r}")
    return {name: known[name] for name in wanted}


def _prepare(source: Source, head: str | None = None) -> tuple[nn.Module, int]:
    """Copy the model, in evaluation mode on the CPU, and read its number of classes from a forward pass."""
    backbone = copy.deepcopy(source.model).cpu().float().eval().requires_grad_(False)
    for module in backbone.modules():
        # torch.onnx converts fused attention of four axes only
        if getattr(module, "fused_attn", False) is True:
            module.fused_attn = False  # type: ignore[assignment]
    size = tuple(source.preprocess.input_size)
    try:
        out, head_name = run_and_find(backbone, torch.zeros(2, *size), head)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{source.name} does not run on an input of size {list(size)}: {plain(error)}; give its own size "
            "(data_config={'input_size': ...}, on the command line --input-size C H W)"
        ) from error
    if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[1] < 2 or not out.is_floating_point():
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ExportError(f"{source.name} is no classifier: expected logits [batch, classes], it gives {got}")
    if head_name is None:
        raise ExportError(
            f"{source.name} has no head, and only classifiers can be exported: the last layer with weights that runs "
            "is not linear. Was it built with num_classes=0? Otherwise name the module of its scores (head=, on the "
            "command line --head)"
            if head is None
            else f"the head {head!r} is not used when {source.name} runs"
        )
    return backbone, out.shape[1]


def _check_k(k: int, n: int) -> int:
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer of at least 1 and below the number of classes, {n}; got {k!r}")
    return int(k)


def _check_temperature(temperature: float) -> float:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature!r}")
    return float(temperature)


def _write(
    backbone: nn.Module,
    metadata: Metadata,
    batch: str | int,
    file: Path,
    images: Images | None,
    external: bool,
    progress: Progress,
    *,
    force: bool,
) -> dict[str, Any]:
    """Write the model with its sample, labels and preprocessing; return further entries of its report."""
    inputs = sample_input(metadata, batch if isinstance(batch, int) else 5)
    if images is not None:  # random images may lie outside the calibrated ranges
        inputs = np.resize(images.measured, inputs.shape)
    logits, error = _reference(backbone, metadata, torch.from_numpy(inputs))
    progress("tracing and converting")
    dtype = torch.float16 if metadata.dtype == "fp16-backbone" else torch.float32
    names = tuple(PROBABILITY_SEMANTICS if metadata.several else SEMANTICS)
    model = convert(Exported(backbone, metadata, dtype).eval(), inputs, names, metadata.opset, batch)
    graph.strip(model)
    graph.plain_attributes(model)
    unfold_padded_maxima(model)
    entries: dict[str, Any] = {}
    if metadata.dtype == "int8-dynamic":
        progress("quantising")
        model = quantise_dynamic(model)
    elif images is not None:
        progress(f"quantising with ranges from {len(images.ranges)} images; {images.told}")
        model, entries["quantisation"] = quantise_static(model, images, metadata.k, force=force)
        progress(comparison_line(entries["quantisation"]))
    graph.keep_outputs(model, metadata.outputs)
    graph.set_metadata(model, metadata.to_props())
    storage.save(model, file, external=external)
    np.savez_compressed(beside(file, SAMPLE), input=inputs, torch_logits=logits, torch_error=error)
    beside(file, LABELS).write_text("\n".join(metadata.class_names) + "\n", encoding="utf-8")
    write_report(_preprocess_file(metadata), beside(file, RECIPE))
    return entries


def _reference(backbone: nn.Module, metadata: Metadata, x: Tensor) -> tuple[np.ndarray, float]:
    """Return torch's logits in float64, and the largest error of its float32 over the largest logit."""
    with torch.no_grad():
        single = Exported(backbone, metadata, torch.float32).eval().scores(x).numpy()
        try:
            double = Exported(copy.deepcopy(backbone), metadata, torch.float64).eval().scores(x).numpy()
        except RuntimeError:  # the model makes tensors of its own in float32
            return single, 0.0
    return double, largest_error(single, double)


def _preprocess_file(metadata: Metadata) -> dict[str, Any]:
    recipe: Preprocess = metadata.preprocess
    return {**asdict(recipe), "scale_size": recipe.scale_size, "in_graph": metadata.in_graph}


def _verify(
    file: Path, path: Path, metadata: Metadata, wanted: bool, entries: dict[str, Any], progress: Progress
) -> None:
    """Check the staged file, and raise if it fails; its report then stays beside the intended path."""
    report: dict[str, Any] = {"passed": None, "not_verified": ["everything: the export was asked not to verify"]}
    if wanted:
        progress("verifying with onnxruntime")
        try:
            report = verify(file)
        except ModelFileError as error:
            raise ExportError(f"the exported file does not load: {error}") from error
    report |= entries
    report["metadata"] = {
        key: value for key, value in vars(metadata).items() if key not in ("class_names", "preprocess")
    }
    write_report(report, beside(file, REPORT))
    failed = {"checks": [check for check in report.get("checks", ()) if check["passed"] is False], "not_verified": ()}
    if failed["checks"]:
        kept = beside(path, "refused.json")
        os.replace(beside(file, REPORT), kept)
        details = "\n  ".join(report_lines(failed))
        raise ExportError(f"the exported file failed its verification and was not written; see {kept}\n  {details}")
