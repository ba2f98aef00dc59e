"""A classifier of several labels whose probabilities are known, and held-out images with targets."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from topk_export import export_onnx
from topk_export.samples import Samples

NAMES = ("red", "green", "blue", "bright", "dark", "yellow", "never")
SIZE = (3, 16, 16)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
# logits of each class from the mean of red, green and blue in [0, 1], and a constant
WEIGHTS = np.array([[9, -2, -2, -3], [-2, 9, -2, -3], [-2, -2, 9, -3], [5, 5, 5, -9], [-6, -6, -6, 6], [6, 6, -9, -3],
                    [1, 1, 1, -8]], np.float64)  # fmt: skip


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, len(NAMES))
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        with torch.no_grad():
            weights = torch.tensor(WEIGHTS[:, :3], dtype=torch.float32)
            self.fc.weight.copy_(weights * std)
            self.fc.bias.copy_(torch.tensor(WEIGHTS[:, 3], dtype=torch.float32) + weights @ mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def exported(folder: Path, **options: Any) -> Path:
    config = {"input_size": SIZE, "mean": MEAN, "std": STD, "interpolation": "bilinear", "crop_pct": 1.0}
    return export_onnx(Channels(), folder, **{"task": "multilabel", "k": 3, "class_names": NAMES,
                                              "data_config": config, **options})  # fmt: skip


def pictures(count: int, *, seed: int = 0) -> Samples:
    """Images of one colour, and labels drawn from the classifier's own probabilities; some have none."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 256, (count, 3)).astype(np.uint8)
    images = [np.broadcast_to(colour, (*SIZE[1:], 3)).copy() for colour in colours]
    logits = colours / 255 @ WEIGHTS[:, :3].T + WEIGHTS[:, 3]
    targets = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    targets[:, -1] = False
    return Samples("made-up colours", images, targets.astype(np.float32))
