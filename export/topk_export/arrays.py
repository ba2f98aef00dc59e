"""Arrays in files of NumPy: inputs of models, labels and logits."""

import zipfile
from pathlib import Path

import numpy as np

from topk_export.errors import ModelFileError


def read_arrays(file: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays in a file ``.npz``, by name.

    Raises:
        ModelFileError: the file is missing, is not a file of this format, or contains Python objects.
    """
    content = _load(file)
    if isinstance(content, np.ndarray):
        raise ModelFileError(f"{file} is not a file .npz with one array per input of the model")
    return content


def read_array(file: str | Path) -> np.ndarray:
    """Return the array in a file ``.npy``. Raise the errors of :func:`read_arrays`."""
    content = _load(file)
    if isinstance(content, dict):
        raise ModelFileError(f"{file} is not a file .npy with one array")
    return content


def _load(file: str | Path) -> np.ndarray | dict[str, np.ndarray]:
    try:
        data = np.load(file, allow_pickle=False)
        if isinstance(data, np.ndarray):
            return data
        with data:
            return dict(data)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{file} is not a file .npz or .npy of NumPy: {error}") from error
