"""Noised top-k loss: ours, the authors' package, and other top-k losses."""

from pathlib import Path

import topk_registry as tr
from topk_studies.timing.contest import Case, Contestant, Loss, Operator
from topk_studies.timing.peers import COMPILED, REFERENCE, by_backend, difftopk_neuralsort, ours, pytopk_balanced


def on_backend(case: Case, impl: str) -> Loss:
    loss = tr.create_loss("noised_topk", k=case.k, **case.loss_options)
    loss.impl = impl
    return loss


def contestants(peer_path: Path | None) -> list[Contestant]:
    return [
        REFERENCE,
        COMPILED,
        ours("noised_topk"),
        *by_backend(on_backend),
        Contestant("pytopk balanced", pytopk_balanced),
        Contestant("difftopk neuralsort", difftopk_neuralsort),
    ]


OPERATOR = Operator(
    name="perturbed",
    summary="the noised top-k loss, over the perturbed top-k operator",
    contestants=contestants,
    options=({"epsilon": 1.0, "num_samples": 5},),
    shapes=((64, 100, 5), (256, 1000, 5), (256, 10000, 5)),
    tests=("tests/ops/perturbed",),
)
