"""A classifier whose answers are known: twelve colours, each image belonging to the nearest to its mean."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from topk_export import export_onnx

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


def colours_by(made_once: Callable[..., Path], **options: Any) -> Path:
    """A file of :func:`exported` in a folder of the caller's own, exported once for all workers."""
    name = "-".join(["colours", *map(str, options.values())])
    return made_once(name, lambda folder: exported(folder / "colours.onnx", **options)) / "colours.onnx"


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """uint8 blocks of 4 x 4 pixels: structure that resampling changes, without being nothing but noise."""
    small = np.random.default_rng(seed).integers(0, 256, (-(-height // 4), -(-width // 4), channels), np.uint8)
    return small.repeat(4, 0).repeat(4, 1)[:height, :width]


def png(colour: str) -> bytes:
    return encoded(Image.new("RGB", (60, 50), COLOURS[colour]))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that declares a size, with as much content as is given."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
