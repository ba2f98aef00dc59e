"""Icons that people drew, for top-k studies: many classes, and drawings that carry several names.

A class is a name such as ``trash``, and an icon set has at most one picture per name. Designers draw ``edit`` and
``pencil``, or ``close`` and ``x``, alike, so a single answer is often not enough. The data set reads the JSON files of
the npm package ``@iconify/json``. ``collections.json`` of this package states the author and the license of each set,
and the license text is at the address that it names. In an empty folder, these commands fetch the files (100 MB):

    npm pack @iconify/json
    tar xzf iconify-json-*.tgz                  # pass --data-dir package
    pip install resvg_py
"""

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from topk_registry.data.drawn import check_counts

SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}  # of the pictures
LEFT_OUT = ("Emoji", "Logos", "Flags / Maps")  # categories without names of things
WITHOUT_NAMES = {"emoji", "flag", "logos", "logo", "cryptocurrency"}  # words of prefixes of other such sets
# endings of names in sets that do not list their own
STYLES = ("outline", "outlined", "filled", "fill", "line", "linear", "solid", "regular", "light", "thin", "bold")
STYLES += ("duotone", "bold-duotone", "line-duotone", "twotone", "sharp", "round", "rounded", "broken", "alt")
SMALLEST_SIZE = 8  # a number at the end of a name is a size in pixels from here on; "home-2" is another drawing
VERSION = 1  # of the pictures in the cache

Drawing = tuple[str, Mapping[str, Any]]  # name of the class, icon with its width and height


class Icons:
    """Grey pictures of icons, black on white, with the name of the icon as the class.

    Each split has other icon sets. Sets of one designer are in the same split. Sets with a non-commercial license, and
    sets of emoji, flags and logos, are left out. The first use renders the pictures with ``resvg_py`` and stores them
    in the folder ``topk-studies`` of ``$XDG_CACHE_HOME`` (default ``~/.cache``).

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``, with about 60, 20 and 20 percent of the pictures.
        root: folder with ``collections.json`` and the folder ``json`` of the npm package ``@iconify/json``.
        size: height and width of a picture.
        min_sets: smallest number of icon sets in which a class is drawn.
        seed: seed that assigns designers to splits.

    Attributes:
        images: [N, size, size, 3] in 8 bits.
        targets: label of each image.
        sets: icon set of each image.

    Example:
        >>> image, label = Icons("train", root="package")[0]  # doctest: +SKIP
    """

    transform: Any = None

    def __init__(
        self,
        split: str = "train",
        *,
        root: str | Path | None = None,
        size: int = 32,
        min_sets: int = 30,
        seed: int = 0,
    ) -> None:
        if split not in SHARES:
            raise ValueError(f"split must be one of {', '.join(SHARES)}, got {split!r}")
        check_counts(size=size, min_sets=min_sets)
        folder = Path(root or "")
        if root is None or not (folder / "collections.json").is_file():
            raise ValueError(
                f"no collections.json in {root}: pass --data-dir DIR, the unpacked npm package @iconify/json"
            )
        sets = chosen_sets(json.loads((folder / "collections.json").read_text()))
        pictures = _cached(folder, sets, size, min_sets)
        names, owners = pictures["names"].tolist(), pictures["sets"].tolist()
        if not names:
            raise ValueError(f"no name is drawn in {min_sets} icon sets of {root}: pass a smaller min_sets")
        self.classes = sorted(set(names))
        part = split_of(sets, Counter(owners), seed)
        rows = [i for i, owner in enumerate(owners) if part[owner] == split]
        label = {name: i for i, name in enumerate(self.classes)}
        self.sets = [owners[i] for i in rows]
        self.targets = [label[names[i]] for i in rows]
        self.images = pictures["images"][rows][..., None].repeat(3, -1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index])
        return (image if self.transform is None else self.transform(image)), self.targets[index]


