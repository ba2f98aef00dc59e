"""Checks of an exported ONNX file. The checks do not need PyTorch.

The checks read the ONNX graph, run the model on batches of several sizes, and run the head on logits that are
numerically difficult. The head is the part of the model that computes all other outputs from the logits.

NumPy functions in float64 compute the marginals, probabilities and prediction sets that the checks expect. These
functions share no code with the graph. The functions start from the logits that onnxruntime computes, so errors in the
logits do not affect this comparison. If a sample with PyTorch's logits exists, a separate check compares the logits.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topk_export import graph
from topk_export.arrays import read_npz
from topk_export.errors import ModelFileError
from topk_export.runtime.inputs import as_arrays, inputs_for
from topk_export.runtime.metadata import ALLOWED, ALPHA, ALPHAS, LOGITS, SET_OUTPUTS, THRESHOLDS, Metadata
from topk_export.runtime.session import device_of, open_session, placement
from topk_export.runtime.weights import check_thresholds, check_weights
from topk_registry.conformal import Score, log_probabilities, probabilities
from topk_registry.files import write_text

SAMPLE = "sample.npz"
INPUT, OUTPUT = "input:", "output:"  # prefixes of the arrays in a sample
END_LIMIT = 2e-6  # absolute error of float32 probabilities that the original model computes from its logits
BATCHES = (1, 2, 5)
RUNS = "runs at batch"
RTOL = 1e-5  # relative tolerance of marginals, probabilities and logits
# Relative errors of values below SMALLEST are not checked. Runtimes may replace numbers below 2^-126 by 0. The graph
# computes a marginal from an exponential of the logit. The marginal is less than 1e3 times this exponential
SMALLEST = 1e-35
SAFETY = 4.0  # factor on tolerances that derive from rounding errors: four standard deviations
CERTAIN = float(np.finfo(np.float32).max)  # a threshold of this size admits every class


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str  # what was checked
    passed: bool
    measured: float | str | None = None  # the measured error, or another result
    tolerance: float | None = None  # largest error with which the check passes
    note: str = ""  # details, such as the reason of a failure


def verify_file(
    path: str | Path, *, device: str = "cpu", require_gpu: bool = False, sample: str | Path | None = None
) -> dict[str, Any]:
    """Check an exported ONNX file, and return a report.

    Args:
        path: the file ``NAME.onnx``.
        device: device that runs the model, as in :class:`~topk_export.Predictor`.
        require_gpu: raise :class:`~topk_export.DeviceError` if the model does not run on a GPU.
        sample: the file ``NAME.sample.npz`` of the export, which contains images and PyTorch's logits for these images.
            Default: the file of this name next to ``NAME.onnx``. If there is no such file, the logits are not compared
            with PyTorch's logits.

    Returns:
        A dictionary of JSON values. ``passed`` is True if all checks passed. ``checks`` is a list with the fields of
        one :class:`Check` per check. ``not_verified`` is a list of texts, which name the properties that no check
        covers. The other entries describe the device and the model.

    Raises:
        ModelFileError: the file cannot be loaded, or :func:`~topk_export.export_onnx` did not write the file.
    """
    model = graph.load(path)
    session = open_session(path, device=device, require_gpu=require_gpu, tf32=False)
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(path))
    file = beside(Path(path), SAMPLE) if sample is None else Path(sample)
    recorded = load_sample(file) if sample is not None or file.is_file() else None
    checks = [*_check_digests(path, metadata), *_check_graph(path, model, session, metadata)]
    runs = list(_check_runs(session, metadata, recorded, _count_layers(model)))
    checks += runs
    if all(check.passed for check in runs if check.name.startswith(RUNS)):  # else, outputs are missing or misshapen
        head = open_session(graph.head_model(model).SerializeToString(), device=device)
        checks += _check_head(head, metadata, model)
    on_cpu = device_of(session) == "cpu"
    missing = ["GPU: this run used the CPU" if on_cpu else "TF32, the default of CUDA: this run did not use TF32"]
    if recorded is None:
        original = "the outputs of the original file" if metadata.attached else "PyTorch's logits"
        missing.append(f"the logits against {original}: there is no {file.name} next to the model")
    missing.append("accuracy on images, and the preprocessing of images" if metadata.preprocess else "accuracy")
    if metadata.sets is not None:
        missing.append("the coverage of the prediction sets on new images")
    return {
        "passed": all(check.passed for check in checks),
        "device": device_of(session),
        "placement": placement(session),
        "k": metadata.k,
        "num_classes": metadata.num_classes,
        "temperature": metadata.temperature,
        "task": metadata.task,
        "dtype": metadata.dtype,
        "checks": [asdict(check) for check in checks],
        "not_verified": missing,
    }


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a report of :func:`verify_file`: one per check, then one per property that is not checked."""
    lines = []
    for check in report["checks"]:
        measured = "" if check["measured"] is None else f"  {_short(check['measured'])}"
        limit = "" if check["tolerance"] is None else f" (limit {_short(check['tolerance'])})"
        note = f"  {check['note']}" if check["note"] else ""
        lines.append(f"{'ok  ' if check['passed'] else 'FAIL'} {check['name']}{measured}{limit}{note}")
    return [*lines, *(f"not verified: {item}" for item in report["not_verified"])]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def beside(model: Path, kind: str) -> Path:
    """Return the path ``FOLDER/NAME.kind`` for the model ``FOLDER/NAME.onnx``."""
    return model.with_name(f"{model.stem}.{kind}")


