"""Checks of every exported file, repeated by ``topk-registry verify`` on any machine (no torch needed).

The marginals are compared with the float64 definition on onnxruntime's *own* logits, so the head's error is not mixed
with the backbone's. The head is also run alone, on rows that a backbone rarely gives: ties, gaps, shifts, flat rows.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import UNKNOWN
from topk_export.runtime.session import device_of, open_session, placement
from topk_export.verification import graph, storage
from topk_export.verification.checks import (
    BATCHES,
    Check,
    Known,
    check_graph,
    check_head,
    check_runs,
    check_weights,
    count_layers,
)

LABELS, RECIPE, SAMPLE, REPORT = "labels.txt", "preprocess.json", "sample.npz", "report.json"


def beside(model: Path, kind: str) -> Path:
    """Return the path of a file that belongs to a model, under its name: several models share a folder."""
    return model.with_name(f"{model.stem}.{kind}")


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
        sample: the export's ``NAME.sample.npz``; default: the one beside ``NAME.onnx``, if there.
    """
    model = load_proto(path)
    shown = path if model is None else _with_logits(model)
    session = open_session(
        shown, device=device, require_gpu=require_gpu, threads=threads, weights=Path(path).absolute().parent
    )
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(path))
    sample_file = Path(sample) if sample is not None else beside(Path(path), SAMPLE)
    recorded = _load_sample(sample_file, required=sample is not None)
    checks: list[Check] = []
    checks += check_weights(path, metadata)
    if model is not None:
        checks += check_graph(path, model, session)
    inputs = sample_input(metadata) if recorded is None else recorded["input"]
    known = None if recorded is None else Known(recorded["torch_logits"], float(recorded["torch_error"]))
    checks += check_runs(session, metadata, inputs, known, layers=count_layers(model))
    if model is not None and metadata.needed[1] in {output.name for output in model.graph.output}:
        checks += check_head(model, metadata, device)
    return _report(Path(path), checks, metadata, session, model is not None)


def report_lines(report: dict) -> list[str]:
    """Format a report as lines of text."""
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


def sample_input(metadata: Metadata, batch: int = max(BATCHES)) -> np.ndarray:
    """Make a batch of smooth random images with noise, in the model's input format."""
    c, h, w = metadata.preprocess.input_size
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (batch, 4, 4, c)).repeat(-(-h // 4), 1).repeat(-(-w // 4), 2)[:, :h, :w]
    pixels = np.clip(coarse + rng.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)
    if metadata.preprocess.color == UNKNOWN:
        return (pixels.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32)
    return pixels if metadata.in_graph else metadata.preprocess.normalise(pixels)


def load_proto(path: str | Path) -> Any:
    """Return a file's ModelProto, or None without the onnx package."""
    return storage.load(path) if find_spec("onnx") else None


def _with_logits(model: Any) -> bytes:
    """Serialise the model with its logits among its outputs, whatever outputs the export kept."""
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
            return {name: data[name] for name in ("input", "torch_logits", "torch_error")}
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"{path} is not a sample of an export: {error}") from error


def _report(path: Path, checks: list[Check], metadata: Metadata, session: Any, has_onnx: bool) -> dict:
    not_verified = [] if device_of(session) != "cpu" else ["any GPU provider: this was run on the CPU"]
    if not has_onnx:
        not_verified.append("the graph and the head alone: the onnx package is not installed")
    if not any(check.name.startswith("logits against") for check in checks):
        not_verified.append(f"the logits against torch: no {beside(path, SAMPLE).name} beside the model")
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
    """Return the versions of the packages that export and verification use, if installed."""
    installed = {}
    for name in ("topk-registry", "torch", "timm", "torchvision", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def write_report(report: dict, path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Progress = Callable[[str], None]
