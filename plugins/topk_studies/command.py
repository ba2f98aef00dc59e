"""``topk-registry study NAME``: a table or figure of the papers, on your data or on the built-in set."""

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from topk_registry import registry
from topk_registry.cli import ArgumentParser, ParseOptions, parse_pairs, positive, within
from topk_registry.registry.options import takes
from topk_studies.engine.catalogue import ON_IMAGENET, PAPERS, STUDIES, UnknownStudyError, load_study
from topk_studies.engine.runner import run_study
from topk_studies.engine.statistics import LOOKS
from topk_studies.engine.store import Store
from topk_studies.engine.study import BUDGETS, ConfigurationError, Options, Study
from topk_studies.old_trainer.executors.interrupts import interruptible
from topk_studies.old_trainer.executors.pool import PoolExecutor
from topk_studies.report import plots
from topk_studies.report.html import write_html
from topk_studies.report.output import print_section, write_data

ALL = "all"
COMPARE = "compare"
NIGHT = 8  # seeds that the standard budget goes up to
PLACES = ("executor", "ray", "slurm", "cpus_per_job", "gpus_per_job")  # where runs are done changes no result


def main(argv: Sequence[str]) -> int:
    """Repeat the studies of the papers, on your data or on a built-in set."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{name:<16} {title}" for name, title in STUDIES.items()))
        return 0
    if args.seeds and args.max_seeds:
        parser.error("--seeds fixes the seeds and --max-seeds adds them: give one of the two")
    if not args.names:
        parser.error("name a study, or 'all'; --list lists them")
    if (args.rates or args.folds > 1) and set(args.names) != {COMPARE}:
        parser.error(f"--rates and --folds are of study {COMPARE}")
    if args.rates and not args.rates[0] < args.rates[1]:
        parser.error(f"--rates must be a lower and a higher rate, got {args.rates[0]} {args.rates[1]}")
    names = list(PAPERS) if ALL in args.names else args.names
    try:
        for name in names:
            load_study(name)
    except UnknownStudyError as error:
        parser.error(str(error))
    args.losses = _expanded(args.losses) if args.losses else None
    try:
        args.flags = _read_flags(args.flags)
        for name in names:
            _check_flags(args, name)
    except ValueError as error:
        parser.error(str(error))
    try:
        plots.require()
    except plots.MissingExtraError as error:
        print(f"topk-registry study: {error}", file=sys.stderr)
        return 1
    if args.plan:
        return _plan(names, args)
    store = Store(args.output)
    try:
        with interruptible():
            status = 0 if args.report_only else _run(names, args, store)
    except (ConnectionError, ImportError, ValueError) as error:
        if args.executor == "local":
            raise
        print(f"topk-registry study: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; finished runs are in {store.root}. Go on with\n  {_command(argv)}", file=sys.stderr)
        return 130
    return max(status, _report(names, store))


def _run(names: Sequence[str], args: argparse.Namespace, store: Store) -> int:
    failed = 0
    with _executor(args, store) as executor:
        for name in names:
            print(f"== {name}", flush=True)
            study, options = load_study(name), _options(args, name)
            for doubt in _foreseen(study, options):
                print(doubt, flush=True)
            records = run_study(study, options, store, jobs=args.jobs, rerun=args.rerun, executor=executor)
            store.write_study(name, records, {"command": _command([name, *_given(args)]), "budget": options.budget})
            failed += sum(bool(record.error) for record in records)
    return 1 if failed else 0


def _plan(names: Sequence[str], args: argparse.Namespace) -> int:
    """Print how many runs there are to do, and the hours that they would take on this machine."""
    # with torch, which the list of studies does without
    from topk_studies.engine.plan import kinds, seconds_of, words
    from topk_studies.report.cells import duration

    planned: set[str] = set()
    seconds = 0.0
    for name in names:
        try:
            study, options = load_study(name), _options(args, name)
            new_kinds = kinds(study, options, planned)
        except ConfigurationError as error:
            print(f"topk-registry study {name}: {error}", file=sys.stderr)
            return 1
        print("\n".join([words(name, new_kinds, args.jobs), *_foreseen(study, options)]), flush=True)
        seconds += seconds_of(new_kinds)
    each = f"; with {args.jobs} side by side {duration(seconds / args.jobs)}" if args.jobs > 1 else ""
    print(f"in all {len(planned)} runs, {duration(seconds)}{each}")
    return 0


def _foreseen(study: Study, options: Options) -> Sequence[str]:
    from topk_studies.engine.experiment import TrainingStudy

    return study.foreseen(options) if isinstance(study, TrainingStudy) else ()


@contextmanager
def _executor(args: argparse.Namespace, store: Store) -> Iterator[PoolExecutor | None]:
    """The cluster's executor; None for processes of this machine, which the runner starts itself."""
    if args.executor == "local":
        yield None
        return
    executor = _on_ray(args) if args.executor == "ray" else _on_slurm(args, store)
    try:
        yield executor
    finally:
        executor.kill()


