# ruff: noqa: RUF009 -- a flag is a dataclass field
"""The settings of ``timm train``, one line each: timm's under timm's names, meanings and defaults, and our own.

A field is a flag: ``batch_size`` is ``--batch-size``. Its type parses and checks the value.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from topk_studies.old_trainer.config.sampling import SAMPLERS
from topk_studies.old_trainer.config.tasks import TASKS

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # of timm and Pillow


def flag(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    names: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    within: str = "(-inf, inf)",
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
        within: the interval of numbers that it takes, each of a list.
        nargs: number of values.
        const: the value of the flag where it is given alone.
    """
    said = {"help": help, "metavar": metavar, "names": names, "choices": choices, "within": within, "nargs": nargs}
    said["const"] = const
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.copy(default), metadata=said)
    return field(default=default, metadata=said)


@dataclass(frozen=True, kw_only=True)
class LossFlags:
    """Task and loss."""

    task: str = flag(
        "classification",
        "what images have: one label each (classification), or any number of labels (multilabel)",
        choices=TASKS,
    )
    loss: str = flag(
        "ce",
        "a registered loss (`timm losses` lists them) or one of timm's own (default: ce; with --task multilabel bce)",
        metavar="NAME",
    )
    loss_opt: dict[str, Any] = flag({}, "options of the loss; a repeated flag adds to those before")
    class_weight: str = flag(
        "",
        "weigh the classes in the loss: inv_freq or effective_num, from the training labels; or a file, or numbers "
        "with commas between them",
        metavar="HOW",
        names=("--loss-class-weight",),
    )
    loss_pos_weight: str = flag(
        "",
        "weigh the positive term of a binary loss: neg_pos, from the training labels; or a file, a number, or numbers "
        "with commas between them",
        metavar="HOW",
    )
    class_stats: str = flag(
        "",
        "JSON with pos_counts and num_samples, as timm's class_weights.py writes it: the class counts of the loss and "
        "its weights (default: those of the training labels)",
        metavar="FILE",
    )
    loss_weight_power: float = flag(
        1.0, "exponent of --class-weight inv_freq and --loss-pos-weight neg_pos", metavar="POWER"
    )
    loss_weight_beta: float = flag(0.999, "beta of --class-weight effective_num", metavar="BETA")
    loss_weight_max: float | None = flag(
        None, "largest weight of a method of --class-weight or --loss-pos-weight (default: no limit)", metavar="WEIGHT"
    )
    normalize_classifier: float | None = flag(
        None,
        "replace the classifier by a cosine one with scores times SCALE, as LDAM and the imbalanced losses want",
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
    val_fold: int = flag(
        0,
        "which of its parts a fractional --val-split holds out, counted from 0: --val-split 0.2 has five",
        metavar="N",
        within="[0, inf)",
    )
    train_batches_per_epoch: int | None = flag(
        None,
        "batches in a training epoch (default: as many as the data holds)",
        metavar="N",
        names=("--train-steps-per-epoch",),
        within="[1, inf)",
    )
    train_num_samples: int | None = flag(None, "images in a streamed training split", metavar="N", within="[1, inf)")
    val_num_samples: int | None = flag(None, "images in a streamed validation split", metavar="N", within="[1, inf)")
    dataset_download: bool = flag(False, "let torch/ and tfds/ data sets download themselves")
    class_map: str = flag("", "a file that maps class names to indices", metavar="FILE")
    input_img_mode: str | None = flag(None, "PIL mode that images are converted to, such as RGB or L")
    input_key: str | None = flag(None, "the data set's key of the image")
    target_key: str | None = flag(
        None, "the data set's key of the label, or of the labels; several with commas between them are a 0 or 1 each"
    )
    target_format: str | None = flag(
        None,
        "with --task multilabel: what --target-key holds, numbers of classes or a 0 or 1 for each class (default: "
        "indices)",
        choices=("indices", "multihot"),
    )
    labels_csv: str = flag(
        "",
        "with --task multilabel: CSV of images and their labels, for a folder of images; {split} in it stands for the "
        "split's name",
        metavar="FILE",
    )
    dataset_trust_remote_code: bool = flag(False, "let a Hugging Face data set run its own code")
    ignore_unknown_classes: bool = flag(
        False, "leave evaluation images out whose class training lacks (default: refuse them)"
    )
    exclude: str = flag(
        "", "CSV of `topk-registry labels`: leave the samples out of training whose action is exclude", metavar="FILE"
    )
    relabel: str = flag("", "such a CSV: train on the column `suggested` where the action is relabel", metavar="FILE")
    strict_data: bool = flag(False, "stop at an unreadable image (default: take its neighbour, and count it)")


@dataclass(frozen=True, kw_only=True)
class HarderDataFlags:
    """Harder training data."""

    label_noise: float = flag(
        0.0, "replace this share of the training labels by random classes of the same superclass", metavar="P"
    )
    label_noise_kind: str = flag(
        "family",
        "with --label-noise: redraw within the superclass (family), or make exactly that share wrong: anywhere "
        "(uniform), as a weaker model errs, or as several people do",
        choices=("family", "uniform", "confusions", "annotators"),
    )
    label_file: str = flag(
        "", "train on the labels of a file such as CIFAR-10N's or CIFAR-100N's (.pt of arrays by name)", metavar="FILE"
    )
    label_column: str | None = flag(None, "which labels of --label-file, such as worse_label", metavar="NAME")
    superclasses: str = flag(
        "",
        "JSON or CSV tree: the superclass of each class (CIFAR-100's and the built-in data's are known)",
        metavar="FILE",
    )
    long_tail: str | None = flag(
        None, "remove training images, ever more from class to class: few remain of the last", choices=("pareto", "exp")
    )
    imbalance_factor: float = flag(
        100.0, "images of the first class over those of the last, with --long-tail", metavar="F"
    )
    subset: float = flag(1.0, "train on this fraction of each class", metavar="FRACTION")


@dataclass(frozen=True, kw_only=True)
class SamplerFlags:
    """Sampler."""

    sampler: str | None = flag(
        None,
        "how often an image comes, by the frequency of its class (default: instance, once an epoch; class_balanced "
        "with --retrain-head)",
        choices=SAMPLERS,
    )
    sampler_beta: float = flag(0.999, "beta of --sampler effective_num", metavar="BETA")
    sampler_threshold: float = flag(
        0.001,
        "share of the images below which --sampler repeat_factor repeats those of a class",
        metavar="SHARE",
        within="[0, inf)",
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model."""

    model: str = flag("resnet50", "a timm model", metavar="NAME")
    pretrained: bool = flag(False, "start from the model's published weights")
    pretrained_path: str | None = flag(None, "start from this file as if it were the published weights")
    pretrained_cfg_overlay: dict[str, Any] = flag({}, "entries in the place of those of the pretrained configuration")
    initial_checkpoint: str = flag("", "load this checkpoint into the model first", metavar="PATH")
    resume: str = flag("", "continue from a checkpoint; 'auto' finds the latest of this run", metavar="PATH")
    retrain_head: str = flag(
        "",
        "train the classifier anew on the features of this checkpoint, and freeze all else; by default class-balanced",
        metavar="PATH",
    )
    no_resume_opt: bool = flag(False, "resume the model alone, not the optimizer")
    num_classes: int | None = flag(
        None,
        "number of classes; more than the data has adds outputs (default: the data's, else the model's)",
        metavar="N",
        within="[1, inf)",
    )
    gp: str | None = flag(None, "global pooling type", metavar="POOL")
    img_size: int | None = flag(None, "image size (default: the model's)", metavar="N", within="[1, inf)")
    in_chans: int | None = flag(None, "input channels (default: 3)", metavar="N", within="[1, inf)")
    input_size: list[int] | None = flag(
        None, "input channels, height and width", metavar="N", nargs=3, within="[1, inf)"
    )
    crop_pct: float | None = flag(
        None, "share of the image kept by evaluation's centre crop", metavar="PCT", within="(0, inf)"
    )
    mean: list[float] | None = flag(None, "channel means to normalise with", metavar="MEAN")
    std: list[float] | None = flag(
        None, "channel standard deviations to normalise with", metavar="STD", within="(0, inf)"
    )
    interpolation: str = flag("", "resizing interpolation (default: the model's)", choices=("", *INTERPOLATIONS))
    batch_size: int = flag(128, "images in a training batch of each process", metavar="N", names=("-b",))
    validation_batch_size: int | None = flag(
        None, "images in an evaluation batch (default: as in training)", metavar="N", names=("-vb",), within="[1, inf)"
    )
    channels_last: bool = flag(False, "use the channels-last memory layout")
    grad_accum_steps: int = flag(1, "batches to an update of the weights", metavar="N")
    grad_checkpointing: bool = flag(False, "recompute activations to save memory")
    fast_norm: bool = flag(False, "use timm's fast normalisation layers")
    model_kwargs: dict[str, Any] = flag({}, "further options of the model")
    head_init_scale: float | None = flag(None, "scale the classifier's initial values")
    head_init_bias: float | None = flag(None, "the classifier's initial bias")
    torchcompile: str | None = flag(None, "compile the model", metavar="BACKEND", const="inductor")
    torchcompile_mode: str | None = flag(None, "mode of torch.compile")


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Device."""

    device: str = flag("cuda", "device to train on; cuda is the CPU where there is no CUDA")
    amp: bool = flag(False, "train in mixed precision")
    amp_dtype: str | None = flag(
        None,
        "lower precision of --amp (default: float16; bfloat16 on a CPU, where float16 is slow)",
        choices=("float16", "bfloat16"),
    )
    model_dtype: str | None = flag(
        None, "precision of the model's weights, without --amp", choices=("float32", "float16", "bfloat16")
    )
    no_ddp_bb: bool = flag(False, "do not broadcast buffers between processes")
    class_parallel: bool = flag(
        False, "divide the classifier's classes among the processes of torchrun; no process computes the scores of all"
    )
    class_sample: float | None = flag(
        None,
        "with --class-parallel: share of the classes in a step, besides those of the labels",
        metavar="RATE",
    )
    chunked_update: str | None = flag(
        None,
        "with --class-parallel: update the classifier a chunk of classes at a time, so that no gradient of all its "
        "weights exists; the value is the precision of its optimizer's states (alone: float32)",
        metavar="STATE",
        choices=("float32", "bfloat16", "int8"),
        const="float32",
    )
    classifier_dtype: str | None = flag(
        None,
        "with --chunked-update: precision of the classifier's weight, rounded at random without bias (default: the "
        "model's)",
        choices=("bfloat16",),
    )
    synchronize_step: bool = flag(False, "wait for the device after each step")
    local_rank: int = flag(0, "set by launchers", names=("--local_rank",))
    device_modules: list[str] | None = flag(None, "modules to import that bring a device to torch", metavar="MODULE")


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer."""

    opt: str = flag("sgd", "a timm optimizer", metavar="NAME")
    opt_eps: float | None = flag(None, "epsilon of the optimizer", metavar="EPS", within="[0, inf)")
    opt_betas: list[float] | None = flag(None, "betas of the optimizer", metavar="BETA", within="[0, 1]")
    momentum: float = flag(0.9, "momentum of the optimizer", metavar="M", within="[0, 1]")
    weight_decay: float = flag(2e-05, "weight decay", within="[0, inf)")
    clip_grad: float | None = flag(
        None,
        "largest norm or value of gradients, see --clip-mode (default: no limit)",
        metavar="NORM",
        within="(0, inf)",
    )
    clip_mode: str = flag(
        "norm",
        "what --clip-grad limits: the norm of all, each value, or norms relative to the weights'",
        choices=("norm", "value", "agc"),
    )
    layer_decay: float | None = flag(
        None, "factor of the learning rate from layer to layer, the deepest first", within="(0, inf)"
    )
    layer_decay_min_scale: float = flag(0, "least factor of --layer-decay", within="[0, inf)")
    layer_decay_no_opt_scale: float | None = flag(
        None, "do not train layers with a factor of --layer-decay below this", within="[0, inf)"
    )
    opt_kwargs: dict[str, Any] = flag({}, "further options of the optimizer")


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Schedule."""

    epochs: int = flag(300, "epochs to train", metavar="N")
    sched: str = flag("cosine", "learning-rate schedule", metavar="NAME")
    sched_on_updates: bool = flag(False, "move on in the schedule at every update, not every epoch")
    lr: float | None = flag(None, "learning rate (default: from --lr-base)", metavar="LR", within="[0, inf)")
    lr_base: float = flag(0.1, "lr = lr_base * global batch / lr_base_size", metavar="LR", within="[0, inf)")
    lr_base_size: int = flag(256, "the batch size that --lr-base is for", metavar="DIV", within="[1, inf)")
    lr_base_scale: str = flag(
        "", "how the learning rate grows with the batch (default: by optimizer)", choices=("", "linear", "sqrt")
    )
    lr_noise: list[float] | None = flag(
        None, "parts of the training between which the learning rate is noisy", metavar="PCT", within="[0, inf)"
    )
    lr_noise_pct: float = flag(0.67, "largest change of the learning rate by --lr-noise, as a share", within="[0, inf)")
    lr_noise_std: float = flag(1.0, "standard deviation of --lr-noise", within="[0, inf)")
    lr_cycle_mul: float = flag(1.0, "factor of the length from one cycle to the next", within="(0, inf)")
    lr_cycle_decay: float = flag(0.5, "factor of the learning rate from one cycle to the next", within="[0, inf)")
    lr_cycle_limit: int = flag(1, "number of cycles of the schedule", metavar="N", within="[1, inf)")
    lr_k_decay: float = flag(1.0, "exponent of k-decay, for the schedules cosine and poly", within="(0, inf)")
    lr_decay_fn: str | None = flag(
        None,
        "how the schedules wsd and rsqrt decay in the end: linear, 1-sqrt, cosine, power or exp (default: 1-sqrt for "
        "wsd, linear for rsqrt)",
        metavar="NAME",
    )
    lr_stable_timescale: float | None = flag(
        None,
        "epochs by which the schedule rsqrt counts before it decays (default: those of warm-up)",
        metavar="N",
        within="(0, inf)",
    )
    warmup_lr: float = flag(1e-05, "learning rate that warm-up starts from", metavar="LR", within="[0, inf)")
    min_lr: float = flag(0, "least learning rate", metavar="LR", within="[0, inf)")
    stop_epoch: int | None = flag(
        None, "stop after N epochs, and leave the schedule that of --epochs (default: do not)", metavar="N"
    )
    epoch_repeats: float = flag(0.0, "repeats of a streamed data set in an epoch", metavar="N", within="[0, inf)")
    start_epoch: int | None = flag(
        None, "epochs that count as done, whatever a checkpoint says", metavar="N", within="[0, inf)"
    )
    decay_milestones: list[int] = flag(
        [90, 180, 270], "epochs at which the schedule multistep lowers the rate", metavar="N", within="[1, inf)"
    )
    decay_epochs: float | None = flag(
        None,
        "epochs after which the schedule step lowers the rate (default: 90), or length of the decay of wsd and rsqrt, "
        "below 1 a share (default: 0.2)",
        metavar="N",
        within="(0, inf)",
    )
    warmup_epochs: int = flag(5, "epochs of warm-up", metavar="N", within="[0, inf)")
    warmup_prefix: bool = flag(False, "warm up before the schedule, not within it")
    cooldown_epochs: int = flag(0, "epochs at the least learning rate, at the end", metavar="N", within="[0, inf)")
    patience_epochs: int = flag(
        10, "epochs without progress after which the schedule plateau lowers the rate", metavar="N", within="[0, inf)"
    )
    decay_rate: float = flag(
        0.1,
        "factor of the rate in the schedules step, multistep and plateau",
        metavar="RATE",
        names=("--dr",),
        within="[0, inf)",
    )


@dataclass(frozen=True, kw_only=True)
class AugmentationFlags:
    """Augmentation and regularisation."""

    no_aug: bool = flag(False, "only resize images, whatever the flags below say")
    train_crop_mode: str | None = flag(None, "how timm crops training images, such as rrc, rkrc or rkrr")
    scale: list[float] = flag(
        [0.08, 1.0],
        "least and largest area of the random crop, as a share of the image",
        metavar="PCT",
        within="(0, inf)",
    )
    ratio: list[float] = flag(
        [0.75, 1.3333333333333333], "least and largest aspect ratio of the random crop", metavar="R", within="(0, inf)"
    )
    hflip: float = flag(0.5, "chance of a horizontal flip", within="[0, 1]")
    vflip: float = flag(0.0, "chance of a vertical flip", within="[0, 1]")
    color_jitter: float = flag(0.4, "strength of colour jitter", metavar="F", within="[0, inf)")
    color_jitter_prob: float | None = flag(
        None, "chance of colour jitter (default: always)", metavar="P", within="[0, 1]"
    )
    grayscale_prob: float | None = flag(None, "chance of greyscale", metavar="P", within="[0, 1]")
    gaussian_blur_prob: float | None = flag(None, "chance of blur", metavar="P", within="[0, 1]")
    aa: str | None = flag(
        None, "auto-augment policy, such as rand-m9-mstd0.5-inc1, v0, original, augmix", metavar="NAME"
    )
    aug_repeats: float = flag(
        0, "times that each image is in an epoch, augmented anew (several processes only)", within="[0, inf)"
    )
    aug_splits: int = flag(0, "parts of a batch with augmentations of their own: 0, or at least 2", within="[0, inf)")
    reprob: float = flag(0.0, "chance of random erasing", metavar="P", within="[0, 1]")
    remode: str = flag("pixel", "what random erasing writes", choices=("const", "rand", "pixel"))
    recount: int = flag(1, "rectangles that random erasing takes", within="[1, inf)")
    resplit: bool = flag(False, "do not erase in the first augmentation split")
    mixup: float = flag(0.0, "alpha of mixup; 0 is off", metavar="ALPHA", within="[0, inf)")
    cutmix: float = flag(0.0, "alpha of cutmix; 0 is off", metavar="ALPHA", within="[0, inf)")
    cutmix_minmax: list[float] | None = flag(
        None, "least and largest side of the pasted part, in place of --cutmix", within="[0, 1]"
    )
    mixup_prob: float = flag(1.0, "chance that a batch is mixed", within="[0, 1]")
    mixup_switch_prob: float = flag(0.5, "chance of cutmix rather than mixup where both are on", within="[0, 1]")
    mixup_mode: str = flag(
        "batch",
        "images that share one mixing ratio: a batch, pairs, or each alone",
        choices=("batch", "pair", "elem", "half"),
    )
    mixup_off_epoch: int = flag(0, "epochs with mixup and cutmix; 0: all", metavar="N", within="[0, inf)")
    smoothing: float = flag(0.1, "label smoothing (default: 0.1; with --task multilabel 0)", within="[0, 1]")
    train_interpolation: str = flag(
        "random",
        "resizing interpolation in training; random: bilinear or bicubic, for each image; '': as in evaluation",
        choices=("random", "", *INTERPOLATIONS),
    )
    drop: float = flag(0.0, "dropout", metavar="P", within="[0, 1]")
    drop_connect: float | None = flag(None, "old name of --drop-path", metavar="P", within="[0, 1]")
    drop_path: float | None = flag(None, "stochastic depth", metavar="P", within="[0, 1]")
    drop_block: float | None = flag(None, "chance of DropBlock", metavar="P", within="[0, 1]")


@dataclass(frozen=True, kw_only=True)
class BatchNormFlags:
    """Batch norm."""

    bn_momentum: float | None = flag(None, "momentum of batch norm", within="[0, 1]")
    bn_eps: float | None = flag(None, "epsilon of batch norm", within="[0, inf)")
    sync_bn: bool = flag(False, "compute batch norm over all processes")
    dist_bn: str = flag(
        "reduce",
        "how processes share batch-norm statistics after each epoch; '' for not",
        choices=("broadcast", "reduce", ""),
    )
    split_bn: bool = flag(False, "use a batch norm of its own for each of --aug-splits")


@dataclass(frozen=True, kw_only=True)
class AverageFlags:
    """Moving average."""

    model_ema: bool = flag(False, "keep a moving average of the weights, and evaluate it")
    model_ema_force_cpu: bool = flag(False, "keep the moving average on the CPU, and do not evaluate it")
    model_ema_decay: float = flag(0.9998, "decay of the moving average", within="[0, 1]")
    model_ema_warmup: bool = flag(False, "let the decay of the moving average grow from 0")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Run."""

    dry_run: bool = flag(False, "build everything, run one batch forward and backward, print the plan")
    seed: int = flag(42, "random seed", metavar="S", within="[0, inf)")
    worker_seeding: str = flag("all", "accepted for timm's sake and not used: every batch has a seed of its own")
    log_interval: int = flag(50, "updates between lines of progress", metavar="N", within="[1, inf)")
    val_interval: int = flag(1, "epochs between evaluations", metavar="N", within="[1, inf)")
    recovery_interval: int = flag(
        0, "updates between recovery checkpoints; 0 writes none", metavar="N", within="[0, inf)"
    )
    save_epochs: list[int] = flag([], "keep milestone-N.pth.tar of these epochs, and evaluate there", metavar="N")
    checkpoint_hist: int = flag(10, "checkpoints to keep", metavar="N", within="[1, inf)")
    workers: int = flag(4, "processes that load data", metavar="N", names=("-j",), within="[0, inf)")
    no_persistent_workers: bool = flag(False, "start processes that load data anew in every epoch")
    save_images: bool = flag(False, "save the training batches of every log interval")
    pin_mem: bool = flag(False, "pin the memory of batches, for faster copies to a GPU")
    no_prefetcher: bool = flag(False, "normalise and mix images on the CPU")
    output: str = flag("", "folder of all runs (default: ./output/train)", metavar="DIR")
    experiment: str = flag("", "name of this run's folder in --output (default: time, model and loss)", metavar="NAME")
    overwrite: bool = flag(False, "begin anew where --experiment names a run: its checkpoints and records are removed")
    eval_metric: str = flag(
        "top1",
        "metric that picks the best checkpoint: nll, topK or macro-topK for any K, many-topK, medium-topK, few-topK; "
        "with --task multilabel map, micro-f1, macro-f1, sample-f1, exact-match, topK-recall, bce (default: top1; map)",
        metavar="NAME",
    )
    multilabel_threshold: float = flag(
        0.5,
        "with --task multilabel: the probability from which a class counts as predicted, for F1 and exact match",
        within="[0, 1]",
    )
    early_stop: int = flag(
        0, "stop after N evaluations without a better --eval-metric; 0: never", metavar="N", within="[0, inf)"
    )
    multi_crop: int = flag(
        0, "evaluate on this many crops of an image, and average their top-k probabilities", choices=(0, 5, 10)
    )
    marginal_temperature: float | None = flag(
        None,
        "temperature of the top-k probabilities of --multi-crop (default: the loss's)",
        metavar="T",
        within="(0, inf)",
    )
    tta: int = flag(
        0,
        "average the scores of N samples in a row, which a data set gives for each image",
        metavar="N",
        within="[0, inf)",
    )
    use_multi_epochs_loader: bool = flag(
        False, "accepted for timm's sake and not used: workers outlive the epoch anyway"
    )


@dataclass(frozen=True, kw_only=True)
class LoggerFlags:
    """Loggers."""

    logger: list[str] = flag([], "also log to these (`topk-registry loggers` lists them)", metavar="NAME")
    logger_opt: dict[str, Any] = flag(
        {}, "options of loggers, such as mlflow.experiment=cifar; a repeated flag adds to those before"
    )
    log_wandb: bool = flag(False, "log to Weights & Biases, as --logger wandb")
    wandb_project: str | None = flag(None, "project at Weights & Biases", metavar="NAME")
    wandb_tags: list[str] = flag([], "tags of the run at Weights & Biases", metavar="TAG")
    wandb_resume_id: str = flag("", "with --resume: go on with the run of this ID at Weights & Biases", metavar="ID")
