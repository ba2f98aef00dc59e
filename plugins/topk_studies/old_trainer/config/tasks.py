"""Settings of ``--task multilabel``: its defaults, and the flags that need one label an image. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from topk_registry.train.errors import ConfigError
from topk_studies.old_trainer.config.sampling import sampler_of

CLASSIFICATION, MULTILABEL = TASKS = ("classification", "multilabel")

# timm's defaults of the task, where they differ from those of single labels
MULTILABEL_DEFAULTS: dict[str, Any] = {"loss": "bce", "smoothing": 0.0, "eval_metric": "map"}

# of the small job where no data is named
BUILTIN_MULTILABEL: dict[str, Any] = {"dataset": "topk/several"}

# settings without a meaning for several labels: what leaves them off, and why
ONE_LABEL: dict[str, tuple[Any, str]] = {
    "label_noise": (0.0, "it replaces the one label of an image"),
    "label_file": ("", "it holds one label for each image; --labels-csv has several"),
    "long_tail": (None, "it thins out classes, and an image of several would leave them all"),
    "subset": (1.0, "it takes as much of each class, and an image is of several"),
    "exclude": ("", "it reads the one label of each sample; leave the rows out of the file of labels"),
    "relabel": ("", "it gives a sample one label; correct the file of labels"),
    "class_parallel": (False, "a process would need the scores of all labels of an image"),
    "multi_crop": (0, "it averages the chance of the one label to be among the k best"),
    "marginal_temperature": (None, "it is for --multi-crop"),
}
SPLIT = "{split}"  # in --labels-csv: the name of the split

# settings of several labels alone, and what leaves them off
SEVERAL_LABELS: dict[str, Any] = {"labels_csv": "", "target_format": None, "multilabel_threshold": 0.5}


def check_task(settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError where a setting is of another task."""
    if settings["task"] != MULTILABEL:
        for name, off in SEVERAL_LABELS.items():
            if settings[name] != off:
                raise ConfigError(f"{_flag(name)} {settings[name]} is for several labels an image: --task multilabel")
        return
    for name, (off, why) in ONE_LABEL.items():
        if settings[name] != off:
            raise ConfigError(f"{_flag(name)} is for one label an image, and --task multilabel refuses it: {why}")
    law = sampler_of(settings["sampler"], settings["retrain_head"])
    if law != "instance":
        given = "" if settings["sampler"] else ", which --retrain-head brings: --sampler instance goes without"
        raise ConfigError(f"--sampler {law} draws images by their one label, and --task multilabel refuses it{given}")
    if not 0.0 < settings["multilabel_threshold"] < 1.0:
        raise ConfigError(f"--multilabel-threshold must be in (0, 1), got {settings['multilabel_threshold']}")
    if settings["labels_csv"] and settings["dataset"]:
        raise ConfigError(
            f"--labels-csv names images in a folder, and --dataset {settings['dataset']} has labels of its own: leave "
            "one out"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
