"""The perturbed top-k operator against its definition, its expectation and its promises."""

import pickle

import pytest
import torch

from tests.ops.perturbed.quadrature import expected_kth
from tests.oracles import perturbed_kth
from topk_registry import PerturbedTopK
from topk_registry.functional import perturbed_topk


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def value_and_grad(f, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = scores.detach().clone().requires_grad_()
    value = f(scores)
    cotangent = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return value.detach(), torch.autograd.grad(value, scores, cotangent)[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize(
    ("shape", "k"),
    [((7,), 3), ((4, 2), 1), ((4, 2), 2), ((3, 1), 1), ((5, 40), 6), ((5, 40), 35), ((2, 3, 9), 5), ((0, 6), 2)],
)
def test_matches_the_definition(shape, k, epsilon):
    scores, noise = randn(*shape), randn(4, *shape, seed=1)
    value, grad = value_and_grad(lambda s: perturbed_topk(s, k, epsilon=epsilon, num_samples=4, noise=noise), scores)
    wanted, wanted_grad = value_and_grad(lambda s: perturbed_kth(s, k, epsilon=epsilon, noise=noise), scores)
    assert value.shape == shape[:-1]
    torch.testing.assert_close(value, wanted, rtol=0, atol=8 * 2**-52 * (scores.abs().sum().item() + epsilon * 6))
    torch.testing.assert_close(grad, wanted_grad, rtol=4e-16, atol=4e-16)


def test_definition_by_hand():
    noise = torch.tensor([[0.0, 0.0, 2.5], [0.0, 0.0, 0.0]])  # second largest: 3 of (3, 2, 3.5), then 2 of (3, 2, 1)
    value, grad = value_and_grad(lambda s: perturbed_kth(s, 2, epsilon=1.0, noise=noise), torch.tensor([3.0, 2.0, 1.0]))
    assert value.item() == 2.5
    assert (grad / grad.sum()).tolist() == [0.5, 0.5, 0.0]


def test_gradcheck_with_fixed_noise():
    scores, noise = randn(3, 7).requires_grad_(), randn(5, 3, 7, seed=1)

    def f(s):
        return perturbed_topk(s, 3, epsilon=0.7, num_samples=5, noise=noise).exp()

    assert torch.autograd.gradcheck(f, (scores,))
    assert torch.autograd.gradgradcheck(f, (scores,))


def test_the_functional_gradient_is_the_same():
    scores, noise = randn(3, 7), randn(5, 3, 7, seed=1)

    def f(s):
        return perturbed_topk(s, 3, epsilon=0.7, num_samples=5, noise=noise).exp().sum()

    leaf = scores.clone().requires_grad_()
    assert torch.equal(torch.func.grad(f)(scores), torch.autograd.grad(f(leaf), leaf)[0])


@pytest.mark.parametrize("epsilon", [0.2, 1.0])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_unbiased(k, epsilon):
    s, draws = [0.0, 0.3, -1.0, 0.3, 1.0], 100_000
    value, indicator = expected_kth(s, k, epsilon)
    assert indicator.sum() == pytest.approx(1, abs=1e-12)
    scores = torch.tensor(s, dtype=torch.float64).expand(draws, 5).requires_grad_()
    sample = perturbed_topk(scores, k, epsilon=epsilon, num_samples=1, generator=generator(k))
    (grad,) = torch.autograd.grad(sample.sum(), scores)
    # five standard errors: a true mean lies outside once in two million
    assert sample.mean().item() == pytest.approx(value, abs=5 * sample.std().item() / draws**0.5)
    for share, chance in zip(grad.mean(0).tolist(), indicator, strict=True):
        assert share == pytest.approx(chance, abs=5 * (chance * (1 - chance) / draws) ** 0.5 + 1e-9)


def test_draws_are_independent_and_their_mean_narrows():
    scores = torch.zeros(20_000, 3, dtype=torch.float64)
    one, nine = (
        perturbed_topk(scores, 2, epsilon=1.0, num_samples=b, generator=generator(b)).var().item() for b in (1, 9)
    )
    # a variance from N draws is known to sqrt(2/N) of itself, 1 percent here
    assert one / nine == pytest.approx(9, rel=0.08)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_generator_same_result(dtype):
    scores = randn(4, 50, dtype=dtype)
    options = {"epsilon": 1.0, "num_samples": 3}
    first = perturbed_topk(scores, 5, **options, generator=generator(7))
    assert torch.equal(first, perturbed_topk(scores, 5, **options, generator=generator(7)))
    assert not torch.equal(first, perturbed_topk(scores, 5, **options, generator=generator(8)))


def test_noise_in_double_precision_fills_tensors():
    scores = randn(4, 50)
    options = {"epsilon": 1.0, "num_samples": 3}
    first = perturbed_topk(scores, 5, **options, generator=generator(7))
    source = generator(7)
    noise = torch.stack([torch.empty(4, 50, dtype=torch.float64).normal_(generator=source) for _ in range(3)])
    assert torch.equal(first, perturbed_topk(scores, 5, **options, noise=noise))


def test_default_noise_follows_the_global_seed():
    scores = randn(4, 50)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = perturbed_topk(scores, 5), perturbed_topk(scores, 5)
        torch.manual_seed(3)
        assert torch.equal(first, perturbed_topk(scores, 5))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(dtype):
    scores, noise = randn(3, 30).to(dtype), randn(4, 3, 30, seed=1, dtype=torch.float32)

    def f(s):
        return perturbed_topk(s, 5, epsilon=0.5, num_samples=4, noise=noise)

    value, grad = value_and_grad(f, scores)
    assert (value.dtype, grad.dtype) == (torch.float32, dtype)
    assert torch.equal(value, f(scores.float()))


@pytest.mark.parametrize("k", [2, 9])
def test_nan_row_stays_alone(k):
    scores, noise = randn(3, 10), randn(4, 3, 10, seed=1)
    broken = scores.clone()
    broken[1, 4] = torch.nan

    def f(s):
        return perturbed_topk(s, k, epsilon=1.0, num_samples=4, noise=noise)

    (value, grad), (clean, clean_grad) = value_and_grad(f, broken), value_and_grad(f, scores)
    assert value.isnan().tolist() == [False, True, False]
    assert grad.isnan().any(1).tolist() == [False, True, False]
    assert torch.equal(value[[0, 2]], clean[[0, 2]])
    assert torch.equal(grad[[0, 2]], clean_grad[[0, 2]])


def test_masked_classes_are_never_chosen():
    scores = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]], dtype=torch.float64)
    value, grad = value_and_grad(lambda s: perturbed_topk(s, 2, num_samples=50, generator=generator()), scores)
    assert value.isfinite().all()
    assert grad[0, [1, 3]].tolist() == [0.0, 0.0]
    assert perturbed_topk(scores, 3, generator=generator()).item() == -torch.inf


