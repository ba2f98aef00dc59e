"""Data, network and schedule of the training runs of a budget, and the trials that tuning may choose from.

``small`` is the built-in data and network. ``standard`` trains the same network on random crops, for as long as
cross-entropy takes to learn noisy labels by heart. ``paper`` is the papers' own setting, as far as timm has it, with
their own hyperparameters and no search: CIFAR-100 by default, ImageNet where ``--dataset``/``--data-dir`` names other
data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.study import Options

BUILT_IN = "topk/hierarchy"
POSTERIOR = "topk/ambiguous"
K = 5

NETWORK: dict[str, Any] = {
    "model": "topk_convnet",
    "model_kwargs": {"norm": True},
    "epochs": 8,
    "batch_size": 64,
    "validation_batch_size": 500,
    "opt": "adamw",
    "weight_decay": 0.05,
    "warmup_epochs": 1,
    "sched_on_updates": True,
    "no_aug": True,
    "smoothing": 0.0,
    "workers": 0,
    "channels_last": True,
    "eval_metric": "top5",
}

# The images of the built-in set are shifted at random, which crops repeat; their mirror images are of no class.
STANDARD: dict[str, Any] = {
    **NETWORK,
    "no_aug": False,
    "scale": [0.8, 1.0],
    "ratio": [1.0, 1.0],
    "hflip": 0.0,
    "color_jitter": 0.0,
    "epochs": 40,
    "val_interval": 2,
}

# Feature vectors with a known posterior. At the highest of its rates cross-entropy learns every training label by heart
# in these epochs, noisy or not.
FEATURES: dict[str, Any] = {
    **NETWORK,
    "dataset_opt": {"feature_noise": 3.0, "ambiguity": 0.1},
    "model": "topk_mlp",
    "model_kwargs": {},
    "opt_kwargs": {"fused": True},  # a third of a step of so small a network is the optimizer's
    "epochs": 12,
}

# Of the authors' published scripts, what both data sets have.
# They crop 32 of 40 padded pixels, and 224 of 256: here a square of (224/256)^2 of the area, enlarged to full size.
SCRIPTS: dict[str, Any] = {
    "opt": "sgd",
    "weight_decay": 1e-4,
    "sched": "multistep",
    "warmup_epochs": 0,
    "scale": [0.766, 0.766],
    "ratio": [1.0, 1.0],
    "color_jitter": 0.0,
    "smoothing": 0.0,
    "eval_metric": "top5",
}

# They train DenseNet 40-40, which timm lacks; this is its bottleneck variant of the same depth.
CIFAR100: dict[str, Any] = {
    **SCRIPTS,
    "dataset": "torch/cifar100",
    "data_dir": "data",
    "dataset_download": True,
    "num_classes": 100,
    "model": "densenet121",
    "model_kwargs": {"growth_rate": 40, "block_config": "(6,6,6)"},
    "img_size": 32,
    "mean": [0.4914, 0.4824, 0.4467],
    "std": [0.2471, 0.2435, 0.2616],
    "crop_pct": 1.0,
    "val_split": "0.1",
    "epochs": 300,
    "batch_size": 64,
    "decay_milestones": [150, 225],
}

IMAGENET: dict[str, Any] = {
    **SCRIPTS,
    "num_classes": 1000,
    "model": "resnet18",
    "val_split": "0.04",
    "epochs": 120,
    "batch_size": 256,
    "decay_milestones": [30, 60, 90],
}

Trial = Mapping[str, Any]  # flags of one point of a grid, "loss_opt" among them

# As many trials for every loss: four rates, or two rates for each of two values of the loss's own option.
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
MIDDLE = (5e-4, 1e-3)


def grid(option: str, *values: float, rates: Sequence[float] = MIDDLE, **flags: Any) -> tuple[Trial, ...]:
    """Trials of each value of an option at each rate."""
    return tuple({"lr": lr, "loss_opt": {option: value}, **flags} for value in values for lr in rates)


# cosine scores need a classifier of their own, and it a higher rate
COSINE = {"normalize_classifier": 1.0}
HIGH = (1e-3, 4e-3)
TRIALS: dict[str, tuple[Trial, ...]] = {
    "smooth_topk_svm": grid("tau", 0.1, 0.3),
    "topk_nll": grid("tau", 0.1, 0.3),
    "noised_topk": grid("epsilon", 0.3, 3.0),
    "focal": grid("gamma", 1.0, 2.0),
    "ldam": grid("max_margin", 0.2, 0.5, rates=HIGH, **COSINE),
    "noised_topk_imbalanced": grid("epsilon", 0.01, 0.05, rates=HIGH, **COSINE),
    "log_spherical_softmax": grid("epsilon", 0.1, 1.0),
}

# Settings of the papers' scripts, where they depart from a rate of 0.1 and the loss's defaults.
PUBLISHED: dict[str, Trial] = {
    "smooth_topk_svm": {"lr": 0.1, "loss_opt": {"tau": 1.0}},
    "topk_nll": {"lr": 0.1, "loss_opt": {"tau": 1.0}},
    "noised_topk": {"lr": 0.1, "loss_opt": {"epsilon": 0.2, "num_samples": 10}},
    "focal": {"lr": 0.1, "loss_opt": {"gamma": 2.0}},
    "ldam": {"lr": 0.1, "loss_opt": {"max_margin": 0.2, "scale": 40.0}, **COSINE},
    "noised_topk_imbalanced": {
        "lr": 0.1,
        "loss_opt": {"epsilon": 0.01, "max_margin": 0.2, "scale": 60.0},
        **COSINE,
    },
}
PUBLISHED_IMAGENET: dict[str, Trial] = {
    "smooth_topk_svm": {"lr": 1.0, "weight_decay": 2.5e-5, "loss_opt": {"tau": 0.1}},
}


ADAPTIVE, PLAIN = (2.5e-4, 4e-3), (0.01, 0.3)  # ranges of rates, of Adam's kind and of plain gradient descent


def rates(optimiser: str, count: int, within: tuple[float, float] | None = None) -> list[float]:
    """So many learning rates at equal ratios, ``within`` a range or the optimizer's usual one; one is its middle."""
    low, high = within or (PLAIN if optimiser.lower() in ("sgd", "momentum", "nesterov", "sgdp") else ADAPTIVE)
    places = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    return [float(f"{low * (high / low) ** place:.3g}") for place in places]


