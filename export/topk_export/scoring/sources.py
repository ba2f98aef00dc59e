"""Sources of images, cut into shards: pieces of work whose content and order do not depend on who does them.

A tar file or a Parquet file is one shard. Images of folders and lists are cut into shards of a fixed size. Listing is
repeated at every start and holds one shard in memory at a time.
"""

import atexit
import hashlib
import os
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from tarfile import EOFHeaderError  # type: ignore  # typeshed has it not
from typing import Any

from topk_export.errors import ImageError, SourceError
from topk_export.runtime.preprocess import SUFFIXES
from topk_export.scoring import files

KINDS = ("auto", "images", "list", "tar", "parquet")
TARS = (".tar", ".tar.gz", ".tgz")
LISTS = (".txt", ".lst", ".list")
IMAGES = tuple(sorted(SUFFIXES))
ENDINGS = {"images": IMAGES, "tar": TARS, "parquet": (".parquet",), "list": LISTS}
COLUMNS = ("image", "img", "jpg", "png", "bytes", "content", "path", "file_name", "file", "url")

Entry = tuple[str, str]  # the name of a file, and its stamp where listing told it
Item = tuple[str, Any]  # the name of an image, and the image: a path, a URL, its bytes, or what is wrong with it


@dataclass(frozen=True)
class Shard:
    """Images that are scored together, into one file.

    Args:
        kind: ``"images"``, ``"tar"`` or ``"parquet"``.
        names: paths or URLs of the images, or of the one file.
        root: what relative paths of the images begin from.
        column: of the images in Parquet; empty to look for it.
        stamps: of images whose folder told sizes and times when it was listed, as those of URLs do.
    """

    kind: str
    names: tuple[str, ...]
    root: str = ""
    column: str = ""
    stamps: tuple[str, ...] = ()

    def __len__(self) -> int:
        """The number of images, 0 where only reading the file tells."""
        return len(self.names) if self.kind == "images" else 0

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def digest(self) -> str:
        """Tell this shard from others by its names."""
        return _digest((self.kind, self.column, *self.names))

    def content(self, *, checksum: bool) -> str:
        """Tell the content of the shard's files by their sizes and times; with ``checksum`` by their bytes.

        Images of a list of URLs have no stamps, for asking would take a request for each.
        """
        if checksum:
            return _digest(_or_missing(files.sha256_of, self._place(name)) for name in self.names)
        if self.stamps:
            return _digest(self.stamps)
        places = [self._place(name) for name in self.names]
        asked = [place for place in places if self.kind != "images" or not files.is_url(place)]
        return _digest(_or_missing(files.stamp_of, place) for place in asked)

    def items(self) -> Iterator[Item]:
        """Every image with its name, in order.

        Raises:
            SourceError: the file cannot be read on; everything before has been given.
        """
        if self.kind == "images":
            return ((name, self._place(name)) for name in self.names)
        read = _tar_items if self.kind == "tar" else _parquet_items
        return _explained(self.names[0], read(self.names[0], self._place(self.names[0]), self.column, self.root))

    def _place(self, name: str) -> str:
        return placed(name, self.root)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _or_missing(tell: Callable[[str], str], place: str) -> str:
    try:
        return tell(place)
    except OSError:  # a row with the error
        return "missing"


def placed(name: str, root: str) -> str:
    return name if files.is_url(name) else os.path.join(root, name)


def shards_of(
    sources: Sequence[str],
    *,
    kind: str = "auto",
    size: int = 1000,
    root: str = "",
    column: str = "",
    skipped: Counter[str] | None = None,
) -> Iterator[Shard]:
    """Yield the shards of all sources, in order.

    Args:
        sources: folders, image files, lists of paths, tar files and Parquet files, or patterns of such.
        kind: one of :data:`KINDS`; ``"auto"`` goes by the ending of the name, and by the content of a folder.
        size: images of one shard, where they are files of their own.
        root: what the relative paths in lists and Parquet files begin from.
        column: of the images in Parquet.
        skipped: counts the files of folders that are left out, by their endings.
    """
    here, skipped = os.getcwd(), Counter() if skipped is None else skipped
    for source in sources:
        for name in files.expanded(source) if source != "-" else ["-"]:
            yield from _shards(name, kind, size, here, os.path.join(here, root), column, skipped)


def _shards(
    name: str, kind: str, size: int, here: str, root: str, column: str, skipped: Counter[str]
) -> Iterator[Shard]:
    if kind == "list" or (kind == "auto" and is_list(name)):
        yield from _cut(((line, "") for line in listed(name)), size, root)
        return
    if files.is_folder(name):
        chosen, inside = _inside(name, kind, skipped)
    else:
        chosen, inside = _kind_of(name, kind), iter([(name, "")])
        if not files.is_url(name) and not os.path.exists(name):
            raise SourceError(f"{name} does not exist")
    if chosen == "images":
        yield from _cut(inside, size, here)
    else:
        for file, _ in inside:
            yield Shard(chosen, (file,), here if chosen == "tar" else root, column)


def _kind_of(name: str, kind: str) -> str:
    if kind != "auto":
        return kind
    found = next((each for each, ends in ENDINGS.items() if name.lower().endswith(ends)), None)
    if found is None:
        known = ", ".join(end for ends in ENDINGS.values() for end in ends)
        raise SourceError(f"{name} is no folder, and its ending is none of {known}: say what it is with --format")
    return found


