"""``topk-registry new-plugin DIR``: a distribution of plug-ins to start from, with its names filled in.

The template is a distribution of its own, ``plugins/template`` in a checkout, whose tests pass as it is. Its three
names (of the distribution, of the import package, and the beginning of every plug-in's name) stand for themselves
alone, so that making another one is copying and replacing them.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from datetime import date
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from topk_registry.cli import ArgumentParser

HERE = Path(__file__).resolve().parents[1]
PLACES = (HERE / "_template", HERE.parent / "plugins/template")  # in a wheel, in a checkout
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache", ".ruff_cache", "*.egg-info", "dist", "build")
DISTRIBUTION, PACKAGE, PREFIX, AUTHOR = "gce-loss", "gce_loss", "gce", "the gce-loss authors"
ENDINGS = ("-losses", "-loss", "-plugins", "-plugin")
TEXTS = {".md", ".toml", ".py", ".yaml", ""}


def main(argv: Sequence[str]) -> int:
    """Make a distribution of plug-ins to start from: losses, a data set, a logger, a command and more."""
    parser = ArgumentParser(
        prog="topk-registry new-plugin",
        description="Make a distribution of plug-ins in a new folder: three losses (a table, a curve with the "
        "registry's kernels, a kernel of its own), a data set, a logger, a command, a score of prediction sets and a "
        "column, each with its entry point and its tests. Delete what you do not need.",
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    parser.add_argument("--name", help="distribution, as in pip install NAME (default: as the folder is called)")
    parser.add_argument("--prefix", help="what the plug-ins' names begin with (default: NAME without -loss or -plugin)")
    parser.add_argument(
        "--author", help="holder of the licence, and author in the metadata (default: the NAME authors)"
    )
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    name = args.name or re.sub(r"[-_.\s]+", "-", folder.resolve().name).lower()
    prefix = args.prefix or _without_ending(name).replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        parser.error(
            f"a distribution's name is lower-case words with hyphens between, such as brier-loss, got {name!r}"
        )
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", prefix):
        parser.error(f"argument --prefix: expected lower-case words with underscores between, got {prefix!r}")
    if iskeyword(name):
        parser.error(f"{name!r} is a word of Python: choose another name")
    if (package := find_spec(name.replace("-", "_"))) is not None:
        parser.error(f"there is a package {package.name!r} already, which {name!r} would hide: choose another name")
    if args.author is not None and not re.fullmatch(r'[^"\\\n]+', args.author):
        parser.error(f"argument --author: expected a name without quotes or backslashes, got {args.author!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{folder} exists and is not empty")
    make(folder, name=name, prefix=prefix, author=args.author or f"the {name} authors")
    print(_next_steps(folder, name, prefix))
    return 0


def make(folder: Path, *, name: str, prefix: str, author: str) -> None:
    """Copy the template into a folder, with these names."""
    source = next((place for place in PLACES if place.is_dir()), None)
    if source is None:
        raise FileNotFoundError(f"the template is not installed, expected it in {PLACES[0]}")
    shutil.copytree(source, folder, ignore=LEFT_OUT, dirs_exist_ok=True)
    package = name.replace("-", "_")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TEXTS:
            path.write_text(renamed(path.read_text(encoding="utf-8"), name, prefix, author), encoding="utf-8")
    (folder / "src" / PACKAGE).rename(folder / "src" / package)


def renamed(text: str, name: str, prefix: str, author: str) -> str:
    """A text of the template with other names: in the names of plug-ins, hyphens where the template has them."""
    held = "\0"  # what was replaced is not looked at again
    text = re.sub(r"Copyright \(c\) \d{4}", f"Copyright (c) {date.today().year}", text)
    text = text.replace(AUTHOR, f"{held}A").replace(DISTRIBUTION, f"{held}D").replace(PACKAGE, f"{held}P")
    text = re.sub(rf"\b{PREFIX}-", prefix.replace("_", "-") + "-", text)
    text = re.sub(rf"\b{PREFIX}(?=_|\b)", prefix, text)
    for mark, value in (("A", author), ("D", name), ("P", name.replace("-", "_"))):
        text = text.replace(held + mark, value)
    return text


def _without_ending(name: str) -> str:
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending) and name != ending), name)


def _next_steps(folder: Path, name: str, prefix: str) -> str:
    pip = f"{Path(sys.executable).stem} -m pip"
    return (
        f"made {name} in {folder}: its loss {prefix!r} is generalised cross-entropy, to be replaced by yours\n"
        f"  cd {folder}\n"
        f'  {pip} install --editable ".[test]"\n'
        f"  topk-registry losses '{prefix}*'\n"
        "  python -m pytest\n"
        "README.md says what each file is for"
    )
