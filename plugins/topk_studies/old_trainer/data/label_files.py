"""Label files of CIFAR-10N and CIFAR-100N: what several people said of CIFAR's training images (Wei et al. 2022).

A file is what ``torch.save`` wrote of a dictionary from names to arrays of one label an image, in the order of
torchvision's training split. Both files have ``clean_label``. CIFAR-10N's also has ``aggre_label``, ``worse_label`` and
``random_label1`` to ``random_label3``; CIFAR-100N's has ``noisy_label``, and ``noisy_coarse_label``, which are
superclasses. A file of that form for other data is read alike.

Reference: Wei, Zhu, Cheng, Liu, Niu, Liu. Learning with Noisy Labels Revisited: A Study Using Real-World Human
Annotations. ICLR 2022.
"""

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from topk_registry.data.labels import Labels

CLEAN = "clean_label"
COARSE = "coarse"  # in the name of labels that are superclasses


def read_label_file(file: str | Path) -> dict[str, Labels]:
    """Read the arrays of a file by name. No code of the file is run: it is read with ``weights_only``.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_arrays()):
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch's reader of a text or of half a file meets whatever its bytes say
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        if isinstance(error, pickle.UnpicklingError):  # whose message tells to read it as code
            reason = "it holds something else than arrays by name"
        raise ValueError(
            f"label file {file} cannot be read: {reason}; expected what torch.save wrote, such as CIFAR-10_human.pt"
        ) from error
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"label file {file}: expected names with an array of labels each, got {type(content).__name__}"
        )
    return {str(name): _checked(each, str(name), file) for name, each in content.items()}


def labels_from_file(file: str | Path, column: str | None, labels: Labels, num_classes: int) -> Labels:
    """Return a column of a label file, once the file is known to be of these samples.

    Args:
        file: see :func:`read_label_file`.
        column: its name; None where the file has one beside ``clean_label`` and those of superclasses.
        labels: of the samples [N], as the data set says, which ``clean_label`` must equal.
        num_classes: n.

    Raises:
        ValueError: there is no such column, or it is of other samples or classes.
    """
    columns = read_label_file(file)
    noisy = [name for name in columns if name != CLEAN and COARSE not in name]
    if column is None and len(noisy) != 1:
        raise ValueError(f"label file {file} has the columns {', '.join(columns)}: name one with --label-column")
    column = noisy[0] if column is None else column
    if column not in columns:
        raise ValueError(f"label file {file} has no column {column!r}; there are {', '.join(columns)}")
    file_labels = columns[column]
    if COARSE in column:
        raise ValueError(f"label file {file}: {column!r} are superclasses, expected one of {', '.join(noisy)}")
    if len(file_labels) != len(labels):
        raise ValueError(
            f"label file {file}: {column!r} has {len(file_labels)} labels, the training split {len(labels)}"
        )
    if len(file_labels) and not (file_labels.min() >= 0 and file_labels.max() < num_classes):
        raise ValueError(
            f"label file {file}: {column!r} has labels from {file_labels.min()} to {file_labels.max()}, "
            f"expected [0, {num_classes})"
        )
    clean = columns.get(CLEAN)
    if clean is not None and not np.array_equal(clean, labels):
        same = int((clean == labels).sum()) if len(clean) == len(labels) else 0
        raise ValueError(
            f"label file {file}: {CLEAN!r} agrees with {same} of {len(labels)} labels of the training split: is it of "
            "other data, or in another order? CIFAR's files are in the order of torch/cifar10 and torch/cifar100"
        )
    return file_labels


def _arrays() -> list[Any]:
    """What the pickle of a NumPy array names, under the names of NumPy 1 and 2."""
    reconstruct, scalar = np.ndarray.__reduce__(np.zeros(0))[0], np.int64(0).__reduce__()[0]
    homes = ("numpy.core.multiarray", "numpy._core.multiarray")
    made = [(reconstruct, f"{home}._reconstruct") for home in homes] + [(scalar, f"{home}.scalar") for home in homes]
    kinds = [type(np.dtype(kind)) for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"])]
    return [*made, np.ndarray, np.dtype, codecs.encode, *dict.fromkeys(kinds)]


def _checked(given: Any, name: str, file: str | Path) -> Labels:
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths, tensors that numpy does not take
        array = np.asarray(None)
    if array.ndim == 1 and array.dtype.kind in "iuf":
        with np.errstate(invalid="ignore"):  # of NaN and of what is too large, which differ from the whole number
            whole = array.astype(np.int64)
        if (array == whole).all():
            return whole
    got = f"{array.dtype} {list(array.shape)}" if array.ndim else type(given).__name__
    raise ValueError(f"label file {file}: {name!r} must be one whole number a sample, got {got}")
