"""Output of a run: the terminal, ``summary.csv``, ``curves.svg``, TensorBoard and Weights & Biases."""

import csv
import io
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topk_registry.errors import TrainError
from topk_registry.train.checkpoint import Progress, Row, write_text

LOSSES = ("train_loss", "nll", "nll_fitted", "bce")
SHOWN = ("nll", "nll_fitted", "bce", "top1", "top5", "macro_top5", "map", "micro_f1", "macro_f1")
LABELS = {
    "map": "mAP",
    "bce": "BCE",
    "nll": "NLL",
    "nll_fitted": "NLL at a fitted temperature",
    "calibration_error": "calibration error (0 to 2)",
}
PERCENT = re.compile(r"top\d|_f1$|map$|exact_match")  # names of metrics in percent
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Report:
    """Output of a run. Only the first process (``primary``) writes. With ``quiet``, it prints and draws nothing."""

    def __init__(self, *, primary: bool = True, quiet: bool = False) -> None:
        self.primary, self.quiet = primary, quiet
        self.metric, self.epochs, self.title = "train_loss", 0, ""
        self.folder: Path | None = None
        self.loggers: list[Any] = []
        self.began = time.perf_counter()
        self._open_line = False
        self._shown = self.began

    def say(self, text: str) -> None:
        """Print text on a new line."""
        if self.primary and not self.quiet:
            print("\n" * self._open_line + text, flush=True)
            self._open_line = False

    def begin_epoch(self, epoch: int, updates: int) -> None:
        self.epoch, self.updates, self.clock = epoch, updates, time.perf_counter()

    def update(self, update: int, now: float, mean: float, lr: float, images: int) -> None:
        """Show the progress within an epoch, and send loss and learning rate to the loggers.

        ``update`` is the index of the update in the epoch, ``now`` the loss of the update. ``mean`` and ``images`` are
        the mean loss and the number of images of the epoch so far.
        """
        rate = images / max(time.perf_counter() - self.clock, 1e-9)
        width = len(str(self.updates))
        self._line(
            f"Train: {self.epoch + 1}/{self.epochs} [{update + 1:{width}}/{self.updates}]  "
            f"Loss: {now:#.4g} ({mean:#.4g})  LR: {lr:.3e}  {rate:.0f} img/s"
        )
        done = self.epoch * self.updates + update + 1
        for logger in self.loggers:
            logger({"loss": now, "lr": lr}, done)

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

    def epoch_done(self, row: Row, history: Sequence[Row], seconds: float) -> None:
        """Print the metrics and the seconds of an epoch, write ``summary.csv``, and send the metrics to the loggers."""
        lines = [f"Epoch {self.epoch + 1}/{self.epochs}: train loss {row['train_loss']:.4f}  {seconds:.1f} s"]
        for prefix, name in (("eval_", "Test"), ("ema_", "Test (EMA)")):
            shown = (*SHOWN, "left_out")
            keys = [key for key in row if key.removeprefix(prefix) in shown and key.startswith(prefix)]
            keys += [self.metric] if self.metric.startswith(prefix) and self.metric not in keys else []
            if text := "  ".join(f"{label(key)} {number(key, row[key])}" for key in keys if key in row):
                lines.append(f"  {name}: {text}")
        self.say("\n".join(lines))
        for logger in self.loggers:
            logger(row, (self.epoch + 1) * self.updates)
        if self.folder is not None:
            write_text(self.folder / "summary.csv", csv_text(history))

    def finish(self, progress: Progress) -> None:
        """Draw the curves, and print a table with the metrics of the last and of the best epoch."""
        if not progress.history:
            return
        self.draw(progress.history)
        last, best = progress.history[-1], best_row(progress)
        names = [name for name in last if name not in ("epoch", "lr")]
        width = max(map(len, map(label, names)))
        lines = [f"{'':{width}}  {'last':>10}  {'best':>10}"]
        lines.append(f"{'epoch':{width}}  {last['epoch']:>10g}  {best['epoch']:>10g}")
        for name in names:
            values = (number(name, row.get(name, math.nan)) for row in (last, best))
            lines.append("  ".join([f"{label(name):{width}}", *(f"{value:>10}" for value in values)]))
        lines.append(f"best by {label(self.metric)}; {time.perf_counter() - self.began:.0f} s in all")
        if self.folder is not None:
            lines.append(f"{self.folder}: {', '.join(sorted(path.name for path in self.folder.iterdir()))}")
        self.say("\n".join(lines))

    def draw(self, history: Sequence[Row]) -> None:
        """Write ``curves.svg``, if matplotlib is installed."""
        if self.folder is None or self.quiet:
            return
        if find_spec("matplotlib") is None:
            self.say("curves.svg needs matplotlib: in the checkout, pip install -e '.[plots]'")
            return
        write_text(self.folder / "curves.svg", draw(self.title, history))

    def open_loggers(self, names: Sequence[str], settings: Mapping[str, Any], update: int) -> None:
        """Open the loggers ``names``. TensorBoard drops old entries after ``update``, the number of updates so far."""
        assert self.folder is not None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(self.folder), purge_step=update + 1 if update else None)
            self.loggers.append(lambda row, step: [writer.add_scalar(name, row[name], step) for name in row])
            self._close = [writer.close]
        if "wandb" in names:
            import wandb  # pyright: ignore[reportMissingImports]

            # the folder name is the id of the log, so that a resumed run continues its log
            run = wandb.init(name=self.folder.name, id=self.folder.name, resume="allow", config=dict(settings))
            self.loggers.append(lambda row, step: run.log(dict(row), step=step))
            self._close = [*getattr(self, "_close", []), run.finish]

    def close(self) -> None:
        for end in getattr(self, "_close", []):
            end()


def check_loggers(names: Sequence[str]) -> None:
    """Raise a TrainError if the Python package of a logger is not installed."""
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            raise TrainError(f"--log {name} needs a package: pip install {PACKAGES[name]}")


def best_row(progress: Progress) -> Row:
    """Return the metrics of the best epoch, else of the last epoch (if no epoch was evaluated), else {}."""
    rows = [row for row in progress.history if row["epoch"] - 1 == progress.best_epoch] or progress.history[-1:]
    return rows[0] if rows else {}


def against_cross_entropy(loss: str, own: Row, other: Row, metric: str, images: int) -> str:
    """Return a table with the metrics of a loss and of cross-entropy, each of its best epoch."""
    names = [name for name in dict.fromkeys(("eval_top1", metric, "eval_nll_fitted")) if name in own and name in other]
    width = max(map(len, map(label, names)))
    lines = [f"{'':{width}}  {loss:>16}  {'cross-entropy':>16}  {'difference':>10}"]
    for name in names:
        values = f"{number(name, own[name]):>16}  {number(name, other[name]):>16}"
        lines.append(f"{label(name):{width}}  {values}  {own[name] - other[name]:>+10.2f}")
    if PERCENT.search(metric):
        p, q = own[metric] / 100, other[metric] / 100
        chance = 196 * math.sqrt((p * (1 - p) + q * (1 - q)) / images)
        lines.append(
            f"one seed, {images} images: differences in {label(metric)} below {chance:.1f} points can be chance"
        )
    return "\n".join(lines)


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
