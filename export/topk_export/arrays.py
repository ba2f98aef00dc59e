"""Arrays in files of NumPy: inputs of models, labels and logits."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from topk_export.errors import ModelFileError

BROKEN = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)  # what numpy.load raises for a wrong file


def read_arrays(file: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays with a batch axis in a file ``.npz``, by name.

    Raises:
        ModelFileError: the file is missing, is not a file of this format, contains Python objects, or contains a number
            in place of an array.
    """
    arrays = read_npz(file)
    if numbers := [name for name, array in arrays.items() if not array.ndim]:
        raise ModelFileError(f"expected one array per input of the model, {numbers[0]} in {file} is a number")
    return arrays


def read_npz(file: str | Path) -> dict[str, np.ndarray]:
    """Return all arrays and numbers in a file ``.npz``, by name. For a wrong file, raise :class:`ModelFileError`."""
    try:
        data = np.load(file, allow_pickle=False)
        if isinstance(data, np.ndarray):
            raise ValueError("the file contains one array without a name")
        with data:
            return {name: data[name] for name in data.files}
    except BROKEN as error:
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
    except BROKEN as error:
        raise ModelFileError(f"{file} is not a file .npy: {error}") from error
