"""What is checked of every exported file, and again by ``topk-registry verify`` on any machine (no torch needed).

The marginals are held against the float64 definition on onnxruntime's *own* logits, so the head's error is not mixed
with the backbone's. The head is also run alone, on rows that a backbone rarely gives: ties, gaps, shifts, flat rows.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from topk_export import graph, reference
from topk_export.errors import ModelFileError
from topk_export.metadata import Metadata
from topk_export.runtime import device_of, open_session, placement

BATCHES = (1, 2, 5)
MARGINALS_RTOL = 1e-5
LOGITS_RTOL = 1e-5
# odds below 2^-126 are denormal numbers, which CPUs and GPUs may flush to 0; a marginal is less than 1e3 times its odds
SMALLEST = 1e-35
MARGIN = 4.0  # of the derived tolerances of reduced precision: four standard deviations


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; ``passed`` is None where it could not be."""

    name: str
    passed: bool | None
    measured: float | str | None = None
    tolerance: float | str | None = None
    note: str = ""


def verify(
    path: str | Path,
    *,
    device: str = "cpu",
    require_gpu: bool = False,
    threads: int | None = None,
    sample: str | Path | None = None,
) -> dict[str, Any]:
    """Check an exported file; the returned report has ``passed``, ``checks`` and ``not_verified``.

    Args:
        path: ``model.onnx``.
        device: where to run it.
        require_gpu: refuse to run on the CPU.
        threads: CPU threads of one run.
        sample: ``sample_io.npz`` of the export; default: the one beside the model, if there.
    """
    model = load_proto(path)
    shown = path if model is None else _with_logits(model)
    session = open_session(shown, device=device, require_gpu=require_gpu, threads=threads)
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(path))
    found = Path(sample) if sample is not None else Path(path).with_name("sample_io.npz")
    recorded = _load_sample(found, required=sample is not None)
    checks: list[Check] = []
    if model is not None:
        checks += _check_graph(model, metadata, session)
    checks += _check_runs(session, metadata, recorded, layers=_layers(model))
    if model is not None and "marginals" in {output.name for output in model.graph.output}:
        checks += _check_head(model, metadata, device)
    return _report(checks, metadata, session, model is not None)


def report_lines(report: dict) -> list[str]:
    """A report as lines of text."""
    marks = {True: "ok  ", False: "FAIL", None: "skip"}
    lines = []
    for check in report["checks"]:
        figure = "" if check["measured"] is None else f"  {_short(check['measured'])}"
        limit = "" if check["tolerance"] is None else f" (limit {_short(check['tolerance'])})"
        note = f"  {check['note']}" if check["note"] else ""
        lines.append(f"{marks[check['passed']]} {check['name']}{figure}{limit}{note}")
    return [*lines, *(f"not verified: {item}" for item in report["not_verified"])]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _check_graph(model: Any, metadata: Metadata, session: Any) -> list[Check]:
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
        valid = Check("onnx.checker, full", True)
    except Exception as error:  # checker and shape inference raise different types
        valid = Check("onnx.checker, full", False, note=str(error))
    foreign, bad = graph.domains(model), graph.forbidden(model.graph)
    batch = session.get_inputs()[0].shape[0]
    return [
        valid,
        Check("default operator domain only", not foreign, note=", ".join(foreign)),
        Check("no Loop, Scan, If, Sigmoid, Einsum or MatMul in the head", not bad, note=", ".join(bad)),
        Check("no stack traces or local paths in the graph", graph.traces(model) == 0, graph.traces(model)),
        Check("batch axis", isinstance(batch, str) or batch >= 1, str(batch), note=_batch_note(batch)),
        Check("nodes in the head", True, len(graph.head_nodes(model.graph))),
    ]


def _batch_note(batch: Any) -> str:
    return "symbolic" if isinstance(batch, str) else "fixed at export"


