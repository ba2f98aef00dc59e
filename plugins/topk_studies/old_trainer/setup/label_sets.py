"""Data of ``--task multilabel``: targets from a CSV file, from timm's readers, or from a registered data set.

timm's readers of ``hfds/``, ``hfids/``, ``tfds/`` and ``wds/`` give numbers of classes, a 0 or 1 for each class, or one
column a class; timm's ``MultiLabelTarget`` makes a k-hot vector of what they give.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data import MultiLabelTarget, get_img_extensions

from topk_registry.data.labels import KHot, class_names_of, is_indexed, k_hot_of, kept_k_hot_of
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.tasks import SPLIT
from topk_studies.old_trainer.data.label_tables import TableReader, as_target, file_of, has_splits, read_label_table
from topk_studies.old_trainer.data.recipes import SelectedSets, hold_out_any
from topk_studies.old_trainer.folders.images import count_of, listed, split_folder
from topk_studies.old_trainer.setup.class_maps import read_class_map
from topk_studies.old_trainer.setup.unreadable import WatchedImages, replace_within

MULTIHOT = "multihot"
FOLDER = (
    "--task multilabel: a folder of images names one label an image; --labels-csv FILE has a row for each image and "
    "its labels"
)


def check_label_sets(config: TrainConfig, *, held_out: bool) -> None:
    """Refuse settings from which no several labels an image can come, before any image is read.

    Args:
        config: of a multilabel run.
        held_out: whether a fraction of the training images is held out for evaluation.
    """
    if "/" in config.dataset:
        return
    if not config.labels_csv:
        raise DataError(FOLDER)
    for split in filter(None, (config.train_split, "" if held_out else config.val_split)):
        if not table_of(config, split).is_file():
            raise DataError(f"--labels-csv: there is no file {table_of(config, split)}")
    alone = SPLIT in config.labels_csv or held_out or not config.val_split
    try:
        splits = alone or has_splits(config.labels_csv)
    except ValueError as error:
        raise DataError(f"--labels-csv: {error}") from error
    if not splits:
        raise DataError(
            f"{config.labels_csv} has no column `split`, so evaluation would read the training images: --val-split 0.1 "
            "holds a part out, --val-split '' evaluates nothing, {split} in --labels-csv stands for the split's name"
        )


def table_of(config: TrainConfig, split: str) -> Path:
    """The CSV file of a split."""
    return Path(config.labels_csv.replace(SPLIT, split))


def open_table(config: TrainConfig, split: str, mode: str) -> WatchedImages:
    """The images of a split as ``--labels-csv`` names them.

    Raises:
        ValueError: the file is not as it should be, or images are missing.
    """
    root = Path(config.data_dir or "")
    class_map = read_class_map(config.class_map, root)
    table = read_label_table(table_of(config, split), split=split, class_map=class_map)
    suffixes = config.input_key.split(";") if config.input_key else sorted(get_img_extensions())
    inside = split_folder(root, split)
    if inside is not None and file_of(root, table.images[0], suffixes) is None:  # names below the folder of the split
        root = inside
    reader = TableReader(table, root, suffixes)
    return WatchedImages(reader, mode=mode, strict=config.strict_data, target_transform=as_target)


def reader_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings of timm's readers that say how targets are written."""
    return {"target_format": config.target_format}


def encoder(config: TrainConfig, reader: Any) -> MultiLabelTarget:
    """Make k-hot targets of what a reader of timm's gives.

    Raises:
        ValueError: the number of classes is not known.
    """
    known = len(class_names_of(reader) or ()) or _shown(config, reader)
    n = known if known else config.num_classes
    if not n:
        raise ValueError("the number of classes is not known, as the data names none: see --num-classes")
    return MultiLabelTarget(n, dense=config.target_format == MULTIHOT)


def _shown(config: TrainConfig, reader: Any) -> int:
    """The number of classes that the targets show, where they can be read without images."""
    if config.num_classes or not hasattr(reader, "iter_targets"):
        return 0
    lengths = (len(target) if config.target_format == MULTIHOT else max(target, default=-1) + 1
               for target in reader.iter_targets())  # fmt: skip
    return max(lengths, default=0)


def hold_out_sets(config: TrainConfig, train: Any, twin: Any, fraction: float) -> tuple[Any, Any, str]:
    """The training data, what is held out of it for evaluation, and a sentence that says so."""
    targets = k_hot_of(train)
    rest, held = hold_out_any(len(train), fraction, seed=config.seed, fold=config.val_fold)
    parts = SelectedSets(train, rest, targets), SelectedSets(twin, held, targets)
    replace_within(train, rest)
    replace_within(twin, held)
    return *parts, f"held out {len(held)} training images, {fraction:g} of all, for evaluation"


def positives_of(dataset: Any, *, read: bool) -> tuple[list[int] | None, list[str]]:
    """The number of images that have each class [n], and sentences for the plan of a run; None where nothing tells.

    Args:
        dataset: of several labels.
        read: whether to read every image where the targets are not kept apart.
    """
    if not is_indexed(dataset):
        return None, []
    targets = k_hot_of(dataset) if read else kept_k_hot_of(dataset)
    return (None, []) if targets is None else ((targets >= 0.5).sum(0).tolist(), [_told(targets)])


def _told(targets: KHot) -> str:
    sizes = (targets >= 0.5).sum(1)
    return f"{sizes.mean():.2f} labels an image, {sizes.min()} to {sizes.max()}"


def without_positives(dataset: Any, classes: Sequence[str]) -> list[str]:
    """The names of the classes that no image has, as far as the data set keeps its targets apart."""
    targets = kept_k_hot_of(dataset)
    if targets is None:
        return []
    positives = (targets >= 0.5).sum(axis=0).tolist()
    return [name for name, has_some in zip(classes, positives, strict=False) if not has_some]


def unlabelled_classes(names: Sequence[str]) -> str:
    """A sentence on classes without an evaluation image."""
    return f"no evaluation images of {count_of(names, 'class')}: {listed(names)}; mAP is the mean over the others"
