"""Write handwritten digits as images, and train a small network on them in seconds. Pages that show outputs use both.

``python make_digits.py digits`` writes ``digits/SPLIT/CLASS/*.png``, scikit-learn's 1797 digits, the class names
``digits.txt`` and the weights ``digits.pth`` of the network ``topk_convnet``. ``before.pth`` has the weights after one
epoch.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

import topk_registry as tr
from topk_registry.nn import convnet  # noqa: F401  registers the model topk_convnet

SPLITS = {"train": 500, "validation": 297, "calibration": 1000}  # images, in the order of the data set


def main(folder: str = "digits") -> None:
    pixels, labels = load_digits(return_X_y=True)
    splits = [split for split, count in SPLITS.items() for _ in range(count)]
    images = []
    for i, (split, label) in enumerate(zip(splits, labels, strict=True)):
        place = Path(folder, split, f"digit_{label}")
        place.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((pixels[i].reshape(8, 8) * 15).astype("uint8"))
        images.append(small.resize((32, 32), Image.Resampling.BICUBIC).convert("RGB"))
        images[-1].save(place / f"{i}.png")
    Path(f"{folder}.txt").write_text("\n".join(f"digit_{c}" for c in range(10)))
    count = SPLITS["train"]
    for name, epochs in (("before", 1), (folder, 3)):
        torch.save(train(np.stack(images[:count]), labels[:count], epochs).state_dict(), f"{name}.pth")


def train(images: np.ndarray, labels: np.ndarray, epochs: int) -> torch.nn.Module:
    """Train ``topk_convnet`` on images [N, 32, 32, 3]."""
    torch.manual_seed(0)
    model = timm.create_model("topk_convnet", num_classes=10)
    mean, std = (torch.tensor(model.default_cfg[name])[:, None, None] for name in ("mean", "std"))
    x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std  # [N, 3, 32, 32]
    y = torch.from_numpy(labels)
    criterion = tr.create_loss("ce")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            criterion(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


if __name__ == "__main__":
    main(*sys.argv[1:])
