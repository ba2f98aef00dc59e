"""The study ``compare``, which compares losses on the user's data."""

from collections.abc import Sequence
from typing import Any

from topk_registry.data import open_dataset
from topk_registry.data.folders import split_folder
from topk_registry.data.open import CHANGES, FOLDERS
from topk_registry.registry import get_loss_builder
from topk_registry.registry.signatures import tuning_grid
from topk_registry.train import TrainConfig
from topk_registry.train.config import MULTILABEL, flag_of
from topk_registry.train.model import resolve_learning_rate
from topk_studies.studies import PARTS, Contestant, Rates, Study

QUESTION = "Which loss is best on this data?"
TIMM_OPTIONS = {"class_map": "class_map", "dataset_download": "download", "input_key": "input_key"}
TIMM_OPTIONS |= {"target_key": "target_key"}  # flag of `timm train` -> argument of timm's create_dataset


def study_of(losses: Sequence[str], trials: int, rates: Rates | None, config: TrainConfig) -> Study:
    """Return a study that compares losses on the user's data.

    Args:
        losses: losses as text, such as ``"focal(gamma=1|2)"``. If the ``tuning_grid`` of a loss has an option that the
            text does not set, the trials try all values of this option in the grid.
        trials: number of learning rates per loss, and per combination of its options.
        rates: lowest and highest learning rate. None: from 1/4 to 8 times the learning rate of ``config``.
        config: training configuration with the metric that selects trials.

    Raises:
        ValueError: a text or the range of learning rates is invalid.
        PluginError: a loss does not exist or cannot be imported.
    """
    if twice := [text for text in losses if losses.count(text) > 1]:
        raise ValueError(f"{twice[0]} is listed twice in --losses")
    contestants = []
    for text in losses:
        plain = Contestant(text)
        fixed = {name for options in plain.options for name in options}
        grid = {name: values for name, values in tuning_grid(get_loss_builder(plain.loss)).items() if name not in fixed}
        contestants.append(Contestant(text, grid=grid))
    rate = resolve_learning_rate(config, 1).lr or 0.0
    low, high = rates or (rate / 4, rate * 8)
    if not 0.0 < low < high:
        raise ValueError(f"the range of learning rates must be above 0 and increase, got {low:g} to {high:g}")
    metrics = tuple(dict.fromkeys((config.metric, "top1", "nll")))
    return Study(QUESTION, "", {"own data": {}}, tuple(contestants), config.metric, metrics, trials, (low, high))


def flags_of(config: TrainConfig, test_split: str) -> tuple[dict[str, Any], str]:
    """Return the flags that all runs share, and a text that names the images for trials and the images for results.

    Args:
        config: training configuration of the user.
        test_split: split of the data for the results. If empty, the results use the split ``test``. If the data has no
            split ``test``, the results use one half of each class of the validation split, and the other half selects
            trials.

    Raises:
        ValueError: the task is multilabel, or the data set does not support an option of ``config`` or ``test_split``.
    """
    if config.task == MULTILABEL:
        raise ValueError("a comparison needs one label per image, so --task multilabel is not supported")
    usual = TrainConfig(dataset=config.dataset or "topk/folder").to_dict()
    asked = {"smoothing"} if config.asks("smoothing") else set()  # its default depends on the loss
    kept = {name: value for name, value in config.to_dict().items() if value != usual[name] or name in asked}
    read_by_timm = not (config.dataset in FOLDERS or config.dataset.startswith("topk/"))
    if wrong := [name for name in TIMM_OPTIONS if name in kept and not read_by_timm]:
        raise ValueError(f"a comparison supports {flag_of(wrong[0])} for timm's data sets only")
    for name in ("train_split", "val_split", "lr", *TIMM_OPTIONS):
        kept.pop(name, None)
    test_split = test_split or ("test" if _has_test_split(config) else "")
    if config.dataset.startswith("torch/") and test_split and not config.val_split.replace(".", "").isdigit():
        raise ValueError("torchvision has one split for evaluation: use --val-split 0.1, or no --test-split")
    changes = {name: value for name, value in config.dataset_opt.items() if name in CHANGES}
    own = {name: value for name, value in config.dataset_opt.items() if name not in CHANGES}
    options: dict[str, Any] = {"of": config.dataset, "train_split": config.train_split, "val_split": config.val_split}
    options |= {"test_split": test_split, "options": own, **changes}
    options["image_mode"] = config.input_img_mode or ("RGB" if config.channels == 3 else "L")
    if read_by_timm:
        options["reader_options"] = {theirs: getattr(config, ours) for ours, theirs in TIMM_OPTIONS.items()}
    chosen = f"{config.val_split} of the training images" if config.val_split.startswith("0.") else config.val_split
    note = f"trials are chosen on {chosen}, results are on {test_split}"
    if not test_split:
        note = f"no test split: trials are chosen on one half of each class of {chosen}, results are on the other half"
    return {**kept, "dataset": PARTS, "dataset_opt": options}, note


def _has_test_split(config: TrainConfig) -> bool:
    if config.dataset in FOLDERS:
        return split_folder(config.data_dir or "", "test") is not None
    if not config.dataset.startswith("topk/"):
        return False
    try:
        open_dataset(config.dataset, "test", config.data_dir, **config.dataset_opt)
    except (ValueError, OSError, TypeError):
        return False
    return True
