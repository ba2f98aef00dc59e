"""Find labels that are probably wrong, and pictures that are there twice.

A label is suspicious where its class is not among the k best of the model, and another class reaches the confidence
that it has, on average, where labels name it. With --folds N the training images are looked at: N models are trained as
the checkpoint was, each on a part of the images, and judge the others, whose labels they have not seen. The CSV file is
for a person to work through, and for timm train --exclude and --relabel.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.evaluation.flags import add_flags, command

if TYPE_CHECKING:
    from topk_registry.data.labels import Labels
    from topk_registry.evaluation.duplicates import Duplicates
    from topk_registry.evaluation.folds import Folds
    from topk_registry.evaluation.images import Images
    from topk_registry.evaluation.label_findings import LabelFindings
    from topk_registry.evaluation.predictions import Predictions

COLUMNS = ("rank", "image", "label", "suggested", "log_odds", "label_place", "duplicates", "action")


@command("labels")
def main(argv: Sequence[str]) -> int:
    """Find labels that are probably wrong, and duplicate images."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.folds_dir and not args.folds:
        parser.error("--folds-dir needs --folds")
    if args.fill and not args.csv:
        parser.error("--fill needs --csv")
    from topk_registry.evaluation.label_page import label_page
    from topk_registry.evaluation.output import write_findings
    from topk_registry.pages import write_page
    from topk_registry.train.report.console import csv_text

    findings = find(args)
    print("\n".join(findings.lines(args.top)))
    if args.csv:
        rows = [{name: row[name] for name in COLUMNS} for row in findings.rows(args.fill or "")]
        write_page(Path(args.csv), csv_text(rows) if rows else ",".join(COLUMNS) + "\n")
        print(
            f"wrote {args.csv}: fill its column action (exclude, relabel or keep), then train with --exclude and "
            "--relabel",
            file=sys.stderr,
        )
    write_findings(args, findings.facts(), lambda: label_page(findings, args.pictures))
    return 0


def find(args: Any) -> "LabelFindings":
    """The findings that a command's flags ask for."""
    from topk_registry.analysis.labels import label_issues
    from topk_registry.data.names import class_words, sample_names
    from topk_registry.evaluation.cache import default_folder
    from topk_registry.evaluation.duplicates import find_duplicates
    from topk_registry.evaluation.label_findings import LabelFindings
    from topk_registry.oldsets import fit_softmax_temperature

    folder = None if args.no_cache else Path(args.cache or default_folder())

    def look(images: "Images", labels: "Labels") -> "Duplicates | None":
        return None if args.no_duplicates or not images.indexed else find_duplicates(images, labels, folder)

    if args.folds:
        folds = _open_folds(args)
        duplicates = look(folds.images(), folds.labels)
        predictions = _scores(
            folds.together(group.members for group in duplicates.groups) if duplicates else folds, args
        )
        scores = f"out of sample by {args.folds} folds in {folds.folder}"
    else:
        predictions = _predictions(args)
        duplicates = look(predictions.images, predictions.labels)
        scores = f"by {predictions.name}"
    temperature = fit_softmax_temperature(predictions.logits, predictions.labels) if args.fit_temperature else 1.0
    issues = label_issues(predictions.logits, predictions.labels, k=args.k, temperature=temperature)
    about = {"model": str(args.model), "data": predictions.images.name, "scores": scores, "k": args.k,
             "temperature": temperature}  # fmt: skip
    images, words = predictions.images, class_words(predictions.class_names, len(predictions.class_names))
    # samples of a stream cannot be picked, and have numbers alone
    names = (
        sample_names(images.dataset, images.config.data_dir)
        if images.indexed
        else map(str, range(len(predictions.labels)))
    )
    return LabelFindings(predictions, issues, duplicates, list(names), words, about)


def _predictions(args: Any) -> "Predictions":
    from topk_registry.evaluation.models import data_settings
    from topk_registry.evaluation.predictions import predictions_of

    (predictions,) = predictions_of([args.model], args)
    config, trained = predictions.images.config, data_settings(args.model)
    same = all(trained.get(name) == getattr(config, name) for name in ("data_dir", "dataset", "dataset_opt"))
    if trained and same and config.val_split == trained.get("train_split"):
        print(
            f"topk-registry labels: {predictions.images.name} is what the model was trained on, and it may have "
            "learned wrong labels by heart; --folds 5 trains models that have not seen them",
            file=sys.stderr,
        )
    return predictions


def _open_folds(args: Any) -> "Folds":
    from topk_registry.evaluation.folds import open_folds
    from topk_registry.evaluation.models import given_settings

    given = given_settings(vars(args))
    if "val_split" in given:
        given["train_split"] = given["val_split"]
    if args.device != "auto":
        given["device"] = args.device
    if args.workers is not None:
        given["workers"] = args.workers
    folds = open_folds(args.model, args.folds, folder=args.folds_dir, settings=given)
    for note in folds.notes:
        print(f"topk-registry labels: {note}", file=sys.stderr)
    return folds


def _scores(folds: "Folds", args: Any) -> "Predictions":
    from topk_registry.evaluation.models import Running
    from topk_registry.train.errors import Interrupted

    try:
        return folds.predictions(Running(args.device, args.batch_size, folds.config.workers, args.use_ema))
    except Interrupted as error:
        raise KeyboardInterrupt from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry labels", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint of timm train, the folder of its run, or an exported file")
    add("--k", type=positive, default=1, metavar="K", help="a label among the K best is right enough (default: 1)")
    add(
        "--fit-temperature",
        action="store_true",
        help="divide the scores by the temperature at which the labels are most likely",
    )
    add(
        "--folds",
        type=within("[2, inf)", int),
        metavar="N",
        help="judge the training split, by N models that are trained without the images that they judge",
    )
    add("--folds-dir", metavar="DIR", help="folder of these trainings (default: folds-N beside the checkpoint)")
    add("--no-duplicates", action="store_true", help="do not look for duplicate images, which reads every image")
    add("--csv", metavar="FILE", help="write the labels to look at, for timm train --exclude and --relabel")
    add("--fill", choices=("exclude", "relabel"), help="fill the column action of suspicious labels")
    add("--top", type=within("[0, inf)", int), default=20, metavar="N", help="labels that are printed (default: 20)")
    add(
        "--pictures",
        type=within("[0, inf)", int),
        default=100,
        metavar="N",
        help="pictures of labels on the page (default: 100)",
    )
    add_flags(parser)
    return parser
