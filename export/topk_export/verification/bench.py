"""Timing of exported models: the whole model and its head alone, in turns, so that noise affects both alike."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topk_export.errors import ExportError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.session import PROVIDERS, BoundRunner, device_of, import_onnxruntime, nvidia_gpus, open_session
from topk_export.verification import graph
from topk_export.verification.verify import load_proto, sample_input

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """One row: medians over ``runs`` runs; ``head_ms`` is None without the onnx package or without a head."""

    device: str
    batch: int
    runs: int
    median_ms: float
    p95_ms: float
    head_ms: float | None


def devices() -> list[str]:
    """Return the devices to time: the CPU, and CUDA if there are a GPU and its provider."""
    cuda = nvidia_gpus() > 0 and PROVIDERS["cuda"] in import_onnxruntime().get_available_providers()
    return ["cpu", "cuda"] if cuda else ["cpu"]


def measure(
    path: str | Path,
    *,
    device: str = "cpu",
    batch: int = 1,
    threads: int | None = None,
    seconds: float = 3.0,
    repeats: int = 200,
    tf32: bool | None = None,
) -> Timing | None:
    """Time runs of one batch size through buffers on the device; None if the model has another, fixed one."""
    session = open_session(path, device=device, require_gpu=device != "cpu", threads=threads, tf32=tf32)
    metadata = Metadata.from_props(session.get_modelmeta().custom_metadata_map, str(path))
    fixed = session.get_inputs()[0].shape[0]
    if isinstance(fixed, int) and fixed != batch:
        return None
    x = sample_input(metadata, batch)
    whole = _timer(session, x)
    head = _head(path, metadata, batch, device=device, threads=threads, tf32=tf32)
    totals, heads = [], []
    end = time.perf_counter() + seconds
    while len(totals) < repeats and (time.perf_counter() < end or not totals):
        totals.append(whole())
        if head is not None:
            heads.append(head())
    return Timing(
        device=device_of(session),
        batch=batch,
        runs=len(totals),
        median_ms=float(np.median(totals)),
        p95_ms=float(np.quantile(totals, 0.95)),
        head_ms=float(np.median(heads)) if heads else None,
    )


def _head(path: str | Path, metadata: Metadata, batch: int, **options: Any) -> Any:
    model = load_proto(path)
    if model is None:
        return None
    try:
        alone = graph.head_model(model)
    except ExportError:  # logits alone were exported
        return None
    logits = np.random.default_rng(0).standard_normal((batch, metadata.num_classes)).astype(np.float32)
    return _timer(open_session(alone.SerializeToString(), **options), logits)


def _timer(session: Any, x: np.ndarray) -> Any:
    run = BoundRunner(session, x.shape)
    for _ in range(WARM_UP):
        run(x)

    def timed() -> float:
        start = time.perf_counter()
        run(x)
        return 1e3 * (time.perf_counter() - start)

    return timed
