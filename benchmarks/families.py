"""Export and verify one model of each family of timm and torchvision, with random weights.

    python -m benchmarks.families --output docs/results/families.json
    python -m benchmarks.families --output docs/results/families.json --only timm/resnet    # repeats one family

A family is a module of ``timm.models`` or ``torchvision.models`` that contains models. The model is the one with the
fewest parameters among at most ten models of the family. Images have 224 x 224 pixels, unless the model needs another
size. The second run with the same arguments continues the first run. A family takes a minute or two on one core.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch
import torchvision

from topk_export import ExportError, export_onnx, load_source, verify_file
from topk_export.checkpoint import build
from topk_registry.files import write_text

CANDIDATES = 10  # models per family whose parameters are counted
CLASSES = 1000
K = 5
SIZE = 224
LIMIT = 3600  # seconds per family
VERIFIED, FAILED = "verified", "failed"
COMMAND = "python -m benchmarks.families --output docs/results/families.json"


def families() -> dict[str, list[str]]:
    """Return the names of the models of each family."""
    found = {f"timm/{module}": timm.list_models(module=module) for module in timm.list_modules()}
    for name in torchvision.models.list_models(module=torchvision.models):
        module = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        found.setdefault(f"torchvision/{module}", []).append(f"torchvision:{name}")
    # models whose name ends in _enc are encoders without a classifier
    classifiers = {family: [name for name in names if not name.endswith("_enc")] for family, names in found.items()}
    return {family: names for family, names in classifiers.items() if names}


def smallest(names: list[str]) -> tuple[str, int]:
    """Return the model with the fewest parameters, and the number of its parameters."""
    step = -(-len(names) // CANDIDATES)
    counts = {}
    for name in names[::step]:
        try:
            with torch.device("meta"):
                model = build(name, num_classes=CLASSES)
        except Exception:  # some models compute with their weights while they are built
            model = build(name, num_classes=CLASSES)
        counts[name] = sum(weight.numel() for weight in model.parameters())
    name = min(counts, key=lambda name: counts[name])
    return name, counts[name]


def exported(name: str, folder: Path) -> list[int]:
    """Export a model without verification to ``folder/model.onnx``, and return the size of its input."""
    default = load_source(name, random_weights=True, num_classes=CLASSES).preprocess.input_size
    channels, height, width = default
    small = (channels, min(height, SIZE), min(width, SIZE))
    for size in dict.fromkeys((small, tuple(default))):
        try:
            source = load_source(name, random_weights=True, num_classes=CLASSES, data_config={"input_size": size})
            export_onnx(source, folder / "model.onnx", k=K, verify=False)
        except ExportError:
            if size == tuple(default):
                raise
        else:
            return list(size)
    raise AssertionError("the loop returns or raises an error")


def check(family: str) -> dict[str, Any]:
    """Export and verify a model of a family, and return the result."""
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    try:
        result["model"], result["parameters"] = smallest(families()[family])
        with tempfile.TemporaryDirectory() as folder:
            result["input"] = exported(result["model"], Path(folder))
            report = verify_file(Path(folder) / "model.onnx")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {**result, "status": FAILED, "reason": reason}
    wrong = [check["name"] for check in report["checks"] if not check["passed"]]
    result["checks"] = len(report["checks"])
    if wrong:
        return {**result, "status": FAILED, "reason": "checks that failed: " + "; ".join(wrong)}
    return {**result, "status": VERIFIED}


def in_a_process(family: str) -> dict[str, Any]:
    """Call ``check`` in a copy of this process, so that a crash or a lack of memory ends one family only."""
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")  # the copy does not import torch again
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(check(family)))
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            process.kill()
            return {"status": FAILED, "reason": f"not finished after {LIMIT} s"}
        result = receiver.recv()
    except EOFError:
        process.join()
        return {"status": FAILED, "reason": f"the process ended with exit code {process.exitcode}"}
    process.join()
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("timm", "torch", "torchvision", "onnx", "onnxscript")}
    return {**found, "onnxruntime": onnxruntime.__version__}


def read(file: Path) -> dict[str, Any]:
    """Return the results of an earlier run, which must have the same versions of the packages."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["versions"] != versions():
        raise SystemExit(f"{file} has results of {content['versions']}, installed are {versions()}: remove the file")
    return content["families"]


def summary(content: dict[str, Any]) -> str:
    """Return the text about the results that two pages contain, docs/export.md and docs/reference/how_checked.md."""
    verified = [result["status"] for result in content["families"].values()].count(VERIFIED)
    return f"{verified} of {content['available']} families verified"


def main(arguments: list[str] | None = None) -> int:
    """Check all families that the file lacks, and write the file after each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="repeat these families")
    options = parser.parse_args(arguments)
    known = read(options.output)
    names = list(families())
    for family in options.only or [name for name in names if name not in known]:
        if family not in names:
            parser.error(f"no family {family!r}, available: {', '.join(names)}")
        known[family] = in_a_process(family)
        content = {
            "command": COMMAND,
            "versions": versions(),
            "available": len(names),
            "families": {name: known[name] for name in names if name in known},
        }
        write_text(options.output, json.dumps(content, indent=1) + "\n")
        print(f"{family}: {known[family]}", flush=True)
        print(summary(content), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
