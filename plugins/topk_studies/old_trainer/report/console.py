"""Progress, a line an epoch and a table on the console; ``summary.csv``, ``args.yaml``,
``classes.txt`` and ``curves.svg`` as files."""

import csv
import io
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from topk_registry.train.errors import SaveError
from topk_studies.old_trainer.report.curves import MISSING, Panel, can_draw, draw
from topk_studies.old_trainer.report.progress import Progress, Row

_SPELT = {"map": "mAP", "bce": "BCE"}
BETWEEN_PICTURES = 30.0  # seconds: a picture takes a fifth of one
CLASSES = "classes.txt"  # one name a line, in the order of the model's outputs
LOSSES = ("train_loss", "eval_nll", "eval_bce")
SHOWN = (*LOSSES, "eval_top1", "eval_top5", "eval_macro_top5", "eval_map", "eval_micro_f1", "eval_macro_f1")
PERCENT = re.compile(r"top\d|_f1$|_map$|exact_match")  # columns that are percentages


class Pace:
    """Speed within an epoch, and the time that the run still needs."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.epoch_seconds = epochs, 0.0  # of the last epoch, evaluation included
        self.start(0, 0, 1)

    def start(self, epoch: int, first: int, total: int) -> None:
        self.epoch, self.first, self.total = epoch, first, total
        self.images, self.began = 0, time.perf_counter()

    def add(self, step: int, images: int) -> str:
        """Count the images of one more batch; the speed and the time left as text."""
        self.images += images
        seconds = time.perf_counter() - self.began
        batch = seconds / max(1, step - self.first)
        left = batch * (self.total - step)
        left += (self.epochs - self.epoch - 1) * max(self.epoch_seconds, batch * self.total)
        return f"{self.images / max(seconds, 1e-9):.0f} img/s  {timedelta(seconds=round(left))} left"


class Report:
    """Output of a run: printed by the first process, and written into the run's folder."""

    def __init__(
        self, *, title: str, metric: str, epochs: int, began: float, primary: bool = True, quiet: bool = False
    ) -> None:
        self.title, self.metric, self.epochs = title, metric, epochs
        self.primary, self.quiet = primary, quiet
        self.folder: Path | None = None  # once there is one to write into
        self.began = began
        self.pace = Pace(epochs)
        self._bar: Any = None
        self._drawn = time.perf_counter()
        self._said_missing = False

    def say(self, text: str) -> None:
        if self.primary and not self.quiet:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def steps(self, batches: Iterable[Any], *, epoch: int, first: int, total: int) -> Iterator[Any]:
        """The batches, behind a progress bar on a terminal."""
        self.pace.start(epoch, first, total)
        hidden = self.quiet or not (self.primary and sys.stderr.isatty())
        label = f"epoch {epoch + 1}/{self.epochs}"
        with tqdm(batches, label, total, leave=False, initial=first, disable=hidden, dynamic_ncols=True) as bar:
            self._bar = bar
            yield from bar

    def step(self, step: int, images: int, loss: float, lr: float, *, due: bool) -> None:
        """Count ``images`` up to a step; where due, show the progress: beside the bar, or as a line without one."""
        pace = self.pace.add(step, images)
        if not due or self._bar is None:
            return
        if not self._bar.disable:
            self._bar.set_postfix_str(f"running loss={loss:.3f}, lr={lr:.2e}, {pace}", refresh=False)
        elif step < self.pace.total:  # the epoch's own line follows
            where = f"epoch {self.pace.epoch + 1}/{self.epochs}  {step:>{len(str(self.pace.total))}}/{self.pace.total}"
            self.say(f"{where}  running loss {loss:.4f}  lr {lr:.2e}  {pace}")

    def epoch(self, row: Row, seconds: float) -> None:
        self.pace.epoch_seconds = seconds
        width = len(str(self.epochs))
        names = dict.fromkeys((*SHOWN, self.metric))
        values = [f"{label(name)} {_number(name, row[name])}" for name in names if name in row]
        self.say(f"epoch {int(row['epoch']):{width}}/{self.epochs}  " + "  ".join(values) + f"  {seconds:.1f} s")

    def write(self, history: list[Row]) -> None:
        """Write ``summary.csv`` whole, so that a resumed run repeats no line, and ``curves.svg`` now and then."""
        if self.folder is not None and history:
            write_text(self.folder / "summary.csv", csv_text(history))
            if time.perf_counter() - self._drawn > BETWEEN_PICTURES:
                self.draw(history)

    def draw(self, history: list[Row]) -> None:
        """Write ``curves.svg``, or say once what it needs."""
        if self.folder is None or self.quiet or not history:
            return
        if can_draw():
            write_text(self.folder / "curves.svg", draw(self.title, _panels(history)))
        elif not self._said_missing:
            self.say(MISSING)
            self._said_missing = True
        self._drawn = time.perf_counter()

    def arguments(self, values: dict[str, Any]) -> None:
        if self.folder is not None:
            write_text(self.folder / "args.yaml", yaml.safe_dump(values, default_flow_style=False))

    def class_names(self, names: Sequence[str] | None) -> None:
        """Write one name a line, in the order of the model's outputs, for whoever exports the model."""
        if self.folder is not None and names:
            write_text(self.folder / CLASSES, "".join(f"{name}\n" for name in names))

    def best(self, progress: Progress) -> Row:
        """The row of the best epoch by the metric that picks checkpoints, else the last."""
        rows = [row for row in progress.history if row["epoch"] - 1 == progress.best_epoch] or progress.history[-1:]
        return rows[0] if rows else {}

    def finish(self, progress: Progress) -> None:
        """The last curves and the table: the last epoch, and the best by the metric that picks checkpoints."""
        if not progress.history:
            return
        self.draw(progress.history)
        last, best = progress.history[-1], self.best(progress)
        names = [name for name in last if name not in ("epoch", "lr") and not math.isnan(last[name])]
        width = max(map(len, map(label, names)))
        lines = ["", f"{'':{width}}  {'last':>10}  {'best':>10}", f"{'epoch':{width}}  {last['epoch']:>10g}  "
                 f"{best['epoch']:>10g}"]  # fmt: skip
        lines += [
            f"{label(name):{width}}  {_number(name, last[name]):>10}  {_number(name, best.get(name, math.nan)):>10}"
            for name in names
        ]
        lines.append(f"\nbest by {label(self.metric)}; {time.perf_counter() - self.began:.0f} s in all")
        if self.folder is not None:
            drawn = ["curves.svg"] if (self.folder / "curves.svg").exists() else []
            named = [CLASSES] if (self.folder / CLASSES).exists() else []
            files = ["model_best.pth.tar", "last.pth.tar", "summary.csv", "args.yaml", *named, *drawn]
            lines.append(f"{self.folder}: {', '.join(files)}")
        self.say("\n".join(lines))