def test_ties_without_noise_pick_one_class():
    value, grad = value_and_grad(lambda s: perturbed_topk(s, 2, epsilon=0.0), torch.zeros(3, 5))
    assert value.tolist() == [0, 0, 0]
    assert grad.count_nonzero(dim=1).tolist() == [1, 1, 1]


def test_non_contiguous_scores():
    scores, noise = randn(12, 5), randn(3, 5, 12, seed=1)
    options = {"epsilon": 1.0, "num_samples": 3, "noise": noise}
    assert torch.equal(perturbed_topk(scores.T, 4, **options), perturbed_topk(scores.T.contiguous(), 4, **options))
    expanded = randn(12).expand(5, 12)
    assert torch.equal(perturbed_topk(expanded, 4, **options), perturbed_topk(expanded.clone(), 4, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        ({"k": 1.5}, "k must be an integer of at least 1, got 1.5"),
        ({"k": 5}, "k must be at most the number of logits in a row: k = 5"),
        ({"epsilon": -1.0}, "epsilon must be a finite number of at least 0, got -1.0"),
        ({"epsilon": float("nan")}, "epsilon must be a finite number of at least 0, got nan"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"noise": torch.zeros(5, 4)}, r"noise must be \[num_samples, \*logits.shape\] = \[5, 3, 4\], got \[5, 4\]"),
        ({"logits": torch.zeros(3, 4, dtype=torch.long)}, "logits must be floating point"),
        ({"logits": torch.zeros(())}, "logits must be floating point"),
    ],
)
def test_bad_input(options, message):
    call = {"logits": torch.zeros(3, 4), "k": 2, **options}
    with pytest.raises(ValueError, match=message):
        perturbed_topk(call.pop("logits"), **call)


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 2, "epsilon": -1.0}, {"k": 2, "num_samples": 0}])
def test_module_checks_its_options_at_once(options):
    with pytest.raises(ValueError, match="must be"):
        PerturbedTopK(**options)


def test_module_inside_a_network():
    net = torch.nn.Sequential(torch.nn.Linear(8, 20), PerturbedTopK(3, epsilon=0.5, num_samples=4)).eval()
    copy = pickle.loads(pickle.dumps(net))
    x, weight = randn(6, 8, dtype=torch.float32), net[0].weight
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = net(x)
        torch.manual_seed(0)
        assert torch.equal(out, copy(x))
    assert out.shape == (6,)
    assert torch.autograd.grad(out.sum(), weight)[0].count_nonzero() > 0
    assert repr(net[1]) == "PerturbedTopK(k=3, epsilon=0.5, num_samples=4)"


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_compiles_to_one_graph(epsilon):
    module = PerturbedTopK(4, epsilon=epsilon)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    scores = randn(6, 30, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = value_and_grad(module, scores)
        torch.manual_seed(0)
        got = value_and_grad(compiled, scores)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
