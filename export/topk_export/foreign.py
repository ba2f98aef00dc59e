"""Attachment of the head to any ONNX classifier.

The head computes the softmax probabilities, the top-k marginals and the top-k classes from the logits of the model.
:func:`attach` finds the logits, adds the head, verifies the new file, and then writes it. All outputs of the original
model remain. The original file is not changed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from topk_export import graph
from topk_export.detect import FLOATS, LINEAR, SIGMOID, Found, find_logits, shape_text
from topk_export.errors import ExportError, ModelFileError, first_line
from topk_export.head import add_head
from topk_export.runtime.inputs import (
    SAMPLES,
    as_arrays,
    check_feed,
    image_batch,
    image_shape,
    random_inputs,
    takes_images,
)
from topk_export.runtime.metadata import (
    ALLOWED,
    ALPHA,
    ALPHAS,
    CLASSIFICATION,
    LOGITS,
    MULTILABEL,
    OUTPUTS,
    SET_OUTPUTS,
    THRESHOLDS,
    Metadata,
)
from topk_export.runtime.preprocess import COLORS, Preprocess
from topk_export.runtime.session import open_session
from topk_export.staging import Progress, described, staged_at, verify_staged
from topk_export.verify import SAMPLE, beside, is_distribution, largest_error, write_sample

OLDEST = 13  # the head needs this version of the default operator set
TARGET = 18  # older models are converted to this version
ORIGINAL = "original_"  # prefix of names that the head also uses
RESERVED = frozenset((LOGITS, ALLOWED, ALPHA, ALPHAS, THRESHOLDS, *OUTPUTS, *SET_OUTPUTS))
SMALLEST_PROBABILITY = 1.2e-38
PREPARE = "prepare/"  # of the names of the nodes between the original model and the head

# operators with the same meaning in all versions of the operator set, for the inputs that models of ai.onnx.ml use
UNCHANGED = frozenset(("Abs", "Add", "Cast", "Concat", "Div", "Exp", "Identity", "MatMul", "Mul", "Neg", "Relu", "Sub"))


def attach(
    model: str | Path,
    path: str | Path,
    *,
    k: int | None = None,
    temperature: float = 1.0,
    logits: str | None = None,
    from_probabilities: bool = False,
    task: str | None = None,
    class_names: Sequence[str] | None = None,
    preprocess: str | Path | None = None,
    marginals: bool = True,
    replace: bool = False,
    inputs: Mapping[str, np.ndarray] | None = None,
    verify: bool = True,
    progress: Progress = lambda message: None,
) -> Path:
    """Add the head to an ONNX classifier of any origin, verify the new file, and return its path.

    The new file also computes softmax probabilities, the top-k classes and the top-k marginals. The top-k marginal of
    a class is the probability that the class is in a random set of k classes. The probability of a set is proportional
    to exp(sum of the logits of its k classes / temperature).

    By default, the function searches for the logits at the end of the outputs: before a softmax or a sigmoid, also if
    these are spelled out in other operators. An output without such an end contains the logits itself.

    Args:
        model: the ONNX file. The operator set may be of any version that the onnx package can convert to version 18.
        path: the ONNX file to write.
        k: number of classes in the random set, from 1 to n - 1 for n classes. Default: min(5, n - 1).
        temperature: number by which the logits are divided for the marginals. For a multilabel file, number by which
            the logits are divided for the sigmoid.
        logits: name of the tensor with the logits: [B, n], [B, T, n], or [n] for a model without a batch axis.
        from_probabilities: the tensor contains probabilities. The logits are then log(max(p, 1.2e-38)).
        task: ``"classification"`` or ``"multilabel"``. Default: ``"multilabel"`` if the output ends in a sigmoid.
        class_names: one name per class. Default: the names in the file if there are any, else ``"0"``, ``"1"``, ...
        preprocess: JSON file with the preprocessing of images, as :func:`~topk_export.export_onnx` writes it. Default:
            the file takes arrays, and no images.
        marginals: whether the file computes the marginals.
        replace: replace the head and the prediction sets that the file already has.
        inputs: inputs for the verification, by name. Default: random values.
        verify: check the file before the file is moved to ``path``. If a check fails, no ONNX file is written.
        progress: function that is called with one line of text per step.

    Raises:
        ExportError: the logits cannot be found, or the file fails its verification (``VerificationError``).
        ModelFileError: ``model`` is not an ONNX model, or a file with external weights is missing or too short.
        ValueError: an argument is out of range.

    Example:
        >>> attach("magika.onnx", "magika-topk.onnx", k=3)  # doctest: +SKIP
        PosixPath('magika-topk.onnx')
    """
    source, path = Path(model), Path(path)
    if path.exists() and path.samefile(source):
        raise ValueError(f"the output {path} is the input: choose another file")
    recipe, in_graph = (None, False) if preprocess is None else read_preprocess(preprocess)
    proto = graph.load(source)
    graph.check_weights_stay(proto, source, path)
    if graph.has_head(proto):
        if not replace:
            raise ExportError(f"{source} already has a head: --replace replaces it")
        proto = graph.without_nodes(proto, (graph.PREFIX, PREPARE))
    proto = _current(proto, source, progress)
    shapes = _with_shapes(proto).graph
    found = find_logits(shapes, name=logits, ends=not from_probabilities)
    session = open_session(source, device="cpu")
    feed, known, error = _sample_of(session, inputs, recipe, in_graph, source)
    kept = {output.name for output in proto.graph.output}
    known = {name: values for name, values in known.items() if name in kept}
    graph.rename(proto.graph, {name: _new_name(name) for name in graph.all_names(proto.graph)})
    tensor, shape = _tensor_of(proto, shapes, found, known)
    n = shape[-1]
    origin = found.output or found.tensor
    is_known = bool(found.end) or from_probabilities
    if not is_known and origin in known and is_distribution(known[origin]):
        raise ExportError(
            f"the output {origin} {list(known[origin].shape)} contains probabilities, and the operation "
            "that computes them is unknown: name the tensor with the logits (--logits NAME), or use "
            "--from-probabilities"
        )
    metadata = described(
        n,
        k=k,
        temperature=temperature,
        task=task or (MULTILABEL if found.end == SIGMOID else CLASSIFICATION),
        class_names=_names_in(proto, n) if class_names is None else class_names,
        marginals=marginals,
        preprocess=recipe,
        in_graph=in_graph,
        backbone=source.stem,
        weights="model",
        opset=graph.opset_of(proto),
        batch=_fixed_batch(session, shape),
        attached={
            "file": source.name,
            "logits": found.tensor,
            "end": found.end,
            "output": _new_name(origin) if origin in known and is_known else "",
            "from_probabilities": from_probabilities,
        },
    )
    _append_logits(proto, tensor, shape, metadata.batch, from_probabilities)
    add_head(proto, metadata)
    progress(_summary(found, metadata))
    with staged_at(path) as staged:
        graph.set_metadata(proto, graph.metadata_of(proto) | metadata.to_props())
        graph.save(proto, staged, source=source.parent)
        write_sample(beside(staged, SAMPLE), _renamed(feed), _renamed(known), error)
        verify_staged(staged, path, metadata, verify, progress)
    progress(f"wrote {path}")
    return path


def read_preprocess(file: str | Path) -> tuple[Preprocess, bool]:
    """Read the preprocessing of images from a JSON file, and whether the graph normalizes the images.

    Raises:
        ModelFileError: the file is not JSON, or has other keys than the fields of :class:`Preprocess`.
    """
    names = [f.name for f in fields(Preprocess)]
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        in_graph = bool(content.pop("in_graph", False))
        content.setdefault("color", COLORS.get(content["input_size"][0], ""))  # timm has no such key
        content.pop("scale_size", None)
        return Preprocess(**content), in_graph
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelFileError(f"{file} is not a file of preprocessing with {', '.join(names)}: {error}") from error


def _current(model: Any, source: Path, progress: Progress) -> Any:
    """Return the model with a default operator set of at least version ``OLDEST``."""
    from onnx import helper, version_converter

    graph.merge_opsets(model)
    version = graph.opset_of(model)
    if version >= OLDEST:
        return model
    if not version:
        model.opset_import.append(helper.make_opsetid("", TARGET))
        return model
    if {entry.domain for entry in model.opset_import} <= {"", "ai.onnx"}:
        progress(f"converting operator set {version} to {TARGET}")
        try:
            return version_converter.convert_version(model, TARGET)
        except Exception as error:  # the converter raises RuntimeError and its own types
            raise ExportError(
                f"onnx cannot convert {source} from operator set {version} to {TARGET}: {first_line(error)}"
            ) from error
    if all(node.domain or node.op_type in UNCHANGED for node in model.graph.node):
        for entry in model.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = TARGET
        return model
    raise ExportError(
        f"{source} has operator set {version}, and onnx cannot convert models with operators of "
        f"{', '.join(graph.domains(model))}: write it with operator set {OLDEST} or above (skl2onnx: target_opset)"
    )


def _with_shapes(model: Any) -> Any:
    from onnx import shape_inference

    try:
        return shape_inference.infer_shapes(model)
    except Exception:  # broken shapes of inner tensors; the declared shapes of the outputs may be enough
        return model


def _sample_of(
    session: Any, given: Mapping[str, np.ndarray] | None, recipe: Preprocess | None, in_graph: bool, source: Path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Return inputs, the outputs of the original model, and the error of these outputs.

    The error is the largest difference between a row in a batch of one and the same row in the whole batch.
    """
    if given is not None:
        arrays = check_feed(session, given)
        fixed = {value.name: _rows_of(value) for value in session.get_inputs()}
        sizes = {name: fixed[name] or min(len(x), SAMPLES) for name, x in arrays.items()}
        choices = [{name: np.resize(x, (sizes[name], *x.shape[1:])) for name, x in arrays.items()}]
    elif recipe is not None:
        _check_images(session, recipe, in_graph)
        value = session.get_inputs()[0]
        choices = [{value.name: image_batch(recipe, in_graph=in_graph, batch=_rows_of(value) or SAMPLES)}]
    else:
        choices = [random_inputs(session, largest) for largest in (255, 1)]
    failure = None
    for inputs in choices:
        try:
            known = as_arrays(session, session.run(None, inputs))
            return inputs, known, _own_error(session, inputs, known)
        except Exception as error:  # onnxruntime raises many types
            failure = error
    assert failure is not None
    shapes = {name: list(values.shape) for name, values in choices[-1].items()}
    raise ExportError(
        f"{source} does not run on inputs of the shapes {shapes}: {first_line(failure)}; give inputs (--inputs FILE)"
    ) from failure


