"""Smooth top-k SVM: ours, the algorithms as published, the authors' code, and other top-k losses."""

import sys
from pathlib import Path

from torch import Tensor

import topk_registry as tr
from topk_studies.baselines.algorithms import published
from topk_studies.timing.contest import Case, Contestant, Loss, Operator, UnavailableError
from topk_studies.timing.peers import (
    COMPILED,
    REFERENCE,
    by_backend,
    difftopk_neuralsort,
    difftopk_smooth,
    needs,
    ours,
    pytopk_balanced,
    quiet,
)


def authors(path: Path) -> Contestant:
    """The authors' SmoothTopkSVM from a checkout of their repository at ``path``."""

    def build(case: Case) -> Loss:
        if not (path / "topk" / "svm.py").is_file():
            raise UnavailableError(f"{path} has no topk/svm.py; give the root of the authors' repository")
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
        with quiet():
            loss = needs("topk.svm", "future").SmoothTopkSVM(case.n, alpha=1.0, tau=case.options["tau"], k=case.k)
            return loss.cuda() if case.device.startswith("cuda") else loss

    return Contestant("authors' code", build)


def on_backend(case: Case, impl: str) -> Loss:
    def loss(logits: Tensor, label: Tensor) -> Tensor:
        return tr.functional.smooth_topk_loss(
            logits, label, case.k, tau=case.options["tau"], impl=impl, reduction="none"
        ).mean()

    return loss


def contestants(peer_path: Path | None) -> list[Contestant]:
    return [
        REFERENCE,
        COMPILED,
        ours("smooth_topk_svm"),
        *by_backend(on_backend),
        published("summation"),
        published("divide and conquer"),
        published("algorithm 2"),
        *([authors(peer_path)] if peer_path else []),
        Contestant("difftopk smooth top-k", difftopk_smooth),
        Contestant("difftopk neuralsort", difftopk_neuralsort),
        Contestant("pytopk balanced", pytopk_balanced),
    ]


OPERATOR = Operator(
    name="ksubset",
    summary="the smooth top-k SVM, over the k-subset operator",
    contestants=contestants,
    options=({"tau": 0.1}, {"tau": 1.0}),
    shapes=(
        (64, 100, 5),
        (256, 1000, 1),
        (256, 1000, 5),
        (256, 1000, 20),
        (256, 1000, 50),
        (256, 10000, 5),
        (32, 100000, 5),
    ),
    tests=("tests/test_oracles.py", "tests/ops/ksubset", "tests/studies/test_published.py"),
)
