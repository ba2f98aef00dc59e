"""``topk-registry score``: the top-k classes of very many images, as Parquet files, on one machine or on a cluster."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from topk_export.commands.common import add_runtime_flags, command, say
from topk_export.errors import ModelFileError, SourceError
from topk_export.runtime.predictor import Predictor
from topk_export.runtime.session import nvidia_gpus
from topk_export.scoring import files
from topk_export.scoring.driver import Summary, jobs, prepare, score, tidy
from topk_export.scoring.labels import accuracy, labels_of
from topk_export.scoring.sources import KINDS, Groups, Shard, shards_of, told
from topk_export.scoring.work import Place, settings_for
from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.executors.errors import WorkerDiedError
from topk_registry.executors.interrupts import interruptible
from topk_registry.executors.local import GPUS, LocalExecutor, processors
from topk_registry.executors.pool import PoolExecutor
from topk_registry.executors.ray import RayExecutor
from topk_registry.folders.groups import read_groups
from topk_registry.folders.images import listed

HAS_ERRORS = 3


@command
def main(argv: Sequence[str]) -> int:
    """Score folders, lists, tar shards or Parquet of images into Parquet files, restartably."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.group is not None and (args.groups or args.group_column):
        parser.error("--group is the group of all images, --groups and --group-column tell the group of each")
    groups = _groups(args)
    settings = settings_for(
        args.model,
        batch_size=args.batch_size,
        top=args.top,
        max_set=args.max_set,
        full=args.all_classes,
        exif=args.exif,
        group=args.group,
        checksum=args.checksum,
        columns=tuple(dict.fromkeys(args.column)),
    )
    skipped: Counter[str] = Counter()
    total = sum(1 for _ in _shards(args, skipped, groups))
    if +skipped:
        say(told(skipped))
    if not total:
        say("error: the sources hold no images")
        return 1
    if groups is not None:
        _check_groups(groups, args.model)
    classes: Sequence[str] = ()
    if args.labels:
        metadata = Predictor(args.model, device="cpu", threads=1).metadata
        if metadata.several:
            raise ModelFileError(
                f"--labels expects a file with one label an image, as folders tell one, and {args.model} gives several"
            )
        classes = metadata.class_names
        mapping = labels_of(_shards(args, Counter()), classes, ignore_unknown=args.ignore_unknown_classes)
        settings = replace(settings, labels=tuple(mapping.numbers.items()))
        say(mapping.told)
    files.make_folder(args.output)
    place = _place(args)
    try:
        with files.held(args.output):
            prepare(args.output, total, overwrite=args.overwrite)
            with interruptible(), _executor(args, place, total) as (executor, workers), _progress(total) as tell:
                work = jobs(_shards(args, Counter(), groups), settings, place)
                summary = score(work, executor, workers=workers, again=args.retry_errors, told=tell)
            tidy(args.output)
    except KeyboardInterrupt:
        say(f"stopped; what is finished is in {args.output}. Go on with\n  {_command(argv)}")
        return 130
    except (WorkerDiedError, OSError) as error:
        say(f"error: {error}\nWhat is finished is in {args.output}. Go on with\n  {_command(argv)}")
        return 1
    status = _summed(summary, args.output, argv)
    if args.labels and not summary.failed:
        right = accuracy(args.output, total, classes)
        print(f"top-1 accuracy {right}")
        right.check(force=args.force)
    return status


def _summed(summary: Summary, output: str, argv: Sequence[str]) -> int:
    """Print the counts, and return the exit status."""
    for failure in summary.failed:
        say(f"error: {failure}")
    before = f", {summary.before} of them by an earlier call" if summary.before else ""
    before += f", {summary.changed} again as their sources have changed" if summary.changed else ""
    bad = f"; {summary.errors} rows hold an error instead of scores" if summary.errors else ""
    print(f"{summary.rows} images in {summary.shards} files of {output}{before}{bad}")
    if summary.failed:
        say(f"{len(summary.failed)} files could not be read to their end and have no scores. Try them again with\n  "
            f"{_command(argv)}")  # fmt: skip
        return 1
    return HAS_ERRORS if summary.errors else 0


def _groups(args: Any) -> Groups | None:
    """Read the table of groups; say where none are told and the file has thresholds by group.

    Raises:
        ModelFileError: groups are told, and the file has no thresholds by group.
    """
    names = Predictor(args.model, device="cpu", threads=1).metadata.group_names
    told = args.groups or args.group_column
    if told and not names:
        raise ModelFileError(f"groups of images are for files with thresholds by group, {args.model} has none")
    if names and not told and args.group is None:
        say(
            "note: sets have the largest threshold of all groups; --group, --groups or --group-column tells one of "
            f"{listed(names)}"
        )
    return Groups(read_groups(args.groups, column=args.group_column or "group")) if args.groups else None


def _check_groups(groups: Groups, model: str) -> None:
    """Raise an error unless the table has a group for every image, and the file a threshold for each group."""
    if missing := groups.missing:
        raise SourceError(f"{groups.file}: {len(missing)} images have no row: {listed(missing, 3)}")
    metadata = Predictor(model, device="cpu", threads=1).metadata
    for group in sorted(groups.used):
        metadata.group_number(group)


def _shards(args: Any, skipped: Counter[str], groups: Groups | None = None) -> Iterator[Shard]:
    """List the shards, as is done twice: to count, and to work."""
    return shards_of(
        args.source,
        kind=args.format,
        size=args.shard_size,
        root=args.root,
        column=args.image_column,
        skipped=skipped,
        groups=groups,
        group_column="" if args.groups else args.group_column,
    )


