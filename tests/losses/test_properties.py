"""Losses and targets by hypothesis, against plain formulas in double precision.

An example draws shapes, dtypes, memory layouts, the kind of the target, and options over their whole ranges with both
ends. Examples are the same in every run. On a failure, hypothesis prints the smallest example that fails; keep it as a
plain test beside the loss.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fuzz import LAYOUTS, OF_LABELS, ON_KERNELS, Case
from tests.formulas import COUNTS, LOSSES
from tests.oracles import mp_log_odds, subset_log_odds
from topk_registry import LabelMixture, create_loss, use_backend
from topk_registry.distributions import KSubset
from topk_registry.functional import smooth_topk, topk_log_odds, topk_marginals
from topk_registry.ops.masses import Masses

INF = math.inf


def repeated(examples: int) -> settings:
    """The same examples in every run, without a time limit per example."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def between(low: float, high: float, *ends: float) -> st.SearchStrategy[float]:
    """Numbers in [low, high], and the ends of the range more often than by chance.

    There are no denormal numbers, because an onnxruntime session of an earlier test may have switched them off.
    """
    return st.sampled_from((low, high, *ends)) | st.floats(low, high, width=32, allow_subnormal=False)


SIZES = "sizes"
TAUS = between(0.0625, 16.0, 1.0)
ALPHAS = between(0.0, 4.0, 1.0)
UNITS = between(0.125, 8.0, 1.0)
CLASS_COUNTS = "counts"
OPTIONS: dict[str, dict[str, Any]] = {
    "smooth_topk_svm": {"k": SIZES, "tau": TAUS, "alpha": ALPHAS},
    "topk_nll": {"k": SIZES, "tau": TAUS},
    "ksubset_nll": {"temperature": UNITS},
    "topk_svm": {"k": SIZES, "alpha": ALPHAS},
    "topk_hinge": {"k": SIZES},
    "topk_hinge_convex": {"k": SIZES},
    "topk_hinge_calibrated": {"k": SIZES},
    "noised_topk": {"k": SIZES, "epsilon": st.just(0.0)},
    "noised_topk_imbalanced": {
        "k": SIZES, "epsilon": st.just(0.0), "max_margin": ALPHAS, "scale": UNITS, "class_counts": CLASS_COUNTS,
    },
    "sigmoid_mse": {},
    "sigmoid_mae": {},
    "focal": {"gamma": between(0.0, 6.0, 1.0, 2.0)},
    "generalised_cross_entropy": {"q": between(2**-7, 1.0)},
    "ldam": {"max_margin": ALPHAS, "scale": UNITS, "class_counts": CLASS_COUNTS},
    "logit_adjustment": {"tau": ALPHAS, "class_counts": CLASS_COUNTS},
    "balanced_softmax": {"class_counts": CLASS_COUNTS},
    "epsilon_softmax": {
        "k": SIZES, "m": between(0.0, 1e5, 0.125), "alpha": ALPHAS, "beta": ALPHAS, "floor": between(0.0, 0.875),
    },
    "ldr_kl": {"temperature": UNITS, "gap": ALPHAS},
    "aldr_kl": {"temperature": UNITS, "alpha": between(3.0, 20.0), "gap": ALPHAS},
    "encouraging": {"log_end": between(0.0, 0.96875, 1.0), "bonus_start": between(0.0, 0.96875), "rho": ALPHAS},
    "mirror": {
        "base": st.sampled_from(["mse", "mae"]), "gamma": between(1.0, 4.0, 2.0), "rho": ALPHAS,
        "link": st.sampled_from(["sigmoid", "softmax"]),
    },
    "log_spherical_softmax": {"epsilon": UNITS},
    "log_taylor_softmax": {},
    "spherical_bound": {},
    "soft_topk": {"k": "real sizes", "tau": UNITS},
    "lapsum": {"k": "real sizes", "tau": UNITS},
    "sparse_topk": {"k": SIZES, "tau": UNITS},
    "differentiable_topk": {
        "k": SIZES, "tau": UNITS, "relaxation": st.sampled_from(["neuralsort", "softsort"]), "candidates": st.none(),
    },
}  # fmt: skip
KINDS = ("labels", "soft", "mixture")
ROWS = {
    "gaussian": lambda s: s,
    "ties": lambda s: s.round(),
    "flat": lambda s: torch.zeros_like(s),
    "wide": lambda s: 8 * s,
    "one leader": lambda s: s.index_fill(1, torch.tensor([0]), 9.0),
    "shifted": lambda s: s + 7,
}


