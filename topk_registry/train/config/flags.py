"""The flags of ``timm train``: timm's own, under timm's names, meanings and defaults, and those this trainer adds."""

import argparse
from typing import Any

from topk_registry.cli import ArgumentParser, ParseOptions

# Flags of timm's modes that its own script runs and this trainer does not, with timm's defaults: a command line or an
# args.yaml of timm's parses, and any other value is refused. A list's own default stands where timm's is None.
ELSEWHERE: dict[str, Any] = {
    **dict.fromkeys(("naflex_loader", "naflex_patchify_channels_first", "log_wandb", "torchscript"), False),
    **{name: [] for name in ("naflex_patch_sizes", "naflex_patch_size_probs", "wandb_tags")},
    **{name: [] for name in ("train_img_sizes", "train_batch_sizes", "train_size_probs")},
    **dict.fromkeys(("wandb_project", "distill_loss_weight", "task_loss_weight"), None),
    **dict.fromkeys(("kd_model_name", "kd_student_feature_dim", "kd_teacher_feature_dim"), None),
    **dict.fromkeys(("wandb_resume_id", "fuser"), ""),
    "naflex_train_seq_lens": [128, 256, 576, 784, 1024],
    "naflex_max_seq_len": 576,
    "naflex_loss_scale": "linear",
    "train_size_schedule": "constant",
    "train_size_schedule_spread": 0.65,
    "train_size_random_mix": 0.1,
    "variable_batch_loss_scale": "none",
    "kd_distill_type": "logit",
    "kd_loss_type": "kl",
    "kd_temperature": 4.0,
    "kd_token_distill_type": "soft",
}


def create_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="timm train",
        description="Train an image classifier by the name of its loss. No data named: on a built-in data set.",
        parents=[config_parser()],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for add in (_loss, _data, _harder, _model, _device, _optimizer, _schedule, _augmentation, _norm, _ema, _run):
        add(parser)
    _elsewhere(parser)
    return parser


def config_parser() -> ArgumentParser:
    parser = ArgumentParser(add_help=False)
    parser.add_argument(
        "-c", "--config", default="", metavar="FILE", help="YAML file of defaults, such as an args.yaml"
    )
    return parser


