"""The smooth hinge at labels: every implementation's against exact arithmetic, and as one function of the scores."""

import pytest
import torch
from torch import Tensor

from tests.ops.ksubset.hinges import MARGINS, check_hinges
from tests.ops.ksubset.scores import KINDS, scores
from topk_registry.functional import soft_hinge, topk_label_margins
from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset import smooth_topk_hinge

INF, NAN = float("inf"), float("nan")
ON_CPU = ("torch", "numba")
SIZES = [(2, 1, 1.0), (30, 5, 0.1), (30, 27, 1e-3), (140, 70, 1.0), (1000, 5, 10.0)]


def hinges_of_numba(margin: Tensor, label: Tensor, hinge: Hinge) -> tuple[Tensor, Tensor]:
    hinges = pytest.importorskip("topk_registry.ops.ksubset.numba.hinges")
    from tests.ops.compiled import for_python

    hinge_of, alpha = for_python(hinges.hinge_of), hinge.alpha.double().reshape(-1).numpy()
    rows = zip(margin.tolist(), label.tolist(), strict=True)
    found = torch.tensor([hinge_of(m, y, alpha, hinge.scale, hinge.tau, 1.0) for m, y in rows])
    return found[:, 0], found[:, 1]


def definition(margin: Tensor, label: Tensor, hinge: Hinge) -> tuple[Tensor, Tensor]:
    return hinge.definition(margin, label.clamp(max=len(MARGINS) - 1))


@pytest.mark.parametrize("of_margins", [definition, hinges_of_numba])
@pytest.mark.parametrize("tau", [1e-300, 1e-3, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("scale", [1.0, 0.2, -1 / 3])
def test_hinges_are_exact(of_margins, scale, tau):
    check_hinges(of_margins, scale, tau)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "tau"), SIZES)
@pytest.mark.parametrize("per_class", [False, True])
def test_it_is_the_hinge_on_the_label_s_margin(kind, n, k, tau, per_class, impl):
    """In double precision: the same numbers by other steps."""
    s, label = scores(kind, n).double(), torch.tensor([0, n - 1])
    alpha = torch.linspace(0, 2, n).double() if per_class else 0.7
    wanted = alpha[label] if isinstance(alpha, Tensor) else alpha
    x, z = s.clone().requires_grad_(), s.clone().requires_grad_()
    composed = soft_hinge(wanted - topk_label_margins(x, label, k, temperature=k * tau, impl="torch") / k, tau)
    found = smooth_topk_hinge(z, label, k, tau=tau, alpha=alpha, impl=impl)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, composed, rtol=1e-9, atol=1e-12)
    g = torch.tensor([0.3, -2.0], dtype=torch.float64)
    composed.backward(g)
    found.backward(g)
    assert x.grad is not None
    torch.testing.assert_close(z.grad, x.grad, rtol=1e-9, atol=1e-12)
    single = smooth_topk_hinge(s.float(), label, k, tau=tau, alpha=alpha, impl=impl)
    assert single.dtype == torch.float32  # also where k above 64 is computed in double


def test_gradcheck():
    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    label, alpha = torch.tensor([0, 3, 6]), torch.rand(7, dtype=torch.float64)
    for k in (1, 3, 5):
        assert torch.autograd.gradcheck(lambda x, k=k: smooth_topk_hinge(x, label, k, tau=0.3, alpha=alpha), x)


def test_half_precision_and_no_rows():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    label = torch.arange(4)
    loss = smooth_topk_hinge(x, label, 2, tau=0.1)
    assert torch.equal(loss, smooth_topk_hinge(x.float(), label, 2, tau=0.1))
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    none = smooth_topk_hinge(torch.zeros(0, 9, requires_grad=True), label[:0], 2)
    assert none.shape == (0,)
    none.sum().backward()


def test_alpha_gets_no_gradient():
    alpha = torch.ones(5, requires_grad=True)
    assert not smooth_topk_hinge(torch.zeros(2, 5), torch.tensor([0, 1]), 2, alpha=alpha).requires_grad


def gradient(f, s):
    x = s.clone().requires_grad_()
    loss = f(x)
    loss.sum().backward()
    return loss.detach(), x.grad


@pytest.mark.parametrize("k", [2, 7])
def test_a_compiled_graph_and_the_functional_gradient_are_the_same(k):
    s = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))

    def loss(x):
        alpha = torch.linspace(0, 2, 9)
        return smooth_topk_hinge(x, torch.arange(4), k, tau=0.1, alpha=alpha)

    expected = gradient(loss, s)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(gradient(compiled, s), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    functional = torch.func.grad(lambda x: loss(x).sum())(s)  # by torch operations in double precision
    torch.testing.assert_close(functional, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"k must be an integer from 1 to n - 1 = 4, got 0"),
        ({"k": 2.0}, r"k must be an integer from 1 to n - 1 = 4, got 2.0"),
        ({"tau": 0.0}, r"tau must be a finite number above 0, got 0.0"),
        ({"tau": NAN}, r"tau must be a finite number above 0, got nan"),
        ({"tau": 1e308}, r"temperature must be a finite number above 0, got inf"),
        ({"alpha": torch.ones(2)}, r"alpha must be one number, or one a class \[5\], got \[2\]"),
        ({"target": torch.tensor([0, 5])}, r"label must be in \[0, 4\], got 5"),
        ({"impl": "fast"}, r"impl must be 'auto' or one of"),
    ],
)
def test_what_is_refused(options, message):
    given = {"target": torch.tensor([0, 1]), "k": 2} | options
    with pytest.raises(ValueError, match=message):
        smooth_topk_hinge(torch.zeros(2, 5), **given)


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("f", [smooth_topk_hinge, topk_label_margins])
@pytest.mark.parametrize("k", [2, 4, 5])
def test_too_few_scores_are_refused(k, f, impl):
    """Also for k above n / 2, where the n - k smallest are drawn instead."""
    s, label = torch.zeros(2, 7), torch.tensor([0, 1])
    s[1, k + 1 :] = -INF
    assert f(s, label, k, impl=impl).isfinite().all()
    s[1, k:] = -INF
    with pytest.raises(ValueError, match=rf"at least k \+ 1 = {k + 1} scores above -inf, one has {k}"):
        f(s, label, k, impl=impl)
    if f is smooth_topk_hinge:
        q = torch.zeros(2, 7)
        q[:, :2] = 0.5
        with pytest.raises(ValueError, match=rf"at least k \+ 1 = {k + 1} scores above -inf, one has {k}"):
            f(s, q, k, impl=impl)
