"""Thumbnails of images inside a page."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from PIL import Image

SIDE = 96  # pixels of the longer side: a page of 200 such images stays below 2 MB


class Picture(NamedTuple):
    """An image of a gallery: its data URI (empty where there is none to show), caption and longer description."""

    uri: str
    caption: str
    title: str = ""


def thumbnail(image: Image.Image, side: int = SIDE) -> str:
    """Return a small copy of an image as a data URI.

    Args:
        image: of any mode and size; a smaller one is enlarged by whole pixels.
        side: pixels of the longer side, at most.
    """
    small = image.convert("RGB")
    factor = side // max(small.size)
    if factor >= 2:
        small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def gallery(pictures: Sequence[Picture]) -> str:
    """Images side by side with their captions; a caption alone where there is no image to show."""
    items = "".join(_figure(*picture) for picture in pictures)
    return f'<div class="gallery">{items}</div>\n' if items else ""


def _figure(uri: str, caption: str, title: str) -> str:
    words = escape(title or caption)
    image = f'<img src="{escape(uri)}" alt="{words}" loading="lazy">' if uri else ""
    return f'<figure title="{words}">{image}<figcaption>{escape(caption)}</figcaption></figure>'
