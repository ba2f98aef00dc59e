"""The command line: ``topk-registry COMMAND ...``, also installed as ``timm``.

A command is a module with ``main(argv) -> int``, imported only when it is asked for, so that listing losses stays as
quick as reading metadata.
"""

import sys
from importlib import import_module

COMMANDS = {
    "losses": ("topk_registry.commands.losses", "list the registered losses, or say why one is broken"),
    "check": ("topk_registry.commands.check", "run the conformance kit on a registered loss"),
    "export": ("topk_export.commands.export", "a trained classifier as one ONNX file with exact top-k probabilities"),
    "verify": ("topk_export.commands.verify", "repeat the checks of an exported file"),
    "predict": ("topk_export.commands.predict", "top-k classes of images from an exported file"),
    "serve": ("topk_export.commands.serve", "serve an exported file over HTTP"),
    "bench": ("topk_export.commands.bench", "time an exported file, and its head's share"),
    "doctor": ("topk_registry.commands.doctor", "versions, GPU, commands on PATH, broken plug-ins"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in COMMANDS:
        return import_module(COMMANDS[name][0]).main(argv[1:])
    return 2


def train() -> int:
    return main(["train", *sys.argv[1:]])
