"""Write prediction sets with guaranteed coverage into an exported file.

The file is run over held-out images. One part of them calibrates the sets, another reports how often they hold the
right class and how large they are. The result is a new file with the outputs set and set_size, and a report beside it.
A file of several labels gets a threshold for each class too, as the output labels, and sets that miss few of them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topk_export.commands.common import add_runtime_flags, command, say
from topk_registry.cli import ArgumentParser, ParseOptions, missed, positive, within

SCORE, TUNE = "raps", 0.2  # unless given
PARTS = ("", "tuning_", "report_")  # of the samples, as the facts count them
# flags of one kind of file, and what leaves them off
ONE_LABEL = {"score": None, "rule": None, "average_size": None, "temperature": "1", "allow_empty": False,
             "max_size": None, "tune_share": None, "penalty": None, "k_reg": None, "weight": None,
             "class_weights": None, "share": None, "clusters": None, "tree": None, "max_nodes": None,
             "groups": None, "group_column": None}  # fmt: skip
SEVERAL_LABELS = {"labels_csv": "", "target_format": None, "target_key": None}
FLAGS = {"penalty": "lambda"}  # where the flag is not called as its setting


@command
def main(argv: Sequence[str]) -> int:
    """Write prediction sets with guaranteed coverage into an exported file."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.average_size is not None and args.rule is not None:
        parser.error(f"--average-size takes the place of a rule, got --rule {args.rule} besides")
    from topk_export.runtime.predictor import Predictor

    metadata = Predictor(args.model, device="cpu").metadata
    _check_flags(args, several=metadata.several)
    output = Path(args.output or Path(args.model).with_name(f"{Path(args.model).stem}-sets.onnx"))
    if not (args.dataset or args.data_dir or args.labels_csv):
        raise ValueError("name the held-out images: --data-dir FOLDER, or --dataset NAME as timm train takes it")
    if not metadata.several:
        return _one_label(args, metadata.class_names, output)
    from topk_export.commands.calibrate_labels import calibrate_labels

    settings = _given(**{name: getattr(args, name) or None for name in SEVERAL_LABELS})
    return calibrate_labels(args, metadata.class_names, output, {**_data(args), **settings}, _runtime(args))


def _check_flags(args: Any, *, several: bool) -> None:
    """Refuse flags of the other kind of file."""
    others = ONE_LABEL if several else SEVERAL_LABELS
    names = [FLAGS.get(name, name) for name, off in others.items() if getattr(args, name) != off]
    given = [f"--{name.replace('_', '-')}" for name in names]
    if given and several:
        raise ValueError(
            f"{args.model} gives several labels an image, and {', '.join(given)} are of files with one: it takes "
            "--alpha, the share of labels that sets may miss, and --report-share"
        )
    if given:
        raise ValueError(
            f"{args.model} gives one label an image, and {', '.join(given)} are of files with several: name a folder "
            "with one folder a class, or a data set of such labels"
        )


def _runtime(args: Any) -> dict[str, Any]:
    from tqdm import tqdm

    return {
        "device": args.device,
        "require_gpu": args.require_gpu,
        "threads": args.threads,
        "batch_size": args.batch_size,
        "force": args.force,
        "progress": lambda items, label, total: tqdm(items, label, total, leave=False, disable=None),
    }


def _data(args: Any) -> dict[str, Any]:
    return {
        "folder": args.data_dir,
        "split": args.split,
        "options": args.dataset_opt,
        "download": args.dataset_download,
        "ignore_unknown": args.ignore_unknown_classes,
    }


