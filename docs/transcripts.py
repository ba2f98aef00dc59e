"""Run the blocks of a page that are marked ``<!-- show -->`` or ``<!-- start -->``, and write what they print into it.

A page is a script: its marked blocks run in order, in one empty folder. The block ``text`` after a marked block is the
output. ``<!-- show: 8 -->`` keeps 8 lines, and shortens the rest to ``...``. ``<!-- show stdout -->`` leaves out
standard error, where commands write their progress. Blocks with the mark ``start`` are also typed by ``.ci/run``. A
comment that starts with ``<!-- setup`` contains shell commands that run first, such as the training of a small model;
readers do not see it. The folder contains a link to ``docs``, and the block after ``<!-- file: NAME -->`` as the file
NAME. If a setup installs a plug-in with ``pip install --target lib``, the blocks find it.

    python docs/transcripts.py docs/attach.md ...          # write the outputs
    python docs/transcripts.py --check docs/attach.md ...  # compare the outputs, except numbers
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.DOTALL)
BLOCK = re.compile(
    r"(?P<head><!-- (?:show|start)(?P<only> stdout)?(?:: (?P<lines>\d+))? -->\n"
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
    args = parser.parse_args(argv)
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
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "docs").symlink_to(ROOT / "docs")
        for name, content in FILE.findall(text):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(content, encoding="utf-8")
        for setup in SETUP.findall(text):
            run("sh", setup, folder)

        def replaced(match: re.Match[str]) -> str:
            printed = run(match["kind"], match["code"], folder, only_stdout=bool(match["only"]))
            lines = shortened(printed, int(match["lines"] or 12))
            return match["head"] + (f"\n```text\n{lines}\n```\n" if lines else "")

        return BLOCK.sub(replaced, text)


def run(kind: str, code: str, folder: str, only_stdout: bool = False) -> str:
    """Run a block of a page in a folder, and return what it prints. If it fails, print the output and exit."""
    program = ["bash", "-euo", "pipefail", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "100", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([f"{folder}/lib", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    stderr = subprocess.PIPE if only_stdout else subprocess.STDOUT
    done = subprocess.run(
        program, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=1800
    )
    if done.returncode:
        sys.exit(f"a block of the page failed:\n{code}\n{done.stdout}\n{done.stderr or ''}")
    return done.stdout.replace(f"{folder}/", "").replace(str(ROOT), ".")


def shortened(output: str, count: int) -> str:
    """Return the first lines of an output, each with at most 110 characters."""
    lines = [line.rstrip() if len(line) <= 110 else f"{line[:107]}..." for line in output.strip("\n").splitlines()]
    return "\n".join(lines if len(lines) <= count else [*lines[: count - 1], "..."])


def masked(text: str) -> list[str]:
    """Return the lines of a page without numbers, and without differences of space."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
