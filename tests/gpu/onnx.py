"""An exported, calibrated file on the GPU against the CPU's numbers, and its speed with and without the head.

    python -m tests.gpu.onnx --device cuda --checkpoint RUN/model_best.pth.tar --json FILE

Numbers are compared on the network of a training run on the built-in images (untrained where there is no run), in full
single precision; times are of resnet50.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import timm

from tests.bench.report import dumps, environment
from topk_export import Predictor, export_onnx
from topk_export.calibration.data import open_dataset
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.runtime.session import device_of, open_session
from topk_export.samples import Samples
from topk_export.verification.bench import measure
from topk_registry.nn import convnet  # noqa: F401  registers the built-in network

ULPS = 64  # of single precision, relative to the largest logit: sums of a thousand products in another order


def calibrated(checkpoint: Path | None, folder: Path, images: int) -> Path:
    """The file of the run's network, or of an untrained one, with prediction sets."""
    model: Any = checkpoint if checkpoint and checkpoint.is_file() else timm.create_model("topk_convnet")
    file = export_onnx(model, folder / "trained.onnx", k=5, verify=False)
    samples = drawn(Predictor(file, device="cpu"), "validation", images)
    calibrate_file(file, folder / "sets.onnx", samples, Plan(score="lac"), device="cpu", force=True)  # may be untrained
    return folder / "sets.onnx"


def drawn(predictor: Predictor, split: str, images: int) -> Samples:
    """Images of the built-in data with labels."""
    classes = predictor.metadata.class_names
    return open_dataset("topk/hierarchy", classes, folder="", split=split, options={"size": images}, download=False)


def compared(file: Path, device: str, images: int) -> dict[str, Any]:
    """How far the outputs on a device are from those on the CPU; exactly equal where they are no real numbers."""
    predictor = Predictor(file, device="cpu")
    there = open_session(file, device=device, require_gpu=device != "cpu", tf32=False)
    samples = drawn(predictor, "test", images)
    x = predictor.preprocess(samples.images)
    wanted = predictor.run(x)
    names = list(predictor.output_names)
    found = dict(zip(names, there.run(names, {predictor.input_name: x}), strict=True))
    row: dict[str, Any] = {"images": images, "device": device_of(there)}
    for name, value in wanted.items():
        other = found[name]
        if value.dtype.kind == "f":
            row[name] = float(np.abs(value - other).max())
        else:
            row[name] = float(np.mean(value != other))  # the share that differs: scores may tie within rounding
    row["largest_logit"] = float(np.abs(wanted["logits"]).max())
    row["agrees"] = row["logits"] <= ULPS * float(np.finfo(np.float32).eps) * row["largest_logit"]
    return row


def timed(name: str, device: str, batches: Sequence[int], folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Medians of a file with logits, probabilities and classes, and of one with logits alone."""
    model = timm.create_model(name)
    rows = []
    for head in (True, False):
        outputs = ("logits", "marginals", "indices") if head else ("logits",)
        file = export_onnx(model, folder / f"head-{head}.onnx", k=5, verify=False, outputs=outputs)
        for batch in batches:
            found = measure(file, device=device, batch=batch, seconds=seconds)
            assert found is not None
            rows.append({"model": name, "head": head, **asdict(found), "images_s": 1e3 * batch / found.median_ms})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.onnx", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda", "tensorrt"))
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="of a training run on the built-in images")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    parser.add_argument("--quick", action="store_true", help="a small network and few images")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"environment": environment("cpu"), "results": (results := [])}
    images, name, batches = (100, "test_resnet", (1,)) if args.quick else (2000, "resnet50", (1, 32, 256))
    with tempfile.TemporaryDirectory() as folder:
        row = compared(calibrated(args.checkpoint, Path(folder), images), args.device, images)
        print(row, flush=True)
        results.append({"compared": row})
        for each in timed(name, args.device, batches, Path(folder), 0.2 if args.quick else 3.0):
            print(each, flush=True)
            results.append(each)
            if args.json:
                args.json.write_text(dumps(report))
    return 0 if row["agrees"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
