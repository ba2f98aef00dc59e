"""Berrada Table 5: is the loss finite as the temperature falls, and beyond the paper, how exact is its gradient?

The reference is computed in 60-digit arithmetic from the very scores that an algorithm is given, after they have been
rounded to its precision: an error below is an error of the algorithm.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topk_studies.baselines.algorithms import CONTESTANTS
from topk_studies.baselines.exact import mp_smooth_svm
from topk_studies.engine.study import Configuration, Options, Progress, Record
from topk_studies.experiments.stability_findings import EXACT_ROWS, PRECISIONS, SHAPE, TAUS, findings
from topk_studies.timing.contest import Case, UnavailableError
from topk_studies.timing.machine import usable

TITLE = "Numerical stability"
QUESTION = (
    "Down to which temperature is the smooth top-k SVM finite, in which precision, and how exact is its gradient?"
)
REFERENCE = "Berrada, Zisserman, Kumar 2018, Table 5; the gradient's error is beyond the paper"
RUNS = "stability"
VERSION = 1
ALONE = False

report = findings


def configurations(options: Options, known: Sequence[Record]) -> list[Configuration]:
    return [
        {
            "algorithm": name,
            "dtype": dtype,
            "taus": list(TAUS),
            **SHAPE,
            "exact_rows": rows,
            "device": usable(options.device),
        }
        for dtype in PRECISIONS
        for name in CONTESTANTS
        for rows in [EXACT_ROWS if options.budget == "small" else 4 * EXACT_ROWS]
    ]


def run(configuration: Configuration, work: Path, progress: Progress) -> dict[str, Any]:
    """For each tau: the loss, whether it and its gradient are finite, and their errors; or why there is none."""
    taus = configuration["taus"]
    results = []
    for i, tau in enumerate(taus):
        progress(i / len(taus), f"tau = {tau:g}")
        results.append({"tau": tau, **_measure(configuration, tau)})
    return {"results": results}


def _measure(configuration: Configuration, tau: float) -> dict[str, Any]:
    c = configuration
    case = Case(c["B"], c["n"], c["k"], {"tau": tau}, device=c["device"], dtype=getattr(torch, c["dtype"]))
    s, y = case.inputs()
    rows = c["exact_rows"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers: about their age, and about overflow, which is counted here
            loss = CONTESTANTS[c["algorithm"]].build(case)
            value, gradient = _value_and_gradient(loss, s, y)
            few, few_gradient = _value_and_gradient(loss, s[:rows].detach(), y[:rows])
    except UnavailableError as error:
        return {"problem": str(error)}
    except RuntimeError as error:
        return {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
    wanted, wanted_gradient = _exact(c["n"], c["k"], tau, c["dtype"], rows, c["B"])
    return {
        "loss": _finite(value),
        "finite_loss": bool(value.isfinite()),
        "finite_gradient": bool(gradient.isfinite().all()),
        "loss_error": _finite(abs(few - wanted) / abs(wanted)),
        "gradient_error": _finite(_worst(few_gradient * rows, wanted_gradient)),
    }


def _value_and_gradient(loss: Callable[[Tensor, Tensor], Tensor], s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    leaf = s.detach().clone().requires_grad_()
    value = loss(leaf, y)
    value.backward()
    assert leaf.grad is not None
    return value.detach().double().cpu(), leaf.grad.double().cpu()


def _worst(gradient: Tensor, wanted: Tensor) -> Tensor:
    """The largest error of an entry relative to the largest entry of its row, over all rows."""
    return ((gradient - wanted).abs().amax(-1) / wanted.abs().amax(-1)).amax()


def _finite(number: Tensor) -> float | None:
    return float(number) if bool(number.isfinite()) else None


@lru_cache(maxsize=64)
def _exact(n: int, k: int, tau: float, dtype: str, rows: int, B: int) -> tuple[Tensor, Tensor]:
    """Mean loss and the rows' gradients [rows, n] at the scores that a case of this shape and precision has."""
    s, y = Case(B, n, k, dtype=getattr(torch, dtype)).inputs()
    pairs = [mp_smooth_svm(s[i].tolist(), int(y[i]), k, tau) for i in range(rows)]
    losses, gradients = zip(*pairs, strict=True)
    return torch.tensor(losses, dtype=torch.float64).mean(), torch.tensor(gradients, dtype=torch.float64)
