"""Let timm's posterize operations keep 0 bits, which Pillow 13 rejects.

This module imports only what older versions of timm have, because ``timm run`` may load a script with its own timm.
"""

from typing import Any

from PIL import Image
from timm.data import auto_augment


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's operation. timm's policies may keep 0 bits, and then the image is black, as with Pillow before 13."""
    return auto_augment.posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)


def allow_zero_bits() -> None:
    """Replace timm's posterize operations, for transforms that are created later. Worker processes need no call."""
    names = [name for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")]
    auto_augment.NAME_TO_OP.update(dict.fromkeys(names, posterize))
