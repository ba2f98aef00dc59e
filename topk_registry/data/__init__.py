"""Data sets of images: built-in ones, folders, label noise, long tails and subsets.

    from topk_registry.data import open_dataset
    train = open_dataset("topk/hierarchy", "train", noise=0.4)

Open
    open_dataset(name, split, root, **options)   a data set by the name that ``timm train --dataset`` takes
    Ambiguous, Hierarchy, Several                the built-in data sets
    Selection                                    samples of a data set, with labels of their own
Change, for a data set of your own
    with_label_noise, long_tail, subset, hold_out, renumber, class_balanced_epoch
Describe
    labels_of, k_hot_of, class_names_of, class_counts, superclasses_of, is_indexed

``topk_registry.data.folders`` reads folders as classes (``read_folders``, ``class_map``), and
``topk_registry.data.agreement`` tells whether labels fit a model; neither imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topk_registry.data.ambiguous import Ambiguous as Ambiguous
    from topk_registry.data.hierarchy import Hierarchy as Hierarchy
    from topk_registry.data.label_noise import with_label_noise as with_label_noise
    from topk_registry.data.labels import class_counts as class_counts
    from topk_registry.data.labels import class_names_of as class_names_of
    from topk_registry.data.labels import is_indexed as is_indexed
    from topk_registry.data.labels import k_hot_of as k_hot_of
    from topk_registry.data.labels import labels_of as labels_of
    from topk_registry.data.labels import superclasses_of as superclasses_of
    from topk_registry.data.open import open_dataset as open_dataset
    from topk_registry.data.selection import Selection as Selection
    from topk_registry.data.selection import class_balanced_epoch as class_balanced_epoch
    from topk_registry.data.selection import hold_out as hold_out
    from topk_registry.data.selection import long_tail as long_tail
    from topk_registry.data.selection import renumber as renumber
    from topk_registry.data.selection import subset as subset
    from topk_registry.data.several import Several as Several
else:
    _NAMES = {
        "ambiguous": ("Ambiguous",),
        "hierarchy": ("Hierarchy",),
        "several": ("Several",),
        "open": ("open_dataset",),
        "selection": ("Selection", "class_balanced_epoch", "hold_out", "long_tail", "renumber", "subset"),
        "label_noise": ("with_label_noise",),
        "labels": ("class_counts", "class_names_of", "is_indexed", "k_hot_of", "labels_of", "superclasses_of"),
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names}
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return getattr(import_module(f"topk_registry.data.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'topk_registry.data' has no attribute {name!r}")
