"""``topk-registry new-plugin DIR``: a distribution with one loss to start from.

The template is a distribution of its own, ``plugins/template`` in a checkout, whose tests pass as it is. Its names (of
the distribution, the import package, and the loss) are replaced.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from topk_registry import registry
from topk_registry.cli.parser import ArgumentParser

HERE = Path(__file__).resolve().parents[1]
PLACES = (HERE / "_template", HERE.parent / "plugins/template")  # in a wheel, in a checkout
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache", ".ruff_cache", "*.egg-info", "dist", "build")
DISTRIBUTION, PACKAGE, LOSS, AUTHOR = "gce-loss", "gce_loss", "gce", "the gce-loss authors"
ENDINGS = ("-losses", "-loss", "-plugins", "-plugin")
TEXTS = {".md", ".toml", ".py", ".yaml", ""}


def main(argv: Sequence[str]) -> int:
    """Create a package with a loss of your own to start from."""
    parser = ArgumentParser(
        prog="topk-registry new-plugin",
        description="Create a distribution in a new folder: one loss, its entry point and its test.",
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    parser.add_argument("--name", help="distribution, as in pip install NAME (default: the folder's name)")
    parser.add_argument("--loss", help="name of the loss (default: NAME without -loss or -plugin)")
    parser.add_argument("--author", help="author in the metadata and the license (default: the NAME authors)")
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    name = args.name or re.sub(r"[-_.\s]+", "-", folder.resolve().name).lower()
    loss = args.loss or _without_ending(name).replace("-", "_")
    author = args.author or f"the {name} authors"
    if problem := _problem(folder, name, loss, author):
        parser.error(problem)
    make(folder, name=name, loss=loss, author=author)
    print(
        f"created {name} in {folder}: its loss {loss!r} is generalised cross-entropy; replace the formula with yours\n"
        f'  cd {folder}\n  {Path(sys.executable).stem} -m pip install --editable ".[test]"\n'
        f"  topk-registry check {loss}\n  python -m pytest"
    )
    return 0


def _problem(folder: Path, name: str, loss: str, author: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return f"expected a distribution name of lower-case words with hyphens, such as brier-loss, got {name!r}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", loss):
        return f"argument --loss: expected lower-case words with underscores, got {loss!r}"
    if iskeyword(name):
        return f"{name!r} is a keyword of Python: choose another name"
    if (package := find_spec(name.replace("-", "_"))) is not None:
        return f"there is already a package {package.name!r}, which {name!r} would hide: choose another name"
    if registry.is_loss(loss):
        owner = registry.loss_info(loss).distribution
        return f"there is already a loss {loss!r} of {owner}, which would win: choose another name with --loss"
    if not re.fullmatch(r'[^"\\\n]+', author):
        return f"argument --author: expected a name without quotes or backslashes, got {author!r}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} exists and is not empty"
    return ""


def make(folder: Path, *, name: str, loss: str, author: str) -> None:
    """Copy the template into a folder, with these names."""
    source = next((place for place in PLACES if place.is_dir()), None)
    if source is None:
        raise FileNotFoundError(f"the template is not installed, expected it in {PLACES[0]}")
    shutil.copytree(source, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TEXTS:
            path.write_text(renamed(path.read_text(encoding="utf-8"), name, loss, author), encoding="utf-8")
    (folder / "src" / PACKAGE).rename(folder / "src" / name.replace("-", "_"))


def renamed(text: str, name: str, loss: str, author: str) -> str:
    """Return a text of the template with other names."""
    words = {AUTHOR: author, DISTRIBUTION: name, PACKAGE: name.replace("-", "_"), LOSS: loss}
    pattern = "|".join([re.escape(AUTHOR), DISTRIBUTION, PACKAGE, rf"\b{LOSS}(?=_|\b)"])
    text = re.sub(r"Copyright \(c\) \d{4}", f"Copyright (c) {date.today().year}", text)
    return re.sub(pattern, lambda match: words[match[0]], text)


def _without_ending(name: str) -> str:
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending) and name != ending), name)
