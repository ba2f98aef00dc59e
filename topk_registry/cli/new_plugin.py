"""The command ``topk-registry new-plugin DIR`` copies the template of a Python project with one loss."""

import keyword
import re
import shlex
import shutil
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from topk_registry import registry
from topk_registry.cli import ArgumentParser

HERE = Path(__file__).resolve().parents[1]
PLACES = (HERE / "_template", HERE.parent / "plugins/template")  # in a wheel, in a checkout
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache", ".ruff_cache", "*.egg-info", "dist", "build")
DISTRIBUTION, PACKAGE, LOSS = "gce-loss", "gce_loss", "gce"  # names in the template, which the copy replaces
TEXTS = {".md", ".toml", ".py", ".yaml", ""}


def main(argv: Sequence[str]) -> int:
    """Create a Python project with an example loss that you can replace with your own loss."""
    parser = ArgumentParser(
        prog="topk-registry new-plugin",
        description="Create a Python project with one loss, the entry point of the loss, and a test.",
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    parser.add_argument("--name", help="name of the distribution, as in pip install NAME (default: the folder's name)")
    parser.add_argument("--loss", help="name of the loss (default: NAME without -loss or -plugin)")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    name = args.name or re.sub(r"[-_.\s]+", "-", folder.resolve().name).lower()
    loss = args.loss or re.sub(r"(?<=.)-(loss|plugin)(es|s)?$", "", name).replace("-", "_")
    if problem := _problem(folder, name, loss):
        parser.error(problem)
    make(folder, name=name, loss=loss)
    print(
        f"created {name} in {folder}: its loss {loss!r} is generalized cross-entropy; replace its formula\n"
        f'  cd {shlex.quote(args.folder)}\n  python -m pip install --editable ".[test]"\n  topk-registry check {loss}\n'
        "  python -m pytest"
    )
    return 0


def _problem(folder: Path, name: str, loss: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return f"expected a distribution name of lower-case words with hyphens, such as brier-loss, got {name!r}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", loss):
        return f"argument --loss: expected lower-case words with underscores, got {loss!r}"
    if keyword.iskeyword(name):
        return f"{name!r} is a keyword of Python: choose another name"
    if find_spec(name.replace("-", "_")) is not None:
        return f"there is already a package {name.replace('-', '_')!r}: choose another name"
    if registry.is_loss(loss):
        owner = registry.loss_info(loss).distribution
        return f"there is already a loss {loss!r} of {owner}, which has priority: choose another name with --loss"
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    return f"{folder} exists and is not empty" if occupied else ""


def make(folder: Path, *, name: str, loss: str) -> None:
    """Copy the template into ``folder``, with ``name`` as name of the distribution and ``loss`` as name of the loss."""
    shutil.copytree(next(filter(Path.is_dir, PLACES)), folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    words = {DISTRIBUTION: name, PACKAGE: name.replace("-", "_"), LOSS: loss}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TEXTS:
            text = re.sub(r"\(c\) \d{4}", f"(c) {date.today().year}", path.read_text(encoding="utf-8"))
            text = re.sub(rf"{DISTRIBUTION}|{PACKAGE}|\b{LOSS}(?=_|\b)", lambda match: words[match[0]], text)
            path.write_text(text, encoding="utf-8")
    (folder / "src" / PACKAGE).rename(folder / "src" / words[PACKAGE])
