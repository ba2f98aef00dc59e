"""A classifier whose answers are known: twelve colours, each image belonging to the nearest to its mean."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from topk_export import Predictor, export_onnx

from .service import Service

COLOURS = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "red": (230, 30, 40),
    "green": (30, 160, 60),
    "blue": (30, 60, 200),
    "yellow": (250, 220, 40),
    "orange": (250, 140, 30),
    "purple": (120, 40, 150),
    "pink": (250, 160, 200),
    "brown": (120, 70, 30),
    "grey": (128, 128, 128),
    "turquoise": (60, 210, 200),
}
K, SIZE = 5, (3, 32, 40)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ColourClassifier(nn.Module):
    """Logits 20 (2 <c, m> - |c|^2), m the mean colour in [0, 1] of a normalised image, c the colour of each class."""

    def __init__(self) -> None:
        super().__init__()
        c, mean, std = torch.tensor(list(COLOURS.values())) / 255, torch.tensor(MEAN), torch.tensor(STD)
        self.fc = nn.Linear(3, len(COLOURS))
        with torch.no_grad():
            self.fc.weight.copy_(40 * c * std)
            self.fc.bias.copy_(20 * (2 * c @ mean - c.square().sum(-1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def exported(folder: Path, **options: Any) -> Path:
    config = {"input_size": SIZE, "mean": MEAN, "std": STD, "interpolation": "bicubic", "crop_pct": 0.9}
    return export_onnx(ColourClassifier(), folder, k=K, class_names=list(COLOURS), data_config=config, **options)


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("metadata") / "colours.onnx")


@pytest.fixture(scope="session")
def in_graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("in-graph") / "colours.onnx", preprocess="in-graph")


@pytest.fixture(scope="session")
def predictor(model_file: Path) -> Predictor:
    return Predictor(model_file, device="cpu", threads=1)


@pytest.fixture
def edited(model_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with metadata, batch size or outputs changed."""

    def edit(*, props: dict[str, Any] | None = None, batch: int | None = None, outputs: tuple[str, ...] = ()) -> Path:
        model = onnx.load(str(model_file))
        if props is not None:
            known = {prop.key: prop.value for prop in model.metadata_props}
            known |= {key: json.dumps(value) for key, value in props.items()}
            del model.metadata_props[:]
            for key in known.keys() - {key for key, value in props.items() if value is None}:
                model.metadata_props.add(key=key, value=known[key])
        if batch is not None:
            for value in (*model.graph.input, *model.graph.output):
                value.type.tensor_type.shape.dim[0].dim_value = batch
        if outputs:
            kept = [output for output in model.graph.output if output.name in outputs]
            del model.graph.output[:]
            model.graph.output.extend(kept)
        path = tmp_path / f"edited-{len(list(tmp_path.glob('edited-*')))}.onnx"
        onnx.save(model, str(path))
        return path

    return edit


@pytest.fixture(scope="session")
def service(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """``topk-registry serve`` in a process of its own."""
    with Service(model_file, tmp_path_factory.mktemp("service") / "log", "--max-pixels", "4000000") as running:
        yield running


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """A file of one colour."""

    def write(colour: str, name: str | None = None, size: tuple[int, int] = (60, 50)) -> Path:
        path = tmp_path / (name or f"{colour}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, COLOURS[colour]).save(path)
        return path

    return write


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 blocks of 4 x 4 pixels: structure that resampling changes, without being nothing but noise."""
    small = np.random.default_rng(seed).integers(0, 256, (-(-height // 4), -(-width // 4), channels), np.uint8)
    return small.repeat(4, 0).repeat(4, 1)[:height, :width]
