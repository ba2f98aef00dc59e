"""``topk-registry plot``: curves of one's own training runs, and what losses look like."""

import csv
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from topk_registry import registry
from topk_registry.cli import ArgumentParser, ParseOptions, positive
from topk_registry.registry.options import accepts
from topk_studies.engine import registered
from topk_studies.engine.study import Record
from topk_studies.experiments import landscape
from topk_studies.experiments.landscape_findings import PANELS, REPLICATIONS, SHAPE, triangles
from topk_studies.old_trainer.report.console import label
from topk_studies.report import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = ("eval_top1", "eval_top5")
SUFFIXES = (".svg", ".png", ".pdf")
CLASSES, LABEL_SCORES = 20, (-6.0, 10.0)


def main(argv: Sequence[str]) -> int:
    """Draw curves of training runs side by side, or what losses look like."""
    parser = _parser()
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.loss):
        parser.error("give folders of runs, or --loss NAME ...: one of the two")
    if args.runs and (args.landscape or args.opt):
        parser.error("--landscape and --opt belong to --loss")
    if args.loss and args.columns:
        parser.error("--columns belongs to runs")
    if args.output.suffix not in SUFFIXES:
        parser.error(f"--output must end in {', '.join(SUFFIXES)}, got {str(args.output)!r}")
    try:
        plots.require()
        write(args)
    except (plots.MissingExtraError, OSError, TypeError, ValueError) as error:
        print(f"topk-registry plot: {error}", file=sys.stderr)
        return 1
    print(args.output)
    return 0


def write(args: Any) -> None:
    """Draw what the arguments ask for into ``args.output``."""
    import matplotlib as mpl

    # without the date, the same picture is the same file
    date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(args.output.suffix, {})
    style: Any = {**plots.STYLE, "svg.hashsalt": "topk-registry"}
    with mpl.rc_context(style):
        figure = runs(args.runs, args.columns or COLUMNS) if args.runs else losses(args)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.output, metadata=date, bbox_inches="tight", facecolor="white")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry plot",
        description="Draw curves of training runs side by side, or what losses look like.",
        epilog="examples: topk-registry plot output/train/*, topk-registry plot --loss ce 'topk_*' --landscape",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="folders of `timm train`, or summary.csv files"
    )
    parser.add_argument(
        "--columns", nargs="+", metavar="NAME", help=f"columns of summary.csv (default: {' '.join(COLUMNS)})"
    )
    parser.add_argument(
        "--loss", nargs="+", metavar="NAME", help="draw these losses against the label's score; wildcards work"
    )
    parser.add_argument(
        "--landscape", action="store_true", help="draw level sets over three scores that trade off, instead"
    )
    parser.add_argument(
        "--opt", nargs="+", default={}, action=ParseOptions, metavar="K=V", help="options of the losses"
    )
    parser.add_argument(
        "--k", type=positive, help="size of the set, for losses that take one (default: 5; 2 in a landscape)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plot.svg"),
        metavar="FILE",
        help="file to write, .svg, .png or .pdf (default: plot.svg)",
    )
    return parser


def runs(folders: Sequence[Path], columns: Sequence[str]) -> "Figure":
    """One panel a column of ``summary.csv``, one line a run."""
    tables = {name: _read(folder, columns) for name, folder in zip(_names(folders), folders, strict=True)}
    figure, panels = _figure(len(columns))
    looks = plots.looks(list(tables))
    for axes, column in zip(panels, columns, strict=False):
        for name, table in tables.items():
            look = looks[name]
            points = [(x, y) for x, y in zip(table["epoch"], table[column], strict=True) if math.isfinite(y)]
            axes.plot(*zip(*points, strict=True), color=look.colour, marker=look.marker, label=name) if points else None
        axes.set(title=label(column), xlabel="epoch")
        axes.set_ylabel("%" if "top" in column else "")
    panels[0].legend()
    return figure


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; whole paths where two would be called alike."""
    paths = [folder.parent if folder.is_file() else folder for folder in folders]
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _read(folder: Path, columns: Sequence[str]) -> dict[str, list[float]]:
    path = folder if folder.is_file() else folder / "summary.csv"
    if not path.exists():
        raise ValueError(f"{folder} is not the folder of a training run: it holds no summary.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no epoch yet")
    if missing := [column for column in columns if column not in rows[0]]:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(rows[0])}")
    epochs = [float(row["epoch"]) for row in rows]
    return {"epoch": epochs, **{column: [float(row[column] or "nan") for row in rows] for column in columns}}


def losses(args: Any) -> "Figure":
    """One panel a loss: against the label's score, or as a landscape."""
    names = list(dict.fromkeys(name for wanted in args.loss for name in registry.list_losses(wanted) or [wanted]))
    builders = [registry.get_loss_builder(name) for name in names]
    if unknown := [option for option in args.opt if not any(accepts(builder, option) for builder in builders)]:
        raise ValueError(f"--opt {unknown[0]}: none of {', '.join(names)} takes it")
    figure, panels = _figure(len(names))
    if args.landscape:
        k = args.k or SHAPE["k"]
        triangles(figure, panels, [(name, _landscape(name, k, args.opt)) for name in names])
        return figure
    for axes, name in zip(panels, names, strict=False):
        options = {"k": args.k or 5, **args.opt}
        label_scores(axes, name, **options)
        axes.set_title("\n".join(filter(None, [name, registered.numbers_of(name, **options)])), pad=14, fontsize=9)
    return figure


def _landscape(name: str, k: int, options: dict[str, Any]) -> Record:
    shape = {"loss": name, "options": options, **SHAPE, "k": k, "replications": REPLICATIONS}
    result = landscape.run(shape, Path(), lambda share, words: None)
    if "problem" in result:
        raise ValueError(f"{name} has no landscape: {result['problem']}")
    return Record(landscape.RUNS, landscape.VERSION, shape, result, seconds=0.0, when="", versions={})


def label_scores(axes: "Axes", name: str, **options: Any) -> None:
    """Draw a loss and its slope against the label's score; the other classes' scores are fixed, a few high."""
    others = torch.linspace(2, -2, CLASSES - 1)
    score = torch.linspace(*LABEL_SCORES, 401).requires_grad_()
    torch.manual_seed(0)
    rows = torch.cat((score[:, None], others.expand(len(score), -1)), 1)
    loss = registered.build(name, class_counts=[100] * CLASSES, **options)
    values = registered.each_row(loss, rows, torch.zeros(len(rows), dtype=torch.int64))
    (slope,) = torch.autograd.grad(values.sum(), score)
    axes.plot(score.detach(), values.detach(), label="loss")
    axes.plot(score.detach(), slope, "--", label="its slope")
    for place, text, side in ((0, " best other class", "left"), (4, "fifth best ", "right")):
        axes.axvline(float(others[place]), color="0.6", linewidth=0.8)
        axes.text(float(others[place]), 1.01, text, transform=axes.get_xaxis_transform(), fontsize=7, ha=side)
    axes.set_xlabel("score of the label")
    axes.legend()


def _figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """Make an empty figure with this number of panels, in rows."""
    from matplotlib.figure import Figure

    columns = min(panels, PANELS)
    rows = -(-panels // columns)
    figure = Figure(figsize=(3.4 * columns, 3.2 * rows), layout="constrained", facecolor="white")
    grid: Iterable[Axes] = figure.subplots(rows, columns, squeeze=False).flat
    return figure, _without_rest(list(grid), panels)


def _without_rest(axes: list["Axes"], panels: int) -> list["Axes"]:
    for empty in axes[panels:]:
        empty.axis("off")
    return axes[:panels]