def write_json(content: Mapping[str, Any], path: Path) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_sample(path: Path, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], error: float) -> None:
    """Write inputs of a model and the expected outputs to a file. ``error`` is the error of the expected outputs."""
    # a file .npz contains no Python objects, such as texts of any length
    arrays = {f"{INPUT}{name}": x.astype(str) if x.dtype == object else x for name, x in inputs.items()}
    arrays |= {f"{OUTPUT}{name}": values for name, values in outputs.items() if values.dtype.kind in "fiub"}
    arrays["error"] = np.asarray(error)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """Inputs of a model, and the outputs of the model from which the file was made."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    error: float = 0.0


def load_sample(path: Path) -> Sample:
    """Read a file of :func:`write_sample`. If the file is no such file, raise :class:`ModelFileError`."""
    try:
        data = read_npz(path)
        inputs, outputs = (
            {name.removeprefix(kind): values for name, values in data.items() if name.startswith(kind)}
            for kind in (INPUT, OUTPUT)
        )
        return Sample(inputs, outputs, float(data["error"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFileError(f"{path} is not a sample of an export: {error}") from error


# --- definitions in float64


def marginals(logits: np.ndarray, k: int, temperature: float = 1.0) -> np.ndarray:
    """Compute the top-k marginals: for each class, the probability that the class is in a random set of k classes.

    The probability of a set is proportional to the product of e_i = exp(logit_i / temperature) over the classes i in
    the set. Let sigma_k(e) be the sum of these products over all sets of k classes. The marginal of class i is

        pi_i = e_i sigma_{k-1}(e without e_i) / sigma_k(e)

    sigma_k(e) is the coefficient of X^k in the product of all factors 1 + e_i X. The function multiplies these factors.
    All terms are positive, so rounding errors stay small. To avoid overflow, the function first subtracts one number
    from all logits of a row, which does not change pi_i.

    Args:
        logits: float [batch, n] with n > k. The value -inf excludes a class.
        k: number of classes in the set.
        temperature: number by which the logits are divided. The function rounds the temperature to float32, because the
            ONNX graph contains the temperature as float32.

    Returns:
        float64 [batch, n]. If at most k logits of a row are finite, the classes with finite logits have the marginal 1.
        If a row contains NaN or plus infinity, all marginals of the row are NaN.
    """
    x = np.asarray(logits, np.float64) / np.float64(np.float32(temperature))
    finite = np.isfinite(x)
    out = np.where(finite, 1.0, 0.0)
    out[(np.isnan(x) | (x == np.inf)).any(-1)] = np.nan
    usual = (finite.sum(-1) > k) & ~np.isnan(out).any(-1)
    if usual.any():
        out[usual] = _many(x[usual], k)
    return out


def _many(x: np.ndarray, k: int) -> np.ndarray:
    batch, n = x.shape
    e = np.exp(np.minimum(x - _shift(x, k), 500.0))
    q, p = 1 / (1 + e), e / (1 + e)  # the factor 1 + e_i X, divided by 1 + e_i, is q_i + p_i X
    prefix = np.zeros((n + 1, batch, k + 1))
    prefix[0, :, 0] = 1
    for i in range(n):
        prefix[i + 1] = _times(prefix[i], q[:, i], p[:, i])
    suffix, out = prefix[0].copy(), np.empty_like(x)
    for i in reversed(range(n)):
        inside = p[:, i] * (prefix[i, :, :k] * suffix[:, k - 1 :: -1]).sum(-1)
        outside = q[:, i] * (prefix[i] * suffix[:, ::-1]).sum(-1)
        out[:, i] = inside / (inside + outside)
        suffix = _times(suffix, q[:, i], p[:, i])
    return out


def _times(c: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Multiply the polynomial with the coefficients in each row of ``c`` by q + p X, and drop the power X^(k + 1)."""
    product = c * q[:, None]
    product[:, 1:] += c[:, :-1] * p[:, None]
    return product


