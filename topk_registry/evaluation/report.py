"""``topk-registry report MODEL``: where is a model right, and do its probabilities come true?

By class precision, recall and top-k recall; the classes that are taken for each other, and groups of look-alikes; the
reliability of probabilities; risk against coverage; the images whose labels are least probable.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.evaluation.flags import add_flags, command


@command("report")
def main(argv: Sequence[str]) -> int:
    """Report on a model by class: accuracy, confusions, reliability, risk."""
    args = _parser().parse_args(argv)
    from topk_registry.analysis.model_report import report
    from topk_registry.analysis.report_page import report_page
    from topk_registry.evaluation.output import thumbnails, write_findings
    from topk_registry.evaluation.predictions import predictions_of
    from topk_registry.pages import write_page

    (model,) = predictions_of([args.model], args)
    findings = report(
        model.logits,
        model.labels,
        name=model.name,
        class_names=model.class_names,
        k=args.k,
        bins=args.bins,
        temperature=args.temperature,
    )
    _say(findings, model.images.name, args.rows)
    if args.superclasses:
        write_page(Path(args.superclasses), json.dumps(findings.superclasses(), indent=2, ensure_ascii=False) + "\n")
        print(f"wrote {args.superclasses}", file=sys.stderr)
    content = findings.to_dict()
    for row in content["worst"]:
        row["file"] = model.images.path(row["image"])
    write_findings(
        args,
        {**content, "data": model.images.name},
        lambda: report_page(findings, thumbnails(model.images), model.images.path),
    )
    return 0


def _say(findings: Any, name: str, most: int) -> None:
    from topk_registry.analysis.report_page import (
        PAIR_COLUMNS,
        advice_of,
        class_cells,
        class_columns,
        pair_rows,
        summary_rows,
        worst_classes,
    )
    from topk_registry.evaluation.output import text_table

    print(f"{findings.name}: {findings.images} images of {len(findings.class_names)} classes, {name}")
    print(text_table(("measure", "value"), summary_rows(findings)))
    lowest = [class_cells(findings, row) for row in worst_classes(findings, most)]
    print(f"\nlowest recall\n{text_table(class_columns(findings), lowest)}")
    if findings.pairs:
        print(f"\ntaken for each other\n{text_table(PAIR_COLUMNS, pair_rows(findings, most))}")
    print(f"\n{advice_of(findings)}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry report", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint, the folder of a training run, or an exported file")
    add("--k", type=positive, nargs="+", default=[1, 5], metavar="K", help="set sizes of accuracies (default: 1 5)")
    add("--bins", type=positive, default=15, metavar="N", help="bins of the reliability diagrams (default: 15)")
    add(
        "--temperature",
        type=within("(0, inf)"),
        default=1.0,
        metavar="T",
        help="temperature of the marginals (default: 1)",
    )
    add("--rows", type=positive, default=10, metavar="N", help="classes and pairs to print (default: 10)")
    add(
        "--superclasses",
        metavar="FILE",
        help="write the groups of look-alikes, as timm train --superclasses FILE takes them",
    )
    add_flags(parser)
    return parser
