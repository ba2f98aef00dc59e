"""``topk-registry export``: write a trained classifier to one ONNX file, with all metadata that prediction needs."""

from collections.abc import Sequence

from topk_export.commands.common import command, say, timed
from topk_registry.cli import ArgumentParser, ParseOptions, positive, within

_DATA = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "exif")


@command
def main(argv: Sequence[str]) -> int:
    """Export a trained classifier to an ONNX file, and print the path of the file."""
    args = _parser().parse_args(argv)
    tell = timed(say)
    tell("importing torch")
    from topk_export.classes import read_class_names
    from topk_export.export import export_onnx
    from topk_export.source import load_source

    source = load_source(
        args.source,
        model=args.model,
        model_kwargs=args.model_kwargs,
        num_classes=args.num_classes,
        pretrained=args.pretrained,
        random_weights=args.random_weights,
        ema=not args.no_ema,
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
        marginals=not args.no_marginals,
        verify=not args.no_verify,
        progress=tell,
    )
    print(path)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry export",
        description="Export a classifier to an ONNX file. From the logits, the file also computes probabilities, the k "
        "best classes, and top-k marginals: for each class, the probability that it is in a random set of k classes. "
        "The source is a checkpoint, the folder of a training run, or the name of a timm or torchvision model.",
    )
    add = parser.add_argument
    add("source", metavar="CHECKPOINT|MODEL", help="checkpoint, folder of a training run, or name of a model")
    add("output", nargs="?", default="model.onnx", metavar="FILE.onnx", help="file to write (default: model.onnx)")
    add(
        "--task",
        choices=("classification", "multilabel"),
        help="one label per image, or several labels (default: the task of the run, else classification)",
    )
    add("-k", "--k", type=positive, help="size of the random set in the marginals (default: k of the loss, else 5)")
    add(
        "--temperature",
        type=within("(0, inf)"),
        help="number that divides the logits before the marginals (default: the temperature of the loss, else 1)",
    )
    add("--dtype", choices=("fp32", "fp16"), default="fp32", help="precision up to the logits (default: fp32)")
    add("--opset", type=within("[18, 21]", int), default=18, help="ONNX operator set, 18 to 21 (default: 18)")
    add("--in-graph", action="store_true", help="the input is uint8 images (default: normalized float32 images)")
    add("--class-names", metavar="FILE", help="class names, one per line, or JSON (default: the names of the run)")
    add("--no-marginals", action="store_true", help="leave the marginals out, such as for prediction sets only")
    add("--no-verify", action="store_true", help="write the file without verification")
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="name of the model, if the checkpoint does not record the name")
    add("--model-kwargs", nargs="*", action=ParseOptions, metavar="KEY=VALUE", help="further options of the model")
    add("--num-classes", type=positive, metavar="N", help="number of classes (default: as in the checkpoint)")
    add("--pretrained", action="store_true", help="load the published weights, if the source is the name of a model")
    add("--random-weights", action="store_true", help="keep the random weights of a named model, to test a deployment")
    add("--no-ema", action="store_true", help="do not use the averaged weights (EMA) of the checkpoint")
    add = parser.add_argument_group("preprocessing of images (default: the values of training or of the model)")
    add = add.add_argument
    add("--input-size", type=positive, nargs=3, metavar=("C", "H", "W"), help="channels, height and width")
    add("--mean", type=within("(-inf, inf)"), nargs="+", help="mean per channel, of values from 0 to 1")
    add("--std", type=within("(0, inf)"), nargs="+", help="standard deviation per channel, of values from 0 to 1")
    add("--interpolation", metavar="NAME", help="interpolation of resizing, such as bicubic")
    add("--crop-pct", type=within("(0, inf)"), metavar="PCT", help="size of the crop / size of the resized image")
    add("--crop-mode", choices=("center", "border", "squash"), help="timm's way to resize an image before the crop")
    add("--exif", action="store_true", default=None, help="rotate images by their EXIF orientation (timm does not)")
    return parser
