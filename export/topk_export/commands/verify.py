"""``topk-registry verify``: repeat the checks of ``topk-registry export``, for example on another machine."""

from collections.abc import Sequence
from pathlib import Path

from topk_export.commands.common import command, say
from topk_export.runtime.session import DEVICES
from topk_export.verify import report_lines, verify_file, write_json
from topk_registry.cli import ArgumentParser


@command
def main(argv: Sequence[str]) -> int:
    """Compare the logits of an exported file with PyTorch's logits, and all other outputs with results of NumPy."""
    parser = ArgumentParser(prog="topk-registry verify", description=main.__doc__)
    written = "an ONNX file that topk-registry export, attach or calibrate wrote"
    parser.add_argument("model", metavar="FILE.onnx", help=written)
    sample = "NAME.sample.npz of the export, with PyTorch's logits (default: the file next to NAME.onnx)"
    parser.add_argument("--sample", metavar="FILE", help=sample)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="device that runs the model (default: cpu)")
    gpu = "exit with an error if the model does not run on a GPU"
    parser.add_argument("--require-gpu", action="store_true", help=gpu)
    args = parser.parse_args(argv)
    say(f"verifying {args.model} with onnxruntime")
    report = verify_file(args.model, device=args.device, require_gpu=args.require_gpu, sample=args.sample)
    if args.json is not None:
        write_json(report, args.json)
    print("\n".join(report_lines(report)))
    return 0 if report["passed"] else 1