def _rows_of(value: Any) -> int | None:
    """Return the fixed length of the first axis of an input, or None."""
    first = value.shape[0] if value.shape else None
    return first if isinstance(first, int) and first > 0 else None


def _own_error(session: Any, inputs: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray]) -> float:
    if any(not value.shape or isinstance(value.shape[0], int) for value in session.get_inputs()):
        return 0.0  # the batch is fixed
    one = as_arrays(session, session.run(None, {name: values[:1] for name, values in inputs.items()}))
    floats = [name for name, values in known.items() if values.dtype.kind == "f"]
    return max((largest_error(one[name], known[name][:1]) for name in floats), default=0.0)


def _check_images(session: Any, recipe: Preprocess, in_graph: bool) -> None:
    inputs = session.get_inputs()
    kind = "tensor(uint8)" if in_graph else "tensor(float)"
    shape = inputs[0].shape[1:]
    if len(inputs) != 1 or inputs[0].type != kind or not takes_images(shape, recipe, in_graph=in_graph):
        found = ", ".join(f"{value.name}: {value.type} {value.shape}" for value in inputs)
        wanted = image_shape(recipe, in_graph=in_graph)
        raise ExportError(f"the preprocessing gives images of {kind} [batch, {wanted}], the model takes {found}")


def _new_name(name: str) -> str:
    return f"{ORIGINAL}{name}" if name in RESERVED or name.startswith((graph.PREFIX, PREPARE)) else name


