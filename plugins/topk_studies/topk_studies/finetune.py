"""Study of the recipe ``finetune``: ``topk-registry study finetune --data-dir package``.

Protocol, written before the first result of these seeds:

- Question: is ``timm train --config finetune`` more accurate than the defaults of ``timm train`` if a run starts from
  pretrained weights and has few pictures?
- Data: each seed draws 40 names of ``topk/icons`` (64 x 64 pixels) and 15 pictures of each name for training. All test
  pictures of these names, which other designers drew, give the results.
- Runs: both runs of a seed have the same pictures, the ImageNet weights of EfficientNet-Lite0, the loss
  ``smooth_topk_svm`` with k = 5 and tau = 1, and 15 epochs. The network's input has 48 x 48 pixels, so that a run takes
  about a minute on one core. All other settings are the defaults or from the recipe.
- The learning rate of the recipe was chosen earlier on validation pictures of two other draws.
- Result: top-1 and top-5 accuracy on the test pictures after the last epoch, for each seed. There are no tests.
"""

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from topk_registry.files import write_text
from topk_registry.train import Trainer
from topk_registry.train.config import parse_args
from topk_registry.train.model import resolve_learning_rate
from topk_studies.data.icons import Icons
from topk_studies.features import network
from topk_studies.runner import Measured, Runs, heading, say, versions

NAMES = 40
PICTURES = 15  # for training, per name
SIZE = 64
INPUT = 48  # height and width of the network's input
EPOCHS = 15
MODEL = "tf_efficientnet_lite0"
LOSS = "smooth_topk_svm"
OPTIONS = {"k": 5, "tau": 1}
RECIPES = {"defaults": [], "finetune": ["--config", "finetune"]}
FIRST_SEED = 10
METRICS = ("top1", "top5")


def write_pictures(folder: Path, splits: Mapping[str, Icons], seed: int) -> None:
    """Write the pictures of a seed as ``folder/SPLIT/NAME/INDEX.png``."""
    random = np.random.default_rng(seed)
    targets = {split: np.array(icons.targets) for split, icons in splits.items()}
    for label in np.sort(random.choice(len(splits["train"].classes), NAMES, replace=False)):
        for split, icons in splits.items():
            place = folder / split / icons.classes[label]
            place.mkdir(parents=True)
            rows = random.permutation(np.flatnonzero(targets[split] == label))
            for i in rows[:PICTURES] if split == "train" else rows:
                Image.fromarray(icons.images[i]).save(place / f"{i}.png")


class FineTuned:
    """Callable that trains a run from pretrained weights and returns its metrics on the test pictures.

    Args:
        splits: data sets ``train`` and ``test``.
        weights: file with the weights of the network.
        minutes: time limit of all runs. Later calls raise TimeoutError.
    """

    def __init__(self, splits: Mapping[str, Icons], weights: Path, minutes: float) -> None:
        self.splits = splits
        self.weights = weights
        self.end = time.time() + 60 * minutes

    def __call__(self, run: Mapping[str, Any]) -> Measured:
        if time.time() > self.end:
            raise TimeoutError("The time limit is reached. Run the command again to continue.")
        with tempfile.TemporaryDirectory() as folder:
            write_pictures(Path(folder), self.splits, run["seed"])
            argv = [folder, *run["flags"], "--pretrained-path", str(self.weights), "--output", f"{folder}/output"]
            config = parse_args(argv).replace(val_split="test", val_interval=EPOCHS, checkpoint_hist=1)
            row = Trainer(config, quiet=True).fit().history[-1]
        return {metric: round(float(row[f"eval_{metric}"]), 4) for metric in METRICS}


def flags_of(recipe: str, seed: int) -> list[str]:
    """Return the flags of ``timm train`` of a run, without the folder and the weights."""
    loss = ["--loss", LOSS, "--loss-opt", *(f"{name}={value}" for name, value in OPTIONS.items())]
    sizes = ["--model", MODEL, "--img-size", str(INPUT), "--epochs", str(EPOCHS), "--workers", "0"]
    return [*RECIPES[recipe], *sizes, *loss, "--seed", str(seed)]


def run_of(recipe: str, seed: int) -> dict[str, Any]:
    flags = flags_of(recipe, seed)
    about = {"study": "finetune", "recipe": recipe, "loss": LOSS, "loss_opt": OPTIONS, "seed": seed, "flags": flags}
    rate = resolve_learning_rate(parse_args(["DIR", *flags]), world_size=1).lr
    return {**about, "lr": rate, "eval_metric": METRICS[-1], "val_split": "test"}


def rows_of(runs: Runs, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train all runs, and return one dictionary per recipe with its flags, and the values of each metric by seed."""
    done = []
    try:
        for seed in seeds:
            runs.all([run_of(recipe, seed) for recipe in RECIPES])
            done.append(seed)
    except TimeoutError as stopped:
        runs.said(str(stopped))
    found = []
    for recipe in RECIPES:
        measured = runs.all([run_of(recipe, seed) for seed in done])
        by_seed = {metric: [one[metric] for one in measured] for metric in METRICS}
        flags = shlex.join(["timm", "train", "DIR", *flags_of(recipe, 0)[:-2], "--pretrained-path", "FILE"])
        found.append({"recipe": recipe, "flags": flags, "seeds": done, **by_seed})
    return found


def main(name: str, args: argparse.Namespace) -> int:
    """Run the study, and write the results to a JSON file. Return the exit status 0.

    Args:
        name: name of the study.
        args: parsed arguments of the command ``topk-registry study``.

    Raises:
        ValueError: the data or the weights of the network are not there.
    """
    torch.set_num_threads(1)
    splits = {split: Icons(split, root=args.data_dir, size=SIZE) for split in ("train", "test")}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "lite0.pth"
        torch.save(network().state_dict(), weights)
        state = str(sum(int(each.images.sum()) for each in splits.values()))
        trained = FineTuned(splits, weights, args.minutes)
        runs = Runs(args.output.with_suffix(".runs.jsonl"), trained, say, args.jobs, state)
        rows = rows_of(runs, range(FIRST_SEED, FIRST_SEED + args.seeds))
    document = {**heading(name, __doc__), "versions": versions(), "rows": rows}
    write_text(args.output, json.dumps(document, indent=1) + "\n")
    say(f"{args.output} has the results")
    return 0
