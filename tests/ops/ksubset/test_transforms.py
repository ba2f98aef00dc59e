"""The operator under torch transforms, against the definition, which autograd differentiates as often as asked."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from topk_registry.functional import topk_label_margins, topk_log_odds, topk_marginals, topk_margins
from topk_registry.ops.hinge import soft_hinge
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.ksubset.chunked.api import linear_label_margins
from topk_registry.ops.ksubset.definition import log_odds_by_recursion
from topk_registry.ops.ksubset.fixed_graph import margins
from topk_registry.ops.targets.label_mixture import LabelMixture

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
B, N, K = 4, 11, 3
THETA = 0.6
LABEL = torch.tensor([0, 3, 6, 10])
Q = torch.rand(B, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def defined(x, k=K):
    return THETA * log_odds_by_recursion(x / THETA, k)


def defined_hinge(x, k):
    return soft_hinge(1 - THETA * log_odds_by_recursion(x / THETA, k) / k, THETA / k)


def hinge(x, target, k=K, **options):
    return smooth_topk_hinge(x, target, k, tau=THETA / k, **options)


# each row of an operator, and the same by the definition
FUNCTIONS = {
    "margins": (lambda x: topk_margins(x, K, temperature=THETA), defined),
    "complement": (lambda x: topk_margins(x, 8, temperature=THETA), lambda x: defined(x, 8)),
    "log_odds": (lambda x: topk_log_odds(x, K), lambda x: log_odds_by_recursion(x, K)),
    "marginals": (
        lambda x: topk_marginals(x, K, temperature=THETA),
        lambda x: torch.sigmoid(log_odds_by_recursion(x / THETA, K)),
    ),
    "label_margins": (
        lambda x: topk_label_margins(x, LABEL, K, temperature=THETA),
        lambda x: defined(x).gather(1, LABEL[:, None])[:, 0],
    ),
    "hinge": (lambda x: hinge(x, LABEL), lambda x: defined_hinge(x, K).gather(1, LABEL[:, None])[:, 0]),
    "hinge of a complement": (
        lambda x: hinge(x, LABEL, 7),
        lambda x: defined_hinge(x, 7).gather(1, LABEL[:, None])[:, 0],
    ),
    "mean hinge": (
        lambda x: hinge(x, LABEL, reduction="mean"),
        lambda x: defined_hinge(x, K).gather(1, LABEL[:, None]).mean(),
    ),
    "soft hinge": (lambda x: hinge(x, Q), lambda x: (Q * defined_hinge(x, K)).sum(1)),
    "smoothed hinge": (
        lambda x: hinge(x, LabelMixture.smoothed(LABEL, 0.25), reduction="sum"),
        lambda x: (LabelMixture.smoothed(LABEL, 0.25).dense(N, torch.float64) * defined_hinge(x, K)).sum(),
    ),
}
every_function = pytest.mark.parametrize(("f", "wanted"), FUNCTIONS.values(), ids=FUNCTIONS.keys())


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "flat", "outlier", "excluded", "wide"])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 2), (12, 3), (12, 6), (30, 8)])
@pytest.mark.parametrize("theta", [0.02, 1.0, 50.0])
def test_torch_operations_alone_are_exact(kind, n, k, theta):
    s = {"flat": 0.0, "wide": 30.0}.get(kind, 1.0) * randn(3, n)
    if kind == "outlier":
        s[:, 0] += 300.0
    if kind == "excluded" and n > 2 * k:
        s[:, 1] = -torch.inf
    wanted = theta * log_odds_by_recursion(s / theta, k)
    scale = theta + s.nan_to_num(neginf=0.0).abs().amax(1, keepdim=True)
    found = margins(s, k, theta)
    assert ((found == wanted) | ((found - wanted).abs() <= 1e-13 * n * scale)).all()


@every_function
def test_second_derivatives(f, wanted):
    def twice(f):
        x = randn(B, N).requires_grad_()
        y = f(x)
        (first,) = torch.autograd.grad(y, x, randn(*y.shape, seed=2), create_graph=True)
        return first.detach(), torch.autograd.grad(first, x, randn(B, N, seed=3))[0]

    for found, right in zip(twice(f), twice(wanted), strict=True):
        assert_close(found, right)


def test_gradgradcheck():
    x = randn(2, 7).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: topk_margins(x, 2), (x,))
    assert torch.autograd.gradgradcheck(lambda x: topk_label_margins(x, torch.tensor([0, 5]), 2), (x,))
    assert torch.autograd.gradcheck(lambda x: topk_margins(x, 2), (x,), check_batched_grad=True)


def test_a_second_derivative_of_a_linear_layer():
    features, weight, bias = (randn(*shape).requires_grad_() for shape in ((B, 5), (N, 5), (N,)))

    def twice(f):
        first = torch.autograd.grad(f().exp().sum(), (features, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (features, weight, bias))

    linear = torch.nn.functional.linear
    found = twice(lambda: linear_label_margins(features, weight, bias, LABEL, K, chunk=4))
    wanted = twice(lambda: log_odds_by_recursion(linear(features, weight, bias), K).gather(1, LABEL[:, None])[:, 0])
    for x, y in zip(found, wanted, strict=True):
        assert_close(x, y)


@every_function
def test_forward_mode(f, wanted):
    x, tangent = randn(B, N), randn(B, N, seed=2)
    for found, right in zip(torch.func.jvp(f, (x,), (tangent,)), torch.func.jvp(wanted, (x,), (tangent,)), strict=True):
        assert_close(found, right)
    with forward_ad.dual_level():
        assert_close(forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent, right)


@every_function
def test_functional_gradients_and_hessians(f, wanted):
    x = randn(B, N)
    assert_close(torch.func.grad(lambda x: f(x).exp().sum())(x), torch.func.grad(lambda x: wanted(x).exp().sum())(x))
    if f is FUNCTIONS["label_margins"][0]:
        found, right = (torch.func.hessian(lambda x: g(x).exp().sum())(x) for g in (f, wanted))  # noqa: B023
        assert_close(found, right)


@every_function
def test_vmap(f, wanted):
    x = randn(5, B, N)
    assert_close(torch.func.vmap(f)(x), torch.stack([wanted(row) for row in x]))
    assert_close(torch.func.vmap(f, in_dims=1)(x.transpose(0, 1)), torch.stack([wanted(row) for row in x]))


def test_per_sample_gradients():
    x = randn(B, N)

    def loss(x, y):
        return hinge(x[None], y[None], reduction="mean")

    found = torch.func.vmap(torch.func.grad(loss))(x, LABEL)
    leaf = x.clone().requires_grad_()
    assert_close(found, torch.autograd.grad(hinge(leaf, LABEL).sum(), leaf)[0])
    assert_close(
        torch.func.vmap(torch.func.jacrev(lambda x: topk_margins(x, K)))(x).diagonal(0, 1, 2), torch.ones(B, N)
    )


@every_function
def test_meta_and_fake_tensors(f, wanted):
    x = randn(B, N)
    right = f(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        found = f(leaf)
        found.sum().backward()
    assert (found.shape, found.dtype, found.device) == (right.shape, right.dtype, right.device)
    assert leaf.grad.shape == x.shape


@pytest.mark.parametrize("device", ["meta"])
def test_meta_tensors(device):
    x, y = randn(B, N).to(device).requires_grad_(), LABEL.to(device)
    for found in (topk_margins(x, K), topk_label_margins(x, y, K), hinge(x, y), hinge(x, Q.to(device))):
        assert found.is_meta
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert gradient.is_meta
        assert gradient.shape == x.shape


@pytest.mark.slow
def test_compiles_for_any_batch():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def losses(x, y):
        return hinge(x, y), topk_margins(x, K), topk_marginals(x, K), topk_label_margins(x, y, K)

    for batch in (4, 7, 9):
        x, y = randn(batch, N), torch.arange(batch)
        for found, right in zip(losses(x, y), losses.__wrapped__(x, y), strict=True):
            assert_close(found, right)
    assert len(seen) == 1


def test_a_traced_graph_holds_the_operator():
    """Real tensors whose operations are recorded: a kernel that is not seen would leave its numbers as a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: topk_margins(x, K))(randn(B, N))
    assert_close(graph(randn(B, N, seed=5)), topk_margins(randn(B, N, seed=5), K))
