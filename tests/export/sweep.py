"""Export one model of every family of timm and torchvision, with random weights, and write what came of it.

    python -m tests.export.sweep --output docs/results/export_sweep.json [--seconds 600] [FAMILY ...]

Results are added to the file after each model, and families that are in it already are left out: a sweep can be
stopped, and goes on where it was. ``--table`` prints the file as a table.
"""

import argparse
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from topk_export import export_onnx
from topk_export.errors import ExportError
from topk_export.verification.verify import REPORT, beside, versions

SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxtiny",
    "xtiny",
    "tiny",
    "xxs",
    "xs",
    "mini",
    "small",
    "_s",
    "18",
    "b0",
)


def families() -> dict[str, str]:
    """Return a small model of each family: ``{"timm:resnet": "resnet18", "torchvision:vgg": "torchvision:vgg11"}``."""
    found = {}
    for module in timm.list_modules():
        if names := [name for name in timm.list_models(module=module) if _classifies(name)]:
            found[f"timm:{module}"] = min(names, key=_size)
    names = torchvision.models.list_models(module=torchvision.models)
    for name in names:
        module = torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]
        best = min(found.get(f"torchvision:{module}", name).removeprefix("torchvision:"), name, key=_parameters)
        found[f"torchvision:{module}"] = f"torchvision:{best}"
    return found


def _classifies(name: str) -> bool:
    """Whether a model is built with a classifier, unless it is asked to be without."""
    config = timm.get_pretrained_cfg(name)
    return config is None or config.num_classes != 0


def _parameters(name: str) -> int:
    return torchvision.models.get_model_weights(name)["DEFAULT"].meta["num_params"]


def _size(name: str) -> tuple[int, int, int, str]:
    """Order names from small models to large ones, as far as names tell."""
    kind = next((i for i, word in enumerate(SMALL) if word in name and word != "test_"), len(SMALL))
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return kind, numbers[0] if numbers else 0, len(name), name


def sweep_one(name: str) -> dict[str, Any]:
    """Export and verify one model; return the seconds it took and what was measured, or why it was refused."""
    torch.manual_seed(0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        try:
            export_onnx(name, path)
        except (ExportError, ValueError) as error:
            refused = beside(path, "refused.json")
            lines = str(error).splitlines()
            reason = " ".join(line.strip() for line in lines[1:]) if refused.is_file() else lines[0]
            return {"model": name, "passed": False, "reason": reason, "seconds": time.perf_counter() - start}
        checks = json.loads(beside(path, REPORT).read_text())["checks"]
        size = path.stat().st_size
    logits = [check for check in checks if check["name"].startswith("logits against torch")]
    marginals = [check["measured"] for check in checks if check["name"].startswith("marginals")]
    return {
        "model": name,
        "passed": True,
        "logits_error": max(check["measured"] for check in logits),
        "logits_limit": max(check["tolerance"] for check in logits),
        "marginals_error": max(marginals),
        "megabytes": size / 1e6,
        "seconds": time.perf_counter() - start,
    }


def table(content: dict[str, Any]) -> str:
    lines = ["| family | model | logits | limit | marginals | result |", "|---|---|---|---|---|---|"]
    for family, row in sorted(content["families"].items()):
        numbers = [row.get(key) for key in ("logits_error", "logits_limit", "marginals_error")]
        shown = " | ".join("" if number is None else f"{number:.1e}" for number in numbers)
        result = "passed" if row["passed"] else row["reason"].replace("|", "/")[:160]
        lines.append(f"| {family} | {row['model']} | {shown} | {result} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.export.sweep", description=__doc__)
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help="such as timm:resnet, or a model's name (default: all families)"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/export_sweep.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after this long")
    parser.add_argument("--table", action="store_true", help="print the results there are, and stop")
    args = parser.parse_args(argv)
    content = {"versions": versions(), "families": {}}
    if args.output.is_file():
        content = json.loads(args.output.read_text())
    if args.table:
        print(table(content))
        return 0
    start, every = time.monotonic(), families()
    for family in args.families or every:
        if family in content["families"] or time.monotonic() - start > args.seconds:
            continue
        row = content["families"][family] = sweep_one(every.get(family, family))
        staged = args.output.with_suffix(".part")
        staged.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(staged, args.output)
        print(f"{family:28} {row['model']:40} {'passed' if row['passed'] else row['reason'][:100]}", flush=True)
    return 0 if all(row["passed"] for row in content["families"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
