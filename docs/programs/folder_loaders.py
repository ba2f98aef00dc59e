"""Loaders for a folder of images, with the preprocessing of a model's pretrained weights."""

from typing import Any

import timm
from timm.data import create_transform, resolve_data_config
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder


def loaders(folder: str, name: str) -> tuple[DataLoader, DataLoader, list[str], dict[str, Any]]:
    """Return loaders of ``FOLDER/train/CLASS`` and ``FOLDER/validation/CLASS``, the classes, and the preprocessing."""
    recipe = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    train = ImageFolder(f"{folder}/train", create_transform(**recipe, is_training=True))
    held_out = ImageFolder(f"{folder}/validation", create_transform(**recipe))
    batches = DataLoader(train, batch_size=32, shuffle=True, num_workers=2, drop_last=len(train) > 32)
    return batches, DataLoader(held_out, batch_size=32, num_workers=2), train.classes, recipe
