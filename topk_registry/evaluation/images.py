"""The labelled images of an evaluation: opened as ``timm train`` opens them, and told apart by their content."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from topk_registry.data.labels import class_names_of, is_indexed, kept_labels_of
from topk_registry.train.config.config import TrainConfig
from topk_registry.train.errors import DataError
from topk_registry.train.setup.datasets import Data, check_data_arguments, name_of
from topk_registry.train.setup.pictures import path_of, picture_of
from topk_registry.train.validate import align_data, open_evaluation

# the settings that say which images an evaluation reads, and under which labels
DATA = (
    *("dataset", "data_dir", "dataset_opt", "train_split", "val_split", "val_fold", "seed", "subset", "long_tail"),
    *("imbalance_factor", "label_noise", "superclasses", "class_map", "input_img_mode", "input_key", "target_key"),
    *("label_noise_kind", "label_file", "label_column"),
    *("ignore_unknown_classes", "dataset_trust_remote_code", "val_num_samples", "strict_data"),
)
FORMAT = 1  # of the fingerprint


@dataclass(frozen=True)
class Images:
    """The images of one split in their order.

    Args:
        config: the data's settings.
        data: the opened split; its class numbers are its own, or those of a model after :meth:`aligned`.
    """

    config: TrainConfig
    data: Data

    @classmethod
    def open(cls, settings: Mapping[str, Any], *, channels: int = 3) -> "Images":
        """Open the split that settings of :data:`DATA` name.

        Raises:
            DataError: there is no such data, or it cannot be read.
        """
        if not (settings.get("data_dir") or settings.get("dataset")):
            raise DataError("name the images: --data-dir FOLDER, or --dataset NAME as timm train takes it")
        config = TrainConfig.from_dict({"val_split": "validation", **settings})
        check_data_arguments(config)
        return cls(config, open_evaluation(config, channels))

    @property
    def name(self) -> str:
        """The data and its split, for messages."""
        return f"split {self.config.val_split!r} of {name_of(self.config)}"

    @property
    def dataset(self) -> Any:
        """The data set of pairs (image, label)."""
        return self.data.validation

    @property
    def indexed(self) -> bool:
        """Whether images can be picked by their number; those of a stream cannot."""
        return is_indexed(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def settings(self) -> dict[str, Any]:
        """The data's settings by name."""
        return {name: getattr(self.config, name) for name in DATA}

    def aligned(self, class_names: Sequence[str]) -> "Images":
        """The same images under the class numbers of a model.

        Raises:
            DataError: they have classes that the model lacks.
        """
        data = Data(None, self.dataset, self.data.class_names, self.data.counts, [*self.data.notes])
        if not self.config.class_map:
            align_data(self.config, data, class_names)
        return Images(self.config, data)

    @property
    def notes(self) -> list[str]:
        """Sentences on what was left out, and on how its classes became the model's."""
        return self.data.notes

    def path(self, index: int) -> str:
        """The file of an image, or its number where it has none."""
        return path_of(self.dataset, index)

    def picture(self, index: int) -> Image.Image | None:
        """An image as it is stored; None where the data set gives none, or cannot pick or read it."""
        return picture_of(self.dataset, index)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of what tells these images apart.

        For files their paths below the folder, sizes, times and labels; for arrays in memory their bytes; for data sets
        of Hugging Face their own fingerprint; for others the settings and the labels.
        """
        digest = hashlib.sha256(json.dumps([FORMAT, self._named_settings()], sort_keys=True, default=str).encode())
        digest.update(json.dumps(class_names_of(self.dataset)).encode())
        if self.config.class_map and Path(self.config.class_map).is_file():
            digest.update(Path(self.config.class_map).read_bytes())
        _add_content(digest, self.dataset)
        return digest.hexdigest()

    def _named_settings(self) -> dict[str, Any]:
        # a folder is told by what is in it, wherever it lies
        return {name: value for name, value in self.settings.items() if name not in ("data_dir", "strict_data")}


def _add_content(digest: Any, dataset: Any) -> None:
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        digest.update(np.ascontiguousarray(dataset.indices).tobytes())
        digest.update(np.ascontiguousarray(dataset.targets).tobytes())
        dataset = dataset.dataset
    reader = getattr(dataset, "reader", dataset)
    if own := getattr(getattr(reader, "dataset", None), "_fingerprint", None):
        digest.update(str(own).encode())
        return
    files = getattr(reader, "samples", None)
    if files and all(isinstance(path, (str, os.PathLike)) for path, _ in files):
        for path, label in files:
            state = os.stat(path)
            name = os.path.relpath(path, getattr(reader, "root", None) or os.path.dirname(path))
            digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\0{label}\n".encode())
        return
    labels = kept_labels_of(dataset) if is_indexed(dataset) else None
    digest.update(b"" if labels is None else labels.tobytes())
    for name in ("images", "data"):
        values = getattr(dataset, name, None)
        if isinstance(values, np.ndarray) or hasattr(values, "numpy"):
            digest.update(np.ascontiguousarray(values).tobytes())
