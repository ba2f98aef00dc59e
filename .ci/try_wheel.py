"""Run the losses' tests against an installed wheel: ``python .ci/try_wheel.py PYTHON``.

PYTHON is an environment with the wheel, pytest and filelock, and without numba. The tests run from a copy, so that the
packages of the checkout are not found; nothing may be compiled, and no kernel may be missing.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/test_kernels.py", "tests/losses/test_fused.py", "tests/losses/test_row_losses.py")
CHECK = """
from topk_registry.ops.cpu.library import library
import topk_registry, importlib.util
assert importlib.util.find_spec("numba") is None, "numba is installed"
assert not library().why, library().why
print(topk_registry.__file__, library().level)
"""


def main(python: str) -> int:
    """Return the status of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tests", Path(folder) / "tests")
        options = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (Path(folder) / "pyproject.toml").write_text(options, encoding="utf-8")
        subprocess.run([python, "-c", CHECK], cwd=folder, check=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
