# ruff: noqa: RUF009 -- a flag is a dataclass field
"""The settings of ``timm train``, one line each: timm's under timm's names, meanings and defaults, and our own.

A field is a flag: ``batch_size`` is ``--batch-size``. Its type parses and checks the value.
"""

import copy
from dataclasses import dataclass, field
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    names: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    nargs: int | None = None,
    const: Any = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: its value where the flag is not given.
        help: the line of ``--help``.
        metavar: name of the value in ``--help``.
        names: further names of the flag.
        choices: the values it takes.
        nargs: number of values.
        const: the value of the flag where it is given alone.
    """
    said = {"help": help, "metavar": metavar, "names": names, "choices": choices, "nargs": nargs, "const": const}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.copy(default), metadata=said)
    return field(default=default, metadata=said)


@dataclass(frozen=True, kw_only=True)
class LossFlags:
    """Loss."""

    loss: str = flag("ce", "a registered loss (`timm losses` lists them) or one of timm's own", metavar="NAME")
    loss_opt: dict[str, Any] = flag({}, "the loss's options; repeats add")
    normalize_classifier: float | None = flag(
        None,
        "swap the model's classifier for a cosine one, as LDAM and the imbalanced losses want",
        metavar="SCALE",
        names=("--cosine-classifier",),
        const=1.0,
    )
    learn_scale: bool = flag(False, "train the cosine classifier's scale")


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Data."""

    data_dir: str | None = flag(None, "the data's root directory", metavar="DIR")
    dataset: str = flag(
        "",
        "<type>/<name> as in timm (torch/cifar100, hfds/..., wds/...), an image folder if empty, or topk/<name> for a "
        "registered data set",
        metavar="NAME",
    )
    dataset_opt: dict[str, Any] = flag({}, "options of a registered data set, such as size=20000 noise=6")
    train_split: str = flag("train", "the split to train on", metavar="NAME")
    val_split: str = flag(
        "validation",
        "the split to evaluate on; a fraction such as 0.1 holds out that much of each training class; '' for none",
        metavar="NAME",
    )
    train_batches_per_epoch: int | None = flag(
        None, "batches in a training epoch (else what the data gives)", metavar="N", names=("--train-steps-per-epoch",)
    )
    train_num_samples: int | None = flag(None, "length of a streamed training split", metavar="N")
    val_num_samples: int | None = flag(None, "length of a streamed validation split", metavar="N")
    dataset_download: bool = flag(False, "let torch/ and tfds/ data sets download themselves")
    class_map: str = flag("", "class name to index map", metavar="FILE")
    input_img_mode: str | None = flag(None, "PIL mode of the images")
    input_key: str | None = flag(None, "the data set's key of the image")
    target_key: str | None = flag(None, "the data set's key of the label")
    dataset_trust_remote_code: bool = flag(False, "let a Hugging Face data set run its own code")
    strict_data: bool = flag(False, "stop at an unreadable image (else its neighbour is used, and counted)")


