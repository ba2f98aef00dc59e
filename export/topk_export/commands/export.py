"""``topk-registry export``: write a trained classifier as one ONNX file with all metadata that prediction needs."""

from collections.abc import Sequence

from topk_export.commands.common import command, say
from topk_registry.cli import ArgumentParser, ParseOptions, positive, within

_DATA = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "exif")


@command
def main(argv: Sequence[str]) -> int:
    """Export a trained classifier as one ONNX file with exact top-k probabilities."""
    args = _parser().parse_args(argv)
    say("importing torch")
    from topk_export.export import export_onnx
    from topk_export.source import load_source, read_class_names
    from topk_export.triton import write_repository

    source = load_source(
        args.source,
        model=args.model,
        model_kwargs=args.model_kwargs,
        num_classes=args.num_classes,
        pretrained=args.pretrained,
        random_weights=args.random_weights,
        ema=not args.no_ema,
        head=args.head,
        data_config={name: value for name in _DATA if (value := getattr(args, name)) is not None},
    )
    recipe = source.preprocess
    say(f"{source.name}, weights: {source.weights}")
    say(
        f"input {' x '.join(map(str, recipe.input_size))}, {recipe.interpolation}, crop {recipe.crop_pct:g} "
        f"({recipe.crop_mode}), mean {tuple(recipe.mean)}, std {tuple(recipe.std)}"
    )
    path = export_onnx(
        source,
        args.output,
        k=args.k,
        temperature=args.temperature,
        task=args.task,
        dtype=args.dtype,
        opset=args.opset,
        in_graph=args.in_graph,
        class_names=read_class_names(args.class_names) if args.class_names else None,
        verify=not args.no_verify,
        progress=say,
    )
    if args.triton is not None:
        say(f"wrote {write_repository(path, args.triton)}")
    print(path)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry export",
        description="Export a classifier with its exact top-k head to ONNX. The source is a checkpoint, the output "
        "folder of a training run, or the name of a timm or torchvision model.",
    )
    add = parser.add_argument
    add("source", metavar="CHECKPOINT|MODEL", help="checkpoint, folder of a run, or name of a model")
    add("output", nargs="?", default="model.onnx", metavar="FILE.onnx", help="file to write (default: model.onnx)")
    add("--task", choices=("classification", "multilabel"), help="default: the run's, else classification")
    add("-k", "--k", type=positive, help="size of the top-k set (default: the run's, else 5)")
    add("--temperature", type=within("(0, inf)"), help="divisor of the logits (default: of the run's loss, else 1)")
    add("--dtype", choices=("fp32", "fp16"), default="fp32", help="precision of the backbone (default: fp32)")
    add("--opset", type=within("[18, 21]", int), default=18, help="ONNX operator set, 18 to 21 (default: 18)")
    add("--in-graph", action="store_true", help="the graph normalizes uint8 images (default: it takes normalized ones)")
    add("--class-names", metavar="FILE", help="class names, one per line or JSON (default: the run's)")
    add("--no-verify", action="store_true", help="write the file without verification")
    add("--triton", metavar="DIR", help="also add the model to this Triton model repository")
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="the model of a checkpoint that does not record it")
    add("--model-kwargs", nargs="*", action=ParseOptions, metavar="KEY=VALUE", help="further options of the model")
    add("--num-classes", type=positive, metavar="N", help="number of classes (default: the checkpoint's)")
    add("--pretrained", action="store_true", help="load the published weights of a model name")
    add("--random-weights", action="store_true", help="export a model name without trained weights, for tests")
    add("--no-ema", action="store_true", help="use the model's weights (default: the EMA, if there is one)")
    add("--head", metavar="MODULE", help="module whose output is the scores, if the model's output is something else")
    add = parser.add_argument_group("evaluation preprocessing (default: as recorded by training)").add_argument
    add("--input-size", type=positive, nargs=3, metavar=("C", "H", "W"), help="channels, height and width")
    add("--mean", type=within("(-inf, inf)"), nargs="+", help="channel means")
    add("--std", type=within("(0, inf)"), nargs="+", help="channel standard deviations")
    add("--interpolation", metavar="NAME", help="interpolation of resizing, such as bicubic")
    add("--crop-pct", type=within("(0, inf)"), metavar="PCT", help="fraction of the image that the crop keeps")
    add("--crop-mode", choices=("center", "border", "squash"), help="how timm crops")
    add("--exif", action="store_true", default=None, help="apply the EXIF orientation of images (timm does not)")
    return parser
