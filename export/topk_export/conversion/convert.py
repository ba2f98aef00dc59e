"""From a module to an ONNX graph."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from topk_export.errors import ExportError


def convert(module: nn.Module, inputs: np.ndarray, outputs: Sequence[str], opset: int, batch: str | int) -> Any:
    """Convert a module to a ModelProto; a dynamic batch is traced at size 2, as torch.export would fix a size of 1."""
    dynamic = batch == "dynamic"
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    example = torch.from_numpy(inputs[:2] if dynamic else inputs)
    try:
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            input_names=["input"],
            output_names=list(outputs),
            verbose=False,
        )
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        why = plain(error) if root is error else f"{plain(error)}: {type(root).__name__}: {plain(root)}"
        raise ExportError(f"torch.onnx cannot convert the model: {why}") from error
    assert program is not None
    return program.model_proto


def plain(error: BaseException) -> str:
    """Return the first line of an error's text, without codes for a terminal."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__