def _shift(x: np.ndarray, k: int) -> np.ndarray:
    """Return the number t [batch, 1] with sum_i sigmoid(x_i - t) = k - 1/2. ``_many`` subtracts t from x.

    Draw each class i independently with the probability sigmoid(x_i - t). The mean number of drawn classes is k - 1/2,
    so the probability that exactly k classes are drawn does not underflow. ``_many`` divides by this probability.
    """
    low = np.where(np.isfinite(x), x, np.inf).min(-1, keepdims=True) - 50.0
    high = x.max(-1, keepdims=True) + 50.0
    for _ in range(100):
        t = (low + high) / 2
        more = sigmoids(x - t).sum(-1, keepdims=True) > k - 0.5
        low, high = np.where(more, t, low), np.where(more, high, t)
    return low


def sigmoids(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return sigmoid(logits / temperature) in float64. The temperature is first rounded to float32, as in the graph."""
    x = np.asarray(logits, np.float64) / np.float64(np.float32(temperature))
    with np.errstate(over="ignore"):  # exp(-x) may be infinite: the result is then 0
        return 1 / (1 + np.exp(-x))


def expected_sets(
    logits: np.ndarray, sets: Mapping[str, Any], thresholds: np.ndarray, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute prediction sets by their definition, without the ONNX graph.

    A prediction set consists of the classes with nonconformity scores of at most a threshold, and of the class with the
    largest probability. The threshold depends on alpha, the probability with which a set may miss the true class.

    Args:
        logits: [batch, n].
        sets: entry ``sets`` of the metadata of a calibrated file.
        thresholds: thresholds for one value of alpha: [1] for all classes, or [n] for one threshold per class.
        allowed: bool [1 or batch, n], the classes that the set may contain. Default: all classes.

    Returns:
        Two bool arrays [batch, n]: whether the set contains the class, and whether the nonconformity score of the class
        is so close to the threshold that rounding may decide.
    """
    score = Score(sets["score"], **sets.get("options", {}))
    # the graph contains the temperature as float32
    log_p = log_probabilities(np.asarray(logits, np.float64), float(np.float32(sets.get("temperature", 1.0))))
    values = score(log_p)
    allowed = np.ones_like(log_p, bool) if allowed is None else np.broadcast_to(allowed, log_p.shape)
    best = np.where(allowed, log_p, -np.inf).argmax(-1)[:, None]
    np.put_along_axis(values, best, -np.inf, -1)  # the best allowed class is in every set
    limit = np.where(thresholds >= CERTAIN, np.inf, thresholds.astype(np.float64))
    with np.errstate(invalid="ignore"):
        return (values <= limit) & allowed, np.abs(values - limit) <= RTOL * np.maximum(1, np.abs(log_p))


# --- single checks


def _check_digests(path: str | Path, metadata: Metadata) -> Iterator[Check]:
    checks: list[tuple[str, Any, Any]] = [
        ("external weights belong to this model", check_weights, metadata.external_weights),
        ("thresholds are those of the calibration", check_thresholds, metadata.sets),
    ]
    for name, check, recorded in checks:
        if recorded is None:
            continue
        try:
            check(path, recorded)
            yield Check(name, True)
        except ModelFileError as error:
            yield Check(name, False, note=str(error))


def _check_graph(path: str | Path, model: Any, session: Any, metadata: Metadata) -> Iterator[Check]:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)  # onnx cannot check a ModelProto above 2 GiB
        yield Check("onnx.checker, full", True)
    except Exception as error:  # checker and shape inference raise different types
        yield Check("onnx.checker, full", False, note=str(error))
    foreign, bad = graph.domains(model), graph.forbidden(model.graph)
    if metadata.attached is None:
        yield Check("default operator domain only", not foreign, note=", ".join(foreign))
    yield Check("no Loop, Scan, If, Sigmoid, Einsum or MatMul in the head", not bad, note=", ".join(bad))
    if metadata.attached is None:
        yield Check("no stack traces or local paths in the graph", graph.traces(model) == 0)
    if metadata.batch is None:
        yield Check("the batch axis is symbolic", not isinstance(session.get_inputs()[0].shape[0], int))
    optional = {value.name for value in session.get_overridable_initializers()}
    wanted = {ALLOWED} | ({ALPHA} if metadata.sets is not None else set())
    yield Check("optional inputs", wanted <= optional, ", ".join(sorted(optional & {ALLOWED, ALPHA})))


