"""The library of compiled kernels that comes with a wheel.

It holds every entry for one or more levels of the processor, such as x86-64-v3 and x86-64-v4, and needs neither numba
nor Python. It may serve if it was made from the sources that are installed. The environment variable
``TOPK_REGISTRY_KERNELS`` chooses: the path of a library, ``compile`` for none, or empty for the installation's own.
"""

import ctypes
import os
import warnings
import zlib
from functools import lru_cache
from pathlib import Path

VARIABLE = "TOPK_REGISTRY_KERNELS"
OPERATORS = Path(__file__).parents[1]
NAME = "topk_kernels"
ENDING = {"nt": ".dll"}.get(os.name, ".so")
# Python around kernels, which may change without them
NOT_COMPILED = (
    *(f"cpu/{name}.py" for name in ("compiling", "entries", "library", "linking", "threads")),
    *(f"{operator}/numba/backend.py" for operator in ("ksubset", "perturbed", "rows", "update")),
    "ksubset/numba/chunks.py",
)


class Library:
    """Addresses of entries by their symbols.

    Args:
        path: of the shared library; None for no library, which has no entries.
        why: why there is none, or why it does not serve; "" where it does.
        level: the level of the processor whose code is used.
    """

    def __init__(self, path: Path | None = None, why: str = "", level: str = "") -> None:
        self.path, self.why, self.level = path, why, level
        self._code = None if path is None or why else ctypes.CDLL(str(path))

    def reject(self, why: str) -> None:
        """Have no entries from now on."""
        self.why, self._code = why, None

    def get(self, symbol: str) -> int | None:
        """The address of an entry, None where the library does not have it."""
        if self._code is None:
            return None
        try:
            function = getattr(self._code, exported(self.level, symbol))
        except AttributeError:
            return None
        return ctypes.cast(function, ctypes.c_void_p).value


def exported(level: str, symbol: str) -> str:
    """The name of an entry among the names that a library exports."""
    return f"topk_{level}_{symbol}".replace("-", "_")


@lru_cache(maxsize=1)
def library() -> Library:
    """Return the library that serves this process; it is loaded once."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "compile":
        return Library(why=f"{VARIABLE}=compile")
    path = Path(wanted) if wanted else OPERATORS / "cpu" / f"{NAME}{ENDING}"
    if not path.is_file():
        if wanted:
            raise FileNotFoundError(f"{VARIABLE} must be 'compile' or the path of a library, got {wanted!r}")
        return Library(why="this installation has no library of kernels")
    opened_library = opened(path)
    if wanted and opened_library.why:
        warnings.warn(f"{VARIABLE}: {opened_library.why}", stacklevel=2)
    return opened_library


def is_prebuilt() -> bool:
    """Whether a library serves this process, so that kernels need no numba."""
    return not library().why


def opened(path: Path) -> Library:
    """Load a library, and find the level of it that suits this processor."""
    try:
        code = ctypes.CDLL(str(path))
        made_from = ctypes.c_uint64.in_dll(code, "topk_edition").value
        levels = ctypes.string_at(ctypes.c_char_p.in_dll(code, "topk_levels")).decode().split()
        suits = code.topk_suits
    except (OSError, ValueError, AttributeError) as error:
        return Library(path, f"{path} cannot be loaded ({error})")
    if made_from != edition():
        return Library(path, f"{path} was made from other sources than those installed")
    level = next((level for i, level in enumerate(levels) if suits(i)), None)
    if level is None:
        return Library(path, f"{path} is for other processors ({', '.join(levels)})")
    return Library(path, level=level)


@lru_cache(maxsize=1)
def edition() -> int:
    """A number that changes with the source of any compiled kernel: those of one operator call another's functions."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sources()))


def sources() -> list[Path]:
    """The files that compiled kernels depend on."""
    files = {file for where in ("cpu/*.py", "*/numba/*.py", "*/definition.py") for file in OPERATORS.glob(where)}
    return sorted(files - {OPERATORS / name for name in NOT_COMPILED})
