"""Real pictures for the studies ``icons``, ``fashion`` and ``cifar10n``, as arrays with all label sets.

- ``icons``: the data set ``topk/icons``.
- ``fashion``: Fashion-MNIST in torchvision's layout (``DIR/FashionMNIST/raw``) or the four files themselves in ``DIR``,
  compressed or not. Debian's package ``dataset-fashion-mnist`` has these files in
  ``/usr/share/datasets/fashion-mnist``.
- ``cifar10n``: CIFAR-10 with the labels of CIFAR-10N (Wei et al., ICLR 2022; CC BY-NC 4.0). ``DIR`` has
  ``cifar10.npz``, or torchvision's folder ``cifar-10-batches-py`` and the file ``CIFAR-10_human.pt`` of CIFAR-10N.
"""

import gzip
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from topk_studies.data.icons import Icons

TRAIN, VALIDATION, TEST = 10_000, 4000, 5000  # at most so many pictures per split
SEED = 0  # of the random choice of these pictures
HUMAN = {"clean_label": "clean", "aggre_label": "aggregate", "random_label1": "random1", "worse_label": "worst"}


@dataclass(frozen=True)
class Pictures:
    """Pictures [N, height, width, 3] in 8 bits, and label sets by name, each [N]. ``clean`` has the true labels."""

    images: NDArray[np.uint8]
    labels: Mapping[str, NDArray[np.int64]]

    def take(self, rows: NDArray[np.int64]) -> "Pictures":
        return Pictures(self.images[rows], {name: labels[rows] for name, labels in self.labels.items()})


def open_pictures(name: str, folder: Path) -> tuple[dict[str, Pictures], list[str]]:
    """Return the pictures of the splits ``train``, ``validation`` and ``test``, and the names of the classes.

    At most ``TRAIN``, ``VALIDATION`` and ``TEST`` pictures are chosen at random. If the data has no validation split,
    other pictures of the training split are for validation.

    Args:
        name: a key of ``READERS``.
        folder: folder of the data.

    Raises:
        ValueError: the folder does not contain the data.
    """
    whole, classes = READERS[name](folder)
    random = np.random.default_rng(SEED)
    order = {split: random.permutation(len(whole[split].images)) for split in sorted(whole)}
    if "validation" not in whole:
        whole["validation"], order["validation"] = whole["train"], order["train"][TRAIN:]
    counts = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    return {split: whole[split].take(order[split][:count]) for split, count in counts.items()}, classes


def _icons(folder: Path) -> tuple[dict[str, Pictures], list[str]]:
    splits = {split: Icons(split, root=folder) for split in ("train", "validation", "test")}
    found = {split: Pictures(each.images, {"clean": np.array(each.targets)}) for split, each in splits.items()}
    return found, splits["train"].classes


def _fashion(folder: Path) -> tuple[dict[str, Pictures], list[str]]:
    place = folder / "FashionMNIST" / "raw"
    place = place if place.is_dir() else folder
    found = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx(place / f"{prefix}-images-idx3-ubyte")[..., None].repeat(3, -1)
        found[split] = Pictures(images, {"clean": _idx(place / f"{prefix}-labels-idx1-ubyte").astype(np.int64)})
    names = "T-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
    return found, list[str](names.split(", "))


def _idx(path: Path) -> NDArray[np.uint8]:
    # a file in the format of MNIST: the number of dimensions, the dimensions as 32-bit integers, then the values
    packed = path.with_name(f"{path.name}.gz")
    if not path.is_file() and not packed.is_file():
        raise ValueError(f"no {path.name} or {packed.name} in {path.parent}: pass --data-dir DIR with Fashion-MNIST")
    content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cifar10n(folder: Path) -> tuple[dict[str, Pictures], list[str]]:
    path = folder / "cifar10.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as stored:
            return _packed(dict(stored))
    human = folder / "CIFAR-10_human.pt"
    if not human.is_file() or not (folder / "cifar-10-batches-py").is_dir():
        raise ValueError(f"{folder} has neither cifar10.npz nor cifar-10-batches-py with CIFAR-10_human.pt")
    from torchvision.datasets import CIFAR10

    arrays = [np.ndarray, np.dtype, type(np.dtype(np.int64)), np._core.multiarray._reconstruct]  # type: ignore[attr-defined]
    with torch.serialization.safe_globals(arrays):
        labels = torch.load(human, weights_only=True)
    sets = {name: np.asarray(labels[key], np.int64) for key, name in HUMAN.items()}
    train, test = CIFAR10(str(folder), train=True), CIFAR10(str(folder), train=False)
    if not np.array_equal(sets["clean"], train.targets):
        raise ValueError(f"clean_label of {human} differs from the labels of the training pictures")
    return {"train": Pictures(train.data, sets), "test": Pictures(test.data, {"clean": np.array(test.targets)})}, (
        train.classes
    )


def _packed(stored: Mapping[str, Any]) -> tuple[dict[str, Pictures], list[str]]:
    def decoded(split: str) -> NDArray[np.uint8]:
        content, ends = stored[f"{split}_jpeg"], stored[f"{split}_offsets"]
        files = (content[a:b].tobytes() for a, b in pairwise(ends))
        return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])

    sets = {name: stored[f"train_{name}"].astype(np.int64) for name in HUMAN.values()}
    test = {"clean": stored["test_clean"].astype(np.int64)}
    found = {"train": Pictures(decoded("train"), sets), "test": Pictures(decoded("test"), test)}
    return found, stored["classes"].tolist()


READERS: dict[str, Callable[[Path], tuple[dict[str, Pictures], list[str]]]] = {
    "icons": _icons,
    "fashion": _fashion,
    "cifar10n": _cifar10n,
}
