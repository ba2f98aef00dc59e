"""All settings of a training run in one frozen object."""

import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin, get_type_hints

from topk_registry.registry.ranges import Interval
from topk_registry.train.errors import ConfigError
from topk_studies.old_trainer.config import flags, sampling
from topk_studies.old_trainer.config.tasks import BUILTIN_MULTILABEL, MULTILABEL, MULTILABEL_DEFAULTS, SPLIT, check_task
from topk_studies.old_trainer.config.timm_names import from_timm
from topk_studies.old_trainer.config.weights import SETTINGS, idle_setting

# Defaults where no data is named: a job that a laptop finishes in a minute or two.
BUILTIN_DEFAULTS: dict[str, Any] = {
    "dataset": "topk/hierarchy",
    "model": "topk_convnet",
    "epochs": 12,
    "batch_size": 64,
    "validation_batch_size": 500,
    "opt": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.05,
    "warmup_epochs": 1,
    "sched_on_updates": True,
    "no_aug": True,
    "smoothing": 0.0,
    "workers": 0,
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    flags.LossFlags,
    flags.DataFlags,
    flags.HarderDataFlags,
    flags.SamplerFlags,
    flags.ModelFlags,
    flags.DeviceFlags,
    flags.OptimizerFlags,
    flags.ScheduleFlags,
    flags.AugmentationFlags,
    flags.BatchNormFlags,
    flags.AverageFlags,
    flags.RunFlags,
    flags.LoggerFlags,
):
    """Settings of a training run, under the names of the flags of ``timm train``.

    Defaults are timm's, and with ``task="multilabel"`` those of timm's multi-label task. Where no data is named
    (neither ``data_dir`` nor ``dataset``), they are those of a small job on a built-in data set.

    Raises:
        ConfigError: a value has a wrong type, or settings exclude each other.

    Example:
        >>> config = TrainConfig(loss="focal", epochs=2)
        >>> config.epochs, config.dataset, config.model
        (2, 'topk/hierarchy', 'topk_convnet')
    """

    def __new__(cls, **given: Any) -> "TrainConfig":
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(given))  # which names were given is known only here
        return config

    def __post_init__(self) -> None:
        given = self.__dict__.pop("_given")
        if self.labels_csv and not (self.data_dir or self.dataset):
            object.__setattr__(self, "data_dir", os.path.dirname(self.labels_csv.partition(SPLIT)[0]) or ".")
        several = {**MULTILABEL_DEFAULTS} if self.task == MULTILABEL else {}
        for name, value in several.items():
            if name not in given:
                object.__setattr__(self, name, value)
        if not (self.data_dir or self.dataset):
            for name, value in (BUILTIN_DEFAULTS | (BUILTIN_MULTILABEL if several else {})).items():
                if name not in given or name == "dataset":
                    object.__setattr__(self, name, value)
        hints = _hints()
        for setting in fields(self):
            value = _checked(setting.name, getattr(self, setting.name), hints[setting.name])
            choices = setting.metadata["choices"]
            if choices and value is not None and value not in choices:
                known = ", ".join(str(one) or "''" for one in choices)
                raise ConfigError(f"{spelt(setting.name)} must be one of {known}, got {value!r}")
            _check_within(setting.name, value, setting.metadata["within"])
            object.__setattr__(self, setting.name, value)
        object.__setattr__(self, "grad_accum_steps", max(1, self.grad_accum_steps))
        self._check_together()

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        """The configuration from names and values, such as the content of an args.yaml of this trainer or of timm's.

        Raises:
            ConfigError: a name is unknown, or belongs to a mode of timm's own script.
        """
        settings = from_timm(settings)
        hints = _hints()
        for name in settings:
            if name not in hints:
                close = get_close_matches(name, hints, n=1)
                raise ConfigError(f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        # None stands for the default where the setting itself cannot be None
        known: dict[str, Any] = {
            name: value for name, value in settings.items() if value is not None or _optional(hints[name])
        }
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Names and values of all settings, as plain types."""
        return {setting.name: getattr(self, setting.name) for setting in fields(self)}

    def replace(self, **settings: Any) -> "TrainConfig":
        """A copy with other values of these settings."""
        return replace(self, **settings)

    def _check_together(self) -> None:
        if self.overwrite and self.resume:
            raise ConfigError("--overwrite removes a run and --resume goes on with it: leave one out")
        if self.mixup > 0 or self.cutmix > 0 or self.cutmix_minmax:
            if self.batch_size % 2:
                raise ConfigError(f"mixup and cutmix need an even --batch-size, got {self.batch_size}")
            if self.aug_splits:
                raise ConfigError("mixup and cutmix cannot be combined with --aug-splits")
        if self.aug_splits == 1 or (self.aug_splits and self.no_aug):
            raise ConfigError("--aug-splits must be 0, or at least 2 without --no-aug")
        if self.class_sample is not None and not (self.class_parallel and 0.0 < self.class_sample <= 1.0):
            raise ConfigError(
                f"--class-sample must be above 0 and at most 1, with --class-parallel, got {self.class_sample}"
            )
        problem = self._update_problem()
        if problem:
            raise ConfigError(problem)
        idle = idle_setting(self.class_weight, self.loss_pos_weight, **{name: getattr(self, name) for name in SETTINGS})
        if idle:
            raise ConfigError(idle)
        sampler = sampling.sampler_of(self.sampler, self.retrain_head)
        settings = {name: getattr(self, name) for name in sampling.SETTINGS}
        problem = sampling.sampler_problem(sampler, self.aug_repeats, **settings) or self._head_problem()
        if problem:
            raise ConfigError(problem)
        check_task({setting.name: getattr(self, setting.name) for setting in fields(self)})
        if self.amp and self.model_dtype not in (None, "float32"):
            raise ConfigError(f"--amp needs a float32 model, got --model-dtype {self.model_dtype}")

    def _update_problem(self) -> str:
        """Say what ``--chunked-update`` cannot be combined with; empty where all is well."""
        if self.chunked_update is None:
            return "--classifier-dtype needs --chunked-update" if self.classifier_dtype else ""
        if not self.class_parallel:
            return "--chunked-update needs --class-parallel, which one process can run, too"
        if self.class_sample is not None:
            return (
                "--chunked-update changes the rows of all classes in a step, --class-sample computes the gradient of a "
                "part of them: leave one out"
            )
        if self.clip_grad is not None and self.clip_mode == "value":
            return "--clip-mode value looks at a gradient of all weights, which --chunked-update never makes: use norm"
        return ""

    def _head_problem(self) -> str:
        """Say what ``--retrain-head`` cannot be combined with; empty where all is well."""
        if not self.retrain_head:
            return ""
        for name in ("pretrained", "pretrained_path", "initial_checkpoint"):
            if getattr(self, name):
                return f"--retrain-head and {spelt(name)} both say which weights the model begins with: leave one out"
        for name in ("drop", "drop_connect", "drop_path", "drop_block", "sync_bn", "split_bn"):
            if getattr(self, name):
                return f"{spelt(name)} has no effect with --retrain-head: what is frozen runs as in evaluation"
        return "--retrain-head needs the whole classifier, without --class-parallel" if self.class_parallel else ""


def spelt(name: str) -> str:
    """Return the flag of a setting: ``batch_size`` is ``--batch-size``."""
    return "--" + name.replace("_", "-")


def value_type(hint: Any) -> tuple[type, type | None]:
    """The type of a setting without None, and the type of its items if it is a list."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is list:
        return list, get_args(hint)[0]
    return (dict, None) if get_origin(hint) is dict else (hint, None)


def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)


def _optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _check_within(name: str, value: Any, within: str) -> None:
    """Raise unless a number, or each of a list, is in an interval."""
    interval = Interval.parse(within)
    for one in value if isinstance(value, list) else [value]:
        if type(one) in (int, float) and one not in interval:
            raise ConfigError(f"{spelt(name)} must be {interval.in_words()}, got {one!r}")


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value as the type that its setting has."""
    if value is None and _optional(hint):
        return None
    kind, items = value_type(hint)
    if items is not None and isinstance(value, (list, tuple)):
        return [_checked(name, item, items) for item in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = f"a list of {items.__name__}" if items else kind.__name__
        raise ConfigError(f"{spelt(name)} must be {expected}, got {value!r}")
    return value
