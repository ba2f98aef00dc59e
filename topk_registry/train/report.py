"""Output of a run: the terminal, ``summary.csv``, ``curves.svg``, TensorBoard and Weights & Biases."""

import csv
import io
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from topk_registry.train.run import Row, Run, write_text

LOSSES = ("train_loss", "nll", "nll_fitted", "bce")
SHOWN = ("nll", "nll_fitted", "bce", "top1", "top5", "macro_top5", "map", "micro_f1", "macro_f1")
LABELS = {
    "map": "mAP",
    "bce": "BCE",
    "nll": "NLL",
    "nll_fitted": "NLL at a fitted temperature",
    "ece": "top-1 calibration error (ECE)",
}
PERCENT = re.compile(r"top\d|_f1$|map$|exact_match|ece$")  # names of metrics in percent


class Report:
    """Output of a run. Only the first process (``primary``) writes. With ``quiet``, it prints and draws nothing."""

    def __init__(self, *, primary: bool = True, quiet: bool = False) -> None:
        self.primary, self.quiet = primary, quiet
        self.began = self._shown = self._epoch_began = time.perf_counter()
        self._loggers: list[Callable[[Row, int], object]] = []
        self.closing = ExitStack()  # closes the loggers
        self._open_line = False

    def say(self, text: str) -> None:
        """Print text on a new line."""
        if self.primary and not self.quiet:
            print("\n" * self._open_line + text, flush=True)
            self._open_line = False

    def begin_epoch(self) -> None:
        self._epoch_began = time.perf_counter()

    def update(self, run: Run, update: int, now: float, mean: float, images: int) -> None:
        """Show the progress within an epoch, and send loss and learning rate to the loggers.

        ``update`` is the index of the update in the epoch, ``now`` the loss of the update. ``mean`` and ``images`` are
        the mean loss and the number of images of the epoch so far.
        """
        rate = images / max(time.perf_counter() - self._epoch_began, 1e-9)
        epoch, updates = run.progress.epoch, run.updates_per_epoch
        self._line(
            f"Train: {epoch + 1}/{run.num_epochs} [{update + 1:{len(str(updates))}}/{updates}]  "
            f"Loss: {now:#.4g} ({mean:#.4g})  LR: {run.lr:.3e}  {rate:.0f} img/s"
        )
        self._log({"loss": now, "lr": run.lr}, epoch * updates + update + 1)

    def silent(self) -> bool:
        """Return whether the line on a terminal is older than three seconds."""
        return sys.stdout.isatty() and time.perf_counter() - self._shown > 3

    def testing(self, name: str, batch: int, batches: int, every: int) -> None:
        """Print a line such as ``Test: [11/50]``, but only for every ``every``-th batch and for the last batch."""
        if batch % every == 0 or batch == batches - 1:
            self._line(f"{name}: [{batch + 1:{len(str(batches))}}/{batches}]")

    def _line(self, text: str) -> None:
        self._shown = time.perf_counter()
        if sys.stdout.isatty() and self.primary and not self.quiet:
            print(f"\r\033[K{text}", end="", flush=True)
            self._open_line = True
        else:
            self.say(text)

    def epoch_done(self, run: Run, row: Row) -> None:
        """Print the metrics and the seconds of an epoch, write ``summary.csv``, and send the metrics to the loggers."""
        if not self.primary:
            return
        seconds, epoch = time.perf_counter() - self._epoch_began, run.progress.epoch
        lines = [f"Epoch {epoch}/{run.num_epochs}: train loss {row['train_loss']:.4f}  {seconds:.1f} s"]
        for prefix, name in (("eval_", "Test"), ("ema_", "Test (EMA)")):
            keys = [key for key in row if key.startswith(prefix) and key.removeprefix(prefix) in (*SHOWN, "left_out")]
            if run.metric in row and run.metric.startswith(prefix) and run.metric not in keys:
                keys.append(run.metric)
            if keys:
                lines.append(f"  {name}: " + "  ".join(f"{label(key)} {number(key, row[key])}" for key in keys))
        self.say("\n".join(lines))
        self._log(row, epoch * run.updates_per_epoch)
        write_text(run.folder / "summary.csv", csv_text(run.progress.history))

    def finish(self, run: Run) -> None:
        """Draw the curves, and print a table with the metrics of the last and of the best epoch."""
        history = run.progress.history
        if not history or not self.primary or self.quiet:
            return
        if find_spec("matplotlib") is None:
            self.say("curves.svg needs matplotlib: in the checkout, pip install -e '.[plots]'")
        else:
            title = f"{run.config.loss} on {run.config.data_name}, {run.config.model}"
            write_text(run.folder / "curves.svg", draw(title, history))
        last, best = history[-1], run.progress.best_row
        names = [name for name in last if name not in ("epoch", "lr")]
        rows = [("", "last", "best"), ("epoch", f"{last['epoch']:g}", f"{best['epoch']:g}")]
        rows += [(label(name), *(number(name, row.get(name, math.nan)) for row in (last, best))) for name in names]
        lines = [aligned(rows, 10, 10)]
        lines.append(f"best by {label(run.metric)}; {time.perf_counter() - self.began:.0f} s in all")
        lines.append(f"{run.folder}: {', '.join(sorted(path.name for path in run.folder.iterdir()))}")
        self.say("\n".join(lines))

    def open_loggers(self, run: Run, settings: Mapping[str, Any]) -> None:
        """Open the loggers of the run. TensorBoard drops entries of updates that the run will repeat."""
        if "tensorboard" in run.config.log:
            from torch.utils.tensorboard import SummaryWriter

            done = run.progress.epoch * run.updates_per_epoch
            writer = SummaryWriter(str(run.folder), purge_step=done + 1 if done else None)
            self._loggers.append(lambda row, step: [writer.add_scalar(name, row[name], step) for name in row])
            self.closing.callback(writer.close)
        if "wandb" in run.config.log:
            import wandb  # pyright: ignore[reportMissingImports]

            # the folder name is the id of the log, so that a resumed run continues its log
            log = wandb.init(name=run.folder.name, id=run.folder.name, resume="allow", config=dict(settings))
            self._loggers.append(lambda row, step: log.log(dict(row), step=step))
            self.closing.callback(log.finish)

    def _log(self, row: Row, step: int) -> None:
        for logger in self._loggers:
            logger(row, step)