def _renamed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {_new_name(name): values for name, values in arrays.items()}


def _tensor_of(model: Any, shapes: Any, found: Found, known: Mapping[str, np.ndarray]) -> tuple[str, list[int]]:
    """Return the new name of the tensor with the logits, and its shape. Lengths that are not fixed are 0.

    ``shapes`` is the graph of the original model after the shape inference of ONNX.
    """
    tensor = _new_name(found.tensor)
    if found.end == LINEAR:
        tensor = _linear_scores(model, tensor)
    values = known.get(found.output or found.tensor)
    if values is not None:
        shape = list(values.shape)
        if values.dtype.kind != "f":
            raise ExportError(f"the tensor {found.tensor} contains {values.dtype}, expected floating-point numbers")
    else:
        kind = next((value.type for value in shapes.value_info if value.name == found.tensor), None)
        if kind is None or not kind.tensor_type.HasField("shape"):
            raise ExportError(f"the shape of the tensor {found.tensor} is unknown: choose an output of the model")
        if kind.tensor_type.elem_type not in FLOATS:
            raise ExportError(f"the tensor {found.tensor} does not contain floating-point numbers")
        shape = [d.dim_value for d in kind.tensor_type.shape.dim]
        if not shape or not shape[-1]:
            raise ExportError(f"the tensor {found.tensor} {shape_text(kind)} has no fixed number of classes")
    while len(shape) > 2 and shape[-1] == 1:  # [B, n, 1, 1]
        shape.pop()
    if not 1 <= len(shape) <= 3 or shape[-1] < 2:
        raise ExportError(f"expected logits [n], [B, n] or [B, T, n] with n >= 2, {found.tensor} has the shape {shape}")
    return tensor, shape