@dataclass
class Drawn(Case):
    """A case whose parts hypothesis draws, and which also has sample weights and any ignored index."""

    ignore_index: int = -100
    rows: Tensor | None = None  # sample weights
    uniform: float = 0.0

    def __post_init__(self) -> None:
        pass

    def masses(self) -> tuple[Tensor, Tensor]:
        B, n = self.logits.shape
        weight = torch.ones(n, dtype=torch.float64) if self.weight is None else self.weight.double()
        rows = torch.ones(B, dtype=torch.float64) if self.rows is None else self.rows.double()
        if isinstance(self.target, LabelMixture):
            labels, shares, uniform = self.target
            q = torch.zeros(B, n, dtype=torch.float64)
            for j in range(labels.shape[1]):
                q[torch.arange(B), labels[:, j]] += shares[:, j].double()
            even = torch.zeros(B, dtype=torch.float64) if uniform is None else uniform.double()
            total = q.sum(1) * self.smoothing + even
            q = (1 - self.smoothing) * q + total[:, None] / n
            return rows[:, None] * weight * q, rows.sum()
        if self.target.is_floating_point():
            q = (1 - self.smoothing) * self.target.double() + self.smoothing / n
            return rows[:, None] * weight * q, rows.sum()
        label = self.target.long()
        counted = (label != self.ignore_index).double()
        hot = torch.zeros(B, n, dtype=torch.float64)
        for i in range(B):
            if counted[i]:
                hot[i, label[i]] = 1
        q = ((1 - self.smoothing) * hot + self.smoothing / n) * counted[:, None]
        return rows[:, None] * weight * q, (rows[:, None] * weight * hot).sum()

    def loss(self) -> Any:
        common = {"weight": self.weight, "reduction": self.reduction, "label_smoothing": self.smoothing}
        return create_loss(self.name, **self.options, **common, ignore_index=self.ignore_index)

    def found(self) -> tuple[Tensor, Tensor]:
        s = LAYOUTS[self.layout](self.logits).requires_grad_()
        with use_backend(self.backend):
            value = self.loss()(s, self.target, self.rows)
        return value.detach(), torch.autograd.grad(value.sum(), s)[0]

    def __repr__(self) -> str:
        return (
            f"{self.name} {self.options} on {self.backend}, {self.dtype} {self.layout} logits {self.logits.tolist()}, "
            f"target {self.target}, weight {self.weight}, rows {self.rows}, {self.reduction}, smoothing "
            f"{self.smoothing}, ignore_index {self.ignore_index}"
        )


@st.composite
def cases(draw: Any, name: str, kinds: tuple[str, ...] = KINDS) -> Drawn:
    n, B = draw(st.sampled_from([2, 3, 4, 7, 8, 13])), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    case = Drawn("", name)
    for option, strategy in OPTIONS[name].items():
        if strategy == SIZES:
            strategy = st.sampled_from([1, n - 1]) | st.integers(1, n - 1)
        elif strategy == "real sizes":
            strategy = st.floats(0.125, n - 0.125, width=32) | st.integers(1, n - 1).map(float)
        elif strategy == CLASS_COUNTS:
            strategy = st.just(COUNTS[:n])
        case.options[option] = draw(strategy)
    case.dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    case.layout = draw(st.sampled_from(sorted(LAYOUTS)))
    case.backend = draw(st.sampled_from(["torch", "numba"])) if name in ON_KERNELS else "torch"
    case.reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    scores = torch.randn(B, n, generator=generator, dtype=torch.float64)
    case.logits = ROWS[draw(st.sampled_from(sorted(ROWS)))](scores).to(case.dtype)
    weighted, by_rows = draw(st.booleans()), draw(st.booleans())
    case.weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 if weighted else None
    case.rows = torch.rand(B, generator=generator) + 0.1 if by_rows else None
    case.smoothing = 0.0 if name in OF_LABELS else draw(between(0.0, 1.0, 0.0))
    kind = "labels" if name in OF_LABELS else draw(st.sampled_from(kinds))
    labels = torch.randint(n, (B,), generator=generator)
    if kind == "labels":
        case.ignore_index = draw(st.sampled_from([-100, -1, 0, n - 1, n, 255]))
        ignored = torch.tensor(draw(st.lists(st.booleans(), min_size=B, max_size=B)))
        labels = labels.masked_fill(ignored, case.ignore_index)
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.int16]))
        strided = torch.stack([labels, labels + 1], 1)[:, 0].to(dtype)
        case.target = draw(st.sampled_from([labels.to(dtype), strided]))
    elif kind == "soft":
        table = (3 * torch.randn(B, n, generator=generator, dtype=torch.float64)).softmax(1)
        table = table.where(table > 0.01, 0.0)
        view = draw(st.sampled_from(["contiguous", "transposed", "expanded", "sliced"]))
        table = {
            "contiguous": table,
            "transposed": table.t().contiguous().t(),
            "expanded": table[:1].expand(B, n),
            "sliced": torch.cat([table, table], 1)[:, :n],
        }[view]
        case.target = table.to(draw(st.sampled_from([torch.float64, torch.float32])))
    else:
        m = draw(st.integers(1, 3))
        many = torch.randint(n, (B, m), generator=generator)  # may hold a class twice
        shares = torch.rand(B, m, generator=generator, dtype=torch.float64)
        uniform = torch.rand(B, generator=generator, dtype=torch.float64) if draw(st.booleans()) else None
        if m > 1 or uniform is not None:  # a row whose masses are all 0 is ignored
            shares[0, 0] = 0.0
        case.target = LabelMixture(many, shares, uniform)
    return case


