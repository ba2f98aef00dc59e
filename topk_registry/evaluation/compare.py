"""``topk-registry compare A B``: is a model better than another one, on the same images?

Each model is compared with the first: accuracies, log-likelihood and set sizes with the interval of their paired
difference, exact tests, and a verdict at a margin, corrected for all measures. Scores are kept, so that a further model
costs one pass over the images.
"""

from collections.abc import Sequence

from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.evaluation.flags import add_flags, command


@command("compare")
def main(argv: Sequence[str]) -> int:
    """Compare models on the same images: differences, exact tests, verdicts."""
    parser = _parser()
    args = parser.parse_args(argv)
    if len(args.models) < 2:
        parser.error("takes at least two models")
    from topk_registry.analysis.comparison import compare
    from topk_registry.analysis.comparison_page import columns_of, comparison_page, rows_of, summary_of, told_of
    from topk_registry.evaluation.output import text_table, thumbnails, write_findings
    from topk_registry.evaluation.predictions import predictions_of

    models = predictions_of(args.models, args)
    first = models[0]
    comparison = compare(
        [model.logits for model in models],
        first.labels,
        names=[model.name for model in models],
        class_names=first.class_names,
        k=args.k,
        margin=args.margin,
        coverage=args.coverage,
        alpha=args.alpha,
        fit_temperature=args.fit_temperature,
        resamples=args.resamples,
        seed=args.seed,
    )
    print(f"{comparison.images} images of {comparison.classes} classes, {first.images.name}")
    for other in comparison.others:
        print(f"\n{other.name} (second) beside {comparison.names[0]} (first)")
        print(text_table(columns_of(comparison), rows_of(other.differences)))
        print(summary_of(comparison, other))
    print(f"\n{told_of(comparison)}")
    files = {"files": {str(i): first.images.path(i) for other in comparison.others
                       for i in (*other.changes.gained.tolist(), *other.changes.lost.tolist())}}  # fmt: skip
    write_findings(
        args,
        {**comparison.to_dict(), "data": first.images.name, **files},
        lambda: comparison_page(comparison, thumbnails(first.images), first.images.path),
    )
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry compare", description=__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="checkpoints, folders of training runs, exported files; first is A")
    add("--k", type=positive, nargs="+", default=[1, 5], metavar="K", help="set sizes of accuracies (default: 1 5)")
    add(
        "--margin",
        type=within("[0, inf)"),
        default=0.5,
        metavar="P",
        help="percent points of accuracy that matter; hundredths of a nat, percent of the set size (default: 0.5)",
    )
    add(
        "--coverage",
        type=within("(0, 1)"),
        default=0.9,
        metavar="C",
        help="coverage of sets compared in size (default: 0.9)",
    )
    add(
        "--alpha",
        type=within("(0, 1)"),
        default=0.05,
        metavar="A",
        help="probability of any wrong verdict (default: 0.05)",
    )
    add(
        "--fit-temperature",
        action="store_true",
        help="divide each model's scores by the temperature at which the labels are most likely, so that losses whose "
        "scores have a scale of their own are compared in log-likelihood and set size",
    )
    add(
        "--resamples",
        type=positive,
        default=2000,
        metavar="N",
        help="resamples of the images (default: 2000)",
    )
    add(
        "--seed", type=within("[0, inf)", int), default=0, metavar="S", help="random seed of the resamples (default: 0)"
    )
    add_flags(parser)
    return parser
