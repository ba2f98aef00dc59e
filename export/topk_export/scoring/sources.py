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
from dataclasses import dataclass, replace
from itertools import islice
from tarfile import EOFHeaderError  # type: ignore  # typeshed has it not
from typing import Any

from topk_export.errors import ImageError, SourceError
from topk_export.runtime.preprocess import SUFFIXES
from topk_export.scoring import files
from topk_registry.folders.groups import GroupTable

KINDS = ("auto", "images", "list", "tar", "parquet")
TARS = (".tar", ".tar.gz", ".tgz")
LISTS = (".txt", ".lst", ".list")
IMAGES = tuple(sorted(SUFFIXES))
ENDINGS = {"images": IMAGES, "tar": TARS, "parquet": (".parquet",), "list": LISTS}
COLUMNS = ("image", "img", "jpg", "png", "bytes", "content", "path", "file_name", "file", "url")

Entry = tuple[str, str]  # the name of a file, and its stamp where listing told it
Item = tuple[str, Any]  # the name of an image, and the image: a path, a URL, its bytes, or what is wrong with it
Grouped = tuple[str, Any, str | None]  # and its group, where it is told


@dataclass(frozen=True)
class Shard:
    """Images that are scored together, into one file.

    Args:
        kind: ``"images"``, ``"tar"`` or ``"parquet"``.
        names: paths or URLs of the images, or of the one file.
        root: what relative paths of the images begin from.
        column: of the images in Parquet; empty to look for it.
        stamps: of images whose folder told sizes and times when it was listed, as those of URLs do.
        groups: of images, by a table; empty where it has no row, or where no groups are told.
        group_column: of the groups in Parquet; empty where no groups are told.
    """

    kind: str
    names: tuple[str, ...]
    root: str = ""
    column: str = ""
    stamps: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    group_column: str = ""

    @property
    def grouped(self) -> bool:
        """True where the shard tells the group of each image."""
        return bool(self.groups or self.group_column)

    def __len__(self) -> int:
        """The number of images, 0 where only reading the file tells."""
        return len(self.names) if self.kind == "images" else 0

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def digest(self) -> str:
        """Tell this shard from others by its names."""
        return digest((self.kind, self.column, *self.names))

    def content(self, *, checksum: bool) -> str:
        """Tell the content of the shard's files by their sizes and times; with ``checksum`` by their bytes.

        Images of a list of URLs have no stamps, for asking would take a request for each.
        """
        if checksum:
            return digest(_or_missing(files.sha256_of, self._place(name)) for name in self.names)
        if self.stamps:
            return digest(self.stamps)
        places = [self._place(name) for name in self.names]
        asked = [place for place in places if self.kind != "images" or not files.is_url(place)]
        return digest(_or_missing(files.stamp_of, place) for place in asked)

    def items(self) -> Iterator[Item]:
        """Every image with its name, in order.

        Raises:
            SourceError: the file cannot be read on; everything before has been given.
        """
        return ((name, image) for name, image, _ in self.grouped_items())

    def grouped_items(self) -> Iterator[tuple[str, Any, str | None]]:
        """Every image with its name and its group; None where the shard tells no groups.

        Raises:
            SourceError: as :meth:`items` does.
        """
        if self.kind == "images":
            groups = self.groups or (None,) * len(self.names)
            return ((name, self._place(name), group) for name, group in zip(self.names, groups, strict=True))
        name, place = self.names[0], self._place(self.names[0])
        if self.kind == "tar":
            return _explained(name, ((*item, None) for item in _tar_items(name, place)))
        return _explained(name, _parquet_items(name, place, self.column, self.root, self.group_column))

    def _place(self, name: str) -> str:
        return placed(name, self.root)


def digest(parts: Iterable[str]) -> str:
    """Tell these texts from others."""
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
    groups: "Groups | None" = None,
    group_column: str = "",
) -> Iterator[Shard]:
    """Yield the shards of all sources, in order.

    Args:
        sources: folders, image files, lists of paths, tar files and Parquet files, or patterns of such.
        kind: one of :data:`KINDS`; ``"auto"`` goes by the ending of the name, and by the content of a folder.
        size: images of one shard, where they are files of their own.
        root: what the relative paths in lists and Parquet files begin from.
        column: of the images in Parquet.
        skipped: counts the files of folders that are left out, by their endings.
        groups: of images in folders and lists.
        group_column: of the groups in Parquet, where no table has them.

    Raises:
        SourceError: a source is none, or tells no groups where they are asked for.
    """
    here, skipped = os.getcwd(), Counter() if skipped is None else skipped
    for source in sources:
        for name in files.expanded(source) if source != "-" else ["-"]:
            for shard in _shards(name, kind, size, here, os.path.join(here, root), column, skipped):
                yield _with_groups(shard, name, groups, group_column)