def _check_runs(session: Any, metadata: Metadata, recorded: Sample | None, layers: int) -> Iterator[Check]:
    sample = recorded or Sample(inputs_for(session, metadata), {})
    outputs: dict[str, np.ndarray] = {}
    for batch in BATCHES if metadata.batch is None else (metadata.batch,):
        feed = {name: _rows(values, batch) for name, values in sample.inputs.items()}
        try:
            outputs = as_arrays(session, session.run(None, feed))
        except Exception as error:  # onnxruntime raises many types
            yield Check(f"{RUNS} {batch}", False, note=str(error))
            return
        shapes = {name: value.shape for name, value in outputs.items() if name in (*metadata.outputs, *SET_OUTPUTS)}
        lead = (max(batch, 1), *shapes.get(LOGITS, (0, 0))[1:-1])
        right = {name: _shape(name, lead, metadata) for name in metadata.outputs}
        missing = ", ".join(sorted(right.keys() - shapes.keys()))
        passed = {name: shapes.get(name) for name in right} == right
        yield Check(f"{RUNS} {batch}", passed, str(shapes), note=f"missing outputs: {missing}" if missing else "")
        if not passed:
            return
        for name, known in sample.outputs.items():
            if name not in outputs:
                yield Check(f"the output {name} of the original file", False, note="the output is missing")
            elif known.dtype.kind == "f":
                known = _rows(known, batch)
                yield _check_against_sample(name, outputs[name], known, sample.error, metadata, layers, batch)
    rows = outputs[LOGITS].reshape(-1, metadata.num_classes)
    flat = {name: value.reshape(len(rows), -1) for name, value in outputs.items() if name in metadata.outputs}
    yield from _check_outputs("model", flat, rows, metadata)
    if (attached := metadata.attached or {}).get("output"):
        yield _check_end(attached, outputs)


def _rows(values: np.ndarray, batch: int) -> np.ndarray:
    """Repeat or cut the rows of an array to ``batch`` rows. For the batch 0, the array has no batch axis."""
    return np.resize(values, (batch, *values.shape[1:])) if batch and values.ndim else values


def _shape(name: str, lead: tuple[int, ...], metadata: Metadata) -> tuple[int, ...]:
    last = {"indices": (metadata.k,), "set_size": ()}
    return *lead, *last.get(name, (metadata.num_classes,))