def against_cross_entropy(loss: str, own: Row, other: Row, metric: str, images: int) -> str:
    """Return a table with the metrics of a loss and of cross-entropy, each of its best epoch."""
    names = [name for name in dict.fromkeys(("eval_top1", metric, "eval_nll_fitted")) if name in own and name in other]
    rows = [("", loss, "cross-entropy", "difference")]
    rows += [(label(name), number(name, own[name]), number(name, other[name]), f"{own[name] - other[name]:+.2f}")
             for name in names]  # fmt: skip
    lines = [aligned(rows, 16, 16, 10)]
    if PERCENT.search(metric):
        p, q = own[metric] / 100, other[metric] / 100
        chance = 196 * math.sqrt((p * (1 - p) + q * (1 - q)) / images)
        lines.append(
            f"one seed, {images} images: differences in {label(metric)} below {chance:.1f} points can be chance"
        )
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], *widths: int) -> str:
    """Return rows as text. The first column is as wide as its cells, the other columns have at least these widths."""
    first = max(len(row[0]) for row in rows)
    lines = ([f"{row[0]:{first}}", *(cell.rjust(w) for cell, w in zip(row[1:], widths, strict=True))] for row in rows)
    return "\n".join(map("  ".join, lines))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV text. There is one column for each name that occurs in any row."""
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def label(name: str) -> str:
    """Return the name of a metric for display, such as "macro top-5" for ``eval_macro_top5``."""
    ema = " (EMA)" if name.startswith("ema_") else ""
    name = re.sub(r"top(?=\d)", "top-", name.removeprefix("eval_").removeprefix("ema_"))
    name = LABELS.get(name) or name.replace("_f1", " F1").replace("_", " ")
    return name + ema


def number(name: str, value: float) -> str:
    if name.endswith("left_out"):
        return f"{value:g}"
    return f"{value:.2f} %" if PERCENT.search(name) else f"{value:.4f}"


def draw(title: str, history: Sequence[Row]) -> str:
    """Return an SVG image with the curves of losses and accuracies over the epochs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = dict.fromkeys(name for row in history for name in row if name.split("_", 1)[-1] in SHOWN or name in LOSSES)
    losses = [name for name in names if name == "train_loss" or name.split("_", 1)[-1] in LOSSES]
    panels = {"Loss": losses, "Accuracy (%)": [name for name in names if name not in losses]}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "topk-registry"}):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        figure.suptitle(title, fontweight="bold")
        for axes, (panel, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            axes.set(title=panel, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            for name in lines:
                points = [(row["epoch"], row[name]) for row in history if math.isfinite(row.get(name, math.nan))]
                if points:
                    axes.plot(*zip(*points, strict=True), ".-", label=label(name), gid=name)
            if axes.lines:
                axes.legend()
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