def _with_groups(shard: Shard, source: str, groups: "Groups | None", column: str) -> Shard:
    if groups is not None:
        if shard.kind != "images":
            raise SourceError(
                f"--groups is of images in folders and lists, and {shard.title} is one file; --group-column alone "
                "names the column of groups in Parquet"
            )
        return replace(shard, groups=tuple(groups.of(name, source) for name in shard.names))
    if column and shard.kind != "parquet":
        raise SourceError(f"--group-column without --groups is of Parquet files, and {shard.title} is none")
    return replace(shard, group_column=column)


class Groups:
    """The groups of a table, and which of them were looked up.

    Args:
        table: with a column of images: paths below the folder that is scored, or as the scores name them.
    """

    def __init__(self, table: GroupTable) -> None:
        self._known = table.by_image(_key, where="of the images")
        self.file, self.used, self.missing = table.file, set[str](), list[str]()

    def of(self, name: str, source: str) -> str:
        """The group of an image by the name that its scores have; empty where the table has no row for it.

        Args:
            name: of the image.
            source: the folder or list that it is from.
        """
        prefix = f"{source.rstrip('/')}/"
        below = name.removeprefix(prefix) if files.is_url(name) else os.path.relpath(name, source)
        group = self._known.get(_key(below)) or self._known.get(_key(name), "")
        if group:
            self.used.add(group)
        else:
            self.missing.append(name)
        return group


def _key(name: str) -> str:
    """The form of a path that a table is looked up by."""
    return name if files.is_url(name) else os.path.normpath(name)


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
    by_ending = next((each for each, ends in ENDINGS.items() if name.lower().endswith(ends)), None)
    if by_ending is None:
        known = ", ".join(end for ends in ENDINGS.values() for end in ends)
        raise SourceError(f"{name} is no folder, and its ending is none of {known}: say what it is with --format")
    return by_ending


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
        entries = _chosen(folder, ENDINGS[each], left)
        first = next(entries, None)
        if first is not None:
            return each, _chained(first, entries, left, skipped)
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


def _explained(name: str, items: Iterator[Grouped]) -> Iterator[Grouped]:
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


def _tar_items(name: str, place: str) -> Iterator[Item]:
    with files.opened(place) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(IMAGES):
                content = archive.extractfile(member)
                assert content is not None
                yield f"{name}/{member.name}", content.read()
            archive.members = []  # type: ignore  # tarfile keeps them all
        if not getattr(archive, "ended", False):
            raise SourceError(f"{name} cannot be read: it is cut off")


def _parquet_items(name: str, place: str, column: str, root: str, group_column: str) -> Iterator[Grouped]:
    import pyarrow.parquet as pq

    with files.opened(place) as file, pq.ParquetFile(file) as table:
        column = column or _find_column(name, table.schema_arrow.names)
        wanted = [column, group_column] if group_column else [column]
        for each in wanted:
            if each not in table.schema_arrow.names:
                raise SourceError(f"{name} has no column {each!r}; there are {', '.join(table.schema_arrow.names)}")
        row = 0
        for batch in table.iter_batches(batch_size=64, columns=wanted):
            groups = batch.column(group_column).to_pylist() if group_column else [None] * len(batch)
            for value, group in zip(batch.column(column), groups, strict=True):
                told = ("" if group is None else str(group).strip()) if group_column else None
                yield (*_cell(f"{name}/{row}", value.as_py(), root), told)
                row += 1


def _find_column(name: str, names: Sequence[str]) -> str:
    image_column = next((column for column in COLUMNS if column in names), None)
    if image_column is None:
        raise SourceError(f"{name} has none of the columns {', '.join(COLUMNS)}: name one of {', '.join(names)}")
    return image_column


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
