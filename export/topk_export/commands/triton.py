"""``topk-registry triton``: add an ONNX file to a model repository of Triton Inference Server."""

from collections.abc import Sequence

from topk_export.commands.common import command
from topk_registry.cli import ArgumentParser


@command
def main(argv: Sequence[str]) -> int:
    """Add an exported, attached or calibrated file to a Triton model repository, and print the new folder."""
    parser = ArgumentParser(prog="topk-registry triton", description=main.__doc__)
    written = "an ONNX file that topk-registry export, attach or calibrate wrote"
    parser.add_argument("model", metavar="FILE.onnx", help=written)
    folder = "the model repository; the model gets the name of the file"
    parser.add_argument("repository", metavar="DIR", help=folder)
    args = parser.parse_args(argv)
    from topk_export.triton import write_repository

    print(write_repository(args.model, args.repository))
    return 0
