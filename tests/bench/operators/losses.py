"""Every loss of this distribution with its default options: what choosing it costs, beside cross-entropy."""

from pathlib import Path

import topk_registry as tr
from topk_studies.timing.contest import Case, Contestant, Loss, Operator
from topk_studies.timing.peers import REFERENCE

# The scores here are standard normal, not cosines; times 30 most of them would underflow in exp, which is slow.
OPTIONS = {"ldam": {"scale": 1.0}}


def registered(name: str) -> Contestant:
    def build(case: Case) -> Loss:
        builder = tr.get_loss_builder(name)
        context = {"num_classes": case.n, "class_counts": long_tail(case.n)}
        loss = builder(**tr.accepted_context(builder, context), **OPTIONS.get(name, {}))
        return loss.to(case.device)

    return Contestant(name, build)


def long_tail(n: int) -> list[int]:
    """Class counts that fall from 500 to 5 by the same factor from each class to the next."""
    return [round(500 * 0.01 ** (c / (n - 1))) for c in range(n)]


def contestants(peer_path: Path | None) -> list[Contestant]:
    names = [name for name in tr.list_losses() if tr.loss_info(name).distribution == "topk-registry"]
    return [REFERENCE, *map(registered, names)]


OPERATOR = Operator(
    name="losses",
    summary="every loss of this distribution, with its default options",
    contestants=contestants,
    options=({},),
    shapes=((256, 1000, 5),),
    tests=("tests/plugins",),
)