def read_class_names(folder: Path) -> list[str]:
    """The names of a run's classes in the order of the model's outputs; none where its data did not tell."""
    file = folder / CLASSES
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def write_text(path: Path, text: str) -> None:
    """Write a file beside the old one, then rename: a reader sees one or the other."""
    half = path.with_name(path.name + ".tmp")
    try:
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise SaveError(f"could not write {path}: {error}") from error


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, under every name that any of them has."""
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _panels(history: list[Row]) -> list[Panel]:
    def line(name: str) -> list[tuple[float, float]]:
        return [(row["epoch"], row[name]) for row in history if name in row]

    measured = [name for name in SHOWN if any(name in row for row in history)]
    loss, accuracy = (
        {label(name): line(name) for name in measured if (name in LOSSES) == kind} for kind in (True, False)
    )
    return [Panel("Loss", loss), Panel("Accuracy", accuracy, unit="%")]


def label(name: str) -> str:
    """Return a column's name for people: ``eval_macro_top5`` is macro top-5, ``eval_nll`` is NLL."""
    name = re.sub(r"top(?=\d)", "top-", name.removeprefix("eval_"))
    return _SPELT.get(name) or name.replace("nll", "NLL").replace("_f1", " F1").replace("_", " ")


def _number(name: str, value: float) -> str:
    return f"{value:.2f}%" if PERCENT.search(name) else f"{value:.4f}"
