"""``topk-registry attach``: add the head to an ONNX classifier of any origin."""

from collections.abc import Sequence

from topk_export.arrays import read_arrays
from topk_export.commands.common import command, say, timed
from topk_registry.cli import ArgumentParser, positive, within


@command
def main(argv: Sequence[str]) -> int:
    """Add probabilities, top-k marginals and the top-k classes to an ONNX classifier, and print the new path."""
    args = _parser().parse_args(argv)
    say("reading the model")
    from topk_export.classes import read_class_names
    from topk_export.foreign import attach

    path = attach(
        args.model,
        args.output,
        k=args.k,
        temperature=args.temperature,
        task=args.task,
        logits=args.logits,
        from_probabilities=args.from_probabilities,
        class_names=read_class_names(args.class_names) if args.class_names else None,
        preprocess=args.preprocess,
        marginals=not args.no_marginals,
        replace=args.replace,
        inputs=read_arrays(args.inputs) if args.inputs else None,
        verify=not args.no_verify,
        progress=timed(say),
    )
    print(path)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="topk-registry attach",
        description="Add a head to an ONNX classifier. From the logits, the new file also computes probabilities, the "
        "top-k classes, and top-k marginals: for each class, the probability that it is in a random set of k classes. "
        "The outputs of the original model remain. By default, the command finds the logits before the end of the "
        "output: before a softmax or a sigmoid, also if these are spelled out in other operators.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL.onnx", help="the classifier, from any program")
    add("output", metavar="OUT.onnx", help="file to write")
    add("-k", "--k", type=positive, help="size of the random set in the marginals (default: 5)")
    divisor = "number that divides the logits before the marginals (default: 1)"
    add("--temperature", type=within("(0, inf)"), default=1.0, metavar="T", help=divisor)
    tasks = "one label per image, or several (default: several if the output ends in a sigmoid)"
    add("--task", choices=("classification", "multilabel"), help=tasks)
    add("--logits", metavar="NAME", help="tensor with the logits (default: search)")
    add(
        "--from-probabilities",
        action="store_true",
        help="the output contains probabilities, and the logits cannot be found: use the logarithm",
    )
    add("--class-names", metavar="FILE", help="class names, one per line, or JSON (default: names in the file)")
    recipe = "NAME.preprocess.json of an export: preprocessing of images (default: the file takes arrays)"
    add("--preprocess", metavar="FILE", help=recipe)
    add("--no-marginals", action="store_true", help="leave the marginals out, such as for prediction sets only")
    add("--replace", action="store_true", help="replace the head and the prediction sets that the file already has")
    add("--inputs", metavar="FILE.npz", help="inputs for the verification, one array per input (default: random)")
    add("--no-verify", action="store_true", help="write the file without verification")
    return parser