def _check_end(attached: Mapping[str, Any], outputs: Mapping[str, np.ndarray]) -> Check:
    """Compare probabilities, computed in float64 from the logits, with the probabilities of the original model.

    The original probabilities may be multiplied by a constant, such as 100.
    """
    logits = outputs[LOGITS].astype(np.float64)
    name = attached["output"]
    original = outputs.get(name)
    title = f"{attached.get('end') or 'exponential'} of the logits against the output {name}"
    if original is None:
        return Check(title, False, note="the output is missing")
    limit = max(END_LIMIT, float(np.finfo(original.dtype).eps))
    original = original.astype(np.float64).reshape(logits.shape)
    if attached.get("end") == "sigmoid":
        wanted = sigmoids(logits)
        original = original * (wanted.sum() / original.sum())
    else:
        wanted = probabilities(logits)
        original = original / original.sum(-1, keepdims=True)
    error = float(np.abs(wanted - original).max())
    return Check(title, error <= limit, error, limit, "absolute, up to a constant factor")


def _check_against_sample(
    output: str, got: np.ndarray, known: np.ndarray, known_error: float, metadata: Metadata, layers: int, batch: int
) -> Check:
    """Compare an output of the ONNX model (``got``) with the recorded output (``known``).

    For an fp32 file, the error is max abs(got - known) / max abs(known). The tolerance is the larger of ``RTOL`` and
    4 ``known_error``, where ``known_error`` is the error of PyTorch's float32 logits.

    For an fp16 file, the error is rms(got - known) / rms(known - mean of each row), where rms is the root mean square.
    The tolerance is 4 u sqrt(2 ``layers``), where u = 2^-11 is the relative error of one rounding. Each layer has two
    roundings (weights and activations), and the squares of independent errors add up.
    """
    if metadata.attached is not None:
        name, note = f"{output} against the original file, batch {batch}", "over the largest value"
    else:
        name, note = f"{output} against torch in float64, batch {batch}", "over the largest logit"
        note += f"; torch's float32: {known_error:.2g}"
    if got.shape != known.shape:
        return Check(name, False, note=f"shape {got.shape}, expected {known.shape}")
    if metadata.dtype == "fp32":
        error, limit = largest_error(got, known), max(RTOL, SAFETY * known_error)
        return Check(name, error <= limit, error, limit, note)
    spread = known - known.mean(-1, keepdims=True)
    error = float(np.sqrt(((got - known) ** 2).mean() / max((spread**2).mean(), 1e-30)))
    limit = SAFETY * 2.0**-11 * (2 * layers) ** 0.5
    return Check(name, error <= limit, error, limit, f"root mean square over spread, {layers} layers")


def largest_error(got: np.ndarray, known: np.ndarray) -> float:
    """Return the largest absolute error of ``got``, divided by the largest finite absolute value of ``known``."""
    with np.errstate(invalid="ignore"):
        difference = np.where(got == known, 0.0, np.abs(got - known))  # two equal infinities have no error
    return float(difference.max(initial=0.0) / np.abs(known[np.isfinite(known)]).max(initial=1e-30))


def is_distribution(values: np.ndarray) -> bool:
    """Return whether each row contains probabilities, up to one constant factor of all rows."""
    rows = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
    sums = rows.sum(-1)
    return bool((rows >= 0).all() and sums.min(initial=np.inf) > 0 and np.ptp(sums) <= 2e-3 * sums.max())


def _count_layers(model: Any) -> int:
    return max(1, sum(node.op_type in ("Conv", "MatMul", "Gemm") for node in model.graph.node))


def _check_head(session: Any, metadata: Metadata, model: Any) -> Iterator[Check]:
    names = [output.name for output in session.get_outputs()]
    optional = {value.name for value in session.get_overridable_initializers()}

    flat = len(session.get_inputs()[0].shape) == 2  # else, the logits have the axes [B, T, n]

    def run(logits: np.ndarray, **others: np.ndarray) -> dict[str, np.ndarray]:
        feed = {name: value if flat else value[:, None] for name, value in others.items() if name in optional}
        feed[LOGITS] = logits if flat else logits[:, None]
        outputs = session.run(names, feed)
        return {name: x if flat else x.reshape(len(logits), -1) for name, x in zip(names, outputs, strict=True)}

    rows = hard_rows(metadata.num_classes, metadata.k)
    for name, logits in rows.items():
        yield from _check_outputs(f"head, {name}", run(logits), logits, metadata)
    for name, mask in class_lists(metadata.num_classes, metadata.k).items():
        logits = np.resize(np.concatenate((rows["normal"], rows["ties"])), (len(mask), metadata.num_classes))
        outputs = run(logits, **{ALLOWED: mask})
        yield from _check_outputs(f"head, class list of {name}", outputs, logits, metadata, mask)
    if metadata.sets is not None:
        yield from _check_sets(run, metadata, model)