@pytest.mark.parametrize("name", OPTIONS)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name):
    @repeated(8 if name == "aldr_kl" else 16)  # the formula of ALDR-KL bisects a table per label
    @given(cases(name))
    def holds(case):
        assert not case.problem()

    holds()


def test_every_formula_has_options():
    assert OPTIONS.keys() == LOSSES.keys()
    assert {name: set(options) for name, options in OPTIONS.items()} == {
        name: set(draw(random.Random(0), 9)) for name, (draw, _) in LOSSES.items()
    }


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - set(OF_LABELS)))
def test_the_gradient_with_respect_to_a_target_is_the_loss_of_each_class(name):
    @repeated(5)
    @given(cases(name, ("soft", "mixture")))
    def holds(case):
        case.logits = case.logits.double()
        case.layout = "contiguous"
        case.dtype = torch.float64
        if isinstance(case.target, LabelMixture):
            of = case.target.shares
            target = case.target._replace(shares=of.clone().requires_grad_())
            leaf = target.shares
        else:
            leaf = target = case.target.double().clone().requires_grad_()
        with use_backend(case.backend):
            value = case.loss()(case.logits, target, case.rows)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        case.target = target
        _, divisor = case.masses()
        masses = case.masses()[0] / (divisor if case.reduction == "mean" else 1)
        table = LOSSES[name][1](case.logits, **case.options).detach()
        (expected,) = torch.autograd.grad((masses * table).sum(), leaf)
        scale = max(1.0, table.abs().max().item())
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=2e-9 * scale)

    holds()


SCORES = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0, 3.5]), min_size=3, max_size=24)


@repeated(40)
@given(SCORES, st.integers(1, 23), between(0.25, 4.0))
def test_log_odds_and_marginals_for_every_size(scores, k, temperature):
    """Brute force up to 12 classes, 60 digits above; k from 1 to n - 1, and many ties."""
    k = 1 + k % (len(scores) - 1)
    x = torch.tensor([scores], dtype=torch.float64)
    scaled = [s / temperature for s in scores]
    exact = subset_log_odds(scaled, k) if len(scores) <= 12 else mp_log_odds(scaled, k)
    expected = torch.tensor([exact], dtype=torch.float64)
    scale = 1e-13 * (1 + 16 * k)
    torch.testing.assert_close(topk_log_odds(x / temperature, k), expected, rtol=scale, atol=scale)
    pi = topk_marginals(x, k, temperature=temperature)
    torch.testing.assert_close(pi, expected.sigmoid(), rtol=scale, atol=1e-15)
    torch.testing.assert_close(KSubset(x, k, temperature).marginals, pi, rtol=scale, atol=1e-15)


@repeated(20)
@given(st.integers(17, 40), st.data())
def test_the_mode_of_a_subset_takes_ties_in_the_order_of_classes(n, data):
    """torch.sort is stable on short rows by chance, and from 17 entries on only where it is asked for."""
    k = data.draw(st.integers(1, n - 1))
    scores = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
    order = sorted(range(n), key=lambda i: (-scores[i], i))
    expected = torch.zeros(n).index_fill(0, torch.tensor(order[:k]), 1.0)
    assert torch.equal(KSubset(torch.tensor(scores), k).mode, expected)


