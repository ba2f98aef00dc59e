"""Image files as samples, read with Pillow."""

import struct
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from PIL import Image

from topk_registry.data.folders import IMAGE_SUFFIXES, read_folders
from topk_registry.data.selection import UnreadableImageError

# what Pillow raises on broken files
DECODE_ERRORS = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)


class FolderReader:
    """Files and labels of a folder with one folder per class, with the interface of timm's readers.

    Attributes:
        samples: pairs (path, class number).
        class_to_idx: class numbers by name.
        notes: sentences about files and folders that were skipped.
    """

    def __init__(self, root: str | Path, suffixes: Collection[str] = IMAGE_SUFFIXES, *, flat: bool = False) -> None:
        folders = read_folders(root, suffixes, flat=flat)
        self.root, self.notes = str(root), folders.notes
        self.class_to_idx = {name: i for i, name in enumerate(folders.names)}
        self.samples = [(path, self.class_to_idx[name]) for path, name in folders.images]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return open(path, "rb"), label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.samples[index][0]
        return Path(path).name if basename else path if absolute else str(Path(path).relative_to(self.root))


class ReaderImages:
    """Images of a reader of files, as pairs (image, target); an unreadable one is an ``UnreadableImageError``.

    Args:
        reader: a :class:`FolderReader`, or one of timm's.
        mode: of Pillow, that images are converted to.
        target_transform: applied to what the reader returns as target.
    """

    def __init__(self, reader: Any, *, mode: str = "RGB", target_transform: Callable[[Any], Any] | None = None) -> None:
        self.reader, self.mode, self.target_transform = reader, mode, target_transform
        self.transform: Any = None
        self.notes: list[str] = list(getattr(reader, "notes", ()))

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        file, target = self.reader[index]
        try:
            with file, Image.open(file) as opened:
                check_depth(opened)
                image = opened.convert(self.mode)
        except DECODE_ERRORS as error:
            raise UnreadableImageError(f"cannot read {self.filename(index)}: {error}") from error
        if self.target_transform is not None:
            target = self.target_transform(target)
        return (image if self.transform is None else self.transform(image)), -1 if target is None else target

    def filename(self, index: int) -> str:
        try:
            return str(self.reader.filename(index, absolute=True) or f"sample {index}")
        except NotImplementedError:  # readers of tables have no files
            return f"sample {index}"


def check_depth(image: Image.Image) -> None:
    """Raise ValueError if Pillow would clip values outside of 0 to 255, as in images of 16 bits or of floats."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        extrema: Any = image.getextrema()
        low, high = extrema
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1 and low != high):
            raise ValueError(f"values from {low:g} to {high:g} (mode {image.mode}) need a conversion to 8 bits")
