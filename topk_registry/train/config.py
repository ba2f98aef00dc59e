# ruff: noqa: RUF009 -- fields are created by function calls
"""The settings of ``timm train``, as fields of one dataclass.

The fields define the command-line flags, the entries of ``args.yaml`` and the checks of values. Flags have the names,
meanings and defaults of timm's training script. Parsing needs neither torch nor timm.
"""

import argparse
import copy
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from topk_registry.cli import ArgumentParser, ParseOptions, parse_pairs
from topk_registry.data.held_out import fraction_of
from topk_registry.errors import ConfigError
from topk_registry.registry.ranges import Interval
from topk_registry.registry.source import closest

CLASSIFICATION, MULTILABEL = TASKS = ("classification", "multilabel")
INTERPOLATIONS = ("", "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
WEIGHT_METHODS = ("inv_freq", "effective_num")  # values of --class-weight that compute weights from class counts
METRIC = re.compile(r"(?:(macro|many|medium|few)[-_])?top[1-9]\d*|nll|loss")
MULTILABEL_METRIC = re.compile(r"map|(?:micro|macro|sample)[-_]f1|exact[-_]match|top[1-9]\d*[-_]recall|bce|loss")
DECREASING = ("nll", "bce", "train_loss")  # metrics for which lower values are better

# Defaults if no data set is specified: a job of less than a minute, with the comparison with cross-entropy.
BUILTIN_DEFAULTS: dict[str, Any] = {
    "dataset": "topk/hierarchy",
    "model": "topk_convnet",
    "epochs": 8,
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
CROSS_ENTROPY = ("ce", "timm:ce")  # the losses that timm's default label smoothing applies to
OWN_BATCHES = "own-batches"  # value of the setting "dataset" if the user passes data loaders to Trainer
MULTILABEL_DEFAULTS: dict[str, Any] = {"loss": "bce", "smoothing": 0.0, "eval_metric": "map"}  # same as in timm

# The flags that --help shows. --help-all shows every flag.
COMMON = (
    *("data_dir", "dataset", "dataset_opt", "val_split", "loss", "loss_opt", "class_weight", "model", "pretrained"),
    *("img_size", "batch_size", "device", "amp", "opt", "lr", "epochs", "smoothing", "mixup", "model_ema", "workers"),
    *("experiment", "resume"),
)

# Flags of timm's training script that this trainer does not have, with timm's defaults. The trainer accepts an
# args.yaml of timm's script if these flags have their defaults.
_OFF = """
fast_norm torchscript no_ddp_bb synchronize_step resplit split_bn model_ema_force_cpu jsd_loss bce_loss bce_sum
save_images use_multi_epochs_loader log_wandb no_resume_opt naflex_loader naflex_patchify_channels_first
dataset_trust_remote_code head_init_scale head_init_bias torchcompile_mode device_modules opt_eps opt_betas
layer_decay_no_opt_scale lr_noise start_epoch color_jitter_prob grayscale_prob gaussian_blur_prob bce_target_thresh
bce_pos_weight cutmix_minmax drop_connect drop_block bn_momentum bn_eps wandb_project train_img_sizes
train_batch_sizes train_size_probs train_batches_per_epoch naflex_patch_sizes naflex_patch_size_probs kd_model_name
kd_student_feature_dim kd_teacher_feature_dim distill_loss_weight task_loss_weight class_stats loss_weight_max
lr_decay_fn lr_stable_timescale save_epochs gp train_crop_mode fuser lr_base_scale wandb_resume_id loss_pos_weight
layer_decay_min_scale model_dtype no_prefetcher epoch_repeats recovery_interval tta wandb_tags local_rank
"""  # the default of each of these flags is False, empty, 0 or None
TIMM_ONLY: dict[str, Any] = {
    **dict.fromkeys(_OFF.split()),
    "lr_noise_pct": 0.67,
    "lr_noise_std": 1.0,
    "lr_cycle_mul": 1.0,
    "lr_cycle_decay": 0.5,
    "lr_cycle_limit": 1,
    "lr_k_decay": 1.0,
    "lr_base_size": 256,
    "patience_epochs": 10,
    "recount": 1,
    "worker_seeding": "all",
    "train_size_schedule": "constant",
    "train_size_schedule_spread": 0.65,
    "train_size_random_mix": 0.1,
    "variable_batch_loss_scale": "none",
    "naflex_train_seq_lens": [128, 256, 576, 784, 1024],
    "naflex_max_seq_len": 576,
    "naflex_loss_scale": "linear",
    "kd_distill_type": "logit",
    "kd_loss_type": "kl",
    "kd_temperature": 4.0,
    "kd_token_distill_type": "soft",
    "loss_weight_power": 1.0,
    "loss_weight_beta": 0.999,
    "multilabel_threshold": 0.5,
}
EQUIVALENTS = {  # of some of these flags, what has the same effect here
    "bce_loss": "--loss bce",
    "bce_sum": "--loss bce --loss-opt bce_sum=True",
    "bce_target_thresh": "--loss bce --loss-opt bce_target_thresh=0.2",
    "bce_pos_weight": "--loss bce --loss-opt pos_weight=2",
    "loss_pos_weight": "--loss-opt pos_weight=2",
    "jsd_loss": "--loss jsd --aug-splits 3",
    "opt_eps": "--opt-kwargs eps=1e-6",
    "opt_betas": "--opt-kwargs 'betas=(0.9,0.99)'",
    "log_wandb": "--log wandb",
    "drop_connect": "--drop-path 0.1",
    "model_dtype": "--amp --amp-dtype bfloat16",
}
NOT_SETTINGS = ("loss_record", "config", "class_names")  # entries of an args.yaml that are not settings


def usual_workers() -> int:
    """Return the default of ``--workers``: 4 as in timm, but at most one per CPU. PyTorch warns about more."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cpus)


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    short: str = "",
    choices: tuple[Any, ...] = (),
    within: str = "(-inf, inf)",
    nargs: int | None = None,
    const: Any = None,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    ``group`` is the heading in the help. ``short`` is an additional name such as ``-b``. ``within`` is the interval of
    accepted numbers, or of each number in a list. ``nargs`` is the required length of a list. ``const`` is the value
    if the command line has the flag without a value.
    """
    info = {"group": group, "help": help, "metavar": metavar, "short": short, "choices": choices, "within": within,
            "nargs": nargs, "const": const}  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=partial(copy.copy, default), metadata=info)
    return field(default=default, metadata=info)


_LOSS, _DATA, _MODEL, _DEVICE, _OPT, _SCHEDULE, _AUG, _RUN = (
    partial(flag, group)
    for group in ("Loss", "Data", "Model", "Device", "Optimizer", "Schedule", "Augmentation", "Run")
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run, under the names of the flags of ``timm train``.

    The defaults are the defaults of timm, except for those of ``eval_metric``, ``smoothing``, ``workers``, ``device``
    and ``amp_dtype``. With ``task="multilabel"``, the defaults are those of timm's multi-label task. If neither
    ``task="multilabel"`` nor ``data_dir`` nor ``dataset`` is set, the defaults describe a job of less than a minute on
    a built-in data set.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or two settings exclude each other.

    Example:
        >>> config = TrainConfig(loss="focal", epochs=2)
        >>> config.epochs, config.dataset, config.model
        (2, 'topk/hierarchy', 'topk_convnet')
    """

    task: str = _LOSS(
        "classification", "classification: one label per image; multilabel: any number of labels", choices=TASKS
    )
    loss: str = _LOSS("ce", "a registered loss or a loss of timm; `timm losses` lists both", metavar="NAME")
    loss_opt: dict[str, Any] = _LOSS({}, "options of the loss; a repeated flag adds options")
    class_weight: str = _LOSS(
        "", "class weights of the loss: inv_freq or effective_num, a file, or numbers joined by commas", metavar="HOW"
    )
    normalize_classifier: float | None = _LOSS(
        None, "use a cosine classifier of this scale", metavar="SCALE", within="(0, inf)", const=1.0
    )
    learn_scale: bool = _LOSS(False, "train the scale of the cosine classifier")

    data_dir: str | None = _DATA(None, "root directory of the data", metavar="DIR")
    dataset: str = _DATA("", "TYPE/NAME as in timm, topk/NAME if registered, or empty for a folder", metavar="NAME")
    dataset_opt: dict[str, Any] = _DATA({}, "options of a registered data set, such as size=20000 noise=0.4")
    train_split: str = _DATA("train", "split to train on", metavar="NAME")
    val_split: str = _DATA(
        "validation", "split to evaluate on; 0.1 instead holds out 10 % of the training images of each class; '': none",
        metavar="NAME",
    )  # fmt: skip
    train_num_samples: int | None = _DATA(None, "images in a streamed training split", metavar="N", within="[1, inf)")
    val_num_samples: int | None = _DATA(None, "images in a streamed evaluation split", metavar="N", within="[1, inf)")
    dataset_download: bool = _DATA(False, "download missing data sets of torch/ and tfds/")
    class_map: str = _DATA("", "file that maps class names to indices", metavar="FILE")
    input_img_mode: str | None = _DATA(None, "PIL mode that images are converted to, such as RGB or L")
    input_key: str | None = _DATA(None, "key of the image; for a folder, file endings such as .png;.jpg")
    target_key: str | None = _DATA(None, "key of the label in the data set")
    target_format: str | None = _DATA(None, "form of label sets (default: indices)", choices=("indices", "multihot"))
    sampler: str = _DATA("", "class_balanced: draw each class equally often", choices=("", "class_balanced"))

    model: str = _MODEL("resnet50", "a timm model", metavar="NAME")
    pretrained: bool = _MODEL(False, "start from the published weights of the model")
    pretrained_path: str | None = _MODEL(None, "read the pretrained weights from this file", metavar="PATH")
    initial_checkpoint: str = _MODEL("", "start from the weights in this checkpoint", metavar="PATH")
    num_classes: int | None = _MODEL(None, "number of classes (default: of the data)", metavar="N", within="[1, inf)")
    img_size: int | None = _MODEL(None, "image size (default: of the model)", metavar="N", within="[1, inf)")
    in_chans: int | None = _MODEL(None, "input channels (default: 3)", metavar="N", within="[1, inf)")
    input_size: list[int] | None = _MODEL(None, "channels, height and width", metavar="N", nargs=3, within="[1, inf)")
    crop_pct: float | None = _MODEL(None, "share of the image that evaluation keeps", metavar="PCT", within="(0, inf)")
    mean: list[float] | None = _MODEL(None, "channel means", metavar="MEAN")
    std: list[float] | None = _MODEL(None, "channel standard deviations", metavar="STD", within="(0, inf)")
    interpolation: str = _MODEL("", "interpolation of evaluation (default: of the model)", choices=INTERPOLATIONS)
    channels_last: bool = _MODEL(False, "use the channels-last memory layout")
    grad_checkpointing: bool = _MODEL(False, "recompute activations to save memory")
    model_kwargs: dict[str, Any] = _MODEL({}, "further options of the model")
    torchcompile: str | None = _MODEL(None, "compile the model with torch.compile", metavar="BACKEND", const="inductor")
    drop: float = _MODEL(0.0, "dropout rate", metavar="P", within="[0, 1]")
    drop_path: float | None = _MODEL(None, "stochastic depth rate", metavar="P", within="[0, 1]")
    sync_bn: bool = _MODEL(False, "compute the statistics of batch norm over all processes in each step")
    dist_bn: str = _MODEL(
        "reduce", "after each epoch, average the batch-norm statistics of all processes (reduce), copy those of the "
        "first process (broadcast), or neither ('')", choices=("broadcast", "reduce", "")
    )  # fmt: skip
    model_ema: bool = _MODEL(False, "keep an exponential moving average of the weights (EMA), and evaluate it too")
    model_ema_decay: float = _MODEL(0.9998, "decay of the EMA", within="[0, 1]")
    model_ema_warmup: bool = _MODEL(False, "let the decay of the EMA grow from 0")

    device: str = _DEVICE("auto", "auto (CUDA if there is a CUDA device, else the CPU), cpu, cuda or cuda:N")
    amp: bool = _DEVICE(False, "train in mixed precision")
    amp_dtype: str | None = _DEVICE(
        None, "precision of --amp (default: float16; bfloat16 on a CPU)", choices=("float16", "bfloat16")
    )
    workers: int = _DEVICE(
        usual_workers(), "data loader processes (default: 4, but at most one per CPU)", metavar="N", short="-j",
        within="[0, inf)",
    )  # fmt: skip
    pin_mem: bool = _DEVICE(False, "load batches into pinned memory")

    batch_size: int = _OPT(128, "training batch size per process", metavar="N", short="-b", within="[1, inf)")
    validation_batch_size: int | None = _OPT(
        None, "evaluation batch size (default: as in training)", metavar="N", short="-vb", within="[1, inf)"
    )
    grad_accum_steps: int = _OPT(1, "batches per update of the weights", metavar="N", within="[1, inf)")
    opt: str = _OPT("sgd", "a timm optimizer", metavar="NAME")
    momentum: float = _OPT(0.9, "momentum", metavar="M", within="[0, 1]")
    weight_decay: float = _OPT(2e-05, "weight decay", within="[0, inf)")
    clip_grad: float | None = _OPT(None, "clip gradients, see --clip-mode", metavar="NORM", within="(0, inf)")
    clip_mode: str = _OPT("norm", "what --clip-grad limits", choices=("norm", "value", "agc"))
    layer_decay: float | None = _OPT(None, "learning rate factor per layer below the last layer", within="(0, inf)")
    opt_kwargs: dict[str, Any] = _OPT({}, "further options of the optimizer, such as eps=1e-6 betas=(0.9,0.99)")

    epochs: int = _SCHEDULE(300, "epochs to train", metavar="N", within="[1, inf)")
    sched: str = _SCHEDULE("cosine", "learning rate schedule", metavar="NAME")
    sched_on_updates: bool = _SCHEDULE(False, "step the schedule per update, not per epoch")
    lr: float | None = _SCHEDULE(None, "learning rate (default: from --lr-base)", metavar="LR", within="[0, inf)")
    lr_base: float = _SCHEDULE(
        0.1, "lr = lr_base * r, r = global batch / 256; adaptive optimizers: sqrt(r)", metavar="LR", within="[0, inf)"
    )
    warmup_lr: float = _SCHEDULE(1e-05, "learning rate at the start of warmup", metavar="LR", within="[0, inf)")
    min_lr: float = _SCHEDULE(0.0, "lowest learning rate", metavar="LR", within="[0, inf)")
    decay_milestones: list[int] = _SCHEDULE(
        [90, 180, 270], "epochs at which the schedule multistep lowers the rate", metavar="N", within="[1, inf)"
    )
    decay_epochs: float = _SCHEDULE(90, "epochs between drops of the schedule step", metavar="N", within="(0, inf)")
    warmup_epochs: int = _SCHEDULE(5, "epochs of warmup", metavar="N", within="[0, inf)")
    warmup_prefix: bool = _SCHEDULE(False, "start the schedule after the warmup epochs, not with the first epoch")
    cooldown_epochs: int = _SCHEDULE(0, "additional epochs at the lowest learning rate", metavar="N", within="[0, inf)")
    decay_rate: float = _SCHEDULE(0.1, "factor of each reduction", metavar="RATE", short="--dr", within="[0, inf)")

    no_aug: bool = _AUG(False, "only resize and center-crop training images; mixup and cutmix still apply")
    scale: list[float] = _AUG(
        [0.08, 1.0], "share of the image in the random crop", metavar="PCT", nargs=2, within="(0, inf)"
    )
    ratio: list[float] = _AUG(
        [3.0 / 4.0, 4.0 / 3.0], "aspect ratio of the random crop", metavar="R", nargs=2, within="(0, inf)"
    )
    hflip: float = _AUG(0.5, "probability of a horizontal flip", within="[0, 1]")
    vflip: float = _AUG(0.0, "probability of a vertical flip", within="[0, 1]")
    color_jitter: float = _AUG(0.4, "strength of color jitter", metavar="F", within="[0, inf)")
    aa: str | None = _AUG(None, "AutoAugment policy, such as rand-m9-mstd0.5-inc1, v0 or augmix", metavar="NAME")
    aug_repeats: float = _AUG(0, "repeats of each image per epoch (several processes only)", within="[0, inf)")
    aug_splits: int = _AUG(0, "augmented copies of each image, for --loss jsd: 0, or at least 2", within="[0, inf)")
    reprob: float = _AUG(0.0, "probability of random erasing", metavar="P", within="[0, 1]")
    remode: str = _AUG("pixel", "content of erased areas: 0, one color or noise", choices=("const", "rand", "pixel"))
    mixup: float = _AUG(0.0, "alpha of mixup; 0 is off", metavar="ALPHA", within="[0, inf)")
    cutmix: float = _AUG(0.0, "alpha of cutmix; 0 is off", metavar="ALPHA", within="[0, inf)")
    mixup_prob: float = _AUG(1.0, "probability that a batch is mixed", within="[0, 1]")
    mixup_switch_prob: float = _AUG(0.5, "probability of cutmix if mixup is on too", within="[0, 1]")
    mixup_mode: str = _AUG("batch", "which images share a mixing ratio", choices=("batch", "pair", "elem", "half"))
    mixup_off_epoch: int = _AUG(0, "epoch at which mixup and cutmix end; 0: never", metavar="N", within="[0, inf)")
    smoothing: float = _AUG(0.1, "label smoothing (default: 0.1 with --loss ce, else 0)", within="[0, 1]")
    train_interpolation: str = _AUG("random", "in training; '': as in evaluation", choices=("random", *INTERPOLATIONS))

    seed: int = _RUN(42, "random seed", metavar="S", within="[0, 4294967295]")  # the seeds of NumPy
    eval_metric: str = _RUN(
        "", "metric that selects the best checkpoint: nll, topK, {macro,many,medium,few}-topK; multilabel: map, "
        "micro-f1, macro-f1, sample-f1, exact-match, topK-recall, bce (default: topK for the k of the loss, else top1)",
        metavar="NAME",
    )  # fmt: skip
    multi_crop: int = _RUN(0, "evaluate N crops per image and average their top-k marginals", choices=(0, 5, 10))
    marginal_temperature: float | None = _RUN(
        None, "temperature of the marginals of --multi-crop (default: of the loss)", metavar="T", within="(0, inf)"
    )
    val_interval: int = _RUN(1, "epochs between evaluations", metavar="N", within="[1, inf)")
    early_stop: int = _RUN(0, "stop after N evaluations without a better --eval-metric", metavar="N", within="[0, inf)")
    log_interval: int = _RUN(50, "updates between lines of progress", metavar="N", within="[1, inf)")
    log: list[str] = _RUN([], "also log to tensorboard or wandb", metavar="NAME", choices=("tensorboard", "wandb"))
    checkpoint_hist: int = _RUN(10, "number of best checkpoints to keep", metavar="N", within="[1, inf)")
    output: str = _RUN("", "folder of all runs (default: output/train)", metavar="DIR")
    experiment: str = _RUN("", "name of the folder of this run (default: time, model and loss)", metavar="NAME")
    overwrite: bool = _RUN(False, "delete the run in the folder of --experiment, if there is one")
    resume: str = _RUN("", "continue from a checkpoint; auto: from the newest with these settings", metavar="PATH")
    dry_run: bool = _RUN(False, "build everything, try the loss on one batch, and stop")

    def __new__(cls, **given: Any) -> "TrainConfig":
        for name in given.keys() - SETTINGS.keys():
            raise ConfigError(_no_setting(name))
        config = super().__new__(cls)
        object.__setattr__(config, "_given", frozenset(given))  # __init__ could not tell set values from defaults
        return config

    def __post_init__(self) -> None:
        given: frozenset[str] = self.__dict__["_given"]
        defaults = MULTILABEL_DEFAULTS if self.task == MULTILABEL else {}
        if not (self.data_dir or self.dataset or defaults):
            defaults = BUILTIN_DEFAULTS
        elif self.loss not in CROSS_ENTROPY:
            defaults = {"smoothing": 0.0, **defaults}
        for name, setting in SETTINGS.items():
            replaced = name in defaults and (name not in given or name == "dataset")
            value = defaults[name] if replaced else getattr(self, name)
            object.__setattr__(self, name, _read(setting, value))
        self._check_together()

    def to_dict(self) -> dict[str, Any]:
        """Return names and values of all settings as plain types."""
        return {name: getattr(self, name) for name in SETTINGS}

    def replace(self, **settings: Any) -> "TrainConfig":
        """Return a copy in which ``settings`` replace the settings of the same names.

        Settings that were never set get their defaults, which depend on the task and the data set of the copy.
        """
        return type(self)(**{name: getattr(self, name) for name in self.__dict__["_given"]} | settings)

    def asks(self, name: str) -> bool:
        """Return whether a setting was set, instead of having its default."""
        return name in self.__dict__["_given"]

    @property
    def mixes(self) -> bool:
        """Whether mixup or CutMix is on, so that targets are distributions."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return self.in_chans or (self.input_size[0] if self.input_size else 3)

    @property
    def prepared(self) -> str:
        """The preprocessing of a run as text, such as "224x224, crop 0.9, bicubic"."""
        size = "x".join(map(str, (self.input_size or ())[1:]))
        return f"{size}, crop {self.crop_pct:g}, {self.interpolation}"

    @property
    def held_out(self) -> float:
        """Fraction of the training images that ``val_split`` holds out for evaluation. 0: ``val_split`` is a name."""
        return fraction_of({"val_split": self.val_split})

    @property
    def data_name(self) -> str:
        """Name of the data set, with its directory."""
        place = repr(self.data_dir) if self.data_dir else ""
        return " in ".join(filter(None, [self.dataset or "image folder", place]))

    @property
    def metric(self) -> str:
        """Name of ``eval_metric`` in results: "macro-top5" -> "macro_top5", "loss" -> "nll" (multi-label: "bce").

        If ``eval_metric`` is not set, the name is "top1". A run sets ``eval_metric`` when it knows the k of its loss.
        """
        chosen = self.eval_metric or "top1"
        name = {"loss": "bce" if self.task == MULTILABEL else "nll"}.get(chosen, chosen)
        return name.replace("-", "_")

    def _check_together(self) -> None:
        multilabel = self.task == MULTILABEL
        known = "map, micro-f1, topK-recall, bce" if multilabel else "nll, topK, macro-topK, many-topK, few-topK"
        named = (MULTILABEL_METRIC if multilabel else METRIC).fullmatch(self.eval_metric or "loss")
        problems = {
            "--loss is empty: expected the name of a loss (`timm losses` lists them)": not self.loss,
            f"--eval-metric must be one such as {known}, got {self.eval_metric!r}": not named,
            f"--val-split must name a split or be in (0, 1), got {self.val_split}":
                re.fullmatch(r"[-+.\d]+", self.val_split) and not 0 < self.held_out < 1,
            # timm deprecates the schedule plateau, because checkpoints do not save its state
            "--sched plateau: use another schedule of timm; --early-stop N ends a run that stagnates":
                self.sched == "plateau",
            "--overwrite removes a run and --resume continues it: use one of them": self.overwrite and self.resume,
            f"mixup and cutmix need an even --batch-size, got {self.batch_size}": self.mixes and self.batch_size % 2,
            "--aug-splits must be 0, or at least 2 without --no-aug, mixup and cutmix":
                self.aug_splits == 1 or (self.aug_splits and (self.no_aug or self.mixes)),
            "--learn-scale needs --normalize-classifier": self.learn_scale and self.normalize_classifier is None,
            "--model-kwargs num_classes and in_chans: use --num-classes and --in-chans":
                self.model_kwargs.keys() & {"num_classes", "in_chans"},
        }  # fmt: skip
        for name in ("sampler", "multi_crop", "marginal_temperature") if multilabel else ():
            problem = f"{flag_of(name)} needs one label per image, and --task multilabel has several"
            problems[problem] = getattr(self, name)
        for problem, found in problems.items():
            if found:
                raise ConfigError(problem)


SETTINGS: dict[str, "Field[Any]"] = {setting.name: setting for setting in fields(TrainConfig)}


def flag_of(name: str) -> str:
    """Return the flag of a setting, such as ``--batch-size`` for ``batch_size``."""
    return "--" + name.replace("_", "-")


def parse_args(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration of a command line. Flags take priority over the file of ``--config``."""
    parser = create_parser()
    given = vars(parser.parse_args(argv))
    file = given.pop("config", "")
    if file == "list":
        print("\n".join(f"--config {name}\n{path.read_text(encoding='utf-8')}" for name, path in recipes().items()))
        parser.exit()
    try:
        saved = read_config(file, given) if file else {}
        if given.get("loss", saved.get("loss")) != saved.get("loss"):
            if "loss" in saved:
                saved.pop("loss_opt", None)  # the options in the file belong to another loss
            others = {name: value for name, value in saved.items() if name != "smoothing"}
            if saved.get("smoothing") == TrainConfig(**others).smoothing:  # the default for the other loss
                saved = others
        options = {**saved.get("loss_opt", {}), **given.get("loss_opt", {})}
        return TrainConfig(**{**saved, **given, "loss_opt": options})
    except ConfigError as error:
        parser.error(str(error))


def recipes() -> dict[str, Path]:
    """Return the built-in files of settings by name."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}


def read_config(file: str, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings in a YAML file or a recipe, or raise a ConfigError. A string is parsed like a flag's value.

    If ``given``, the names of the settings in the command line, has other weights, a recipe's weights are left out.
    """
    try:
        with open(recipes().get(file, file), encoding="utf-8") as stream:
            settings = yaml.safe_load(stream)
        if not isinstance(settings, dict):
            found = "an empty file" if settings is None else type(settings).__name__
            raise ConfigError(f"expected names and values, got {found}")
        cleaned = clean_settings(settings)
        TrainConfig(**cleaned)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {file}: {getattr(error, 'strerror', None) or error}") from error
    if file in recipes() and {"initial_checkpoint", "pretrained_path"} & {*given}:
        cleaned.pop("pretrained", None)
    return cleaned


def clean_settings(settings: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Return the ``settings`` that this trainer has. A string is parsed like the argument of the flag.

    If the settings name no loss, but have a record of the loss, as those of timm's script under ``timm run`` do, the
    loss is that of the record. With ``strict=False``, settings that this trainer does not have are dropped. Otherwise,
    a setting that only timm's script has is dropped if its value is timm's default, and else raises a ConfigError. An
    unknown name raises a ConfigError. A value None is dropped if the setting does not accept None.
    """
    cleaned: dict[str, Any] = {}
    if "loss" not in settings and (record := settings.get("loss_record")):
        settings = {**settings, "loss": record["name"], "loss_opt": dict(record["options"])}
    for name, value in settings.items():
        setting = SETTINGS.get({"data": "data_dir"}.get(name, name))
        if setting is not None and (value is not None or type(None) in get_args(setting.type)):
            cleaned[setting.name] = _read(setting, value)
        ignored = name in TIMM_ONLY and (value or None) == (TIMM_ONLY[name] or None)
        if strict and setting is None and name not in NOT_SETTINGS and not ignored:
            raise ConfigError(_no_setting(name))
    return cleaned


def create_parser(full: bool = False) -> ArgumentParser:
    """Return the parser of ``timm train``. The parsed result has attributes only for flags in the command line.

    With ``full``, the help shows all flags. Otherwise, the help shows only the common flags.
    """
    parser = ArgumentParser(
        prog="timm train",
        usage="timm train [DIR] [--loss NAME] [--model NAME] [flags]",
        description="Train an image classifier with a loss by name. Without DIR and --dataset, train on a built-in "
        "data set. " + ("" if full else "--help-all shows every flag. `timm run PATH` runs timm's training script."),
        argument_default=argparse.SUPPRESS,
        elsewhere={flag_of(name): _no_setting(name) for name in TIMM_ONLY},
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag")
    about = f"YAML file of settings, such as an args.yaml, or a recipe: {', '.join(recipes())}; list shows the recipes"
    parser.add_argument("-c", "--config", metavar="FILE", help=about)
    parser.add_argument("data_dir", nargs="?", metavar="DIR", help="root directory of the data")
    groups: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        title = setting.metadata["group"]
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        _add(group, setting, shown=full or name in COMMON)
    return parser


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        create_parser(full=True).print_help()
        parser.exit()


def _add(group: Any, setting: "Field[Any]", *, shown: bool) -> None:
    info, (kind, items) = setting.metadata, _type_of(setting)
    default = None if setting.default is MISSING else setting.default
    text = "" if default in (None, "", False) or "default" in info["help"] else f" (default: {default})"
    options: dict[str, Any] = {"help": (info["help"] + text).replace("%", "%%") if shown else argparse.SUPPRESS}
    if kind is bool:
        options["action"] = "store_true"
    elif kind is dict:
        options |= {"nargs": "*", "action": ParseOptions, "metavar": "K=V"}
    else:
        options |= {"type": items or kind, "metavar": info["metavar"], "choices": info["choices"] or None}
        if items:
            options["nargs"] = info["nargs"] or "+"
        elif info["const"] is not None:
            options |= {"nargs": "?", "const": info["const"]}
    group.add_argument(*filter(None, [info["short"]]), flag_of(setting.name), dest=setting.name, **options)


def _no_setting(name: Any) -> str:
    if name not in TIMM_ONLY:
        return f"there is no setting {name!r}{closest(str(name), SETTINGS)}"
    flag = flag_of(name)
    if name in EQUIVALENTS:
        return f"{flag} belongs to timm's own script; the equivalent here is {EQUIVALENTS[name]}"
    return f"{flag} belongs to timm's own script: timm run PATH/train.py ... {flag} ... --loss NAME"


def _type_of(setting: "Field[Any]") -> tuple[type, type | None]:
    """Return the type of a setting, and the type of the items if the setting is a list."""
    hint: Any = setting.type
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    kind = get_origin(hint) or hint
    return kind, get_args(hint)[0] if kind is list else None


def _read(setting: "Field[Any]", value: Any) -> Any:
    """Return the value of a setting, or raise a ConfigError. Text is parsed as the words after the flag."""
    info, (kind, items) = setting.metadata, _type_of(setting)
    if value is None and type(None) in get_args(setting.type):
        return None
    try:
        if isinstance(value, str) and items:
            value = value.replace(",", " ").split()
        values = value if items and isinstance(value, (list, tuple)) else [value]
        values = [_converted(items or kind, one) for one in values]
        if info["nargs"] and len(values) != info["nargs"]:
            raise ValueError(f"takes {info['nargs']} numbers, got {len(values)}")
        interval = Interval.parse(info["within"])
        for one in values:
            if info["choices"] and one not in info["choices"]:
                known = ", ".join(str(choice) or "''" for choice in info["choices"])
                raise ValueError(f"must be one of {known}, got {one!r}")
            if type(one) in (int, float) and one not in interval:
                raise ValueError(f"must be in {interval}, got {one!r}")
    except ValueError as error:
        raise ConfigError(f"{flag_of(setting.name)} {error}") from error
    return values if items else values[0]


def _converted(kind: type, value: Any) -> Any:
    """Return a value of the type ``kind``, from a value of a YAML file or of a program, or raise a ValueError."""
    if kind is dict and isinstance(value, (str, list)):
        return parse_pairs(value.split() if isinstance(value, str) else list(map(str, value)))
    number = type(value) in (int, float)
    if (kind in (int, float) and isinstance(value, str)) or (kind in (str, float) and number):
        with suppress(ValueError):
            return kind(value)
    if not isinstance(value, Mapping if kind is dict else kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"must be {kind.__name__}, got {value!r}")
    return dict(value) if isinstance(value, Mapping) else value
