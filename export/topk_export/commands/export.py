"""``topk-registry export``: a trained classifier as one self-describing ONNX file."""

from collections.abc import Sequence

from topk_export.commands.common import command, say
from topk_registry.cli import ArgumentParser, ParseOptions, positive, within

_DATA = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


@command
def main(argv: Sequence[str]) -> int:
    """Export a trained classifier as one ONNX file with exact top-k probabilities."""
    args = _parser().parse_args(argv)
    say("importing torch")
    from topk_export.conversion.recipe import read_class_names
    from topk_export.conversion.to_onnx import export_onnx

    path = export_onnx(
        args.source,
        args.output,
        task=args.task,
        k=args.k,
        temperature=args.temperature,
        opset=args.opset,
        batch=args.batch,
        dtype=args.dtype,
        outputs=args.outputs,
        preprocess=args.preprocess,
        class_names=read_class_names(args.class_names) if args.class_names else None,
        verify=not args.no_verify,
        model=args.model,
        model_kwargs=args.model_kwargs,
        num_classes=args.num_classes,
        pretrained=args.pretrained,
        use_ema=not args.no_ema,
        head=args.head,
        data_config={name: value for name in _DATA if (value := getattr(args, name)) is not None},
        calibration_data=args.calibration_data,
        calibration_images=args.calibration_images,
        force=args.force,
        external_data=args.external_data,
        triton=args.triton,
        progress=say,
    )
    print(path)
    return 0


def _batch(text: str) -> str | int:
    return text if text == "dynamic" else positive(text)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry export",
        description="Export a classifier with its exact top-k head to ONNX. The source is the output folder of a "
        "training run, a checkpoint, or the name of a timm or torchvision model.",
    )
    parser.add_argument("source", metavar="CHECKPOINT_OR_MODEL", help="a run's folder, a checkpoint, or a name")
    parser.add_argument("output", nargs="?", default="model.onnx", help="file, or folder for model.onnx (default: .)")
    parser.add_argument(
        "--task",
        choices=("classification", "multilabel"),
        help="one label an image, with exact top-k probabilities, or several, with a probability for each class "
        "(default: the training run's, else classification)",
    )
    parser.add_argument(
        "-k",
        type=positive,
        help="size of the set, or the classes to show of several labels (default: the training run's, else 5, or one "
        "below the number of classes)",
    )
    parser.add_argument(
        "--temperature",
        type=within("(0, inf)"),
        help="divides the logits (default: k tau of the run's loss where there is one label an image, else 1)",
    )
    parser.add_argument(
        "--opset", type=within("[18, 23]", int), default=18, help="ONNX operator set, 18 to 23 (default: 18)"
    )
    parser.add_argument(
        "--batch", type=_batch, default="dynamic", help="batch size of the file, or 'dynamic' for any (default)"
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16-backbone", "int8-dynamic", "int8-static"),
        default="fp32",
        help="precision of the backbone; the head is float32 always (default: fp32)",
    )
    parser.add_argument(
        "--calibration-data", metavar="DIR", help="images for --dtype int8-static, at best one folder a class"
    )
    parser.add_argument(
        "--calibration-images",
        type=positive,
        default=512,
        metavar="N",
        help="most images to take from --calibration-data (default: 512)",
    )
    parser.add_argument(
        "--force", action="store_true", help="go on although labels of --calibration-data look wrong, by the accuracy"
    )
    parser.add_argument(
        "--outputs",
        nargs="+",
        metavar="NAME",
        help="outputs of the file (default: logits marginals indices; of several labels: logits probabilities)",
    )
    parser.add_argument(
        "--preprocess",
        choices=("metadata", "in-graph"),
        default="metadata",
        help="what normalises the input: the caller, by the file's metadata, or the graph (default: metadata)",
    )
    parser.add_argument(
        "--class-names", metavar="FILE", help="a file of class names, one a line or JSON (default: the run's)"
    )
    parser.add_argument("--no-verify", action="store_true", help="write the file without checking it")
    parser.add_argument(
        "--external-data",
        action="store_true",
        help="put the weights beside the file, into FILE.data (default: only above 2 GiB, which one file cannot hold)",
    )
    parser.add_argument("--triton", metavar="DIR", help="also write a Triton Inference Server repository there")
    source = parser.add_argument_group("the model")
    source.add_argument("--model", metavar="NAME", help="the timm model that a bare checkpoint holds")
    source.add_argument(
        "--model-kwargs", nargs="*", action=ParseOptions, metavar="KEY=VALUE", help="further options of the model"
    )
    source.add_argument(
        "--head", metavar="NAME", help="module that gives the scores, where it is not the last layer with weights"
    )
    source.add_argument("--num-classes", type=positive, metavar="N", help="number of classes (default: the source's)")
    source.add_argument("--pretrained", action="store_true", help="load the published weights of a model name")
    source.add_argument("--no-ema", action="store_true", help="take a checkpoint's last weights, not their average")
    data = parser.add_argument_group("the evaluation transform, where it differs from the model's own (timm's flags)")
    data.add_argument(
        "--input-size", type=positive, nargs=3, metavar=("C", "H", "W"), help="channels, height and width"
    )
    data.add_argument("--mean", type=within("(-inf, inf)"), nargs="+", help="channel means")
    data.add_argument("--std", type=within("(0, inf)"), nargs="+", help="channel standard deviations")
    data.add_argument("--interpolation", metavar="NAME", help="resizing interpolation, such as bicubic")
    data.add_argument(
        "--crop-pct", type=within("(0, inf)"), metavar="PCT", help="share of the image kept by the centre crop"
    )
    data.add_argument("--crop-mode", choices=("center", "border", "squash"), help="how timm crops the image")
    return parser