def _on_ray(args: argparse.Namespace) -> PoolExecutor:
    from topk_studies.old_trainer.executors.ray import RayExecutor

    return RayExecutor(args.jobs, address=args.ray, cpus=args.cpus_per_job, gpus=args.gpus_per_job)


def _on_slurm(args: argparse.Namespace, store: Store) -> PoolExecutor:
    from topk_studies.old_trainer.executors.slurm import SlurmExecutor

    needs = {"cpus_per_task": max(1, math.ceil(args.cpus_per_job)), "gpus_per_node": math.ceil(args.gpus_per_job)}
    needs["timeout_min"] = 240
    return SlurmExecutor(args.jobs, store.root.resolve() / "slurm", **{**needs, **args.slurm})


def _report(names: Sequence[str], store: Store) -> int:
    """Print the studies that were asked for, and write the reports of all that the folder holds."""
    sections = write_data(store)
    write_html(sections, store.root / "report.html")
    for section in sections:
        if section.name in names:
            print_section(section)
    missing = [name for name in names if name not in {section.name for section in sections}]
    if missing:
        print(f"no runs of {', '.join(missing)} in {store.root}", file=sys.stderr)
        return 1
    print(f"\n{store.root}: report.html, summary.json, runs.csv, runs.json")
    return 0


def _expanded(names: Sequence[str]) -> list[str]:
    """Names and patterns of losses as names; a name that nobody has is an error that lists those that there are."""
    losses: list[str] = []
    for name in names:
        if any(sign in name for sign in "*?["):
            losses += registry.list_losses(name)
        else:
            registry.get_loss_builder(name)
            losses.append(name)
    return list(dict.fromkeys(losses))


