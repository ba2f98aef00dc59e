"""Duplicates among images: one pass that reads every picture, whose hashes are kept on disk by the images' content."""

import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from topk_registry.analysis.duplicates import DuplicateGroup, duplicate_groups, picture_hash
from topk_registry.data.labels import Labels
from topk_registry.evaluation.images import Images

CONTENT, HASH = 32, 16
WIDTH = 1 + CONTENT + HASH  # bytes a picture: whether it was read, the digest of its pixels, its hash
BLOCK = 256  # pictures between writes
READERS = 4


@dataclass(frozen=True)
class Duplicates:
    """What the pictures of a data set say.

    Args:
        groups: of pictures that look alike.
        unreadable: the numbers of images that cannot be read, or are no pictures.
    """

    groups: list[DuplicateGroup]
    unreadable: list[int]


def find_duplicates(images: Images, labels: Labels, folder: Path | None = None) -> Duplicates:
    """Read every picture and group those that look alike.

    Args:
        images: whose samples can be picked.
        labels: of the images [N].
        folder: of kept hashes; None keeps none.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="topk-pictures-") as temporary:
            rows = _rows(images, Path(temporary, "pictures.u8"))
    else:
        rows = _rows(images, folder / f"pictures-{images.fingerprint[:32]}.u8")
    read = np.flatnonzero(rows[:, 0])
    contents = [row.tobytes() for row in rows[read, 1 : 1 + CONTENT]]
    groups = duplicate_groups(contents, rows[read, 1 + CONTENT :], labels[read])
    numbered = [
        DuplicateGroup(tuple(int(read[i]) for i in group.members), group.exact, group.labels_differ) for group in groups
    ]
    return Duplicates(numbered, np.flatnonzero(rows[:, 0] == 0).tolist())


def _rows(images: Images, file: Path) -> np.ndarray:
    """The bytes of all pictures [N, WIDTH]; what the file has is not read again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = min(file.stat().st_size // WIDTH if file.is_file() else 0, len(images))
    with file.open("r+b" if file.is_file() else "w+b") as out, ThreadPoolExecutor(READERS) as readers:
        out.seek(done * WIDTH)
        numbers = iter(range(done, len(images)))
        images.dataset.transform = None  # which :meth:`Images.picture` restores, in one thread as in four
        with tqdm(total=len(images), initial=done, desc="duplicates", unit=" images", disable=None) as bar:
            for block in _blocks(numbers):
                out.write(b"".join(readers.map(lambda i: _row(images.picture(i)), block)))
                out.flush()
                bar.update(len(block))
        out.seek(0)
        return np.frombuffer(out.read(len(images) * WIDTH), np.uint8).reshape(-1, WIDTH)


def _blocks(numbers: Iterator[int]) -> Iterator[list[int]]:
    while block := list(islice(numbers, BLOCK)):
        yield block


def _row(picture: Image.Image | None) -> bytes:
    if picture is None:
        return bytes(WIDTH)
    content = hashlib.sha256(f"{picture.mode} {picture.size}".encode() + picture.tobytes()).digest()
    return b"\1" + content + picture_hash(picture).tobytes()