@dataclass(frozen=True, kw_only=True)
class HarderDataFlags:
    """Harder training data."""

    label_noise: float = flag(0.0, "draw this share of the training labels anew, within their superclass", metavar="P")
    superclasses: str = flag(
        "", "JSON: the superclass of each class (CIFAR-100's and the built-in data's are known)", metavar="FILE"
    )
    long_tail: str | None = flag(
        None, "thin the classes out, from all of the first to few of the last", choices=("pareto", "exp")
    )
    imbalance_factor: float = flag(100.0, "first over last class of --long-tail", metavar="F")
    subset: float = flag(1.0, "train on this fraction of each class", metavar="FRACTION")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model."""

    model: str = flag("resnet50", "a timm model", metavar="NAME")
    pretrained: bool = flag(False, "start from its published weights")
    pretrained_path: str | None = flag(None, "start from this file as if it were the published weights")
    initial_checkpoint: str = flag("", "load this checkpoint into the model first", metavar="PATH")
    resume: str = flag("", "continue from a checkpoint; 'auto' finds the latest of this run", metavar="PATH")
    no_resume_opt: bool = flag(False, "resume the model alone, not the optimizer")
    num_classes: int | None = flag(None, "number of classes (else the data set's, else the model's)", metavar="N")
    gp: str | None = flag(None, "global pooling type", metavar="POOL")
    img_size: int | None = flag(None, "image size (else the model's)", metavar="N")
    in_chans: int | None = flag(None, "input channels (else 3)", metavar="N")
    input_size: list[int] | None = flag(None, "input channels, height and width", metavar="N", nargs=3)
    crop_pct: float | None = flag(None, "share of the image kept by evaluation's centre crop", metavar="PCT")
    mean: list[float] | None = flag(None, "channel means to normalise with", metavar="MEAN")
    std: list[float] | None = flag(None, "channel standard deviations to normalise with", metavar="STD")
    interpolation: str = flag("", "resizing interpolation", metavar="NAME")
    batch_size: int = flag(128, "training batch of each process", metavar="N", names=("-b",))
    validation_batch_size: int | None = flag(
        None, "evaluation batch (else the training one)", metavar="N", names=("-vb",)
    )
    channels_last: bool = flag(False, "channels-last memory layout")
    grad_accum_steps: int = flag(1, "batches to an update", metavar="N")
    grad_checkpointing: bool = flag(False, "recompute activations to save memory")
    fast_norm: bool = flag(False, "timm's fast normalisation layers")
    model_kwargs: dict[str, Any] = flag({}, "extra model options")
    head_init_scale: float | None = flag(None, "scale the classifier's initial values")
    head_init_bias: float | None = flag(None, "the classifier's initial bias")
    torchcompile: str | None = flag(None, "compile the model", metavar="BACKEND", const="inductor")
    torchcompile_mode: str | None = flag(None, "torch.compile mode")


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Device."""

    device: str = flag("cuda", "where to train; without CUDA, cuda means cpu")
    amp: bool = flag(False, "mixed precision")
    amp_dtype: str | None = flag(
        None,
        "the lower precision of --amp (else float16, and bfloat16 on a CPU, where float16 is slow)",
        choices=("float16", "bfloat16"),
    )
    model_dtype: str | None = flag(
        None, "the model's own precision, without --amp", choices=("float32", "float16", "bfloat16")
    )
    no_ddp_bb: bool = flag(False, "do not broadcast buffers between processes")
    class_parallel: bool = flag(
        False, "spread the classifier's rows over the processes of torchrun; scores of all classes are never made"
    )
    class_sample: float | None = flag(
        None,
        "with --class-parallel: the share of classes that takes part in a step, besides the labels",
        metavar="RATE",
    )
    synchronize_step: bool = flag(False, "wait for the device after each step")
    local_rank: int = flag(0, "set by launchers", names=("--local_rank",))
    device_modules: list[str] | None = flag(None, "modules to import for a device backend", metavar="MODULE")


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer."""

    opt: str = flag("sgd", "a timm optimizer", metavar="NAME")
    opt_eps: float | None = flag(None, "its epsilon", metavar="EPS")
    opt_betas: list[float] | None = flag(None, "its betas", metavar="BETA")
    momentum: float = flag(0.9, "its momentum", metavar="M")
    weight_decay: float = flag(2e-05, "weight decay")
    clip_grad: float | None = flag(None, "clip gradients", metavar="NORM")
    clip_mode: str = flag("norm", "how to clip", choices=("norm", "value", "agc"))
    layer_decay: float | None = flag(None, "layer-wise learning-rate decay")
    layer_decay_min_scale: float = flag(0, "its least scale")
    layer_decay_no_opt_scale: float | None = flag(None, "layers below this scale are not trained")
    opt_kwargs: dict[str, Any] = flag({}, "extra optimizer options")


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Schedule."""

    epochs: int = flag(300, "epochs", metavar="N")
    sched: str = flag("cosine", "learning-rate schedule", metavar="NAME")
    sched_on_updates: bool = flag(False, "step the schedule on updates, not epochs")
    lr: float | None = flag(None, "learning rate (else from --lr-base)", metavar="LR")
    lr_base: float = flag(0.1, "lr = lr_base * global batch / lr_base_size", metavar="LR")
    lr_base_size: int = flag(256, "the batch that --lr-base is for", metavar="DIV")
    lr_base_scale: str = flag("", "how lr grows with the batch; by optimizer", choices=("", "linear", "sqrt"))
    lr_noise: list[float] | None = flag(None, "epochs between which the rate is noisy", metavar="PCT")
    lr_noise_pct: float = flag(0.67, "the noise's limit")
    lr_noise_std: float = flag(1.0, "the noise's standard deviation")
    lr_cycle_mul: float = flag(1.0, "cycle length multiplier")
    lr_cycle_decay: float = flag(0.5, "decay from cycle to cycle")
    lr_cycle_limit: int = flag(1, "number of cycles", metavar="N")
    lr_k_decay: float = flag(1.0, "k-decay of cosine and poly")
    warmup_lr: float = flag(1e-05, "the rate that warm-up starts from", metavar="LR")
    min_lr: float = flag(0, "the least rate", metavar="LR")
    epoch_repeats: float = flag(0.0, "repeats of a streamed data set in an epoch", metavar="N")
    start_epoch: int | None = flag(None, "start here, whatever a checkpoint says", metavar="N")
    decay_milestones: list[int] = flag([90, 180, 270], "of multistep", metavar="N")
    decay_epochs: float = flag(90, "epochs between decays of step", metavar="N")
    warmup_epochs: int = flag(5, "epochs of warm-up", metavar="N")
    warmup_prefix: bool = flag(False, "warm up before the schedule, not within it")
    cooldown_epochs: int = flag(0, "epochs at the least rate, at the end", metavar="N")
    patience_epochs: int = flag(10, "of plateau", metavar="N")
    decay_rate: float = flag(0.1, "of step, multistep and plateau", metavar="RATE", names=("--dr",))