def _place(args: Any) -> Place:
    output = args.output if files.is_url(args.output) else os.path.abspath(args.output)
    remote = any(map(files.is_url, args.source))
    gpu = args.device in ("cuda", "tensorrt") or (args.device == "auto" and nvidia_gpus() > 0)
    return Place(
        model=os.path.abspath(args.model),
        output=output,
        device=args.device,
        require_gpu=args.require_gpu,
        threads=args.threads or 1,
        readers=args.readers or (8 if remote or gpu else 1),
    )


@contextmanager
def _executor(args: Any, place: Place, total: int) -> Iterator[tuple[PoolExecutor, int]]:
    """The executor of the shards and its number of workers."""
    executor = _on_ray(args, place, total) if args.ray else _local(args, place, total)
    try:
        yield executor, len(executor.workers)
    finally:
        executor.kill()


def _local(args: Any, place: Place, total: int) -> PoolExecutor:
    gpus = nvidia_gpus() if place.device != "cpu" else 0
    count = args.workers or gpus or max(1, processors() // (args.threads or 1))
    # what the environment names, it names for good reasons
    names = None if GPUS in os.environ else [str(i) for i in range(gpus)]
    return LocalExecutor(min(count, total), device="cuda" if gpus else "cpu", gpus=names)


def _on_ray(args: Any, place: Place, total: int) -> PoolExecutor:
    gpus = args.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if place.device in ("cuda", "tensorrt") else 0.0
    executor = RayExecutor(args.workers, address=args.ray, cpus=float(place.threads or 1), gpus=gpus, most=total)
    say(f"{len(executor.workers)} workers on the Ray cluster at {args.ray}")
    return executor


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar of shards with the counts of images and errors, where the output is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit="file", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def told(summary: Summary) -> None:
            bar.set_postfix(images=summary.rows, errors=summary.errors, refresh=False)
            bar.update(summary.shards + len(summary.failed) - bar.n)

        yield told


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["topk-registry", "score", *(word for word in argv if word != "--overwrite")])


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry score",
        description="Score images into DIR/part-000000.parquet and so on: rows in the order of the source, whatever "
        "the number of workers. An interrupted command, given again, goes on where it stopped.",
        epilog="exit status: 0, every image has scores; 3, some rows hold an error instead; 1, not all shards were "
        "scored; 130, interrupted",
    )
    add = parser.add_argument
    add("model", metavar="model.onnx", help="a file of topk-registry export")
    add(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="folders, images, lists of paths (.txt, or - for the standard input), tar shards, Parquet files; local or "
        "URLs; patterns such as 'shards/{000..099}.tar'",
    )
    add("--output", "-o", required=True, metavar="DIR", help="folder or URL of the Parquet files")
    add("--overwrite", action="store_true", help="remove the scores that the folder holds")
    add("--retry-errors", action="store_true", help="repeat finished shards that hold errors")
    add(
        "--checksum",
        action="store_true",
        help="tell changed sources by their bytes, which are then read twice (default: by size and time)",
    )
    source = parser.add_argument_group("source").add_argument
    source("--format", choices=KINDS, default="auto", help="what the sources are (default: by their names)")
    source("--root", default="", metavar="DIR", help="folder that relative paths in lists and tables start from")
    source(
        "--image-column",
        default="",
        metavar="NAME",
        help="column of a Parquet file with bytes, paths, or a struct of both",
    )
    source(
        "--shard-size",
        type=positive,
        default=1000,
        metavar="N",
        help="images a file of scores, for folders and lists (default: 1000)",
    )
    source("--group", metavar="NAME", help="the group of all images, where thresholds are by group")
    source(
        "--groups",
        metavar="FILE",
        help="CSV table with the group of each image of folders and lists: columns image and group",
    )
    source(
        "--group-column",
        default="",
        metavar="NAME",
        help="column of the groups, in --groups FILE (default: group) or, without it, in Parquet sources",
    )
    source("--exif", action="store_true", help="turn images as EXIF says (timm's evaluation does not)")
    rows = parser.add_argument_group("rows").add_argument
    rows("--top", type=positive, metavar="K", help="number of best classes (default: the file's k)")
    rows("--max-set", type=positive, metavar="N", help="the most classes of a prediction set to write")
    rows("--labels", action="store_true", help="take the folder of an image for its class: adds the column label, and "
         "prints the accuracy")  # fmt: skip
    rows(
        "--ignore-unknown-classes",
        action="store_true",
        help="with --labels: give images of folders with the name of no class no label (default: refuse them)",
    )
    rows("--force", action="store_true", help="with --labels: exit with status 0 although labels look wrong")
    rows(
        "--column",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="columns of installed plug-ins (`topk-registry doctor` counts those of topk_registry.columns)",
    )
    rows("--all-classes", action="store_true", help="also write logits and marginals of all classes")
    work = parser.add_argument_group("work").add_argument
    work("--workers", type=positive, metavar="N", help="processes (default: one a GPU, else one a processor)")
    work("--ray", metavar="ADDRESS", help="work on this Ray cluster: auto, HOST:6379 or ray://HOST:10001")
    work(
        "--gpus-per-worker",
        type=within("(0, inf)"),
        metavar="X",
        help="GPUs of a worker on Ray, such as 0.5 (default: 1 with --device cuda)",
    )
    work("--readers", type=positive, metavar="N", help="threads that read, of each process (default: 1; 8 for URLs "
         "and GPUs)")  # fmt: skip
    work("--batch-size", type=positive, metavar="N", help="images a run (default: 32, fewer where inputs are large)")
    add_runtime_flags(parser)
    return parser
