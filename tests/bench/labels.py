"""How many of the first labels on the list are wrong, where labels were made wrong on purpose; cleanlab beside ours.

    python -m tests.bench.labels [--noise 0.1] [--folds 5] [--state DIR] [--json FILE]

On each built-in data set, a share of the training labels is drawn anew: within families of look-alike classes, or among
all classes. Models trained in folds score every image out of sample. All lists are made from these scores. On the
feature vectors the exact posterior makes a list, too, that of a perfect model. Needs cleanlab.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench.report import aligned, dumps, environment
from topk_registry.analysis import label_issues
from topk_registry.data.ambiguous import Ambiguous
from topk_registry.data.hierarchy import Hierarchy
from topk_registry.evaluation.folds import folds_of
from topk_registry.evaluation.models import Running
from topk_registry.train import TrainConfig

FIRST = (50, 100, 200)
SHARED: dict[str, Any] = {"device": "cpu", "batch_size": 64, "opt": "adamw", "weight_decay": 0.05, "warmup_epochs": 1,
                          "sched_on_updates": True, "no_aug": True, "workers": 0, "smoothing": 0.0, "epochs": 12,
                          "lr": 2e-3}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "feature vectors": {
        "dataset": "topk/ambiguous",
        "model": "topk_mlp",
        "dataset_opt": {"feature_noise": 3.0, "ambiguity": 0.1},
        **SHARED,
    },
    "images": {"dataset": "topk/hierarchy", "model": "topk_convnet", "model_kwargs": {"norm": True}, **SHARED},
}
FLIPS = ("within look-alikes", "anywhere")
Lists = Mapping[str, np.ndarray]


def lists_of(logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The labels that each method finds, worst first."""
    from cleanlab.filter import find_label_issues

    odds = np.exp(logits - logits.max(axis=1, keepdims=True).astype(np.float64))
    probabilities = odds / odds.sum(axis=1, keepdims=True)
    found = {f"log-odds, k = {k}": label_issues(logits, labels, k=k).found for k in (1, 5)}
    for name, options in {
        "cleanlab": {},
        "cleanlab, confident learning": {"filter_by": "confident_learning"},
        "cleanlab, normalized margin": {"return_indices_ranked_by": "normalized_margin"},
    }.items():
        settings: dict[str, Any] = {"return_indices_ranked_by": "self_confidence", "n_jobs": 1, **options}
        found[name] = np.asarray(find_label_issues(labels, probabilities, **settings), np.int64)
    return found


def row_of(order: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    """Precision among the first N, and of the whole list; None where the list is shorter than N."""
    hits = wrong[order]
    at = {f"first_{n}": float(hits[:n].mean()) if len(order) >= n else None for n in FIRST}
    precision = float(hits.mean()) if len(order) else None
    return {**at, "found": len(order), "precision": precision, "recall": float(hits.sum() / max(1, wrong.sum()))}


def measure(
    name: str, flips: str, args: argparse.Namespace, state: Path, tell: Callable[[str], object]
) -> list[dict[str, Any]]:
    settings = {**DATA[name], **({"epochs": args.epochs} if args.epochs else {})}
    options = {**settings.get("dataset_opt", {}), "size": args.size}
    everywhere = state / "one_family.json"
    everywhere.write_text(json.dumps([0] * 100))
    config = TrainConfig(
        **{**settings, "dataset_opt": options},
        label_noise=args.noise,
        superclasses=str(everywhere) if flips == "anywhere" else "",
        seed=args.seed,
    )
    began = time.process_time()
    place = state / f"{name}-{flips}".replace(" ", "-")
    found = folds_of(config, args.folds, place).predictions(Running("cpu", 500, 0))
    seconds = time.process_time() - began
    clean: Any = (Ambiguous if name == "feature vectors" else Hierarchy)("train", **options)
    truth = np.asarray(clean.targets)
    wrong = truth != found.labels
    lists = lists_of(found.logits, found.labels)
    if isinstance(clean, Ambiguous):
        exact = np.log(np.maximum(clean.posterior(), np.finfo(np.float64).tiny))
        lists["exact posterior, k = 1"] = label_issues(exact, found.labels).order[: wrong.sum()]
    about = {
        "data": name,
        "flips": flips,
        "images": len(wrong),
        "wrong": int(wrong.sum()),
        "top1": float((found.logits.argmax(axis=1) == truth).mean()),
        "training_seconds": seconds,
    }
    tell(f"{name}, {about['wrong']} of {len(wrong)} labels wrong {flips}; top-1 out of sample {about['top1']:.1%}")
    return [{**about, "list": each, **row_of(order, wrong)} for each, order in lists.items()]


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["list", *(f"first {n}" for n in FIRST), "found", "precision", "recall"]
    share = lambda value: "-" if value is None else f"{value:.1%}"  # noqa: E731
    cells = [
        [
            row["list"],
            *(share(row[f"first_{n}"]) for n in FIRST),
            str(row["found"]),
            *(share(row[name]) for name in ("precision", "recall")),
        ]
        for row in rows
    ]
    return aligned([head, *cells])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.labels", description=__doc__)
    parser.add_argument("--noise", type=float, default=0.1, help="share of labels that are drawn anew")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--size", type=int, default=5000, help="images of each data set")
    parser.add_argument("--epochs", type=int, default=0, help="of each training, where not as the data set has them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder of the trainings, to go on with (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write environment and results to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "state")}
    report: dict[str, Any] = {
        "environment": {**environment("cpu"), "cleanlab": version("cleanlab")},
        "settings": settings,
        "results": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        state = args.state or Path(temporary)
        state.mkdir(parents=True, exist_ok=True)
        for name in DATA:
            for flips in FLIPS:
                rows = measure(name, flips, args, state, print)
                print("\n".join(lines(rows)), flush=True)
                report["results"] += rows
                if args.json:
                    args.json.write_text(dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
