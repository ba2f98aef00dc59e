"""What the studies train: data, losses, and the trials that each loss may choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Flags = Mapping[str, Any]  # fields of topk_registry.train.TrainConfig

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
MIDDLE_RATES = (5e-4, 1e-3)

_COMMON: Flags = {
    "batch_size": 64,
    "validation_batch_size": 500,
    "opt": "adamw",
    "weight_decay": 0.05,
    "warmup_epochs": 1,
    "sched_on_updates": True,
    "no_aug": True,
    "smoothing": 0.0,
    "workers": 0,
}
# images: three convolutions with batch norm; vectors: a perceptron, on data whose posterior is known
DATA: dict[str, Flags] = {
    "images": {**_COMMON, "dataset": "topk/hierarchy", "model": "topk_convnet", "model_kwargs": {"norm": True},
               "channels_last": True, "epochs": 8},
    "vectors": {**_COMMON, "dataset": "topk/ambiguous", "model": "topk_mlp", "epochs": 12,
                "dataset_opt": {"feature_noise": 3.0, "ambiguity": 0.1}, "opt_kwargs": {"fused": True}},
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """A loss and the trials it may choose from: rates, times values of one option of its own."""

    loss: str
    fixed: tuple[tuple[str, Any], ...] = ()
    option: str = ""
    values: tuple[float, ...] = ()
    flags: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.loss, *(f"{key}={value}" for key, value in self.fixed)])

    def trials(self) -> list[dict[str, Any]]:
        """Return four trials, whatever the loss."""
        fixed, flags = dict(self.fixed), dict(self.flags)
        if not self.option:
            return [{**flags, "loss": self.loss, "loss_opt": fixed, "lr": rate} for rate in RATES]
        return [
            {**flags, "loss": self.loss, "loss_opt": {**fixed, self.option: value}, "lr": rate}
            for value in self.values
            for rate in MIDDLE_RATES
        ]


@dataclass(frozen=True)
class Study:
    """One question.

    Args:
        question: what it asks.
        reference: paper and place that ask it.
        conditions: by name, options of the data set.
        contestants: the losses; the first is what the others are compared with.
        metric: chosen by, on the validation split; without the prefix ``eval_``.
        metrics: reported.
    """

    question: str
    reference: str
    conditions: Mapping[str, Flags]
    contestants: tuple[Contestant, ...]
    metric: str
    metrics: tuple[str, ...]


_CE = Contestant("ce")
_SVM = Contestant("smooth_topk_svm", option="tau", values=(0.1, 0.3))
_NOISED = Contestant("noised_topk", option="epsilon", values=(0.3, 3.0))
_COSINE = (("normalize_classifier", 1.0),)  # scores of a cosine classifier, which both losses ask for

STUDIES: dict[str, Study] = {
    "noise": Study(
        "With wrong labels within families of classes, does a top-k loss raise top-5?",
        "Berrada, Zisserman, Kumar 2018, Table 1; Garcin et al. 2022, Table 3",
        {f"label noise {p}": {"noise": p} for p in (0.0, 0.4, 0.8)},
        (_CE, _SVM, Contestant("topk_nll", option="tau", values=(0.1, 0.3)), _NOISED),
        "top5",
        ("top1", "top5"),
    ),
    "small-data": Study(
        "With few images, does a top-k loss raise top-5?",
        "Berrada, Zisserman, Kumar 2018, Table 2",
        {f"{size} samples": {"size": size} for size in (1250, 2500, 5000)},
        (_CE, _SVM, _NOISED),
        "top5",
        ("top1", "top5"),
    ),
    "long-tail": Study(
        "Which loss finds the rare classes of a long tail among five guesses?",
        "Garcin et al. 2022, Tables 5, 6 and 8",
        {"first class 100 times the last": {"size": 20_000, "eval_size": 2000, "imbalance": 100.0}},
        (
            _CE,
            Contestant("focal", option="gamma", values=(1.0, 2.0)),
            Contestant("ldam", option="max_margin", values=(0.2, 0.5), flags=_COSINE),
            Contestant("logit_adjustment"),
            _NOISED,
            Contestant("noised_topk_imbalanced", option="epsilon", values=(0.01, 0.05), flags=_COSINE),
        ),
        "macro_top5",
        ("top5", "macro_top1", "macro_top5"),
    ),
    "spherical": Study(
        "Do spherical losses win with few classes, and lose with many?",
        "de Brebisson, Vincent 2016, section 5",
        {"10 classes": {"families": 2, "fine": 5}, "100 classes": {"families": 20, "fine": 5}},
        (
            _CE,
            Contestant("log_taylor_softmax"),
            Contestant("log_spherical_softmax", option="epsilon", values=(0.1, 1.0)),
        ),
        "top1",
        ("top1", "top5"),
    ),
    "encouraging": Study(
        "Does a bonus for samples that are classified well already raise accuracy?",
        "Zhao et al. 2022",
        {"clean": {}},
        (
            _CE,
            Contestant("encouraging", (("log_end", 0.75),)),
            Contestant("encouraging", (("log_end", 1.0),)),
            Contestant("sigmoid_mse"),
            Contestant("mirror", (("base", "mse"),)),
            Contestant("mirror", (("link", "softmax"),)),
        ),
        "top1",
        ("top1", "top5"),
    ),
}