@repeated(25)
@given(st.integers(2, 9), st.integers(1, 8), st.data())
def test_an_expanded_subset_is_the_subset_of_expanded_logits(n, k, data):
    k = 1 + k % (n - 1) if n > 2 else 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(2, 1, n, generator=generator, dtype=torch.float64)
    sizes = data.draw(st.sampled_from([k, torch.tensor([[k], [1]])]))
    validates = data.draw(st.booleans())
    expanded = KSubset(logits, sizes, 0.75, validate_args=validates).expand((2, 3))
    wide = KSubset(
        logits.expand(2, 3, n), sizes if isinstance(sizes, int) else sizes.expand(2, 3), 0.75, validate_args=validates
    )
    assert expanded.batch_shape == wide.batch_shape == (2, 3)
    assert expanded.event_shape == (n,)
    assert expanded._validate_args == validates
    assert torch.equal(expanded.k, wide.k)
    for name in ("entropy", "log_partition"):
        assert torch.equal(getattr(expanded, name)(), getattr(wide, name)())
    for name in ("mode", "marginals", "variance"):
        assert torch.equal(getattr(expanded, name), getattr(wide, name))
    torch.testing.assert_close(expanded.log_prob(wide.mode), wide.log_prob(wide.mode), rtol=0, atol=0)
    torch.manual_seed(0)
    drawn = expanded.sample((5,))
    torch.manual_seed(0)
    assert torch.equal(drawn, wide.sample((5,)))


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("k", [6, 10, 33])
@pytest.mark.parametrize("kind", ["label", "smoothed", "two", "dense"])
def test_a_large_k_is_as_precise_as_a_small_one(backend, k, kind):
    """From k = 6 on, errors of a polynomial's coefficients would show."""
    n = 80
    s = 3 * torch.randn(4, n, generator=torch.Generator().manual_seed(k))
    s[1], s[2, : k - 1] = s[1].round(), 14.0
    s[3] *= 1e-3
    label = torch.tensor([0, 5, 79, 20])
    soft = torch.rand(4, n, generator=torch.Generator().manual_seed(1)).softmax(1)
    target, smoothing = {
        "label": (label, 0.0),
        "smoothed": (label, 0.125),
        "two": (LabelMixture.mixed(label, label.flip(0), 0.75), 0.0),
        "dense": (soft, 0.0),
    }[kind]
    case = Drawn("", "smooth_topk_svm", options={"k": k, "tau": 1 / k, "alpha": 1.0})
    case.logits = s
    case.target = target
    case.smoothing = smoothing
    case.dtype = torch.float32
    case.backend = backend
    case.layout = "contiguous"
    case.weight = None
    case.reduction = "none"
    (value, gradient), (expected, slope) = case.found(), case.expected()
    torch.testing.assert_close(value.double(), expected, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(9, 1), (9, 3), (9, 7), (40, 6)])
@pytest.mark.parametrize("label", [0, -1])
def test_scores_of_infinity(backend, dtype, n, k, label):
    """Fewer than k such classes are far ahead of the others. With k of them, other classes have no margin."""
    for count in range(k + 2):
        s = torch.linspace(1, -1, n, dtype=dtype)[None].clone()
        s[0, :count] = INF
        far = s.clamp(max=1e4).double()
        target = torch.tensor([label % n])
        s.requires_grad_()
        with use_backend(backend):
            value = smooth_topk(s, Masses.of(s, target), k=k, tau=0.5)
            (gradient,) = torch.autograd.grad(value.sum(), s)
            expected = smooth_topk(far, Masses.of(s, target), k=k, tau=0.5)
        if count < k:
            torch.testing.assert_close(value.detach().double(), expected, rtol=1e-6, atol=1e-7)
            # exactly 0, up to the rounding of a difference of probabilities in double precision
            assert (gradient[0, :count].abs() <= torch.finfo(torch.float64).eps).all()
            assert gradient.isfinite().all() or 2 * k > n  # there, scores change their sign
        elif label == 0:
            assert count > k or value.item() == 0
        else:
            assert not value.isfinite().any()
            assert value.item() == INF or gradient.isnan().any()
