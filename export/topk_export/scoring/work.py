"""The work on one shard, wherever it is done: read, score, and write one Parquet file whole."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from topk_export.errors import ImageError, ModelFileError
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.preprocess import MAX_PIXELS
from topk_export.runtime.ranking import check_outputs
from topk_export.runtime.stream import read_ahead
from topk_export.runtime.weights import digest_of, files_of
from topk_export.scoring import files
from topk_export.scoring.columns import opened, owners, values_of
from topk_export.scoring.rows import Rows, import_arrow, schema
from topk_export.scoring.sources import Shard, digest, load

ROW_GROUP = 4096  # rows: megabytes of the k best, tens of megabytes of a thousand classes
BATCH_BYTES = 32 << 20  # of one batch's input, so that large inputs make small batches
ABOUT = "topk_registry.score"


@dataclass(frozen=True)
class Settings:
    """Everything of a job that decides what its rows hold.

    Args:
        model: SHA-256 of the model file and its weights.
        batch_size: images of one run of the model.
        top: number of best classes; None: the file's k.
        max_set: the most classes of a set that are given; None: all.
        full: give logits and marginals of all classes too.
        exif: turn images as their EXIF orientation says.
        max_pixels: images with more pixels are refused.
        checksum: tell a changed source by its bytes, and not by its size and time.
        labels: the class of each folder of images, where labels are wanted.
        columns: names of columns of plug-ins.
        group: the group of all images, in a file with thresholds by group.
    """

    model: str
    batch_size: int
    top: int | None = None
    max_set: int | None = None
    full: bool = False
    exif: bool = False
    max_pixels: int = MAX_PIXELS
    checksum: bool = False
    labels: tuple[tuple[str, int], ...] | None = None
    columns: tuple[str, ...] = ()
    group: str | None = None

    def about(self, shard: Shard) -> dict[str, Any]:
        """Return what decides the rows of a shard's file; it is kept in there."""
        content = shard.content(checksum=self.checksum)
        labels = None if self.labels is None else dict(self.labels)
        facts = {"schema": 2, **asdict(self), "labels": labels, "shard": shard.digest(), "content": content}
        del facts["columns"]  # files without any stay those of earlier versions
        if self.group is None:
            del facts["group"]
        if shard.groups:
            facts["groups"] = digest(shard.groups)
        if shard.group_column:
            facts["group_column"] = shard.group_column
        return facts | ({"columns": owners(self.columns)} if self.columns else {})


@dataclass(frozen=True)
class Place:
    """Where and with what a shard is scored; the rows do not depend on it.

    Args:
        model: path of the model file.
        output: folder or URL of the scores.
        device: as of :class:`~topk_export.Predictor`.
        require_gpu: fail rather than run on the CPU.
        threads: CPU threads of one run.
        readers: threads that read images ahead; 1 reads none ahead.
    """

    model: str
    output: str
    device: str = "auto"
    require_gpu: bool = False
    threads: int | None = 1
    readers: int = 1


@dataclass(frozen=True)
class Job:
    """One shard to score."""

    number: int
    shard: Shard
    settings: Settings
    place: Place

    @property
    def part(self) -> str:
        return files.joined(self.place.output, part_name(self.number))


@dataclass(frozen=True)
class Scored:
    """A finished shard: its rows, and how many of them are errors."""

    number: int
    rows: int
    errors: int


def part_name(number: int) -> str:
    return f"part-{number:06d}.parquet"


