"""repeat an experiment of a paper on built-in data"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from topk_studies.studies import DATA, STUDIES


def main(argv: Sequence[str]) -> int:
    """Run one study and write its rows.

    Args:
        argv: arguments after ``study``.

    Returns:
        the exit status.
    """
    parser = argparse.ArgumentParser(prog="topk-registry study", description=__doc__)
    parser.add_argument("name", nargs="?", choices=STUDIES, metavar="NAME", help=", ".join(STUDIES))
    parser.add_argument("--list", action="store_true", help="say what each study asks")
    parser.add_argument("--data", choices=DATA, default="vectors", help="built-in data to train on (default: vectors)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds of the results (default: 5)")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of each run (default: of the data)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: NAME.json)")
    args = parser.parse_args(argv)
    if args.list or not args.name:
        for name, study in STUDIES.items():
            print(f"{name:12} {study.question} {study.reference}")
        return 0 if args.list else parser.error("say which study")
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    if args.data == "images" and args.name == "long-tail":
        parser.error("the long tail is drawn by the data vectors only")

    from topk_studies.runner import Runs, run

    study, output = STUDIES[args.name], args.output or Path(f"{args.name}.json")
    base = {**DATA[args.data], **({"epochs": args.epochs} if args.epochs else {}), "eval_metric": study.metric}
    runs = Runs(output.with_suffix(".runs.jsonl"), said=lambda line: print(line, file=sys.stderr, flush=True))
    if args.name == "spherical" and args.data == "images":
        renamed = {name: {"superclasses" if key == "families" else key: value for key, value in options.items()}
                   for name, options in study.conditions.items()}  # fmt: skip
        study = type(study)(**{**vars(study), "conditions": renamed})
    rows = run(study, base, range(args.seeds), runs)
    document = {"study": args.name, "question": study.question, "reference": study.reference, "data": args.data,
                "seeds": args.seeds, "rows": rows}  # fmt: skip
    output.write_text(json.dumps(document, indent=1))
    for row in rows:
        shown = []
        for metric in study.metrics:
            value = row[metric]
            gap = f" ({value['difference']:+.2f}" if "difference" in value else ""
            gap += f" ± {value['half_width']:.2f}" if "half_width" in value else ""
            gap += ")" if gap else ""
            shown.append(f"{metric} {value['mean']:.2f}{gap}")
        print(f"{row['condition']:32} {row['loss']:32} {'  '.join(shown)}")
    return 0
