"""Run the blocks of a page that are marked ``<!-- show -->``, and write what they print into it.

A page is a script: its marked blocks run in order, in one empty folder. The block ``text`` after a marked block is the
output. ``<!-- show: 8 -->`` keeps 8 lines, and shortens the rest to ``...``. ``<!-- show stdout -->`` leaves out
standard error, where commands write their progress. Comments that start with ``<!-- setup`` contain shell commands that
run first, such as the training of a small model; readers do not see them. Pages whose first setups are equal share
them. The folder contains a link to ``docs``, and the block after ``<!-- file: NAME -->`` as the file NAME. If a setup
installs a plug-in with ``pip install --target lib``, the blocks find it.

    python docs/transcripts.py docs/attach.md ...          # write the outputs
    python docs/transcripts.py --check docs/attach.md ...  # compare the outputs, except numbers
"""

import argparse
import atexit
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.DOTALL)
BLOCK = re.compile(
    r"(?P<head><!-- show(?P<only> stdout)?(?:: (?P<lines>\d+))? -->\n"
    r"```(?P<kind>sh|python)\n(?P<code>.*?)```\n)"
    r"(?:\n```text\n.*?```\n)?",
    re.DOTALL,
)
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write what the blocks of pages print into the pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a line differs")
    parser.add_argument("--no-warnings", action="store_true", help="exit with an error if a block prints a warning")
    args = parser.parse_args(argv)
    os.environ["PYTHONWARNINGS"] = "" if args.no_warnings else "ignore"
    wrong = 0
    for page in args.pages:
        before = page.read_text(encoding="utf-8")
        after = with_outputs(before)
        if args.check:
            changes = list(
                difflib.unified_diff(masked(before), masked(after), str(page), "what the page prints", lineterm="")
            )
            wrong += bool(changes)
            print("\n".join(changes) or f"{page}: as printed")
        else:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page}")
    return int(wrong > 0)


def with_outputs(text: str) -> str:
    """Return the text of a page with the outputs of its marked blocks."""
    files, setups = FILE.findall(text), SETUP.findall(text)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(prepared(tuple(files), tuple(setups)), folder, symlinks=True, dirs_exist_ok=True)

        def replaced(match: re.Match[str]) -> str:
            printed = run(match["kind"], match["code"], folder, only_stdout=bool(match["only"]))
            lines = shortened(printed, int(match["lines"] or 12))
            return match["head"] + (f"\n```text\n{lines}\n```\n" if lines else "")

        return BLOCK.sub(replaced, text)


@cache
def prepared(files: tuple[tuple[str, str], ...], setups: tuple[str, ...]) -> str:
    """Return a folder with a link to the documentation and with files, in which setups ran."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    if setups:
        shutil.copytree(prepared(files, setups[:-1]), folder, symlinks=True, dirs_exist_ok=True)
        run("sh", setups[-1], folder)
        return folder
    Path(folder, "docs").symlink_to(ROOT / "docs")
    for name, content in files:
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(content, encoding="utf-8")
    return folder


def run(kind: str, code: str, folder: str, only_stdout: bool = False) -> str:
    """Run a block of a page in a folder, and return what it prints. If it fails, print the output and exit."""
    program = ["bash", "-euo", "pipefail", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "100"}
    environment["PYTHONPATH"] = os.pathsep.join([f"{folder}/lib", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    stderr = subprocess.PIPE if only_stdout else subprocess.STDOUT
    done = subprocess.run(
        program, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=1800
    )
    printed = f"{code}\n{done.stdout}\n{done.stderr or ''}"
    if done.returncode:
        sys.exit(f"a block of the page failed:\n{printed}")
    if os.environ["PYTHONWARNINGS"] != "ignore" and "Warning: " in printed:
        sys.exit(f"a block of the page printed a warning:\n{printed}")
    return done.stdout.replace(f"{folder}/", "").replace(str(ROOT), ".")


def shortened(output: str, count: int) -> str:
    """Return the first lines of an output, each with at most 110 characters."""
    lines = [line.rstrip() if len(line) <= 110 else f"{line[:107]}..." for line in output.strip("\n").splitlines()]
    return "\n".join(lines if len(lines) <= count else [*lines[: count - 1], "..."])


def masked(text: str) -> list[str]:
    """Return the lines of a page without numbers and spaces, and without the last word of a line that was cut."""
    lines = (re.sub(r"\S*\.\.\.$", "...", line) for line in text.splitlines())
    return ["".join(NUMBER.sub("#", line).split()) for line in lines]


if __name__ == "__main__":
    raise SystemExit(main())