def images_below(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the images below a folder; count what is left out by its endings.

    Raises:
        SourceError: there are none.
    """
    return (name for name, _ in _inside(folder, "images", skipped)[1])


def told(skipped: Counter[str]) -> str:
    """Say in a line which files of folders were left out, and how many."""
    kinds = ", ".join(
        f"{count} {ending}" for ending, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"left out of folders, by their names: {kinds}"


def _inside(folder: str, kind: str, skipped: Counter[str]) -> tuple[str, Iterator[Entry]]:
    """The kind of a folder's files, and those files: images, else tar files, else Parquet files."""
    for each in ("images", "tar", "parquet") if kind == "auto" else (kind,):
        left: Counter[str] = Counter()
        found = _chosen(folder, ENDINGS[each], left)
        first = next(found, None)
        if first is not None:
            return each, _chained(first, found, left, skipped)
    wanted = "images, tar files or Parquet files" if kind == "auto" else f"{kind} ({', '.join(ENDINGS[kind])})"
    raise SourceError(f"{folder} holds no {wanted}")


def _chosen(folder: str, endings: tuple[str, ...], skipped: Counter[str]) -> Iterator[Entry]:
    for name, stamp in files.below(folder, skipped):
        if name.lower().endswith(endings):
            yield name, stamp
        else:
            skipped[os.path.splitext(name)[1].lower() or "without an ending"] += 1


def _chained(first: Entry, rest: Iterable[Entry], left: Counter[str], skipped: Counter[str]) -> Iterator[Entry]:
    yield first
    yield from rest
    skipped.update(left)


def _cut(entries: Iterable[Entry], size: int, root: str) -> Iterator[Shard]:
    rest = iter(entries)
    while chunk := tuple(islice(rest, size)):
        names, stamps = zip(*chunk, strict=True)
        yield Shard("images", names, root, stamps=stamps if any(stamps) else ())


def is_list(name: str) -> bool:
    """Return whether a source is a list of images: the standard input, or a text file by its ending."""
    return name == "-" or name.lower().endswith(LISTS)


def listed(name: str) -> Iterator[str]:
    """Yield the lines of a list, without empty ones; ``-`` is the standard input."""
    try:
        with files.opened(name) if name != "-" else open(_standard_input(), "rb") as file:
            for line in file:
                if text := os.fsdecode(line.rstrip(b"\r\n")):
                    yield text
    except OSError as error:
        raise SourceError(f"the list {name} cannot be read: {error}") from error


_kept: list[str] = []


def _standard_input() -> str:
    """A copy of the standard input, which is listed more than once."""
    if not _kept:
        with tempfile.NamedTemporaryFile(prefix="topk-score-", delete=False) as copy:
            for line in sys.stdin.buffer:
                copy.write(line)
        _kept.append(copy.name)
        atexit.register(os.unlink, copy.name)
    return _kept[0]


def _explained(name: str, items: Iterator[Item]) -> Iterator[Item]:
    try:
        yield from items
    except (SourceError, ImportError):
        raise
    except Exception as error:  # tarfile, zlib, Arrow and file systems raise many kinds
        raise SourceError(f"{name} cannot be read: {error}") from error


class _Member(tarfile.TarInfo):
    """A member of an archive that notes whether the archive's end was reached: tarfile takes a cut for an end."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> "_Member":
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.ended = True
            raise


def _tar_items(name: str, place: str, _column: str, _root: str) -> Iterator[Item]:
    with files.opened(place) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(IMAGES):
                content = archive.extractfile(member)
                assert content is not None
                yield f"{name}/{member.name}", content.read()
            archive.members = []  # type: ignore  # tarfile keeps them all
        if not getattr(archive, "ended", False):
            raise SourceError(f"{name} cannot be read: it is cut off")


def _parquet_items(name: str, place: str, column: str, root: str) -> Iterator[Item]:
    import pyarrow.parquet as pq

    with files.opened(place) as file, pq.ParquetFile(file) as table:
        column = column or _find_column(name, table.schema_arrow.names)
        if column not in table.schema_arrow.names:
            raise SourceError(f"{name} has no column {column!r}; there are {', '.join(table.schema_arrow.names)}")
        row = 0
        for batch in table.iter_batches(batch_size=64, columns=[column]):
            for value in batch.column(0):
                yield _cell(f"{name}/{row}", value.as_py(), root)
                row += 1


def _find_column(name: str, names: Sequence[str]) -> str:
    found = next((column for column in COLUMNS if column in names), None)
    if found is None:
        raise SourceError(f"{name} has none of the columns {', '.join(COLUMNS)}: name one of {', '.join(names)}")
    return found


def _cell(name: str, value: Any, root: str) -> Item:
    """An image of a table: bytes, a path, or both in a struct, as Hugging Face's data sets write them."""
    if isinstance(value, dict):
        path, content = value.get("path"), value.get("bytes")
        return (path or name, content) if content is not None else _cell(name, path, root)
    if isinstance(value, str):
        return value, placed(value, root)
    if isinstance(value, bytes):
        return name, value
    return name, ImageError(f"the cell holds no image, got {type(value).__name__}")


def load(image: Any) -> Any:
    """The image with the content of a URL fetched.

    Raises:
        ImageError: there is none.
    """
    if isinstance(image, ImageError):
        raise image
    if not isinstance(image, str) or not files.is_url(image):
        return image
    try:
        with files.opened(image) as file:
            return file.read()
    except FileNotFoundError as error:
        raise ImageError(f"{image} does not exist") from error
    except Exception as error:  # each file system has errors of its own
        raise ImageError(f"{image} cannot be fetched: {error}") from error
