"""From a module to an ONNX graph, and from a graph in float32 to one with integer matrix products."""

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from topk_export.errors import ExportError
from topk_export.runtime.metadata import SEMANTICS
from topk_export.verification import graph


def convert(module: nn.Module, inputs: np.ndarray, opset: int, batch: str | int) -> Any:
    """The module as a ModelProto. Traced at batch 2 where the batch is dynamic: a batch of 1 would be specialised."""
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
            output_names=list(SEMANTICS),
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


def quantise(model: Any) -> Any:
    """onnxruntime's dynamic quantisation. The head has no matrix product, so it stays in float32."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quiet():
        graph.forget_constants(model)
        before, after = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, str(before))
        quantize_dynamic(before, after, op_types_to_quantize=["MatMul", "Conv"], weight_type=QuantType.QUInt8)
        return onnx.load(str(after))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The quantiser logs advice through the root logger."""
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger().setLevel(level)
