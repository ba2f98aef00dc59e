"""Definitions of the studies that repeat experiments of papers: the data, the losses, and the trials of each loss."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

Flags = Mapping[str, Any]  # fields of topk_registry.train.TrainConfig
Rates = tuple[float, float]  # lowest and highest learning rate
PARTS = "topk/parts"  # data set that opens a part of the data set in its option "of"


class OnPictures(NamedTuple):
    """A study on real pictures: the module with its protocol, a summary, and the default number of seeds."""

    module: str
    summary: str
    seeds: int


_HEADS = "compare all losses on the data set {}, on features of a pretrained network"
_NETWORKS = "compare losses on the data set {}, with a small network that is trained from scratch"
ON_PICTURES = {name: OnPictures("heads", _HEADS.format(name), 3) for name in ("icons", "fashion", "cifar10n")}
ON_PICTURES |= {f"{name}-network": OnPictures("networks", _NETWORKS.format(name), 5) for name in ("icons", "fashion")}
ON_PICTURES["finetune"] = OnPictures("finetune", "compare the recipe finetune with the defaults of timm train", 3)

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
# images: a network of three convolutions with batch norm; vectors: a perceptron on generated feature vectors
DATA: dict[str, Flags] = {
    "images": {**_COMMON, "dataset": "topk/hierarchy", "model": "topk_convnet", "model_kwargs": {"norm": True},
               "channels_last": True, "epochs": 8},
    "vectors": {**_COMMON, "dataset": "topk/ambiguous", "model": "topk_mlp", "epochs": 12,
                "dataset_opt": {"feature_noise": 3.0, "ambiguity": 0.1}, "opt_kwargs": {"fused": True}},
    # --data-dir contains cifar-100-python; 45,000 images are for training, 5000 select trials
    "cifar100": {"dataset": PARTS, "dataset_opt": {"of": "torch/cifar100", "val_split": 0.1, "test_split": "test"},
                 "model": "resnet18", "img_size": 64, "epochs": 100, "weight_decay": 5e-4, "smoothing": 0.0,
                 "scale": [0.5, 1.0], "color_jitter": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """A loss in a study, with one or several values per option. An example is ``smooth_topk_svm(tau=0.1|0.3)``.

    Args:
        text: name of the loss, and options in parentheses. ``|`` separates alternative values.
        flags: further flags of ``timm train`` for the runs of this loss.
        grid: alternative values of options that are not in the text.

    Raises:
        ValueError: the text is invalid.

    Example:
        >>> Contestant("focal(gamma=1.0|2.0)").options
        [{'gamma': 1.0}, {'gamma': 2.0}]
    """

    text: str
    flags: Flags = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.options  # raises an error if the text is invalid

    @property
    def loss(self) -> str:
        return self.text.partition("(")[0].strip()

    @property
    def options(self) -> list[dict[str, Any]]:
        """All combinations of the values of the loss options. ``a=1|2, b=3`` has two: a=1, b=3 and a=2, b=3."""
        try:
            call = ast.parse("f(" + (self.text.partition("(")[2] or ")"), mode="eval").body
            if not self.loss or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError(self.text)
            values = {**self.grid, **{str(each.arg): _alternatives(each.value) for each in call.keywords}}
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"expected NAME, NAME(option=value) or NAME(option=a|b), got {self.text!r}") from error
        return [dict(zip(values, each, strict=True)) for each in product(*values.values())]

    def trials(self, count: int, rates: Rates) -> list[dict[str, Any]]:
        """Return the flags of the training runs that tune the loss, one per combination of options and learning rate.

        Every combination of options gets the same ``count`` learning rates, which :func:`spread` takes from the range
        ``rates``. So a loss with options to tune is not compared at fewer learning rates than another loss.
        """
        return [
            {**self.flags, "loss": self.loss, "loss_opt": options, "lr": rate}
            for options in self.options
            for rate in spread(*rates, count)
        ]


def spread(low: float, high: float, count: int) -> list[float]:
    """Return ``count`` numbers that are spread over a range, rounded to three significant digits.

    The range is divided into ``count`` parts of equal length on the logarithmic scale. The numbers are the centers of
    the parts.

    Example:
        >>> spread(0.01, 100.0, 2)
        [0.1, 10.0]
    """
    return [float(f"{low * (high / low) ** ((i + 0.5) / count):.3g}") for i in range(count)]


def _alternatives(value: ast.expr) -> list[Any]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return [*_alternatives(value.left), *_alternatives(value.right)]
    return [value.id if isinstance(value, ast.Name) else ast.literal_eval(value)]


@dataclass(frozen=True)
class Study:
    """A study: a question, the data and the losses.

    Args:
        question: the question that the study answers.
        reference: paper with the experiment that the study repeats, and the table or section of the paper.
        conditions: name of each condition, and the options of the data set under this condition.
        contestants: the losses. The first loss is the baseline.
        metric: metric on the validation split that selects a trial.
        metrics: metrics that the results show.
        trials: number of learning rates per combination of options. A trial is a run with one of these learning rates.
        rates: lowest and highest learning rate.
        data: name of the data, a key of ``DATA``. If empty, the user chooses ``"vectors"`` or ``"images"``.
    """

    question: str
    reference: str
    conditions: Mapping[str, Flags]
    contestants: tuple[Contestant, ...]
    metric: str
    metrics: tuple[str, ...]
    trials: int = 4
    rates: Rates = (2.5e-4 * 0.5**0.5, 2e-3 * 2**0.5)
    data: str = ""


_CE = Contestant("ce")
_SVM = Contestant("smooth_topk_svm(tau=0.1|0.3)")
_NOISED = Contestant("noised_topk(epsilon=0.3|3.0)")
_COSINE = {"normalize_classifier": 1.0}  # a cosine classifier, for which ldam and noised_topk_imbalanced are designed

STUDIES: dict[str, Study] = {
    "noise": Study(
        "With wrong labels within families of classes, does a top-k loss raise top-5?",
        "Berrada, Zisserman, Kumar 2018, Table 1; Garcin et al. 2022, Table 3",
        {f"label noise {p}": {"noise": p} for p in (0.0, 0.4, 0.8)},
        (_CE, _SVM, Contestant("topk_nll(tau=0.1|0.3)"), _NOISED),
        "top5",
        ("top1", "top5"),
    ),
    "cifar100": Study(
        "On CIFAR-100 with label noise within superclasses, does a top-k loss raise top-5?",
        "Berrada, Zisserman, Kumar 2018, Table 1",
        {f"label noise {p}": {"noise": p, "noise_kind": "family"} for p in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)},
        (_CE, Contestant("smooth_topk_svm(tau=1.0)")),
        "top5",
        ("top1", "top5"),
        rates=(0.02, 2.0),
        data="cifar100",
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
            Contestant("focal(gamma=1.0|2.0)"),
            Contestant("ldam(max_margin=0.2|0.5)", flags=_COSINE),
            Contestant("logit_adjustment"),
            _NOISED,
            Contestant("noised_topk_imbalanced(epsilon=0.01|0.05)", flags=_COSINE),
        ),
        "macro_top5",
        ("top5", "macro_top1", "macro_top5"),
    ),
    "spherical": Study(
        "Do spherical losses win with few classes, and lose with many?",
        "de Brebisson, Vincent 2016, section 5",
        {"10 classes": {"families": 2, "fine": 5}, "100 classes": {"families": 20, "fine": 5}},
        (_CE, Contestant("log_taylor_softmax"), Contestant("log_spherical_softmax(epsilon=0.1|1.0)")),
        "top1",
        ("top1", "top5"),
    ),
    "encouraging": Study(
        "Does a bonus for samples that are classified well already raise accuracy?",
        "Zhao et al. 2022",
        {"clean": {}},
        (
            _CE,
            Contestant("encouraging(log_end=0.75)"),
            Contestant("encouraging(log_end=1.0)"),
            Contestant("sigmoid_mse"),
            Contestant("mirror(base=mse)"),
            Contestant("mirror(link=softmax)"),
        ),
        "top1",
        ("top1", "top5"),
    ),
}