@dataclass(frozen=True, kw_only=True)
class AugmentationFlags:
    """Augmentation and regularisation."""

    no_aug: bool = flag(False, "resize only, whatever the flags below say")
    train_crop_mode: str | None = flag(None, "timm's training crop mode")
    scale: list[float] = flag([0.08, 1.0], "random crop's area", metavar="PCT")
    ratio: list[float] = flag([0.75, 1.3333333333333333], "random crop's aspect", metavar="R")
    hflip: float = flag(0.5, "chance of a horizontal flip")
    vflip: float = flag(0.0, "chance of a vertical flip")
    color_jitter: float = flag(0.4, "colour jitter", metavar="F")
    color_jitter_prob: float | None = flag(None, "its chance", metavar="P")
    grayscale_prob: float | None = flag(None, "chance of greyscale", metavar="P")
    gaussian_blur_prob: float | None = flag(None, "chance of blur", metavar="P")
    aa: str | None = flag(
        None, "auto-augment policy, such as rand-m9-mstd0.5-inc1, v0, original, augmix", metavar="NAME"
    )
    aug_repeats: float = flag(0, "repeated augmentation (distributed only)")
    aug_splits: int = flag(0, "augmentation splits: 0, or at least 2")
    reprob: float = flag(0.0, "chance of random erasing", metavar="P")
    remode: str = flag("pixel", "random erasing mode")
    recount: int = flag(1, "random erasing count")
    resplit: bool = flag(False, "do not erase in the first augmentation split")
    mixup: float = flag(0.0, "mixup's alpha, on if above 0", metavar="ALPHA")
    cutmix: float = flag(0.0, "cutmix's alpha, on if above 0", metavar="ALPHA")
    cutmix_minmax: list[float] | None = flag(None, "cutmix's least and largest ratio")
    mixup_prob: float = flag(1.0, "chance that a batch is mixed")
    mixup_switch_prob: float = flag(0.5, "chance of cutmix where both are on")
    mixup_mode: str = flag("batch", "mix by batch, pair, element", choices=("batch", "pair", "elem", "half"))
    mixup_off_epoch: int = flag(0, "no mixing from this epoch, if above 0", metavar="N")
    smoothing: float = flag(0.1, "label smoothing")
    train_interpolation: str = flag("random", "random, bilinear or bicubic")
    drop: float = flag(0.0, "dropout", metavar="P")
    drop_connect: float | None = flag(None, "old name of --drop-path", metavar="P")
    drop_path: float | None = flag(None, "stochastic depth", metavar="P")
    drop_block: float | None = flag(None, "drop block", metavar="P")


