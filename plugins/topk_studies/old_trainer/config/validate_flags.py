"""The flags of ``timm validate``: timm's under timm's names, and our own."""

import argparse

from topk_registry.cli import ArgumentParser, ParseOptions, missed, positive, within
from topk_studies.old_trainer.config.tasks import TASKS
from topk_studies.old_trainer.oldsets.scores import SCORES, spelled

SETS = spelled(name for name, kind in SCORES.items() if not kind.learned)  # an evaluation has no samples to learn from


def create_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="timm validate",
        description="Evaluate a checkpoint, a pretrained model, or several. A checkpoint of `timm train` tells its "
        "model, classes, data and loss; a flag overrides it.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="DIR", default=None, help="the data's root directory (or --data-dir)")
    add(
        "--checkpoint",
        default="",
        metavar="PATH",
        help="a checkpoint, or a folder of them; without one, the model's published weights",
    )
    add(
        "-m",
        "--model",
        metavar="NAME",
        help="a timm model, a wildcard, `all`, or a file of names (default: the checkpoint's, else dpn92)",
    )
    add("--pretrained", action="store_true", default=False, help="use the published weights")
    add("--data-dir", metavar="DIR", help="the data's root directory")
    add("--dataset", metavar="NAME", help="<type>/<name> as in timm, or topk/<name> for a registered data set")
    add("--dataset-opt", nargs="*", action=ParseOptions, metavar="K=V", help="options of a registered data set")
    add("--split", dest="val_split", metavar="NAME", help="the split to evaluate on (default: the training run's)")
    add("--num-samples", dest="val_num_samples", type=positive, metavar="N", help="images in a streamed split")
    add("--dataset-download", action="store_true", help="let the data set download itself")
    add("--class-map", metavar="FILE", help="a file that maps class names to indices")
    add("--input-key", metavar="NAME", help="the data set's key of the image")
    add("--input-img-mode", metavar="MODE", help="PIL mode that images are converted to, such as RGB or L")
    add("--target-key", metavar="NAME", help="the data set's key of the label, or of the labels")
    add("--task", choices=TASKS, help="what images have: one label each, or several (default: the checkpoint's)")
    add("--target-format", choices=("indices", "multihot"), help="with --task multilabel: what --target-key holds")
    add("--labels-csv", metavar="FILE", help="with --task multilabel: CSV of images and their labels")
    add(
        "--multilabel-threshold",
        type=within("[0, 1]"),
        metavar="P",
        help="the probability from which a class is predicted",
    )
    add("--interpolation", metavar="NAME", help="resizing interpolation, such as bicubic")
    add("--gp", metavar="POOL", help="global pooling type")
    add("--dataset-trust-remote-code", action="store_true", help="let a Hugging Face data set run its own code")
    add(
        "--ignore-unknown-classes",
        action="store_true",
        help="leave images out whose class the model lacks (default: refuse them)",
    )
    add("--strict-data", action="store_true", help="stop at an unreadable image (default: take its neighbour)")
    add("--img-size", type=positive, metavar="N", help="image size (default: the model's)")
    add("--in-chans", type=positive, metavar="N", help="input channels (default: the checkpoint's, else 3)")
    add(
        "--num-classes",
        type=positive,
        metavar="N",
        help="number of classes (default: the checkpoint's, else the model's)",
    )
    add("--input-size", nargs=3, type=positive, metavar="N", help="channels, height and width")
    add(
        "--use-train-size",
        action="store_true",
        default=False,
        help="take images in the training size, where the test size differs",
    )
    add("--crop-pct", type=within("(0, inf)"), metavar="PCT", help="share of the image kept by the centre crop")
    add(
        "--crop-mode",
        default=None,
        choices=("center", "squash", "border"),
        help="how an image is cropped (default: the model's)",
    )
    add(
        "--crop-border-pixels",
        type=within("[0, inf)", int),
        default=None,
        metavar="N",
        help="pixels to crop from the border of an image",
    )
    add("--mean", type=within("(-inf, inf)"), nargs="+", metavar="MEAN", help="channel means")
    add("--std", type=within("(0, inf)"), nargs="+", metavar="STD", help="channel standard deviations")
    add("-j", "--workers", type=within("[0, inf)", int), metavar="N", help="processes that load data (default: 4)")
    add("-b", "--batch-size", type=positive, default=256, metavar="N", help="batch size (default: 256)")
    add("--use-ema", action="store_true", default=False, help="take the moving average of the weights, if there is one")
    add("--device", metavar="NAME", help="device (default: cuda, or cpu without it)")
    add("--amp", action="store_true", help="evaluate in mixed precision")
    add("--amp-dtype", choices=("float16", "bfloat16"), help="lower precision of --amp")
    add("--model-dtype", choices=("float32", "float16", "bfloat16"), help="precision of the model's weights")
    add("--channels-last", action="store_true", help="use the channels-last memory layout")
    add("--fast-norm", action="store_true", help="use timm's fast normalisation layers")
    add("--pin-mem", action="store_true", help="pin the memory of batches, for faster copies to a GPU")
    add("--no-prefetcher", action="store_true", help="normalise images on the CPU")
    add("--model-kwargs", nargs="*", action=ParseOptions, metavar="K=V", help="further options of the model")
    add("--topk", type=positive, nargs="+", default=[1, 5], metavar="K", help="set sizes to report (default: 1 5)")
    add(
        "--multi-crop",
        type=int,
        choices=(0, 5, 10),
        help="average the top-k probabilities of this many crops of an image",
    )
    add(
        "--marginal-temperature",
        type=within("(0, inf)"),
        metavar="T",
        help="temperature of the top-k probabilities (default: the loss's)",
    )
    add(
        "--sets",
        default="",
        metavar="SCORE",
        help=f"also report prediction sets: {', '.join(SETS[:-1])} or {SETS[-1]}; with --task multilabel risk-control",
    )
    add(
        "--alpha",
        type=missed,
        default=0.1,
        metavar="A",
        help="the share of labels that sets may miss (default: 0.1)",
    )
    add("--sets-opt", nargs="*", default={}, action=ParseOptions, metavar="K=V", help="options of the sets' score")
    add(
        "--tree", default="", metavar="FILE", help="the tree of the classes (CSV or JSON), for --sets tree, its default"
    )
    add("--max-nodes", type=positive, default=None, metavar="M", help="most nodes of a set of --sets tree (default: 1)")
    add(
        "--groups",
        default="",
        metavar="FILE",
        help="CSV table with the group of each image, for a threshold by group: columns image (paths below the split's "
        "folder; without it a row for each sample) and group",
    )
    add("--group-column", default="", metavar="NAME", help="column of --groups with the groups (default: group)")
    add("--loss", metavar="NAME", help="the loss whose probabilities rank the classes (default: the checkpoint's)")
    add("--loss-opt", nargs="*", action=ParseOptions, metavar="K=V", help="options of the loss")
    add("--seed", type=within("[0, inf)", int), metavar="S", help="random seed")
    add("--results-file", default="", metavar="FILE", help="also write the metrics here")
    add("--results-format", default="csv", choices=("csv", "json"), help="form of --results-file (default: csv)")
    add("--report", default="", metavar="FILE", help="also write a page: classes, confusions, reliability")
    add("--log-freq", type=positive, default=10, metavar="N", help="batches between lines of progress (default: 10)")
    add("--num-gpu", type=positive, default=1, metavar="N", help="GPUs to spread a batch over (default: 1)")
    add("--test-pool", action="store_true", default=False, help="pool over larger images than the model's own")
    add("--tf-preprocessing", action="store_true", default=False, help="preprocess by TensorFlow, which must be there")
    add("--reparam", action="store_true", default=False, help="fuse the model's branches for inference")
    add("--fuser", default="", choices=("", "te", "old", "nvfuser"), help="TorchScript's fuser")
    add("--torchcompile-mode", metavar="MODE", help="mode of torch.compile")
    compiled = parser.add_mutually_exclusive_group()
    compiled.add_argument(
        "--torchscript", action="store_true", default=False, help="compile the model by torch.jit.script"
    )
    compiled.add_argument(
        "--torchcompile", nargs="?", const="inductor", metavar="BACKEND", help="compile the model by torch.compile"
    )
    compiled.add_argument("--aot-autograd", action="store_true", default=False, help="fuse the model by AOT Autograd")
    add(
        "--real-labels", default="", metavar="FILE", help="JSON of ImageNet's real labels, to report top-1 and top-5 on"
    )
    add("--valid-labels", default="", metavar="FILE", help="the classes to keep, one index a line; labels count these")
    add("--metrics-avg", choices=("micro", "macro", "weighted"), default=None,
        help="also report precision, recall and F1, averaged like this (by scikit-learn)")  # fmt: skip
    add("--retry", action="store_true", default=False, help="try a smaller batch where memory runs out")
    add("--naflex-loader", action="store_true", default=False, help="load batches of patches, for NaFlex models")
    add("--naflex-max-seq-len", type=positive, default=576, metavar="N", help="most patches of an image (default: 576)")
    return parser