def _read_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of training, where ``loss_opt="k=2 tau=0.1"`` and its like are written as on the command line."""
    words = {name.replace("-", "_"): value for name, value in given.items()}
    if not any(isinstance(value, str) for value in words.values()):
        return words
    from topk_studies.old_trainer import TrainConfig  # with torch, which other commands here do without

    usual = TrainConfig().to_dict()
    for name, value in words.items():
        if isinstance(usual.get(name), dict) and isinstance(value, str):
            try:
                words[name] = parse_pairs(shlex.split(value))
            except ValueError as error:
                raise ValueError(f"--flags {name} {error}") from error
    return words


def _check_flags(args: argparse.Namespace, study: str) -> None:
    """Refuse an option that no loss of the study takes, and what a comparison cannot be made by."""
    losses = args.losses or getattr(load_study(study), "LOSSES", None) or registry.list_losses()
    for option in args.flags.get("loss_opt", {}):
        if not any(takes(registry.get_loss_builder(loss), option) for loss in losses):
            raise ValueError(f"--flags loss_opt: none of {', '.join(losses)} takes the option {option!r}")
    if study == COMPARE and args.flags.get("eval_metric") == "loss":
        raise ValueError("study compare ranks by an accuracy, such as eval_metric=top5, got eval_metric=loss")
    split = args.val_split or args.flags.get("val_split")
    if args.folds > 1 and split:
        raise ValueError(f"--folds {args.folds} holds out parts of the training data by itself; leave --val-split out")


def _options(args: argparse.Namespace, study: str) -> Options:
    """The options of a study."""
    flags = {**args.flags, **({"data_dir": args.imagenet} if args.imagenet and study in ON_IMAGENET else {})}
    for name in ("dataset", "data_dir", "dataset_opt", "num_classes", "val_split", "superclasses"):
        if getattr(args, name):
            flags[name] = getattr(args, name)
    if args.dataset_download:
        flags["dataset_download"] = True
    return Options(
        losses=tuple(args.losses) if args.losses else None,
        budget=args.budget,
        seeds=tuple(dict.fromkeys(args.seeds)) if args.seeds else None,
        max_seeds=args.max_seeds or (NIGHT if args.budget == "standard" and not args.seeds else None),
        flags=flags,
        test_split=args.test_split,
        device=args.device,
        rates=tuple(args.rates) if args.rates else None,
        folds=args.folds,
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry study",
        description="Run a study of the papers: its runs, each once (they are cached in --output, and an interrupted "
        "command goes on where it stopped), then tables in the terminal and a report. Without data named it runs on a "
        "built-in set.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="studies, or 'all' of the papers; see --list")
    add("--list", action="store_true", help="list the studies")
    add("--losses", nargs="+", metavar="LOSS", help="registered losses, or patterns such as '*'")
    add(
        "--budget",
        choices=BUDGETS,
        default="small",
        help="small: minutes on a laptop; standard: the same data with crops, long training, seeds as they are needed, "
        "a night; paper: the papers' own data, networks and schedules, days on GPUs",
    )
    add("--plan", action="store_true", help="run nothing: count the runs, time a few steps of each kind, say how long")
    add(
        "--rates",
        nargs=2,
        type=within("(0, inf)"),
        metavar=("LOW", "HIGH"),
        help=f"{COMPARE}: learning rates between which trials are spread (default: the optimizer's usual ones)",
    )
    add(
        "--folds",
        type=positive,
        default=1,
        metavar="N",
        help=f"{COMPARE}: judge each trial on N parts of the training data in turn, each an Nth of it, where a tenth "
        "has few images; tuning takes N times as long",
    )
    add("--seeds", nargs="+", type=within("[0, inf)", int), metavar="S", help="random seeds (default: the study's)")
    add(
        "--max-seeds",
        type=within(f"[2, {LOOKS[-1]}]", int),
        metavar="N",
        help="add seeds, up to N, until each claim is decided (5, 8, 13, 21, 40 are the looks); trials are then tuned "
        "on a seed of their own",
    )
    add(
        "--jobs",
        "-j",
        type=positive,
        default=1,
        metavar="N",
        help="runs side by side, each with its share of the cores and its own GPU",
    )
    add(
        "--executor",
        choices=("local", "ray", "slurm"),
        default="local",
        help="who does the runs: processes here, a Ray cluster, or Slurm jobs; all must see --output",
    )
    add("--ray", default="auto", metavar="ADDRESS", help="address of the Ray cluster (default: %(default)s)")
    add(
        "--slurm",
        nargs="*",
        default={},
        action=ParseOptions,
        metavar="K=V",
        help="submitit's parameters, such as slurm_partition=gpu timeout_min=240; cluster=local tries it here",
    )
    add(
        "--cpus-per-job",
        type=within("(0, inf)"),
        default=1.0,
        metavar="N",
        help="processors of a run, on Ray and Slurm",
    )
    add("--gpus-per-job", type=within("[0, inf)"), default=0.0, metavar="N", help="GPUs of a run, on Ray and Slurm")
    add("--output", default="output/studies", metavar="DIR", help="where runs and reports go (default: %(default)s)")
    add("--rerun", action="store_true", help="run anew what is cached, as after a change to a loss of your own")
    add("--report-only", action="store_true", help="write the report anew from what is cached")
    add("--device", default="cuda", metavar="NAME", help="device to train on; cuda is the CPU where there is no CUDA")
    data = parser.add_argument_group("data and training, as in timm train").add_argument
    data("--dataset", default="", metavar="NAME", help="<type>/<name> as in timm, or topk/<name>")
    data("--data-dir", default="", metavar="DIR", help="the data's root directory")
    data(
        "--imagenet",
        default="",
        metavar="DIR",
        help="ImageNet's folder, of train/ and validation/, for the studies that had it in their paper "
        f"({', '.join(ON_IMAGENET)}); the others keep their data",
    )
    data(
        "--dataset-opt",
        nargs="*",
        default={},
        action=ParseOptions,
        metavar="K=V",
        help="options of a registered data set",
    )
    data("--dataset-download", action="store_true", help="let the data set download itself")
    data("--num-classes", type=positive, metavar="N", help="number of classes")
    data(
        "--val-split",
        default="",
        metavar="NAME",
        help="split, or fraction of the training data, that epochs and trials are chosen by",
    )
    data("--test-split", metavar="NAME", help="split that results are reported on")
    data("--superclasses", default="", metavar="FILE", help="the superclass of each class, for label noise")
    data(
        "--flags",
        nargs="*",
        default={},
        action=ParseOptions,
        metavar="K=V",
        help="any other flag of timm train in every training run, such as model=resnet18 epochs=30 batch_size=128",
    )
    return parser


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["topk-registry", "study", *argv])


def _given(args: argparse.Namespace) -> list[str]:
    """The options that were given, less the studies and what concerns this call alone."""
    words: list[str] = []
    defaults = _parser().parse_args([])
    for name, value in vars(args).items():
        if value == getattr(defaults, name) or name in ("names", "rerun", "report_only", "output", "jobs", *PLACES):
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            words += [f"{key}={item}" for key, item in value.items()]
        elif isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words