def _one_label(args: Any, classes: Sequence[str], output: Path) -> int:
    from topk_export.calibration.data import open_dataset, with_groups
    from topk_export.calibration.plan import MAX_SIZE, Plan
    from topk_export.calibration.report import coverage_lines, report_page
    from topk_export.calibration.run import calibrate_file
    from topk_export.samples import open_folder
    from topk_registry.folders.images import split_folder
    from topk_registry.folders.trees import read_tree
    from topk_registry.pages import write_page

    plan = Plan(
        score=(args.score or ("tree" if args.tree and args.rule != "per-node" else SCORE)).replace("-", "_"),
        alpha=args.alpha,
        rule="average_size" if args.average_size is not None else (args.rule or "marginal").replace("-", "_"),
        options=_given(penalty=args.penalty, k_reg=args.k_reg, weight=args.weight, nodes=args.max_nodes),
        rule_options=_given(size=args.average_size, share=args.share, clusters=args.clusters),
        temperature=None if args.temperature == "fit" else float(args.temperature),
        report=args.report_share,
        tune=TUNE if args.tune_share is None else args.tune_share,
        max_size=args.max_size or MAX_SIZE,
        class_weights=tuple(json.loads(Path(args.class_weights).read_text())) if args.class_weights else None,
        allow_empty=args.allow_empty,
        seed=args.seed,
        tree=read_tree(args.tree, classes) if args.tree else None,
    )
    if args.max_nodes is not None and plan.score != "tree":
        raise ValueError(f"--max-nodes is of score tree, got score {plan.score}")
    folder = None
    if args.dataset:
        samples = open_dataset(args.dataset, classes, **_data(args))
    else:
        folder = split_folder(args.data_dir, args.split) or args.data_dir
        samples = open_folder(folder, classes, ignore_unknown=args.ignore_unknown_classes)
    if args.group_column and not args.groups:
        raise ValueError("--group-column is a column of --groups FILE, which is not given")
    if args.groups:
        samples = with_groups(samples, args.groups, column=args.group_column or "group", folder=folder)
    say(samples.line)
    calibrated = calibrate_file(args.model, output, samples, plan, **_runtime(args))
    report = Path(args.report or output.with_suffix(".html"))
    write_page(report, report_page(calibrated))
    values, summary = coverage_lines(calibrated), calibrated.counts.summary()
    if args.json:
        print(
            json.dumps({**calibrated.facts, "coverage": values, "file": str(output), "report": str(report)}, indent=2)
        )
        return 0
    _say(calibrated.facts, values, summary, len(calibrated.class_names), calibrated.groups)
    print(f"wrote       {output}\nreport      {report}")
    return 0


