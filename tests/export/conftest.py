"""Small models to export, each export once."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.export.colours import COLOURS, MEAN, STD, colours_by, png
from topk_export import Predictor, export_onnx, graph

DATA = {"input_size": (3, 8, 8), "crop_pct": 1.0, "interpolation": "bilinear", "mean": MEAN, "std": STD}


def tiny(n: int) -> nn.Module:
    """A classifier that converts in a second: a convolution, an average, a matrix product."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, n))


@pytest.fixture(scope="session")
def export(made_once: Callable[..., Path]) -> Callable[..., Path]:
    """``export(n, **options)``: the path of an exported tiny classifier, converted once for the same arguments."""
    made: dict[str, Path] = {}

    def once(n: int, **options: Any) -> Path:
        key = repr((n, options))
        if key not in made:

            def make(folder: Path) -> None:
                export_onnx(tiny(n), folder, **{"data_config": DATA, **options})

            made[key] = made_once(f"export-{zlib.crc32(key.encode()):08x}", make) / "model.onnx"
        return made[key]

    return once


@pytest.fixture(scope="session")
def model_file(made_once: Callable[..., Path]) -> Path:
    return colours_by(made_once)


@pytest.fixture(scope="session")
def in_graph_file(made_once: Callable[..., Path]) -> Path:
    return colours_by(made_once, in_graph=True)


@pytest.fixture(scope="session")
def predictor(model_file: Path) -> Predictor:
    return Predictor(model_file, device="cpu", threads=1)


@pytest.fixture
def edited(model_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with metadata, weights or outputs changed, or changed by a function of the ModelProto."""

    def edit(
        change: Callable[[Any], object] = lambda model: None,
        *,
        props: dict[str, Any] | None = None,
        outputs: tuple[str, ...] = (),
        nan: bool = False,
    ) -> Path:
        model = onnx.load(str(model_file))
        change(model)
        if props is not None:
            known = {prop.key: prop.value for prop in model.metadata_props}
            known |= {key: json.dumps(value) for key, value in props.items()}
            graph.set_metadata(model, {key: known[key] for key in known if props.get(key, "") is not None})
        if nan:
            (bias,) = (tensor for tensor in model.graph.initializer if list(tensor.dims) == [len(COLOURS)])
            bias.CopyFrom(onnx.numpy_helper.from_array(np.full(len(COLOURS), np.nan, np.float32), bias.name))
        if outputs:
            kept = [output for output in model.graph.output if output.name in outputs]
            del model.graph.output[:]
            model.graph.output.extend(kept)
        path = tmp_path / f"edited-{len(list(tmp_path.glob('edited-*')))}.onnx"
        onnx.save(model, str(path))
        return path

    return edit


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """A file of one colour."""

    def write(colour: str) -> Path:
        path = tmp_path / f"{colour}.png"
        path.write_bytes(png(colour))
        return path

    return write