def _check_runs(session: Any, metadata: Metadata, recorded: dict | None, *, layers: int) -> list[Check]:
    names = [output.name for output in session.get_outputs()]
    inputs = sample_input(metadata) if recorded is None else recorded["input"]
    fixed = session.get_inputs()[0].shape[0]
    batches = (fixed,) if isinstance(fixed, int) else BATCHES
    checks, last = [], {}
    for batch in batches:
        feed = np.resize(inputs, (batch, *inputs.shape[1:])) if batch > len(inputs) else inputs[:batch]
        last = dict(zip(names, session.run(names, {session.get_inputs()[0].name: feed}), strict=True))
        right = all(value.shape == _shape(name, batch, metadata) for name, value in last.items())
        checks.append(Check(f"runs at batch {batch}", right, str({n: v.shape for n, v in last.items()})))
        if "logits" in last and recorded is not None:
            wanted = np.resize(recorded["torch_logits"], (batch, metadata.num_classes))
            checks.append(_check_logits(last["logits"], wanted, metadata, layers, batch))
    if "logits" in last and "marginals" in last:
        checks += _check_marginals("model", last["logits"], last["marginals"], metadata)
    if "logits" in last and "indices" in last:
        checks.append(_check_indices("model", last["logits"], last["indices"], metadata.k))
    return checks


def _shape(name: str, batch: int, metadata: Metadata) -> tuple[int, int]:
    return batch, metadata.k if name == "indices" else metadata.num_classes


def _check_logits(got: np.ndarray, wanted: np.ndarray, metadata: Metadata, layers: int, batch: int) -> Check:
    """fp32: the largest error over the largest logit. Reduced precision: root mean squares about the row's mean."""
    name = f"logits against torch in fp32, batch {batch}"
    if metadata.dtype == "fp32":
        error = float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))
        return Check(name, error <= LOGITS_RTOL, error, LOGITS_RTOL, "largest error over largest logit")
    spread = wanted - wanted.mean(-1, keepdims=True)
    error = float(np.sqrt(((got - wanted) ** 2).mean() / max((spread**2).mean(), 1e-30)))
    limit, how = reduced_tolerance(metadata.dtype, layers)
    agree = float((got.argmax(-1) == wanted.argmax(-1)).mean())
    return Check(name, error <= limit, error, limit, f"{how}; the same best class on {agree:.0%} of rows")


def reduced_tolerance(dtype: str, layers: int) -> tuple[float, str]:
    """What rounding may do to the logits, relative to their spread: independent errors of L layers add in squares.

    fp16 rounds weights and activations to u = 2^-11 relative. int8 has 255 steps over a range of about 8 standard
    deviations, so each rounding has standard deviation 8 / (255 sqrt(12)) = 0.9 %. Either strikes twice a layer, once
    in the weights and once in the activations.
    """
    unit = {"fp16-backbone": 2.0**-11, "int8-dynamic": 8 / (255 * 12**0.5)}[dtype]
    limit = MARGIN * unit * (2 * max(layers, 1)) ** 0.5
    return limit, f"root mean square over spread, {MARGIN:g} x {unit:.2g} x sqrt(2 x {layers} layers)"


def _check_head(model: Any, metadata: Metadata, device: str) -> list[Check]:
    session = open_session(graph.head_model(model).SerializeToString(), device=device)
    names = [output.name for output in session.get_outputs()]
    checks = []
    for name, logits in hard_rows(metadata.num_classes, metadata.k).items():
        outputs = dict(zip(names, _run_rows(session, names, logits), strict=True))
        checks += _check_marginals(f"head alone, {name}", logits, outputs["marginals"], metadata)
        if "indices" in outputs:
            checks.append(_check_indices(f"head alone, {name}", logits, outputs["indices"], metadata.k))
    return checks


def _run_rows(session: Any, names: list[str], logits: np.ndarray) -> list[np.ndarray]:
    """The head's outputs, through runs of the batch size that the graph fixes, if it does."""
    fixed = session.get_outputs()[0].shape[0]
    size = fixed if isinstance(fixed, int) else len(logits)
    padded = np.concatenate((logits, np.zeros((-len(logits) % size, logits.shape[1]), np.float32)))
    runs = [session.run(names, {graph.LOGITS: padded[i : i + size]}) for i in range(0, len(padded), size)]
    return [np.concatenate(parts)[: len(logits)] for parts in zip(*runs, strict=True)]