def settings_for(model: str, *, batch_size: int | None = None, **options: Any) -> Settings:
    """The settings with a model's digest; the batch size is 32, or less where a model's input is large."""
    predictor = Predictor(model, device="cpu", threads=1, group=options.get("group"))
    check_outputs(predictor.output_names, predictor.metadata)
    opened(options.get("columns", ()), predictor.metadata)
    predictor.metadata.preprocess.check_known()
    largest = max(1, BATCH_BYTES // max(1, int(np.prod(predictor.input_shape)) * 4))
    return Settings(model=digest_of(*files_of(model)), batch_size=batch_size or min(32, largest), **options)


def score_shard(job: Job) -> Scored:
    """Score a shard and write its file, under its name only once it is whole."""
    settings = job.settings
    # before the first image is read: one that changes meanwhile is then told at the next call
    about = json.dumps(settings.about(job.shard), sort_keys=True)
    predictor = _predictor(job.place, settings)
    added = opened(settings.columns, predictor.metadata)
    columns = schema(
        full=settings.full,
        labels=settings.labels is not None,
        several=predictor.metadata.several,
        nodes="set_nodes" in predictor.output_names,
        groups=settings.group is not None or job.shard.grouped,
        about={ABOUT: about},
        added={name: column.type for name, column in added.items()},
    )
    rows = Rows(
        predictor,
        columns,
        top=settings.top,
        max_set=settings.max_set,
        labels=dict(settings.labels or ()),
        added={name: partial(values_of, name, column) for name, column in added.items()},
    )
    count = errors = 0
    with (
        files.written_whole(job.part) as file,
        import_arrow().parquet.ParquetWriter(file, columns, compression="zstd") as writer,
    ):
        for table in _groups(job, rows):
            count += len(table)
            errors += len(table) - table.column("error").null_count
            writer.write_table(table)
    return Scored(job.number, count, errors)


def _groups(job: Job, rows: Rows) -> Iterator[Any]:
    """The shard's rows in tables of at least :data:`ROW_GROUP` rows, but for the last."""
    pa = import_arrow()
    waiting: list[Any] = []
    for batch in _batches(job, rows):
        waiting.append(batch)
        if sum(map(len, waiting)) >= ROW_GROUP:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def _batches(job: Job, rows: Rows) -> Iterator[Any]:
    predictor = _predictor(job.place, job.settings)

    def read(item: tuple[str, Any, str | None]) -> tuple[str, np.ndarray | ImageError, str | None]:
        name, image, group = item
        try:
            if group is not None:
                check_group(group, predictor)
            return name, predictor.input_of(load(image)), group or job.settings.group
        except ImageError as error:
            return name, error, group or job.settings.group

    for batch in read_ahead(read, job.shard.grouped_items(), batch=job.settings.batch_size, workers=job.place.readers):
        yield rows.of(*zip(*batch, strict=True))


def check_group(group: str, predictor: Predictor) -> None:
    """Raise an ImageError where a row tells no group, or one that the file has no threshold for."""
    if not group:
        raise ImageError(f"expected a group, got none; there are {', '.join(predictor.metadata.group_names)}")
    try:
        predictor.group_number(group)
    except ModelFileError as error:
        raise ImageError(str(error)) from error


@lru_cache(maxsize=1)
def _predictor(place: Place, settings: Settings) -> Predictor:
    """The model of this process, opened once."""
    if digest_of(*files_of(place.model)) != settings.model:
        raise ModelFileError(f"{place.model} has changed since this command began, or differs between machines")
    return Predictor(
        place.model,
        device=place.device,
        require_gpu=place.require_gpu,
        threads=place.threads,
        max_pixels=settings.max_pixels,
        exif=settings.exif,
        group=settings.group,
    )


def finished(job: Job) -> tuple[Scored, dict[str, Any]] | None:
    """A shard's file as it is: its counts, and what it says of itself; None where there is none."""
    try:
        with files.opened(job.part) as file:
            footer = import_arrow().parquet.read_metadata(file)
    except FileNotFoundError:
        return None
    about = json.loads((footer.metadata or {}).get(ABOUT.encode(), b"{}"))
    return Scored(job.number, *_counted(footer)), about


def _counted(metadata: Any) -> tuple[int, int]:
    """Rows and errors of a file, by the statistics in its footer."""
    column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index("error")
    groups = (metadata.row_group(i).column(column) for i in range(metadata.num_row_groups))
    return metadata.num_rows, metadata.num_rows - sum(group.statistics.null_count for group in groups)
