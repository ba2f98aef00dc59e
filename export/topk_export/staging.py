"""Steps that ``export``, ``attach`` and ``calibrate`` share: the metadata of a new file, its verification, its move.

These steps do not need PyTorch.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any

from topk_export.errors import ExportError, ModelFileError, VerificationError, naming
from topk_export.runtime.metadata import MULTILABEL, MULTILABEL_OUTPUTS, OUTPUTS, TASKS, Metadata
from topk_export.runtime.weights import weights_beside
from topk_export.verify import beside, report_lines, verify_file, write_json
from topk_registry.files import move

REPORT = "report.json"
PACKAGES = ("topk-registry", "torch", "timm", "torchvision", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")
DEFAULT_K = 5

Progress = Callable[[str], object]


@contextmanager
def staged_at(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder next to ``path``. At the end, move all files of this folder to ``path``'s.

    If the ``with`` block raises an exception, nothing is moved.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
        staged = Path(folder) / path.name
        yield staged
        move_into_place(staged, path)


def described(
    n: int,
    *,
    k: int | None,
    temperature: float,
    task: str,
    class_names: Sequence[str] | None,
    marginals: bool,
    **facts: Any,
) -> Metadata:
    """Return the metadata of a new file with ``n`` classes. ``facts`` are other fields of :class:`Metadata`.

    The default of k is min(5, n - 1).

    Raises:
        ValueError: k, the temperature or the task is out of range.
        ExportError: a class name is wrong.
    """
    k = min(DEFAULT_K, n - 1) if k is None else k
    if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k < n:
        raise ValueError(f"k must be an integer of at least 1 and below the number of classes, {n}; got {k!r}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    outputs = MULTILABEL_OUTPUTS if task == MULTILABEL else OUTPUTS
    return Metadata(
        k=int(k),
        temperature=float(temperature),
        num_classes=n,
        class_names=_checked_names(class_names, n),
        outputs={name: text for name, text in outputs.items() if marginals or name != "marginals"},
        task=task,
        versions=_versions(),
        **facts,
    )


def _checked_names(names: Sequence[str] | None, n: int) -> tuple[str, ...]:
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


def _versions() -> dict[str, str]:
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


def move_into_place(staged: Path, path: Path) -> None:
    """Move all files of a new model from the folder of ``staged``, the ONNX file, to the folder of ``path``.

    If the process is interrupted, the folder never contains a model together with the weights of another model.
    Therefore the function first removes an old model that has external weights. The function moves the new model last,
    and syncs each file before the move.
    """
    if weights_beside(path).exists():
        path.unlink(missing_ok=True)
        weights_beside(path).unlink()
    for file in staged.parent.iterdir():
        if file != staged:
            move(file, path.with_name(file.name))
    move(staged, path)
