"""Ways to compute the smooth top-k SVM, which the studies of speed and of stability compare, and other losses."""

from functools import partial

from torch import Tensor

import topk_registry as tr
from topk_studies.baselines import smooth_topk_svm
from topk_studies.timing.contest import OURS, Case, Contestant, Loss
from topk_studies.timing.peers import REFERENCE, difftopk_neuralsort, difftopk_smooth, ours, pytopk_balanced

PLAIN = f"{OURS}, plain torch"
SUMMATION = "summation"
LINEAR_SUMMATION = "summation in linear space"
DIVIDE = "divide and conquer"
LINEAR_DIVIDE = "divide and conquer in linear space"
ALGORITHM_2 = "algorithm 2"
AUTHORS = "authors' code (difftopk)"
PYTOPK = "pytopk, balanced"
NEURALSORT = "difftopk, neuralsort"


def published(algorithm: str, *, name: str = "") -> Contestant:
    """An algorithm of Berrada et al., written anew from the paper."""

    def build(case: Case) -> Loss:
        return partial(smooth_topk_svm, k=case.k, tau=case.options["tau"], algorithm=algorithm)

    return Contestant(name or f"published: {algorithm}", build)


def _plain_torch(case: Case) -> Loss:
    """Ours without a compiled kernel."""

    def run(s: Tensor, y: Tensor) -> Tensor:
        return tr.functional.smooth_topk_loss(
            s, y, case.k, tau=case.options["tau"], impl="torch", reduction="none"
        ).mean()

    return run


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        ours("smooth_topk_svm"),
        Contestant(PLAIN, _plain_torch),
        *(published(name, name=name) for name in (SUMMATION, LINEAR_SUMMATION, DIVIDE, LINEAR_DIVIDE, ALGORITHM_2)),
        Contestant(AUTHORS, difftopk_smooth),
    )
}

PEERS = {
    contestant.name: contestant
    for contestant in (
        REFERENCE,
        Contestant(PYTOPK, pytopk_balanced),
        Contestant(NEURALSORT, difftopk_neuralsort),
    )
}
