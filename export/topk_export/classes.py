"""Class names of a model."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from topk_export.errors import ExportError


def read_class_names(path: str | Path) -> tuple[str, ...]:
    """Return the class names in a file, in the order of the class indices.

    A file with the suffix ``.json`` contains a list of names, or an object that maps each class index to a name. Any
    other file contains one name per line; empty lines are skipped.

    Raises:
        ExportError: the file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".json":
            return tuple(line.strip() for line in text.splitlines() if line.strip())
        content = json.loads(text)
        if isinstance(content, Mapping):
            content = [content[key] for key in sorted(content, key=int)]
    except (OSError, ValueError) as error:
        raise ExportError(f"class names cannot be read from {path}: {error}") from error
    if not isinstance(content, list) or not all(isinstance(name, str | int) for name in content):
        raise ExportError(f"class names cannot be read from {path}: expected a list of names, or a map to names")
    return tuple(map(str, content))


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Append the class index to names that occur several times. In ImageNet, a bird and a machine are named "crane"."""
    counts = Counter(names)
    return tuple(f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names))
