"""``topk-registry calibrate``: write a copy of an exported ONNX file that also computes prediction sets."""

import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from topk_export.commands.common import command, say
from topk_export.runtime.session import DEVICES
from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.conformal import RULES, SCORES, Score


@command
def main(argv: Sequence[str]) -> int:
    """Write a copy of an exported file that also computes a prediction set for each image.

    A prediction set is a set of classes that contains the true class with a given probability.
    """
    args = _parser().parse_args(argv)
    from topk_export.calibrate import calibrate_file, open_folder
    from topk_export.runtime.predictor import Predictor

    source = Path(args.model)
    output = Path(args.output or source.with_name(f"{source.stem}-sets.onnx"))
    names = Predictor(source, device="cpu").metadata.class_names
    data, note = open_folder(args.data_dir, names, split=args.split, ignore_unknown=args.ignore_unknown_classes)
    say(f"{len(data.labels)} images in {note}")
    done = calibrate_file(
        source,
        output,
        data,
        alpha=args.alpha,
        score=Score(args.score, args.penalty, args.k_reg),
        rule=args.rule,
        temperature=args.temperature,
        report_share=args.report_share,
        seed=args.seed,
        batch_size=args.batch_size,
        force=args.force,
        device=args.device,
        progress=lambda batches, total: tqdm(batches, "batches", total, disable=None),
    )
    if args.json:
        Path(args.json).write_text(json.dumps(done.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    print("\n".join(done.lines()))
    print(f"file        {output}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry calibrate", description=main.__doc__)
    add = parser.add_argument
    add("model", metavar="model.onnx", help="an ONNX file that topk-registry export wrote")
    add(
        "--data-dir",
        required=True,
        metavar="DIR",
        help="folder with one folder per class, of images used neither for training nor for model selection",
    )
    add("--split", metavar="NAME", help="folder in DIR (default: calibration, or DIR itself if it has no splits)")
    add("-o", "--output", metavar="FILE", help="the calibrated file (default: MODEL-sets.onnx)")
    add("--alpha", type=within("(0, 1)"), default=0.1, help="probability that a set misses the class (default: 0.1)")
    add("--score", choices=SCORES, default="lac", help="nonconformity score (default: lac)")
    rules = "one threshold for all classes (marginal), or one threshold per class (default: marginal)"
    add("--rule", choices=RULES, default="marginal", help=rules)
    add("--penalty", type=within("[0, inf)"), default=0.01, metavar="L", help="raps: penalty per rank (default: 0.01)")
    k_reg = "raps: number of ranks without a penalty (default: 5)"
    add("--k-reg", type=within("[0, inf)", int), default=5, metavar="K", help=k_reg)
    divisor = "number that divides the logits before the softmax (default: 1)"
    add("--temperature", type=within("(0, inf)"), default=1.0, metavar="T", help=divisor)
    share = "fraction of the images that measure the coverage; the others determine the thresholds (default: 0.5)"
    add("--report-share", type=within("(0, 1)"), default=0.5, metavar="P", help=share)
    add("--seed", type=within("[0, inf)", int), default=0, metavar="N", help="seed of the random split (default: 0)")
    add("--batch-size", type=positive, default=32, metavar="N", help="images per run of the model (default: 32)")
    add("--ignore-unknown-classes", action="store_true", help="skip folders with a name that is not a class name")
    add("--force", action="store_true", help="calibrate although labels look wrong; the file then has no guarantee")
    add("--json", metavar="FILE", help="write the report as JSON, with coverage per class")
    add("--device", choices=DEVICES, default="auto", help="device that runs the model (default: a GPU if there is one)")
    return parser
