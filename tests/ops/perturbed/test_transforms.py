"""The perturbed top-k under torch transforms, against its definition on the same noise."""

import pytest
import torch
from torch.autograd import forward_ad

from topk_registry.functional import perturbed_topk
from topk_registry.ops.perturbed.definition import perturbed_topk_definition

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode
K, DRAWS, EPSILON = 3, 4, 0.7


def randn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SCORES, NOISE = randn(5, 9), randn(DRAWS, 5, 9, seed=1)


def f(s):
    return perturbed_topk(s, K, epsilon=EPSILON, num_samples=DRAWS, noise=NOISE)


def wanted(s):
    return perturbed_topk_definition(s, K, epsilon=EPSILON, noise=NOISE)


def test_gradients_and_second_derivatives():
    def curved(g):
        return lambda s: g(s).exp().sum()

    torch.testing.assert_close(torch.func.grad(curved(f))(SCORES), torch.func.grad(curved(wanted))(SCORES))
    torch.testing.assert_close(torch.func.hessian(curved(f))(SCORES), torch.func.hessian(curved(wanted))(SCORES))
    leaf = SCORES.clone().requires_grad_()
    (first,) = torch.autograd.grad(curved(f)(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    (right,) = torch.autograd.grad(curved(wanted)(leaf), leaf, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(right.square().sum(), leaf)[0])


def test_forward_mode():
    tangent = randn(5, 9, seed=2)
    torch.testing.assert_close(torch.func.jvp(f, (SCORES,), (tangent,)), torch.func.jvp(wanted, (SCORES,), (tangent,)))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(SCORES, tangent)))
    torch.testing.assert_close(tuple(found), torch.func.jvp(wanted, (SCORES,), (tangent,)))


def test_vmap_and_its_randomness():
    batch = torch.stack((SCORES, -SCORES))
    torch.testing.assert_close(torch.func.vmap(f)(batch), torch.stack((wanted(SCORES), wanted(-SCORES))))

    def drawn(s):
        return perturbed_topk(s, K, num_samples=DRAWS)

    same = torch.func.vmap(drawn, randomness="same")(SCORES[:1].expand(3, 9))
    assert torch.equal(same, same[:1].expand(3))
    assert len(torch.func.vmap(drawn, randomness="different")(SCORES[:1].expand(3, 9)).unique()) == 3
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(drawn)(SCORES)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_meta_tensors(epsilon):
    s = SCORES.to("meta").requires_grad_()
    value = perturbed_topk(s, K, epsilon=epsilon)
    assert (value.shape, value.device.type) == ((5,), "meta")
    assert torch.autograd.grad(value.sum(), s)[0].shape == s.shape


@pytest.mark.slow
def test_compiles_for_any_batch():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda s: perturbed_topk(s, K), backend=backend, dynamic=True, fullgraph=True)
    for batch in (4, 7, 9):
        s = randn(batch, 9)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found = compiled(s)
            torch.manual_seed(0)
            torch.testing.assert_close(found, perturbed_topk(s, K))
    assert len(graphs) == 1
