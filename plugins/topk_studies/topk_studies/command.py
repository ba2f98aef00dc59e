"""tune several losses with the same learning rates, then compare the losses over several seeds"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from topk_registry.cli import INTERRUPTED, ArgumentParser, positive, within
from topk_registry.files import write_text
from topk_registry.train import TrainConfig, TrainError
from topk_registry.train.config import create_parser, flag_of, read_config
from topk_studies.studies import DATA, ON_PICTURES, PARTS, STUDIES, Flags, Study

# flags of `timm train` that a study sets for each run
SET = ("loss", "loss_opt", "seed", "output", "experiment", "overwrite", "resume", "dry_run")
ALSO = "All flags of `timm train`, except flags of the loss, seed and output, are accepted and apply to every run."


def create_study_parser() -> ArgumentParser:
    """Return the parser of the command ``topk-registry study``. Unknown arguments are flags of ``timm train``."""
    parser = ArgumentParser(prog="topk-registry study", description=__doc__)
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    texts = {name: (study.question, f"{study.question} {study.reference}.") for name, study in STUDIES.items()}
    texts["compare"] = ("compare losses on your own data", "Tune and compare losses on your own data.")
    for name, (summary, description) in texts.items():
        one = names.add_parser(name, help=summary, description=f"{description} {ALSO}")
        one.add_argument("--seeds", type=positive, default=5, metavar="N", help="number of seeds (default: 5)")
        one.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at the same time (default: 1)")
        one.add_argument("--output", type=Path, default=Path(f"{name}.json"), metavar="FILE",
                         help=f"JSON file (default: {name}.json); a file .runs.jsonl stores each run")  # fmt: skip
        one.add_argument("--dry-run", action="store_true", help="check the losses, list the runs, and stop")
        if name in STUDIES and not STUDIES[name].data:
            one.add_argument("--data", choices=("vectors", "images"), default="vectors",
                             help="built-in data to train on (default: vectors)")  # fmt: skip
    for name, (module, summary, seeds) in ON_PICTURES.items():
        protocol = f"The module topk_studies.{module} has the protocol."
        one = names.add_parser(name, help=summary, description=f"{summary}. {protocol}")
        one.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="folder of the data")
        one.add_argument("--seeds", type=positive, default=seeds, metavar="N",
                         help=f"seeds of all rows (default: {seeds})")  # fmt: skip
        if module == "heads":
            one.add_argument("--main-seeds", type=positive, default=12, metavar="N",
                             help="seeds of cross-entropy and the twelve main rows (default: 12)")  # fmt: skip
        one.add_argument("--minutes", type=within("(0, inf)"), default=float("inf"), metavar="N",
                         help="stop after so many minutes, and write the results of the finished seeds")  # fmt: skip
        one.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at the same time (default: 1)")
        one.add_argument("--output", type=Path, default=Path(f"{name}.json"), metavar="FILE",
                         help=f"JSON file (default: {name}.json); a file .runs.jsonl stores each run")  # fmt: skip
    one = names.choices["compare"]
    one.add_argument("--losses", nargs="+", required=True, metavar="LOSS",
                     help="NAME, 'NAME(option=value)' or 'NAME(option=a|b)'; the first is the baseline")  # fmt: skip
    one.add_argument(
        "--trials",
        type=positive,
        default=6,
        metavar="N",
        help="learning rates per loss, and per combination of its options (default: 6)",
    )
    one.add_argument("--rates", type=within("(0, inf)"), nargs=2, metavar=("LOW", "HIGH"),
                     help="range of the learning rates (default: from a quarter to 8 times --lr)")  # fmt: skip
    one.add_argument("--test-split", default="", metavar="NAME",
                     help="split for the results (default: test if it exists, else a half of --val-split)")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    """Tune losses with the same learning rates, and compare the losses over several seeds.

    Write the results to a JSON file, and print the results as a table.

    Args:
        argv: arguments after ``topk-registry study``.

    Returns:
        The exit status: 0 for success, 2 for an error, ``INTERRUPTED`` if a signal stopped the study.
    """
    parser = create_study_parser()
    args, rest = parser.parse_known_args(argv)
    parser.prog += f" {args.name}"
    if not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: there is no folder {args.output.parent}")
    if args.output.is_dir():
        parser.error(f"--output {args.output} is a folder: name a file in it")
    with suppress(ValueError):  # batch systems send SIGTERM; only the main thread can handle it
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.name in ON_PICTURES:
        return _on_pictures(parser, args, rest, argv)
    try:
        study, base, note = _set_up(args, _flags_of_train(parser, rest))
    except (TrainError, ValueError) as error:
        parser.error(str(error))

    from topk_studies.runner import Runs, cells, fingerprint, run, versions

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    data = fingerprint(base["data_dir"]) if base.get("data_dir") else ""
    runs = Runs(args.output.with_suffix(".runs.jsonl"), said=say, jobs=args.jobs, data=data)
    table = cells(study, base)
    tuning = [flags for cell in table for flags in cell.tuning()]
    say(f"{len(tuning)} trials ({len(tuning) - len(runs.missing(tuning))} already done) and "
        f"{len(table) * args.seeds} runs of results; {note or 'built-in splits'}")  # fmt: skip
    try:
        check(study, runs.missing(tuning))
        if args.dry_run:
            return _list(table, args.seeds)
        rows = run(study, base, range(args.seeds), runs)
    except TrainError as error:
        say(f"{parser.prog}: {error}".replace(PARTS, base["dataset_opt"].get("of") or "image folder"))
        return 2
    except KeyboardInterrupt:
        command = shlex.join(["topk-registry", "study", *argv])
        say(f"stopped: {len(runs.done)} runs are kept in {runs.path}; continue with\n  {command}")
        return INTERRUPTED
    document = {"study": args.name, "question": study.question, "reference": study.reference, "splits": note,
                "command": shlex.join(["topk-registry", "study", *argv]), "seeds": args.seeds, "flags": base,
                "chosen by": study.metric, "rows": rows,
                "versions": versions()}  # fmt: skip
    write_text(args.output, json.dumps(document, indent=1) + "\n")
    print(table_of(study, rows))
    print(f"{args.output} has all trials and seeds; {note or 'built-in splits'}")
    return 0


def _on_pictures(parser: ArgumentParser, args: argparse.Namespace, rest: Sequence[str], argv: Sequence[str]) -> int:
    if rest:
        parser.error(f"this study takes no flags of `timm train`: {shlex.join(rest)}")
    module = import_module(f"topk_studies.{ON_PICTURES[args.name].module}")
    print(f"reading {args.data_dir}; the first time takes minutes", file=sys.stderr, flush=True)
    try:
        return module.main(args.name, args)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        command = shlex.join(["topk-registry", "study", *argv])
        print(f"stopped; continue with\n  {command}", file=sys.stderr, flush=True)
        return INTERRUPTED


def _flags_of_train(parser: ArgumentParser, rest: Sequence[str]) -> dict[str, Any]:
    train = create_parser()
    train.prog = parser.prog
    given = vars(train.parse_args([word for word in rest if word != "--"]))
    file = given.pop("config", "")
    saved = {name: value for name, value in read_config(file, given).items() if name not in SET} if file else {}
    if wrong := [name for name in given if name in SET]:
        hint = "; pass --losses" if wrong[0].startswith("loss") else ""
        parser.error(f"a study sets {flag_of(wrong[0])} for each run{hint}")
    return {**saved, **given}


def _set_up(args: argparse.Namespace, given: dict[str, Any]) -> tuple[Study, Flags, str]:
    # returns the study, the flags that all its runs share, and a sentence that says which images select trials
    if args.name == "compare":
        from topk_studies.compare import flags_of, study_of

        config = TrainConfig(**{"eval_metric": "top5", **given})
        return (study_of(args.losses, args.trials, args.rates, config), *flags_of(config, args.test_split))
    study = STUDIES[args.name]
    data = study.data or args.data
    if "lr" in given:
        raise ValueError("this study sets --lr for each run")
    if data == "images" and args.name == "long-tail":
        raise ValueError("a long tail is supported for --data vectors only")
    if data == "images" and args.name == "spherical":
        renamed = {name: {"superclasses" if key == "families" else key: value for key, value in options.items()}
                   for name, options in study.conditions.items()}  # fmt: skip
        study = type(study)(**{**vars(study), "conditions": renamed})
    base = {**DATA[data], "eval_metric": study.metric, **given}
    base["dataset_opt"] = {**DATA[data].get("dataset_opt", {}), **given.get("dataset_opt", {})}
    if data == "cifar100":
        if not base.get("data_dir"):
            raise ValueError("pass --data-dir DIR, the folder that contains cifar-100-python")
        return study, base, "trials are chosen on 0.1 of the training images, results are on the test images"
    return study, base, ""


def check(study: Study, runs: Sequence[Flags]) -> None:
    """Train each loss of ``runs`` on one batch, so that errors occur before the study starts. Write no file.

    Raises:
        TrainError: a run could not start, or the metric is top-k accuracy and there are at most k classes.
    """
    from topk_registry.train import Trainer
    from topk_registry.train.data import open_split

    if runs:  # the trainer opens the other two splits
        config = TrainConfig(**runs[0])
        open_split(config, "test", channels=config.channels)
    different = {json.dumps([flags[name] for name in ("loss", "loss_opt")]): flags for flags in runs}
    for flags in different.values():
        trainer = Trainer(TrainConfig(**flags), quiet=True)
        n = trainer.run.config.num_classes or 0
        size = "".join(filter(str.isdecimal, study.metric.partition("top")[2]))
        if size and int(size) >= n:
            raise TrainError(f"{study.metric} of {n} classes is always 100 %: pass another --eval-metric, such as top1")
        trainer.dry_run()


def _list(table: Sequence[Any], seeds: int) -> int:
    from topk_studies.runner import describe

    for cell in table:
        print(f"{cell.condition}: {cell.contestant.text}")
        for flags in cell.tuning():
            print(f"  trial  {describe(flags)}")
        print(f"  result of the best trial with seeds 0 to {seeds - 1}")
    return 0


def table_of(study: Study, rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a text table. After the header, the table has one line per condition and loss.

    Each line has the number of learning rates, the selected learning rate and options, and the mean of each metric over
    the seeds. An asterisk marks a learning rate at the edge of the range. If a run diverged, the line has the word
    ``diverged`` instead of the mean. From the second loss of a condition on, the mean is followed by parentheses with
    the difference from the first loss and the half-width of the 95 % interval of this difference.
    """
    from topk_studies.runner import pairs

    lines = [["condition", "loss", "rates", "chosen", *study.metrics]]
    note = ""
    for row in rows:
        trial = row["chosen"] or {"lr": float("nan"), "loss_opt": {}}
        rates = sorted({each["lr"] for each in row["tuning"]})
        mark = "*" if len(rates) > 1 and trial["lr"] in (rates[0], rates[-1]) else ""
        if mark:
            note = "\n* the lowest or the highest of the learning rates: a wider range may be better"
        chosen = " ".join([f"lr={trial['lr']:g}{mark}", *pairs(trial["loss_opt"])])
        shown = [row["condition"], row["loss"], f"{len(rates)}", chosen]
        for metric in study.metrics:
            value = row[metric]
            gap = f" ({value['difference']:+.2f}" if "difference" in value else ""
            gap += f" ± {value['half_width']:.2f}" if "half_width" in value else ""
            shown.append("diverged" if value["mean"] is None else f"{value['mean']:.2f}{gap}{')' if gap else ''}")
        lines.append(shown)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines) + note