def _parser() -> ArgumentParser:
    from topk_registry.oldsets import RULES, score_names
    from topk_registry.oldsets.scores import spelled

    rules = spelled(name for name, rule in RULES.items() if rule.covers)
    parser = ArgumentParser(prog="topk-registry calibrate", description=__doc__)
    add = parser.add_argument
    add("model", metavar="model.onnx", help="a file of topk-registry export")
    add("-o", "--output", metavar="FILE", help="the calibrated file (default: MODEL-sets.onnx)")
    add("--report", metavar="FILE", help="the report's page (default: beside the file, .html)")
    add(
        "--alpha",
        type=missed,
        default=0.1,
        help="the share of labels that may be missed (default: 0.1)",
    )
    add(
        "--score",
        choices=spelled(score_names()),
        help=f"how badly a class fits an image (default: {SCORE})",
    )
    add("--rule", choices=rules, help="one threshold, or one by class (default: marginal)")
    add(
        "--average-size",
        type=within("(0, inf)"),
        metavar="K",
        help="sets of K classes on average, in place of a coverage",
    )
    add("--temperature", default="1", metavar="T", help="divides the logits, or 'fit' (default: 1)")
    add("--allow-empty", action="store_true", help="let sets be empty, as they should be for images of no class")
    add("--max-size", type=positive, metavar="N", help="the most classes of a ranked set (default: 256)")
    add("--json", action="store_true", help="print the facts as JSON")
    add("--tree", metavar="FILE", help="the tree of the classes, CSV or JSON: sets are nodes of it (--score tree)")
    add("--max-nodes", type=positive, metavar="M", help="with --tree: the most nodes of a set (default: 1)")
    add("--groups", metavar="FILE", help="CSV with the group of each image: a threshold for each group")
    add("--group-column", metavar="NAME", help="the column of --groups (default: group)")
    data = parser.add_argument_group("held-out images, from neither training nor the choice of the model")
    data.add_argument("--data-dir", metavar="DIR", help="a folder with one folder a class")
    data.add_argument("--dataset", default="", metavar="NAME", help="a data set as timm train takes it")
    data.add_argument(
        "--dataset-opt",
        nargs="*",
        default={},
        action=ParseOptions,
        metavar="K=V",
        help="options of a registered data set",
    )
    data.add_argument(
        "--labels-csv",
        default="",
        metavar="FILE",
        help="several labels: CSV of images and their labels; its names are below --data-dir (default: its own folder)",
    )
    data.add_argument(
        "--target-format",
        choices=("indices", "multihot"),
        help="several labels: what --target-key holds, numbers of classes or a 0 or 1 for each class",
    )
    data.add_argument("--target-key", metavar="NAME", help="column of a Hugging Face data set with the labels")
    data.add_argument("--split", default="validation", metavar="NAME", help="split of --dataset (default: validation)")
    data.add_argument(
        "--ignore-unknown-classes",
        action="store_true",
        help="leave images out whose class the file lacks (default: refuse them)",
    )
    data.add_argument("--force", action="store_true", help="go on although labels look wrong, by the file's accuracy")
    data.add_argument("--dataset-download", action="store_true", help="let the data set download itself")
    data.add_argument(
        "--report-share",
        type=within("(0, 1)"),
        default=0.5,
        metavar="P",
        help="share of the images that measure what is reported (default: 0.5)",
    )
    data.add_argument(
        "--tune-share",
        type=within("[0, 1)"),
        metavar="P",
        help=f"share of the others that choose options, where any are to be chosen (default: {TUNE:g})",
    )
    data.add_argument("--seed", type=within("[0, inf)", int), default=0, help="random seed of the shares (default: 0)")
    data.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images a run (default: 32)")
    fixed = parser.add_argument_group("options of scores and rules; those not given are tuned, or the papers' own")
    fixed.add_argument(
        "--lambda", dest="penalty", type=within("[0, inf)"), metavar="L", help="raps: the cost of a rank beyond k-reg"
    )
    fixed.add_argument(
        "--k-reg", type=within("[0, inf)", int), metavar="K", help="raps: the rank up to which there is no cost"
    )
    fixed.add_argument("--weight", type=within("[0, inf)"), metavar="W", help="saps: the cost of a rank")
    fixed.add_argument("--class-weights", metavar="FILE", help="pas: how much each class matters, a JSON list")
    fixed.add_argument(
        "--share", type=within("[0, 1]"), metavar="P", help="interpolated: weight of the class's own threshold, 0 to 1"
    )
    fixed.add_argument("--clusters", type=positive, metavar="N", help="clustered: number of clusters of classes")
    add_runtime_flags(parser)
    return parser


def _say(
    facts: dict[str, Any], values: dict[str, Any], summary: dict[str, float], n: int, groups: Sequence[Any]
) -> None:
    low, high = values["interval"]
    options = ", ".join(f"{key} {value:g}" for key, value in facts["options"].items())
    print(f"top-1       {facts['top1']:.1%} of {sum(facts[f'{part}samples'] for part in PARTS)} images")
    print(f"score       {facts['score']}" + (f" ({options})" if options else ""))
    print(f"promised    {facts['guarantee']}")
    print(f"coverage    {values['coverage']:.4f} ({low:.4f} to {high:.4f}) on {facts['report_samples']} other images")
    print(f"mean size   {summary['mean_size']:.2f} of {n} classes")
    if facts["best_class_alone"] and facts["samples_at_threshold"]:
        wanted = 1 - facts["alpha"]
        say(f"note: the best class alone covers at least {wanted:g}, so sets have no other; --allow-empty empties some")
    for group in groups:
        print(f"  {group.told}")
        if group.lack:
            say(f"note: {group.lack}")
    if facts["classes_in_every_set"] and not groups:
        say(
            f"note: {facts['classes_in_every_set']} classes have too few samples for a threshold of their own, so they "
            "are in every set; --rule interpolated or clustered limits them"
        )


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