def chosen_sets(collections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``collections.json`` that the data set uses."""

    def fits(prefix: str, about: Mapping[str, Any]) -> bool:
        license_name = about["license"].get("spdx") or about["license"]["title"]
        if about.get("hidden") or about.get("category") in LEFT_OUT or "NC" in license_name:
            return False
        return not WITHOUT_NAMES & set(prefix.split("-"))

    return {prefix: about for prefix, about in collections.items() if fits(prefix, about)}


def designers(sets: Mapping[str, Any]) -> dict[str, str]:
    """Return the designer of each set: one text for all sets that share an author, the category Material or a prefix.

    The prefix is the first word of the name of a set, so ``pepicons-pop`` and ``pepicons-print`` stay together.
    """
    leader = {prefix: prefix for prefix in sets}
    first: dict[str, str] = {}
    for prefix, about in sets.items():
        material = about.get("category") == "Material"
        for key in (f"author {about['author']['name']}", f"prefix {prefix.split('-')[0]}", *["Material"] * material):
            mine, other = leader[prefix], leader[first.setdefault(key, prefix)]
            leader = {name: other if found == mine else found for name, found in leader.items()}
    return leader


def split_of(sets: Mapping[str, Any], pictures: Mapping[str, int], seed: int) -> dict[str, str]:
    """Return the split of each set. Designers come in random order, until a split has its share of the pictures."""
    owner = designers(sets)
    count: Counter[str] = Counter()
    for prefix, number in pictures.items():
        count[owner[prefix]] += number
    order = sorted(count, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest())
    found, before, total = {}, 0.0, sum(count.values())
    for name in order:
        middle = (before + count[name] / 2) / total
        bounds = np.cumsum(list(SHARES.values()))
        found[name] = list(SHARES)[min(int((middle > bounds).sum()), len(SHARES) - 1)]
        before += count[name]
    return {prefix: found[owner[prefix]] for prefix in pictures}


def stem(name: str, document: Mapping[str, Any]) -> str:
    """Return the name of an icon without words for its style or size.

    Example:
        >>> stem("home-bold-duotone", {}), stem("home-24-filled", {}), stem("home-2", {})
        ('home', 'home', 'home-2')
    """
    suffixes = [each for each in document.get("suffixes") or STYLES if each]
    for prefix in document.get("prefixes") or ():
        if prefix and name.startswith(f"{prefix}-"):
            name = name[len(prefix) + 1 :]
            break
    for suffix in sorted(suffixes, key=len, reverse=True):
        if name.endswith(f"-{suffix}"):
            name = name[: -len(suffix) - 1]
            break
    base, _, last = name.rpartition("-")
    return base if base and last.isdecimal() and int(last) >= SMALLEST_SIZE else name


def _drawings(folder: Path, prefix: str) -> Iterator[Drawing]:
    # one icon per name of a set: the icon with the shortest name
    document = json.loads((folder / "json" / f"{prefix}.json").read_text())
    usual = {key: document[key] for key in ("left", "top", "width", "height") if key in document}
    best: dict[str, str] = {}
    for name in sorted(document["icons"], key=lambda name: (len(name), name)):
        best.setdefault(stem(name, document), name)
    for name, icon in best.items():
        yield name, {**usual, **document["icons"][icon]}


def _cached(folder: Path, sets: Mapping[str, Any], size: int, min_sets: int) -> dict[str, NDArray[Any]]:
    files = [folder / "json" / f"{prefix}.json" for prefix in sets]
    state = [VERSION, size, min_sets, *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "topk-studies"
    path = cache / f"icons-{key}.npz"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.npz")
        images, names, owners = _rendered(folder, sets, size, min_sets)
        np.savez(partial, images=images, names=names, sets=owners)
        partial.replace(path)
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def _rendered(folder: Path, sets: Mapping[str, Any], size: int, min_sets: int) -> tuple[NDArray[Any], ...]:
    # images [N, size, size], names [N] and sets [N]
    drawn = {prefix: list(_drawings(folder, prefix)) for prefix in sets}
    count = Counter(name for drawings in drawn.values() for name, _ in drawings)
    found: list[tuple[str, str, NDArray[np.uint8]]] = []
    for prefix, drawings in drawn.items():
        for name, icon in drawings:
            picture = render(icon, size) if count[name] >= min_sets else None
            if picture is not None:
                found.append((name, prefix, picture))
    images = np.array([picture for _, _, picture in found], np.uint8).reshape(-1, size, size)
    return images, np.array([row[0] for row in found], str), np.array([row[1] for row in found], str)


def render(icon: Mapping[str, Any], size: int) -> NDArray[np.uint8] | None:
    """Return the picture of an icon [size, size], black on white. If the picture is empty, return None.

    Args:
        icon: ``body`` with the elements of the SVG file, and ``left``, ``top``, ``width`` and ``height`` if they differ
            from Iconify's defaults.
        size: height and width of the picture.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ValueError("topk/icons renders pictures with resvg_py: pip install resvg_py") from error
    width, height = icon.get("width", 16), icon.get("height", 16)
    side = max(width, height)
    left, top = icon.get("left", 0) - (side - width) / 2, icon.get("top", 0) - (side - height) / 2
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    shown = f'width="{size}" height="{size}" viewBox="{left} {top} {side} {side}" color="#000"'
    svg = f"<svg {namespaces} {shown}>{icon['body']}</svg>"
    png = svg_to_bytes(svg_string=svg, background="#ffffff", skip_system_fonts=True)
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    return None if (picture == 255).all() else picture
