"""Every loss of this distribution beside cross-entropy: at class indices, with label smoothing and with mixup."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn import functional as F

import topk_registry as tr
from topk_registry.registry.options import accepts
from topk_registry.testing.subject import Subject
from topk_studies.timing.contest import CROSS_ENTROPY, Case, Contestant, Loss, Operator
from topk_studies.timing.peers import COMPILED, compiled

# The scores here are standard normal, not cosines; times 30 most of them would underflow in exp, which is slow.
OPTIONS = {"ldam": {"scale": 1.0}}
FIRST_K = 5  # losses without a k are measured at this one only
TARGETS = ({"smoothing": 0.0, "mixup": 0.0}, {"smoothing": 0.1, "mixup": 0.0}, {"smoothing": 0.0, "mixup": 0.3})


def registered(name: str) -> Contestant:
    def build(case: Case) -> Loss:
        builder = tr.get_loss_builder(name)
        offered = {"num_classes": case.n, "class_counts": long_tail(case.n)}
        options = dict(OPTIONS.get(name, {}))
        if smoothing := case.options.get("smoothing", 0.0):
            options["label_smoothing"] = smoothing
        if has_k(name):
            options["k"] = case.k
        return builder(**tr.accepted_context(builder, offered), **options).to(case.device)

    def takes_part(case: Case) -> bool:
        mixed = case.options.get("smoothing") or case.options.get("mixup")
        return (case.k == FIRST_K or has_k(name)) and not (mixed and Subject.of(name).is_of_batch)

    return Contestant(name, build, takes_part)


def has_k(name: str) -> bool:
    return accepts(tr.get_loss_builder(name), "k")


def names_of_ours() -> list[str]:
    """The losses of this distribution."""
    return [name for name in tr.list_losses() if tr.loss_info(name).distribution == "topk-registry"]


def cross_entropy(case: Case) -> Loss:
    smoothing = case.options.get("smoothing", 0.0)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    return loss


def long_tail(n: int) -> list[int]:
    """Class counts that fall from 500 to 5 by the same factor from each class to the next."""
    return [round(500 * 0.01 ** (c / (n - 1))) for c in range(n)]


def contestants(peer_path: Path | None) -> list[Contestant]:
    once = replace(COMPILED, build=lambda case: compiled(cross_entropy(case)))
    return [Contestant(CROSS_ENTROPY, cross_entropy), once, *map(registered, names_of_ours())]


OPERATOR = Operator(
    name="losses",
    summary="every loss of this distribution, on targets of every kind",
    contestants=contestants,
    options=tuple({**target, "cold": cold} for cold in (0.0, 1.0) for target in TARGETS),
    shapes=tuple((B, n, k) for B, n in ((64, 100), (256, 1000), (256, 10000)) for k in (FIRST_K, 20, 50)),
    tests=("tests/losses", "tests/plugins"),
)
