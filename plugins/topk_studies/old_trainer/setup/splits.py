"""Check that a named split exists: timm reads another part of the data, or all of it, in the place of a missing one."""

from pathlib import Path

from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.folders.images import EVALUATION, TRAINING, is_hidden, listed, split_folder

# data sets of torchvision with a training and a test part: timm reads the test part for every name not in TRAINING
TWO_PARTS = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist")


def check_split(config: TrainConfig, split: str) -> None:
    """Raise a ``DataError`` that lists the splits if timm would silently read something other than ``split``."""
    kind, _, name = config.dataset.lower().rpartition("/")
    if kind == "torch" and name in TWO_PARTS:
        if split not in (*TRAINING, *EVALUATION, "test"):
            raise DataError(f"{config.dataset} has no split {split!r}; there are train and test")
    elif is_folder(config):
        root = Path(config.data_dir or "")
        known = (TRAINING[0], EVALUATION[0], config.train_split, config.val_split)
        whole = split in (*TRAINING, *EVALUATION) and not any(split_folder(root, each) for each in known)
        if split_folder(root, split) is None and not whole:
            raise DataError(f"{root} has no split {split!r}; it holds {_names(root)}")


def check_apart(config: TrainConfig) -> None:
    """Refuse a run that would evaluate on its training folder because neither split has a folder of its own."""
    if is_folder(config) and config.val_split:
        root = Path(config.data_dir or "")
        if split_folder(root, config.train_split) is None and split_folder(root, config.val_split) is None:
            raise DataError(
                f"{root} has no folders of splits, so evaluation would read the training images; it holds "
                f"{_names(root)}. --val-split 0.1 holds a part out, --val-split '' evaluates nothing"
            )


def is_folder(config: TrainConfig) -> bool:
    """Whether the data is a directory of images, in which timm looks for a folder of each split."""
    kind, _, name = config.dataset.lower().rpartition("/")
    return (not kind or (kind == "torch" and name in ("folder", "image_folder"))) and Path(
        config.data_dir or ""
    ).is_dir()


def _names(root: Path) -> str:
    return (
        listed(sorted(path.name for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)))
        or "no folders"
    )