def hard_rows(n: int, k: int) -> dict[str, np.ndarray]:
    """Return logits that are numerically difficult, such as ties and large gaps.

    The keys of the dictionary describe the logits. Each value is float32 [rows, n].
    """
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((2, n)).astype(np.float32)
    few = sorted({m for m in (1, k - 1, k, k + 1, 2 * k + 1) if 0 < m < n})
    high = np.stack([np.arange(n) < m for m in few])
    gaps = np.where(high, 100.0, 0.0).astype(np.float32)
    return {
        "normal": normal,
        "ties": rng.integers(0, 3, (2, n)).astype(np.float32),
        "flat": np.zeros((1, n), np.float32),
        "flat at 1e8": np.full((1, n), 1e8, np.float32),
        "nearly flat": 1e-4 * normal,
        "gaps of 12": np.where(high, 12.0, 0.0).astype(np.float32),
        "gaps of 100": gaps,
        "gaps of 100 and noise": gaps + normal[:1],
        "gaps of 1e9": np.where(high, normal[:1], np.float32(-1e9)),
        "width of 1e4": 1e4 * normal,
        "shift of 1e3": 5 * normal + np.float32(1e3),
        "shift of -1e3": 5 * normal - np.float32(1e3),
        "far tail": np.linspace(40, -40, n, dtype=np.float32)[None],
        "-inf": np.where(high, normal[:1], np.float32(-np.inf)),
        "NaN": np.where(np.arange(n) == 1, np.float32(np.nan), normal),
    }


def class_lists(n: int, k: int) -> dict[str, np.ndarray]:
    """Return lists of allowed classes, for checks of the input ``allowed``.

    The keys of the dictionary describe the lists. Each value is bool, and True allows a class. The shape is [1, n] for
    one list for all rows, or [rows, n] for one list per row.
    """
    random = np.random.default_rng(1).random((4, n)) < 0.5
    random[:, 0] = True
    return {
        "one class": np.arange(n)[None] == n - 1,
        "k classes": np.arange(n)[None] < k,
        "k + 1 classes": np.arange(n)[None] < k + 1,
        "half of the classes": random[:1],
        "other classes per row": random,
    }


def _check_outputs(
    name: str, outputs: Mapping[str, np.ndarray], logits: np.ndarray, metadata: Metadata, mask: np.ndarray | None = None
) -> Iterator[Check]:
    scores = logits if mask is None else np.where(mask, logits, -np.inf)
    k = metadata.k
    if mask is not None:
        per_class = [outputs[key] for key in ("marginals", "probabilities") if key in outputs]
        zero = all((values[~np.broadcast_to(mask, values.shape)] == 0).all() for values in per_class)
        yield Check(f"excluded classes are exactly 0 ({name})", zero)
    if metadata.multilabel:
        wanted = sigmoids(scores, metadata.temperature)
        yield _compare("probabilities", name, outputs["probabilities"], wanted)
        return
    usual = ~(np.isnan(scores) | (scores == np.inf)).any(-1)
    yield _compare("probabilities", name, outputs["probabilities"], probabilities(scores.astype(np.float64)))
    if "marginals" in outputs:
        yield _compare("marginals", name, outputs["marginals"], marginals(scores, k, metadata.temperature))
        sums = outputs["marginals"][usual].astype(np.float64).sum(-1)
        expected = np.minimum(k, np.isfinite(scores[usual]).sum(-1))
        error = float(np.abs(sums / expected - 1).max(initial=0.0))
        yield Check(f"sum of marginals ({name})", error <= RTOL, error, RTOL, "relative")
    rows = zip(scores[usual], outputs["indices"][usual], strict=True)
    right = all(_right_indices(row, indices, k) for row, indices in rows)
    yield Check(f"top-k classes ({name})", right)


