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
    try:
        data = np.load(file, allow_pickle=False)
        if isinstance(data, np.ndarray):
            raise ValueError("the file contains one array without a name")
        with data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{file} is not a file .npz with one array per input of the model: {error}") from error


def read_array(file: str | Path) -> np.ndarray:
    """Return the array in a file ``.npy``.

    Raises:
        ModelFileError: the file is missing, is not a file of this format, or contains Python objects.
    """
    try:
        array = np.load(file, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("the file contains several arrays")
        return array
    except (OSError, ValueError, EOFError) as error:
        raise ModelFileError(f"{file} is not a file .npy: {error}") from error
