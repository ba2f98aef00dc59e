"""Build a wheel that holds the compiled kernels: ``python .ci/wheel.py --output DIR [--library FILE]``.

It needs topk-registry, numba, hatchling, build and a C compiler. The wheel does not ask for numba: its ``[all]`` leaves
out what a wheel without kernels has there. On Linux ``auditwheel repair`` then gives it its tag.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from topk_registry.ops.cpu.library import ENDING, NAME

ROOT = Path(__file__).parents[1]
WITH_NUMBA, WITHOUT = "topk-registry[curves,fast,", "topk-registry[curves,"


def files() -> list[str]:
    """The files that git knows; where there is no git, those of a plain copy that a wheel is made from."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name]
    folders = ("topk_registry", "plugins", "export", ".ci")
    found = [file for folder in folders for file in (ROOT / folder).rglob("*") if "__pycache__" not in file.parts]
    found = [file for file in found if file.is_file() and not file.name.startswith(NAME)]
    return [str(file.relative_to(ROOT)) for file in (*found, *(ROOT.glob("*.*")), ROOT / "LICENSE") if file.is_file()]


def main() -> int:
    """Compile the kernels unless they are given, and build the wheel from the files that git knows."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the folder for the wheel")
    parser.add_argument("--library", type=Path, help="a library of kernels that was built from these files")
    args = parser.parse_args()
    output = args.output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in files():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
        library = tree / "topk_registry" / "ops" / "cpu" / f"{NAME}{ENDING}"
        if args.library:
            shutil.copyfile(args.library, library)
        else:
            parts = ["--folder", str(output / "kernels")]
            build = [sys.executable, "-m", "topk_registry", "kernels", "build", "--output", str(library), *parts]
            subprocess.run(build, cwd=tree, check=True)  # the module of the tree comes before the installed one
        project = tree / "pyproject.toml"
        text = project.read_text(encoding="utf-8")
        if text.count(WITH_NUMBA) != 1:
            raise SystemExit(f"pyproject.toml must have {WITH_NUMBA!r} once, in [all]")
        project.write_text(text.replace(WITH_NUMBA, WITHOUT), encoding="utf-8")
        wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(tree)]
        subprocess.run(wheel, check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
