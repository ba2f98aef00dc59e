"""Image data sets: built-in data sets, image folders, and changes such as label noise, long tails and subsets.

    from topk_registry.data import open_dataset
    train = open_dataset("topk/hierarchy", "train", noise=0.4)

The module ``topk_registry.data.folders`` finds folders that contain the images of one class. The module
``topk_registry.data.agreement`` compares labels with the predictions of a model. Neither module imports torch.
"""

from typing import TYPE_CHECKING

from topk_registry.lazy import lazy_names

if TYPE_CHECKING:
    from topk_registry.data.hierarchy import Hierarchy
    from topk_registry.data.labels import class_counts, class_names_of, is_indexed, labels_of
    from topk_registry.data.open import open_dataset
    from topk_registry.data.selection import Selection, class_balanced_epoch, hold_out, long_tail, renumber, subset
    from topk_registry.data.selection import with_label_noise as with_label_noise

__all__ = [
    "Hierarchy", "Selection", "class_balanced_epoch", "class_counts", "class_names_of", "hold_out", "is_indexed",
    "labels_of", "long_tail", "open_dataset", "renumber", "subset", "with_label_noise",
]  # fmt: skip
# imported on first use, because folders and agreement must not import torch
_HOMES = dict.fromkeys(__all__, "selection") | {"Hierarchy": "hierarchy", "open_dataset": "open"}
_HOMES |= dict.fromkeys(("class_counts", "class_names_of", "is_indexed", "labels_of"), "labels")

if not TYPE_CHECKING:  # if a type checker saw __getattr__, it would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