@dataclass(frozen=True, kw_only=True)
class BatchNormFlags:
    """Batch norm."""

    bn_momentum: float | None = flag(None, "batch-norm momentum")
    bn_eps: float | None = flag(None, "batch-norm epsilon")
    sync_bn: bool = flag(False, "synchronised batch norm")
    dist_bn: str = flag("reduce", "share statistics after each epoch", choices=("broadcast", "reduce", ""))
    split_bn: bool = flag(False, "a batch norm for each augmentation split")


@dataclass(frozen=True, kw_only=True)
class AverageFlags:
    """Moving average."""

    model_ema: bool = flag(False, "keep, and evaluate, a moving average of the weights")
    model_ema_force_cpu: bool = flag(False, "keep it on the CPU, not evaluated")
    model_ema_decay: float = flag(0.9998, "its decay")
    model_ema_warmup: bool = flag(False, "let its decay warm up")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Run."""

    dry_run: bool = flag(False, "build everything, run one batch forward and backward, print the plan")
    seed: int = flag(42, "random seed", metavar="S")
    worker_seeding: str = flag("all", "accepted as timm's; every batch has a seed of its own here")
    log_interval: int = flag(50, "updates between lines of progress", metavar="N")
    val_interval: int = flag(1, "epochs between evaluations", metavar="N")
    recovery_interval: int = flag(0, "updates between recovery checkpoints", metavar="N")
    checkpoint_hist: int = flag(10, "checkpoints to keep", metavar="N")
    workers: int = flag(4, "data-loading processes", metavar="N", names=("-j",))
    save_images: bool = flag(False, "save the training batches of every log interval")
    pin_mem: bool = flag(False, "pin host memory")
    no_prefetcher: bool = flag(False, "normalise and mix on the CPU")
    output: str = flag("", "where runs go (else ./output/train)", metavar="DIR")
    experiment: str = flag("", "this run's folder in --output", metavar="NAME")
    eval_metric: str = flag(
        "top1",
        "what picks the best checkpoint: loss, topK or macro-topK for any K, many-topK, medium-topK, few-topK",
        metavar="NAME",
    )
    early_stop: int = flag(0, "stop after N evaluations without a better --eval-metric", metavar="N")
    multi_crop: int = flag(0, "evaluate on that many crops, averaging top-k probabilities", choices=(0, 5, 10))
    marginal_temperature: float | None = flag(None, "temperature of those probabilities (else the loss's)", metavar="T")
    tta: int = flag(0, "average the scores of N consecutive samples", metavar="N")
    use_multi_epochs_loader: bool = flag(False, "accepted as timm's; workers outlive the epoch anyway")


@dataclass(frozen=True, kw_only=True)
class LoggerFlags:
    """Loggers."""

    logger: list[str] = flag([], "also log to these (`topk-registry loggers` lists them)", metavar="NAME")
    logger_opt: dict[str, Any] = flag({}, "their options, as mlflow.experiment=cifar; repeats add")
    log_wandb: bool = flag(False, "log to Weights & Biases, as --logger wandb")
    wandb_project: str | None = flag(None, "its project", metavar="NAME")
    wandb_tags: list[str] = flag([], "its tags", metavar="TAG")
    wandb_resume_id: str = flag("", "go on with its run of this ID, with --resume", metavar="ID")
