"""Noised top-k loss: ours, the authors' package, and other top-k losses."""

from pathlib import Path

from topk_registry.studies.timing.contest import Contestant, Operator
from topk_registry.studies.timing.peers import REFERENCE, difftopk_neuralsort, ours, pytopk_balanced


def contestants(peer_path: Path | None) -> list[Contestant]:
    return [
        REFERENCE,
        ours("noised_topk"),
        Contestant("pytopk balanced", pytopk_balanced),
        Contestant("difftopk neuralsort", difftopk_neuralsort),
    ]


OPERATOR = Operator(
    name="perturbed",
    summary="the noised top-k loss, over the perturbed top-k operator",
    contestants=contestants,
    options=({"epsilon": 1.0, "num_samples": 5},),
    shapes=((256, 1000, 5),),
    tests=("tests/ops/perturbed",),
)
