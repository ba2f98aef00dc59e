"""Images of characters from the installed fonts, for top-k studies: 0, O and o look alike in many fonts.

The 62 classes are 0-9, A-Z and a-z. Each font family is in only one split, so the fonts of the test split do not occur
in training. Font families whose names begin with the same letters often have the same design, for example DejaVu Sans
and DejaVu Serif. Therefore such families are in the same split.
"""

import hashlib
import logging
import string
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
SIZE, MARGIN = 28, 1  # pixels
SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}  # of the designs
SUFFIXES = {".ttf", ".otf", ".ttc", ".pfb"}
STYLES = ("regular", "book", "roman", "normal", "text", "medium")  # styles that represent a family, best first
DESIGN = 4  # families whose names begin with the same four letters count as one design
PICTURES = ("symbol", "dingbat", "d050000l", "emoji", "icon")  # families with pictures in place of letters
MISSING = "\U0010fffe"  # no font has this character, so each font renders its box for missing characters


class Glyphs:
    """Images of 62 characters in 28 x 28 pixels, rendered with one font of each font family.

    Font families whose names begin with the same four letters count as one design. All families of a design are in the
    same split.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``. The splits have 60, 20 and 20 percent of the designs.
        root: folder with font files. Default: the fonts that fontconfig lists.
        seed: seed that assigns designs to splits and orders the font families.

    Attributes:
        images: [N, 28, 28, 3] in 8 bits, black on white.
        targets: label of each image.
        families: font family of each image.
        left_out: names of the font families that have no images, because the font lacks a character.

    Example:
        >>> image, label = Glyphs("train")[0]  # doctest: +SKIP
    """

    transform: Any = None

    def __init__(self, split: str = "train", *, root: str | Path | None = None, seed: int = 0) -> None:
        if split not in SHARES:
            raise ValueError(f"split must be one of {', '.join(SHARES)}, got {split!r}")
        faces = faces_by_family(root)
        if not faces:
            raise ValueError(f"no fonts in {root or 'fontconfig'}: install font packages or pass root=FOLDER")
        designs = _part(_shuffled({name[:DESIGN].lower() for name in faces}, seed), split)
        chosen = [name for name in _shuffled(faces, seed) if name[:DESIGN].lower() in designs]
        self.classes = list(CHARACTERS)
        self.families: list[str] = []
        self.left_out: list[str] = []
        rendered: list[NDArray[np.uint8]] = []
        for family in chosen:
            glyphs = render(*faces[family])
            if glyphs is None:
                self.left_out.append(family)
            else:
                rendered.append(glyphs)
                self.families += [family] * len(CHARACTERS)
        if self.left_out:
            logging.getLogger(__name__).info("%d font families left out: they lack characters", len(self.left_out))
        if not rendered:
            raise ValueError(f"none of the {len(chosen)} font families of split {split} has all characters")
        self.images = np.concatenate(rendered)[..., None].repeat(3, -1)
        self.targets = list(range(len(CHARACTERS))) * len(rendered)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]


def _shuffled(names: Iterable[str], seed: int) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest())


def _part(order: list[str], split: str) -> list[str]:
    start = 0.0
    for name, share in SHARES.items():
        if name == split:
            return order[round(start * len(order)) : round((start + share) * len(order))]
        start += share
    raise ValueError(split)


def faces_by_family(root: str | Path | None) -> dict[str, tuple[str, int]]:
    """Return one font per font family: a dict from the family to the file and the index of the font in this file.

    Upright and regular styles are preferred.

    Args:
        root: folder with font files. None: the fonts that fontconfig lists.
    """
    best: dict[str, tuple[tuple[int, str], tuple[str, int]]] = {}
    for path, index in _faces(root):
        try:
            family, style = ImageFont.truetype(path, 20, index=index).getname()
        except (OSError, ValueError):  # the file is damaged, or the font is a bitmap font
            continue
        if not family or any(word in family.lower() for word in PICTURES):
            continue
        words = (style or "").lower()
        rank = next((i for i, name in enumerate(STYLES) if words == name), len(STYLES) + ("italic" in words))
        candidate = ((rank, path), (path, index))
        best[family] = min(best.get(family, candidate), candidate)
    return {family: face for family, (_, face) in best.items()}


def _faces(root: str | Path | None) -> Iterator[tuple[str, int]]:
    if root is not None:
        yield from ((str(path), 0) for path in sorted(Path(root).rglob("*")) if path.suffix.lower() in SUFFIXES)
        return
    try:
        listed = subprocess.run(
            ["fc-list", "--format", "%{file}\t%{index}\n"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError("fontconfig's fc-list is not installed: pass root=FOLDER with font files") from error
    for line in sorted(set(listed.stdout.splitlines())):
        path, _, index = line.partition("\t")
        if Path(path).suffix.lower() in SUFFIXES and int(index) < 1 << 16:  # else: a variable font
            yield path, int(index)


def render(path: str, index: int) -> NDArray[np.uint8] | None:
    """Return images [62, 28, 28] of the characters in a font. If the font lacks a character, return None.

    ``index`` is the index of the font in the file ``path``.
    """
    font = ImageFont.truetype(path, 100, index=index)
    boxes = np.array([font.getbbox(c, anchor="ls") for c in CHARACTERS])  # [62, 4]: left, top, right, bottom
    width, top, bottom = (boxes[:, 2] - boxes[:, 0]).max(), -boxes[:, 1].min(), max(boxes[:, 3].max(), 0)
    if width <= 0 or top <= 0:
        return None
    scale = (SIZE - 2 * MARGIN) / max(width, top + bottom)
    font = ImageFont.truetype(path, 100 * scale, index=index)
    baseline = (SIZE - (top + bottom) * scale) / 2 + top * scale
    images = np.stack([_draw(font, c, baseline) for c in (*CHARACTERS, MISSING)])
    glyphs, box = images[:-1], images[-1]
    if (glyphs == 255).all((1, 2)).any() or (glyphs == box).all((1, 2)).any():
        return None
    return glyphs


def _draw(font: ImageFont.FreeTypeFont, character: str, baseline: float) -> NDArray[np.uint8]:
    left, _, right, _ = font.getbbox(character, anchor="ls")
    image = Image.new("L", (SIZE, SIZE), 255)
    ImageDraw.Draw(image).text((SIZE / 2 - (left + right) / 2, baseline), character, fill=0, font=font, anchor="ls")
    return np.asarray(image)
