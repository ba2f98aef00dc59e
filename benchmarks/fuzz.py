"""Compare every loss with a plain formula in double precision, on random scores, targets, options, dtypes and backends.

    python -m benchmarks.fuzz --cases 20000 [--seed 0] [--seconds 600] [--only NUMBER]

The formulas are in ``tests/formulas.py``. A case has 3 to 2000 classes. The cases of a seed are numbered from 0, and
``--only NUMBER`` repeats one case. The exit status is 1 if a loss or a gradient differs from the formula by more than
the rounding error of a plain implementation in the dtype of the case.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.formulas import LOSSES, PER_LABEL
from topk_registry import LabelMixture, create_loss, use_backend

ROUNDINGS = 64  # number of operations in a loss, each with an error of at most eps times the largest number
PER_ROOT = 4  # further operations per sqrt(n), because the errors of a sum over n classes add up like a random walk
ON_KERNELS = ("smooth_topk_svm", "topk_nll", "noised_topk", "noised_topk_imbalanced")
STEEP = {"encouraging": 1e5, "focal": 1e2}  # largest derivative with respect to the probability, whose error is eps
KINKED = (  # losses whose gradient is not unique at some scores, see Case.has_kink
    "topk_svm", "topk_hinge", "topk_hinge_convex", "topk_hinge_calibrated", "noised_topk", "noised_topk_imbalanced",
    "epsilon_softmax", "sparse_topk", "differentiable_topk",
)  # fmt: skip
OF_LABELS = ("aldr_kl", "ksubset_nll")  # for a distribution, these losses are not the mean of the losses of its labels
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # the same scores in memory of another order
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, -x], dim=2)[..., 0],
    "channels first": lambda x: x.t().contiguous()[None].movedim(1, -1)[0],
    "negated": lambda x: torch._neg_view(-x),
}


@dataclass
class Case:
    """A loss with options, scores [B, n] with 3 to ``classes`` classes, and a target, all drawn from ``seed``."""

    seed: str
    name: str = ""
    classes: int = 9
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        generator = torch.Generator().manual_seed(random.Random(self.seed).getrandbits(60))
        self.name = self.name or rng.choice(list(LOSSES))
        most = min(self.classes, 150 if self.name in PER_LABEL else 2000)
        n = rng.randint(3, rng.choice([9, min(100, most), most]) if most > 9 else most)
        B = rng.randint(1, 4 if n < 300 else 2)
        self.options = LOSSES[self.name][0](rng, n) | self.options
        self.dtype = rng.choice([torch.float64, torch.float32, torch.float16, torch.bfloat16])
        self.backend = rng.choice(["torch", "numba"]) if self.name in ON_KERNELS else "torch"
        self.scale = rng.choice([0.1, 1.0, 3.0, 10.0])
        scores = self.scale * torch.randn(B, n, generator=generator, dtype=torch.float64)
        for _ in range(rng.randint(0, 2)):  # groups of classes that are ahead of the others
            scores[:, : rng.randint(1, min(n, 70))] += rng.uniform(0, 12)
        self.logits = scores[:, torch.randperm(n, generator=generator)].to(self.dtype)
        self.layout = rng.choice(list(LAYOUTS))
        self.weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 if rng.random() < 0.4 else None
        self.reduction = rng.choice(["mean", "sum", "none"])
        kind = rng.choice(["labels", "labels", "distribution", "mixture"])
        kind = "labels" if self.name in OF_LABELS else kind
        self.smoothing = 0.0 if self.name in OF_LABELS or kind == "mixture" else rng.choice([0.0, 0.0, 0.1, 0.5])
        labels = torch.randint(n, (B,), generator=generator)
        self.target: Any = labels
        if kind == "labels":
            labels[torch.rand(B, generator=generator) < 0.1] = -100
        elif kind == "distribution":
            self.target = (3 * torch.randn(B, n, generator=generator, dtype=torch.float64)).softmax(1).to(self.dtype)
        else:
            self.target = LabelMixture.mixed(labels, labels.roll(1), rng.random()).smooth(rng.choice([0.0, 0.1]))

    def masses(self) -> tuple[Tensor, Tensor]:
        """Return masses m [B, n] and a divisor. The loss of row b is sum_c m_bc L_bc.

        Here L_bc is the loss of row b for label c. The reduction "mean" divides the sum over the rows by the divisor.
        """
        n = self.logits.shape[1]
        weight = torch.ones(n, dtype=torch.float64) if self.weight is None else self.weight
        if isinstance(self.target, Tensor) and not self.target.is_floating_point():
            kept = (self.target >= 0)[:, None]
            q = F.one_hot(self.target.clamp(min=0), n).double() * kept
            divisor = (q @ weight).sum()
            return weight * kept * ((1 - self.smoothing) * q + self.smoothing / n), divisor
        q = self.target.double() if isinstance(self.target, Tensor) else self.target.dense(n, torch.float64)
        q = (1 - self.smoothing) * q + self.smoothing / n
        return weight * q, torch.tensor(float(len(q)))

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient that the plain formula gives."""
        s, (masses, divisor) = self.logits.double().requires_grad_(), self.masses()
        rows = (masses * LOSSES[self.name][1](s, **self.options)).sum(1)
        value = {"mean": rows.sum() / divisor, "sum": rows.sum(), "none": rows}[self.reduction]
        return value.detach(), torch.autograd.grad(value.sum(), s)[0]

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient that the package computes."""
        common = {"weight": self.weight, "reduction": self.reduction, "label_smoothing": self.smoothing}
        s = LAYOUTS[self.layout](self.logits).requires_grad_()
        with use_backend(self.backend):
            value = create_loss(self.name, **self.options, **common)(s, self.target)
        return value.detach(), torch.autograd.grad(value.sum(), s)[0]

    def problem(self) -> str:
        """Describe how the loss or the gradient differs from the formula, or return "" if both are close enough."""
        try:
            pairs = zip(("loss", "gradient"), self.found(), self.expected(), strict=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        # an exponential of x = score / temperature errs by eps |x|, a sum by eps of its largest term
        inverse = [1 / self.options[name] for name in ("tau", "temperature") if self.options.get(name)]
        factor = max(1.0, *inverse, self.options.get("scale", 1.0), STEEP.get(self.name, 1.0))
        if self.name == "sparse_topk":  # differences of sums over k classes
            factor = max(factor, self.options["k"] * self.options["tau"])
        if self.name == "spherical_bound":  # a difference of sums over all classes
            factor = max(factor, self.logits.shape[1])
        largest = factor * max(1.0, self.logits.abs().max().item())
        roundings = ROUNDINGS + PER_ROOT * self.logits.shape[1] ** 0.5
        half = self.dtype in (torch.float16, torch.bfloat16)
        computed = torch.float32 if half else self.dtype
        for what, got, wanted in pairs:
            dtype = self.dtype if what == "gradient" else computed
            if got.shape != wanted.shape or got.dtype != dtype:
                return f"{what} of {got.dtype} {list(got.shape)}, expected {dtype} {list(wanted.shape)}"
            if wanted.isnan().any():  # the mean over no rows, because all rows are ignored
                continue
            if what == "gradient" and self.name in KINKED and self.has_kink():
                continue
            finest = max(1.0, wanted.abs().max().item())
            allowed = roundings * torch.finfo(computed).eps * largest * finest
            allowed += torch.finfo(dtype).eps * wanted.abs().max().item() if half else 0.0
            apart = (got.double() - wanted).abs().max().item()
            if not apart <= allowed:
                return f"{what} {got.tolist()}, expected {wanted.tolist()}: off by {apart:.3g}, allowed {allowed:.3g}"
        return ""

    def has_kink(self) -> bool:
        """Return whether a row has two equal scores, or two scores with the difference 1 (the margin of the hinges)."""
        s = self.logits.double()
        equal = (s.sort(1).values.diff(dim=1) == 0).any()
        return bool(equal) or any(bool(torch.isin(row + 1, row).any()) for row in s)

    def __str__(self) -> str:
        target = list(self.target.shape) if isinstance(self.target, Tensor) else "mixture"
        return (
            f"{self.name} {self.options}, {self.dtype} {list(self.logits.shape)} around {self.scale:g}, "
            f"target {target}, {self.reduction}, weight {self.weight is not None}, smoothing {self.smoothing:g}, "
            f"{self.backend}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print those that fail, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this many seconds")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="number of the one case to run")
    options = parser.parse_args(arguments)
    numbers = range(options.cases) if options.only is None else (options.only,)
    start, run, failed = time.monotonic(), Counter[str](), Counter[str]()
    for number in numbers:
        if time.monotonic() - start > options.seconds:
            break
        case = Case(f"{options.seed}-{number}", classes=2000)
        run[case.name] += 1
        if problem := case.problem():
            failed[case.name] += 1
            print(f"case {number}: {case}\n    {problem}", flush=True)
    print(f"{run.total()} cases of {len(run)} losses, {failed.total()} failed {dict(failed) or ''}".rstrip())
    return 1 if failed or not run else 0


if __name__ == "__main__":
    sys.exit(main())