def _right_indices(scores: np.ndarray, indices: np.ndarray, k: int) -> bool:
    count = min(k, int(np.isfinite(scores).sum()))  # classes with a score of -inf are excluded; -1 stands for them
    named, rest = indices[:count], indices[count:]
    largest = -np.sort(-scores)[:count]
    inside = (named >= 0) & (named < len(scores))
    return bool(
        inside.all() and len(set(named.tolist())) == count and (scores[named] == largest).all() and (rest == -1).all()
    )


def _compare(what: str, name: str, got: np.ndarray, wanted: np.ndarray) -> Check:
    """Check the relative errors of ``got`` where ``wanted`` is at least ``SMALLEST``.

    Where ``wanted`` is smaller, ``got`` must be between 0 and 2 * ``SMALLEST``. ``got`` must be NaN where, and only
    where, ``wanted`` is NaN.
    """
    got = got.astype(np.float64)
    invalid = np.isnan(wanted)
    small = ~invalid & (wanted < SMALLEST)
    error = np.where(small | invalid, 0.0, np.abs(got - wanted) / np.where(small | invalid, 1.0, wanted))
    wrong = (np.isnan(got) != invalid) | (small & ((got < 0) | (got > 2 * SMALLEST)))
    worst = float(np.where(wrong, np.inf, error).max(initial=0.0))
    return Check(f"{what} ({name})", worst <= RTOL, worst, RTOL, "relative, against float64")


def _check_sets(run: Any, metadata: Metadata, model: Any) -> Iterator[Check]:
    from onnx import numpy_helper

    sets = metadata.sets or {}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    if not {ALPHAS, THRESHOLDS} <= constants.keys():
        yield Check("thresholds of the prediction sets", False, note=f"the graph has no {ALPHAS} and {THRESHOLDS}")
        return
    alphas, table = (numpy_helper.to_array(constants[name]) for name in (ALPHAS, THRESHOLDS))
    yield Check("alphas are those of the calibration", np.array_equal(alphas, np.asarray(metadata.alphas, np.float32)))
    n, rng = metadata.num_classes, np.random.default_rng(2)
    logits = np.concatenate((3 * rng.standard_normal((6, n)), rng.integers(0, 3, (2, n)))).astype(np.float32)
    mask = np.random.default_rng(3).random((1, n)) < 0.5
    mask[0, 0] = True
    between = (alphas[:-1] + alphas[1:]) / 2
    wrong, sizes = [], True
    # alpha at each level, between levels and outside of the levels; each with and without a class list
    for alpha in np.concatenate((alphas, between, [alphas[0] / 2, (1 + alphas[-1]) / 2])).astype(np.float32):
        level = int((alphas <= alpha).sum()) - 1
        inside = level >= 0 and alpha <= alphas[-1]
        for classes in (np.ones((1, n), bool), mask):
            wanted, near = np.broadcast_to(classes, logits.shape), np.zeros((), bool)
            if inside:
                wanted, near = expected_sets(logits, sets, table[level], classes)
            outputs = run(logits, **{ALPHA: np.asarray([alpha]), ALLOWED: classes})
            if ((wanted != outputs["set"]) & ~near).any():
                wrong.append(f"{alpha:g}")
            sizes &= bool((outputs["set"].sum(-1) == outputs["set_size"]).all())
    yield Check("prediction sets", not wrong, note=f"wrong at alpha {', '.join(dict.fromkeys(wrong))}" if wrong else "")
    yield Check("set_size counts the set", sizes)
    default = numpy_helper.to_array(constants[ALPHA]) if ALPHA in constants else np.zeros(0)
    right = default.tolist() == [float(np.float32(sets["alpha"]))]
    yield Check("the default alpha is that of the calibration", right, note="" if right else f"it is {default}")