def base_flags(options: Options) -> dict[str, Any]:
    """The flags of every training run of a budget, before the study's own and the command line's."""
    named = options.flags.get("dataset") or options.flags.get("data_dir")
    if options.budget == "paper":
        return IMAGENET if named and options.flags.get("dataset") != "torch/cifar100" else CIFAR100
    if named == POSTERIOR:
        return FEATURES
    network = STANDARD if options.budget == "standard" else NETWORK
    if not named:
        return {"dataset": BUILT_IN, **network}
    return network if str(named).startswith("topk/") else {**network, "val_split": "0.1"}


def reported_split(options: Options) -> str:
    """The split to report on: the built-in data has one, elsewhere it is what timm validates on."""
    if options.test_split:
        return options.test_split
    dataset = options.flags.get("dataset") or base_flags(options).get("dataset") or ""
    return "test" if str(dataset).startswith("topk/") else "validation"


def trials(options: Options, loss: str) -> tuple[Trial, ...]:
    """The grid of a loss: of the same size for all."""
    if options.budget != "paper":
        return TRIALS.get(loss) or tuple({"lr": lr} for lr in RATES)
    table = PUBLISHED if base_flags(options) is CIFAR100 else {**PUBLISHED, **PUBLISHED_IMAGENET}
    return (table.get(loss, {"lr": 0.1}),)