def _loss(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("loss").add_argument
    add("--loss", default="", metavar="NAME", help="a registered loss (`timm losses` lists them) or one of timm's own")
    add("--loss-opt", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="the loss's options; repeats add")
    add(
        "--normalize-classifier",
        "--cosine-classifier",
        nargs="?",
        type=float,
        const=1.0,
        default=None,
        metavar="SCALE",
        help="swap the model's classifier for a cosine one, as LDAM and the imbalanced losses want",
    )
    add(
        "--train-script",
        default="",
        metavar="PATH",
        help="run this copy of timm's train.py instead, with --loss added to its flags (or set TIMM_TRAIN_SCRIPT)",
    )
    add("--learn-scale", action="store_true", help="train the cosine classifier's scale")
    add("--jsd-loss", action="store_true", help="timm's name for --loss jsd; needs --aug-splits")
    add("--bce-loss", action="store_true", help="timm's name for --loss bce")
    add("--bce-sum", action="store_true", help="bce: sum over classes")
    add("--bce-target-thresh", type=float, help="bce: targets above this are 1, others 0")
    add("--bce-pos-weight", type=float, help="bce: weight of the positive term")


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    parser.add_argument("data", nargs="?", metavar="DIR", help="the data's root directory (or --data-dir)")
    add = group.add_argument
    add("--data-dir", metavar="DIR", help="the data's root directory")
    add(
        "--dataset",
        default="",
        metavar="NAME",
        help="<type>/<name> as in timm (torch/cifar100, hfds/..., wds/...), an image folder if empty, "
        "or topk/<name> for a registered data set",
    )
    add(
        "--dataset-opt",
        nargs="*",
        default={},
        action=ParseOptions,
        metavar="K=V",
        help="options of a registered data set, such as size=20000 noise=6",
    )
    add("--train-split", default="train", metavar="NAME", help="the split to train on")
    add(
        "--val-split",
        default="validation",
        metavar="NAME",
        help="the split to evaluate on; a fraction such as 0.1 holds out that much of each training class; '' for none",
    )
    add(
        *("--train-batches-per-epoch", "--train-steps-per-epoch"),
        type=int,
        metavar="N",
        help="batches in a training epoch (else what the data gives)",
    )
    add("--train-num-samples", type=int, metavar="N", help="length of a streamed training split")
    add("--val-num-samples", type=int, metavar="N", help="length of a streamed validation split")
    add("--dataset-download", action="store_true", help="let torch/ and tfds/ data sets download themselves")
    add("--class-map", default="", metavar="FILE", help="class name to index map")
    add("--input-img-mode", help="PIL mode of the images")
    add("--input-key", help="the data set's key of the image")
    add("--target-key", help="the data set's key of the label")
    add("--dataset-trust-remote-code", action="store_true", help="let a Hugging Face data set run its own code")
    add(
        "--strict-data",
        action="store_true",
        help="stop at an unreadable image (else its neighbour is used, and counted)",
    )


def _harder(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("harder training data").add_argument
    add(
        "--label-noise",
        type=float,
        default=0.0,
        metavar="P",
        help="draw this share of the training labels anew, within their superclass",
    )
    add(
        "--superclasses",
        default="",
        metavar="FILE",
        help="JSON: the superclass of each class (CIFAR-100's and the built-in data's are known)",
    )
    add("--long-tail", choices=("pareto", "exp"), help="thin the classes out, from all of the first to few of the last")
    add("--imbalance-factor", type=float, default=100.0, metavar="F", help="first over last class of --long-tail")
    add("--subset", type=float, default=1.0, metavar="FRACTION", help="train on this fraction of each class")


def _model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", default="resnet50", metavar="NAME", help="a timm model")
    add("--pretrained", action="store_true", help="start from its published weights")
    add("--pretrained-path", help="start from this file as if it were the published weights")
    add("--initial-checkpoint", default="", metavar="PATH", help="load this checkpoint into the model first")
    add("--resume", default="", metavar="PATH", help="continue from a checkpoint; 'auto' finds the latest of this run")
    add("--no-resume-opt", action="store_true", help="resume the model alone, not the optimizer")
    add("--num-classes", type=int, metavar="N", help="number of classes (else the data set's, else the model's)")
    add("--gp", metavar="POOL", help="global pooling type")
    add("--img-size", type=int, metavar="N", help="image size (else the model's)")
    add("--in-chans", type=int, metavar="N", help="input channels (else 3)")
    add("--input-size", nargs=3, type=int, metavar="N", help="input channels, height and width")
    add("--crop-pct", type=float, metavar="PCT", help="share of the image kept by evaluation's centre crop")
    add("--mean", type=float, nargs="+", metavar="MEAN", help="channel means to normalise with")
    add("--std", type=float, nargs="+", metavar="STD", help="channel standard deviations to normalise with")
    add("--interpolation", default="", metavar="NAME", help="resizing interpolation")
    add("-b", "--batch-size", type=int, default=128, metavar="N", help="training batch of each process")
    add("-vb", "--validation-batch-size", type=int, metavar="N", help="evaluation batch (else the training one)")
    add("--channels-last", action="store_true", help="channels-last memory layout")
    add("--grad-accum-steps", type=int, default=1, metavar="N", help="batches to an update")
    add("--grad-checkpointing", action="store_true", help="recompute activations to save memory")
    add("--fast-norm", action="store_true", help="timm's fast normalisation layers")
    add("--model-kwargs", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="extra model options")
    add("--head-init-scale", type=float, help="scale the classifier's initial values")
    add("--head-init-bias", type=float, help="the classifier's initial bias")
    add("--torchcompile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model")
    add("--torchcompile-mode", help="torch.compile mode")


def _device(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("device").add_argument
    add("--device", default="cuda", help="where to train; without CUDA, cuda means cpu")
    add("--amp", action="store_true", help="mixed precision")
    add(
        "--amp-dtype",
        choices=("float16", "bfloat16"),
        help="the lower precision of --amp (else float16, and bfloat16 on a CPU, where float16 is slow)",
    )
    add("--model-dtype", choices=("float32", "float16", "bfloat16"), help="the model's own precision, without --amp")
    add("--no-ddp-bb", action="store_true", help="do not broadcast buffers between processes")
    add("--synchronize-step", action="store_true", help="wait for the device after each step")
    add("--local_rank", "--local-rank", type=int, default=0, help="set by launchers")
    add("--device-modules", nargs="+", metavar="MODULE", help="modules to import for a device backend")


def _optimizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("optimizer").add_argument
    add("--opt", default="sgd", metavar="NAME", help="a timm optimizer")
    add("--opt-eps", type=float, metavar="EPS", help="its epsilon")
    add("--opt-betas", type=float, nargs="+", metavar="BETA", help="its betas")
    add("--momentum", type=float, default=0.9, metavar="M", help="its momentum")
    add("--weight-decay", type=float, default=2e-5, help="weight decay")
    add("--clip-grad", type=float, metavar="NORM", help="clip gradients")
    add("--clip-mode", default="norm", choices=("norm", "value", "agc"), help="how to clip")
    add("--layer-decay", type=float, help="layer-wise learning-rate decay")
    add("--layer-decay-min-scale", type=float, default=0, help="its least scale")
    add("--layer-decay-no-opt-scale", type=float, help="layers below this scale are not trained")
    add("--opt-kwargs", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="extra optimizer options")


def _schedule(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("schedule").add_argument
    add("--epochs", type=int, default=300, metavar="N", help="epochs")
    add("--sched", default="cosine", metavar="NAME", help="learning-rate schedule")
    add("--sched-on-updates", action="store_true", help="step the schedule on updates, not epochs")
    add("--lr", type=float, metavar="LR", help="learning rate (else from --lr-base)")
    add("--lr-base", type=float, default=0.1, metavar="LR", help="lr = lr_base * global batch / lr_base_size")
    add("--lr-base-size", type=int, default=256, metavar="DIV", help="the batch that --lr-base is for")
    add("--lr-base-scale", default="", choices=("", "linear", "sqrt"), help="how lr grows with the batch; by optimizer")
    add("--lr-noise", type=float, nargs="+", metavar="PCT", help="epochs between which the rate is noisy")
    add("--lr-noise-pct", type=float, default=0.67, help="the noise's limit")
    add("--lr-noise-std", type=float, default=1.0, help="the noise's standard deviation")
    add("--lr-cycle-mul", type=float, default=1.0, help="cycle length multiplier")
    add("--lr-cycle-decay", type=float, default=0.5, help="decay from cycle to cycle")
    add("--lr-cycle-limit", type=int, default=1, metavar="N", help="number of cycles")
    add("--lr-k-decay", type=float, default=1.0, help="k-decay of cosine and poly")
    add("--warmup-lr", type=float, default=1e-5, metavar="LR", help="the rate that warm-up starts from")
    add("--min-lr", type=float, default=0, metavar="LR", help="the least rate")
    add("--epoch-repeats", type=float, default=0.0, metavar="N", help="repeats of a streamed data set in an epoch")
    add("--start-epoch", type=int, metavar="N", help="start here, whatever a checkpoint says")
    add("--decay-milestones", type=int, nargs="+", default=[90, 180, 270], metavar="N", help="of multistep")
    add("--decay-epochs", type=float, default=90, metavar="N", help="epochs between decays of step")
    add("--warmup-epochs", type=int, default=5, metavar="N", help="epochs of warm-up")
    add("--warmup-prefix", action="store_true", help="warm up before the schedule, not within it")
    add("--cooldown-epochs", type=int, default=0, metavar="N", help="epochs at the least rate, at the end")
    add("--patience-epochs", type=int, default=10, metavar="N", help="of plateau")
    add("--decay-rate", "--dr", type=float, default=0.1, metavar="RATE", help="of step, multistep and plateau")


def _augmentation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("augmentation and regularisation").add_argument
    add("--no-aug", action="store_true", help="resize only, whatever the flags below say")
    add("--train-crop-mode", help="timm's training crop mode")
    add("--scale", type=float, nargs="+", default=[0.08, 1.0], metavar="PCT", help="random crop's area")
    add("--ratio", type=float, nargs="+", default=[3 / 4, 4 / 3], metavar="R", help="random crop's aspect")
    add("--hflip", type=float, default=0.5, help="chance of a horizontal flip")
    add("--vflip", type=float, default=0.0, help="chance of a vertical flip")
    add("--color-jitter", type=float, default=0.4, metavar="F", help="colour jitter")
    add("--color-jitter-prob", type=float, metavar="P", help="its chance")
    add("--grayscale-prob", type=float, metavar="P", help="chance of greyscale")
    add("--gaussian-blur-prob", type=float, metavar="P", help="chance of blur")
    add("--aa", metavar="NAME", help="auto-augment policy, such as rand-m9-mstd0.5-inc1, v0, original, augmix")
    add("--aug-repeats", type=float, default=0, help="repeated augmentation (distributed only)")
    add("--aug-splits", type=int, default=0, help="augmentation splits: 0, or at least 2")
    add("--reprob", type=float, default=0.0, metavar="P", help="chance of random erasing")
    add("--remode", default="pixel", help="random erasing mode")
    add("--recount", type=int, default=1, help="random erasing count")
    add("--resplit", action="store_true", help="do not erase in the first augmentation split")
    add("--mixup", type=float, default=0.0, metavar="ALPHA", help="mixup's alpha, on if above 0")
    add("--cutmix", type=float, default=0.0, metavar="ALPHA", help="cutmix's alpha, on if above 0")
    add("--cutmix-minmax", type=float, nargs="+", help="cutmix's least and largest ratio")
    add("--mixup-prob", type=float, default=1.0, help="chance that a batch is mixed")
    add("--mixup-switch-prob", type=float, default=0.5, help="chance of cutmix where both are on")
    add("--mixup-mode", default="batch", choices=("batch", "pair", "elem", "half"), help="mix by batch, pair, element")
    add("--mixup-off-epoch", type=int, default=0, metavar="N", help="no mixing from this epoch, if above 0")
    add("--smoothing", type=float, default=0.1, help="label smoothing")
    add("--train-interpolation", default="random", help="random, bilinear or bicubic")
    add("--drop", type=float, default=0.0, metavar="P", help="dropout")
    add("--drop-connect", type=float, metavar="P", help="old name of --drop-path")
    add("--drop-path", type=float, metavar="P", help="stochastic depth")
    add("--drop-block", type=float, metavar="P", help="drop block")


def _norm(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batch norm").add_argument
    add("--bn-momentum", type=float, help="batch-norm momentum")
    add("--bn-eps", type=float, help="batch-norm epsilon")
    add("--sync-bn", action="store_true", help="synchronised batch norm")
    add("--dist-bn", default="reduce", choices=("broadcast", "reduce", ""), help="share statistics after each epoch")
    add("--split-bn", action="store_true", help="a batch norm for each augmentation split")


def _ema(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("moving average").add_argument
    add("--model-ema", action="store_true", help="keep, and evaluate, a moving average of the weights")
    add("--model-ema-force-cpu", action="store_true", help="keep it on the CPU, not evaluated")
    add("--model-ema-decay", type=float, default=0.9998, help="its decay")
    add("--model-ema-warmup", action="store_true", help="let its decay warm up")


def _run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--dry-run", action="store_true", help="build everything, run one batch forward and backward, print the plan")
    add("--seed", type=int, default=42, metavar="S", help="random seed")
    add("--worker-seeding", default="all", help="accepted as timm's; every batch has a seed of its own here")
    add("--log-interval", type=int, default=50, metavar="N", help="updates between lines of progress")
    add("--val-interval", type=int, default=1, metavar="N", help="epochs between evaluations")
    add("--recovery-interval", type=int, default=0, metavar="N", help="updates between recovery checkpoints")
    add("--checkpoint-hist", type=int, default=10, metavar="N", help="checkpoints to keep")
    add("-j", "--workers", type=int, default=4, metavar="N", help="data-loading processes")
    add("--save-images", action="store_true", help="save the training batches of every log interval")
    add("--pin-mem", action="store_true", help="pin host memory")
    add("--no-prefetcher", action="store_true", help="normalise and mix on the CPU")
    add("--output", default="", metavar="DIR", help="where runs go (else ./output/train)")
    add("--experiment", default="", metavar="NAME", help="this run's folder in --output")
    add(
        "--eval-metric",
        default="top1",
        metavar="NAME",
        help="what picks the best checkpoint: loss, topK or macro-topK for any K, many-topK, medium-topK, few-topK",
    )
    add(
        "--early-stop", type=int, default=0, metavar="N", help="stop after N evaluations without a better --eval-metric"
    )
    add(
        "--multi-crop",
        type=int,
        default=0,
        choices=(0, 5, 10),
        help="evaluate on that many crops, averaging top-k probabilities",
    )
    add("--marginal-temperature", type=float, metavar="T", help="temperature of those probabilities (else the loss's)")
    add("--tta", type=int, default=0, metavar="N", help="average the scores of N consecutive samples")
    add("--use-multi-epochs-loader", action="store_true", help="accepted as timm's; workers outlive the epoch anyway")


def _elsewhere(parser: argparse.ArgumentParser) -> None:
    """The flags of timm's other modes, so that a command line of timm's parses."""
    for flag, default in ELSEWHERE.items():
        kind: dict[str, Any] = (
            {"action": "store_true"}
            if default is False
            else {"type": type(default) if isinstance(default, (int, float)) else str}
        )
        nargs = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument("--" + flag.replace("_", "-"), help=argparse.SUPPRESS, default=default, **kind, **nargs)