def hard_rows(n: int, k: int) -> dict[str, np.ndarray]:
    """Rows on which a careless head fails, by name; each [rows, n] in float32."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((2, n)).astype(np.float32)
    few = {m for m in (1, k - 1, k, k + 1, 2 * k + 1) if 0 < m < n}
    gaps = np.stack([np.where(np.arange(n) < m, 100.0, 0.0) for m in sorted(few)]).astype(np.float32)
    return {
        "normal": normal,
        "ties": rng.integers(0, 3, (2, n)).astype(np.float32),
        "flat": np.zeros((1, n), np.float32),
        "nearly flat": 1e-4 * normal,
        "gaps of 100": gaps,
        "gaps of 100 and noise": gaps + normal[:1],
        "shift of 1e3": 5 * normal + np.float32(1e3),
        "shift of -1e3": 5 * normal - np.float32(1e3),
        "far tail": np.linspace(40, -40, n, dtype=np.float32)[None],
    }


def _check_marginals(name: str, logits: np.ndarray, got: np.ndarray, metadata: Metadata) -> list[Check]:
    wanted = reference.marginals(logits, metadata.k, metadata.temperature)
    error = float(marginal_error(got, wanted))
    off = float(np.abs(got.astype(np.float64).sum(-1) - metadata.k).max() / metadata.k)
    return [
        Check(f"marginals ({name})", error <= MARGINALS_RTOL, error, MARGINALS_RTOL, "relative, against float64"),
        Check(f"sum of marginals is k ({name})", off <= MARGINALS_RTOL, off, MARGINALS_RTOL, "relative"),
    ]


def marginal_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative error of the marginals above SMALLEST; NaN, and a smaller one that comes out large, is inf."""
    got = got.astype(np.float64)
    small = wanted < SMALLEST
    error = np.where(small, 0.0, np.abs(got - wanted) / np.where(small, 1.0, wanted))
    wrong = np.isnan(got) | (small & ((got < 0) | (got > 2 * SMALLEST)))
    return float(np.where(wrong, np.inf, error).max(initial=0.0))


def _check_indices(name: str, logits: np.ndarray, indices: np.ndarray, k: int) -> Check:
    """As sets, and up to ties: k different classes, none below the k-th largest score."""
    lowest = -np.sort(-logits, axis=-1)[:, k - 1]
    different = all(len(set(row.tolist())) == k for row in indices)
    right = different and bool((np.take_along_axis(logits, indices, -1) >= lowest[:, None]).all())
    return Check(f"top-k classes ({name})", right)


def sample_input(metadata: Metadata, batch: int = max(BATCHES)) -> np.ndarray:
    """A batch of smooth random images with noise, as the model takes them."""
    c, h, w = metadata.preprocess.input_size
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (batch, 4, 4, c)).repeat(-(-h // 4), 1).repeat(-(-w // 4), 2)[:, :h, :w]
    pixels = np.clip(coarse + rng.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)
    return pixels if metadata.in_graph else metadata.preprocess.normalise(pixels)


def _layers(model: Any) -> int:
    if model is None:
        return 1
    kinds = ("Conv", "MatMul", "Gemm", "ConvInteger", "MatMulInteger")
    return sum(node.op_type in kinds for node in model.graph.node)


def load_proto(path: str | Path) -> Any:
    try:
        import onnx
    except ImportError:
        return None
    try:
        return onnx.load(str(path))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} does not exist") from error
    except Exception as error:  # protobuf's errors share no base class with onnx's
        raise ModelFileError(f"{path} is not an ONNX model: {error}") from error


def _with_logits(model: Any) -> bytes:
    """The model with its logits among its outputs, whatever the export kept."""
    import onnx

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    graph.expose(shown, graph.LOGITS)
    return shown.SerializeToString()


def _load_sample(path: Path, *, required: bool) -> dict | None:
    if not required and not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in ("input", "torch_logits")}
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"{path} is not a sample of an export: {error}") from error


def _report(checks: list[Check], metadata: Metadata, session: Any, has_onnx: bool) -> dict:
    not_verified = [] if device_of(session) != "cpu" else ["any GPU provider: this was run on the CPU"]
    if not has_onnx:
        not_verified.append("the graph and the head alone: the onnx package is not installed")
    if not any(check.name.startswith("logits against") for check in checks):
        not_verified.append("the logits against torch: no sample_io.npz beside the model")
    return {
        "passed": all(check.passed is not False for check in checks),
        "device": device_of(session),
        "placement": placement(session),
        "k": metadata.k,
        "num_classes": metadata.num_classes,
        "temperature": metadata.temperature,
        "dtype": metadata.dtype,
        "versions": versions(),
        "checks": [asdict(check) for check in checks],
        "not_verified": not_verified,
    }


def versions() -> dict[str, str]:
    """The versions of what takes part, where installed."""
    found = {}
    for name in ("topk-registry", "torch", "timm", "torchvision", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_report(report: dict, path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Progress = Callable[[str], None]
