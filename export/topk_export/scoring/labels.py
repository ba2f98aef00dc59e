"""Labels of scored images, by the names of their folders: the classes that these stand for, and the accuracy."""

from collections.abc import Iterable, Sequence

import numpy as np

from topk_export.errors import SourceError
from topk_export.scoring import files
from topk_export.scoring.rows import folder_of, import_arrow
from topk_export.scoring.sources import Shard
from topk_export.scoring.work import part_name
from topk_registry.folders.agreement import Agreement, agreement
from topk_registry.folders.classes import ClassMap, class_map
from topk_registry.folders.images import natural_key


def labels_of(shards: Iterable[Shard], classes: Sequence[str], *, ignore_unknown: bool) -> ClassMap:
    """Map the folders of all images to classes.

    Raises:
        SourceError: a source is no folder and no list of images.
        FolderError: the folders cannot be told; the message names them.
    """
    folders: set[str] = set()
    for shard in shards:
        if shard.kind != "images":
            raise SourceError(f"--labels takes the folders of images for classes, and {shard.title} is one file")
        folders.update(map(folder_of, shard.names))
    return class_map(sorted(folders, key=natural_key), classes, of="the file", ignore_unknown=ignore_unknown)


def accuracy(output: str, parts: int, classes: Sequence[str]) -> Agreement:
    """Compare labels with best classes in the first parts of the scores."""
    best, labels = [], []
    for number in range(parts):
        with files.opened(files.joined(output, part_name(number))) as file:
            table = import_arrow().parquet.read_table(file, columns=["label", "index"])
        for label, index in zip(table["label"].to_pylist(), table["index"].to_pylist(), strict=True):
            if label is not None and index:
                labels.append(label)
                best.append(index[0])
    return agreement(np.asarray(best, np.int64), np.asarray(labels, np.int64), classes)
