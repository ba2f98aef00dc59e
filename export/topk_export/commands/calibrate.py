"""``topk-registry calibrate``: write a copy of an exported ONNX file that also computes prediction sets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topk_export.arrays import read_array, read_arrays
from topk_export.commands.common import command, say
from topk_export.runtime.session import DEVICES
from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.conformal import RULES, SCORES, Score
from topk_registry.files import write_text


@command
def main(argv: Sequence[str]) -> int:
    """Write a copy of an exported file that also computes a prediction set for each image.

    A prediction set is a set of classes that contains the true class with a given probability.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    given = [flag for flag in ("data_dir", "inputs", "logits") if getattr(args, flag) is not None]
    if len(given) != 1:
        parser.error("give the labeled data with one of --data-dir, --inputs and --logits")
    if (given != ["data_dir"]) != (args.labels is not None):
        parser.error("--inputs and --logits need --labels, and --data-dir takes the labels from its folders")
    from tqdm import tqdm

    from topk_export.calibrate import calibrate_file

    source = Path(args.model)
    output = Path(args.output or source.with_name(f"{source.stem}-sets.onnx"))
    data = _data_of(args)
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
        write_text(args.json, json.dumps(done.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    print("\n".join(done.lines()))
    print(f"file        {output}")
    return 0


def _data_of(args: Any) -> Any:
    """Return the labeled data that the flags name."""
    from topk_export.calibrate import Arrays, KnownLogits, open_folder
    from topk_export.runtime.predictor import Predictor

    if args.data_dir is not None:
        metadata = Predictor(args.model, device="cpu").metadata
        data, note = open_folder(
            args.data_dir,
            metadata.class_names,
            split=args.split,
            ignore_unknown=args.ignore_unknown_classes,
            trained_on=metadata.trained_on,
            all_images=args.all_images,
        )
        say(f"{len(data.labels)} images in {note}")
        return data
    labels = read_array(args.labels)
    if args.logits is not None:
        return KnownLogits(Path(args.logits).name, read_array(args.logits), labels)
    return Arrays(Path(args.inputs).name, read_arrays(args.inputs), labels)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry calibrate", description=main.__doc__)
    add = parser.add_argument
    add("model", metavar="model.onnx", help="an ONNX file that topk-registry export or attach wrote")
    add(
        "--data-dir",
        metavar="DIR",
        help="folder with one folder per class, of images used neither for training nor for model selection",
    )
    add("--inputs", metavar="FILE.npz", help="labeled inputs: one array per input of the model, used as --data-dir")
    add("--logits", metavar="FILE.npy", help="labeled logits [N, classes], if the model ran elsewhere")
    add("--labels", metavar="FILE.npy", help="class indices [N] for --inputs or --logits")
    add("--split", metavar="NAME", help="folder in DIR (default: calibration, or DIR itself if it has no splits)")
    add("-o", "--output", metavar="FILE", help="the calibrated file (default: MODEL-sets.onnx)")
    add("--alpha", type=within("(0, 1)"), default=0.1, help="probability that a set misses the class (default: 0.1)")
    add("--score", choices=SCORES, default="lac", help="nonconformity score (default: lac)")
    rules = "one threshold for all classes (marginal), or one threshold per class (default: marginal)"
    add("--rule", choices=RULES, default="marginal", help=rules)
    add("--penalty", type=within("[0, inf)"), default=0.01, metavar="L", help="raps: penalty per rank (default: 0.01)")
    k_reg = "raps: number of ranks without a penalty (default: 5)"
    add("--k-reg", type=within("[0, inf)", int), default=5, metavar="K", help=k_reg)
    divisor = "number that divides the logits of the sets; 1: no scaling (default: fitted on a fifth of the data)"
    add("--temperature", type=within("(0, inf)"), metavar="T", help=divisor)
    share = "fraction of the other data that measures the coverage; the rest determines the thresholds (default: 0.5)"
    add("--report-share", type=within("(0, 1)"), default=0.5, metavar="P", help=share)
    add("--seed", type=within("[0, inf)", int), default=0, metavar="N", help="seed of the random split (default: 0)")
    add("--batch-size", type=positive, default=32, metavar="N", help="images per run of the model (default: 32)")
    add("--ignore-unknown-classes", action="store_true", help="skip folders with a name that is not a class name")
    add("--all-images", action="store_true", help="use all images of a DIR without splits, also those of training")
    add("--force", action="store_true", help="calibrate although labels look wrong; the file then has no guarantee")
    add("--json", metavar="FILE", help="write the report as JSON, with coverage per class")
    add("--device", choices=DEVICES, default="auto", help="device that runs the model (default: a GPU if there is one)")
    return parser