def _linear_scores(model: Any, tensor: str) -> str:
    """Append a copy of the linear classifier that computes ``tensor``, without its softmax. Return its output."""
    node = next(node for node in model.graph.node if tensor in node.output)
    scores = f"{PREPARE}scores"
    copy = model.graph.node.add()
    copy.CopyFrom(node)
    copy.name = f"{PREPARE}LinearClassifier"
    copy.output[:] = [f"{PREPARE}label", scores]
    for attribute in copy.attribute:
        if attribute.name == "post_transform":
            attribute.s = b"NONE"
    return scores


def _fixed_batch(session: Any, shape: Sequence[int]) -> int | None:
    if len(shape) == 1:
        return 0
    return next(filter(None, map(_rows_of, session.get_inputs())), None)


def _append_logits(model: Any, tensor: str, shape: list[int], batch: int | None, from_probabilities: bool) -> None:
    """Append the output ``logits``: the tensor in float32, with the axes [B, n] or [B, T, n]."""
    from onnx import TensorProto

    add = graph.Nodes(model, PREPARE)
    x = add("Cast", tensor, to=TensorProto.FLOAT)
    if from_probabilities:
        x = add("Log", add("Max", x, SMALLEST_PROBABILITY))
    n = shape[-1]
    if len(shape) == 3:
        axes: list[Any] = [batch or "batch", "positions"]
        add("Identity", x, out=LOGITS)
    else:
        axes = [1 if batch == 0 else batch or "batch"]
        add("Reshape", x, [-1, n], out=LOGITS)
    add.output(LOGITS, TensorProto.FLOAT, [*axes, n])


def _names_in(model: Any, n: int) -> list[str] | None:
    """Return the class names that the file contains, or None."""
    if graph.has_head(model):
        names = Metadata.from_props(graph.metadata_of(model)).class_names
        return list(names) if len(names) == n else None
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name.startswith("classlabels_") and len(attribute.strings or attribute.ints) == n:
                return [s.decode() for s in attribute.strings] or [str(i) for i in attribute.ints]
    return None


def _summary(found: Found, metadata: Metadata) -> str:
    before = f", before the {found.end} of the output {found.output}" if found.end else ""
    if (metadata.attached or {}).get("from_probabilities"):
        before = ", as the logarithm of the probabilities"
    return f"logits: {found.tensor}{before}; {metadata.num_classes} classes, k = {metadata.k}, {metadata.task}"
