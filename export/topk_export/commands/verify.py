"""``topk-registry verify``: repeat the checks of an export, on any machine."""

import json
from collections.abc import Sequence

from topk_export.commands.common import add_runtime_flags, command
from topk_export.verification.verify import report_lines, verify
from topk_registry.cli import ArgumentParser


@command
def main(argv: Sequence[str]) -> int:
    """Repeat the checks of an exported file."""
    parser = ArgumentParser(prog="topk-registry verify", description=main.__doc__)
    parser.add_argument("model", metavar="model.onnx", help="a file of topk-registry export")
    parser.add_argument("--sample", metavar="FILE", help="NAME.sample.npz of the export (default: beside NAME.onnx)")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    add_runtime_flags(parser)
    args = parser.parse_args(argv)
    report = verify(
        args.model, device=args.device, require_gpu=args.require_gpu, threads=args.threads, sample=args.sample
    )
    print(json.dumps(report, indent=2) if args.json else "\n".join(report_lines(report)))
    return 0 if report["passed"] else 1
