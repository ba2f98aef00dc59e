"""Steps that :func:`~topk_export.export_onnx` and :func:`~topk_export.attach` share. They do not need PyTorch."""

import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any

from topk_export.errors import ExportError, ModelFileError, VerificationError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.weights import external_sizes, files_of, weights_beside
from topk_export.verify import beside, report_lines, verify_file, write_json
from topk_registry.files import move

REPORT = "report.json"
PACKAGES = ("topk-registry", "torch", "timm", "torchvision", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")
DEFAULT_K = 5

Progress = Callable[[str], object]


def checked_k(k: int | None, n: int) -> int:
    """Return k, or by default min(5, n - 1). Raise ValueError if k is not an integer from 1 to n - 1."""
    if k is None:
        return min(DEFAULT_K, n - 1)
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer of at least 1 and below the number of classes, {n}; got {k!r}")
    return int(k)


def checked_temperature(temperature: float) -> float:
    """Return the temperature. Raise ValueError if it is not positive and finite."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
    return float(temperature)


def checked_names(names: Sequence[str] | None, n: int) -> tuple[str, ...]:
    """Return the class names, by default ``"0"``, ``"1"``, and so on.

    Raises:
        ExportError: there are not n names, two classes have the same name, or a name is not one line of text.
    """
    if names is None:
        return tuple(map(str, range(n)))
    if len(names) != n:
        raise ExportError(f"expected {n} class names, one per class of the model, got {len(names)}")
    if broken := [name for name in names if len(name.splitlines()) != 1]:
        raise ExportError(f"a class name must be one line of text, got {broken[0]!r}")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ExportError(f"two classes have the name {name!r}, so that class lists and folders cannot name them")
        seen.add(name)
    return tuple(names)


def versions() -> dict[str, str]:
    """Return a dictionary from the name to the version of each installed package in ``PACKAGES``."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def verify_staged(staged: Path, path: Path, metadata: Metadata, wanted: bool, progress: Progress) -> None:
    """Verify the new file ``staged``, and write the report beside it.

    If a check fails, the report goes to ``NAME.failed.json`` beside ``path``, the place of the finished file, and the
    function raises :class:`VerificationError`. If ``wanted`` is False, the report says that nothing was verified.
    """
    report: dict[str, Any] = {"passed": None, "checks": [], "not_verified": ["everything: verification was turned off"]}
    if wanted:
        progress("verifying with onnxruntime")
        try:
            report = verify_file(staged)
        except ModelFileError as error:
            raise VerificationError(f"the new file does not load: {error}") from error
    report["versions"] = dict(metadata.versions)
    write_json(report, beside(staged, REPORT))
    if failed := [check for check in report["checks"] if check["passed"] is False]:
        kept = beside(path, "failed.json")
        os.replace(beside(staged, REPORT), kept)
        details = "\n  ".join(report_lines({"checks": failed, "not_verified": ()}))
        raise VerificationError(f"the new file failed its verification and was not written; see {kept}\n  {details}")


def move_into_place(staged: Path, path: Path, others: Iterable[Path] = ()) -> None:
    """Move the new model ``staged`` to ``path``, and its external weights and ``others`` into the folder of ``path``.

    ``others`` are other files of the new model. If the process is interrupted, the folder never contains a model
    together with the weights of another model. Therefore the function first removes the old model at ``path`` if the
    old model has external weights. The function moves the new model last, and syncs each file before the move.
    """
    _, *weights = files_of(staged)
    before = external_sizes(path) if path.is_file() else {}
    if before:
        path.unlink()
    if weights_beside(path).name in before:
        weights_beside(path).unlink(missing_ok=True)
    for file in (*others, *weights):
        move(file, path.with_name(file.name))
    move(staged, path)
