"""The compiled rows of the perturbed hinge against its definition on the same noise."""

import pytest
import torch

from topk_registry.rows import RowLoss, perturbed_hinge_rows, row_losses

pytest.importorskip("numba")

B, N = 6, 150
GAPS = torch.linspace(0.0, 2.0, N)
LOSSES = {
    "plain": perturbed_hinge_rows(6),
    "cold, with gaps": perturbed_hinge_rows(3, epsilon=0.01, num_samples=3, alpha=GAPS, scale=50.0),
    "nearly all": perturbed_hinge_rows(N - 2, epsilon=0.5, num_samples=2),
    "many draws": perturbed_hinge_rows(1, epsilon=2.0, num_samples=150),
}


def scores(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def targets(dtype: torch.dtype) -> list[torch.Tensor]:
    q = torch.linspace(-1, 1, N, dtype=torch.float64).softmax(-1).repeat(B, 1)
    q[:, 1], q[0] = 0, 0  # a class and a row without mass
    return [torch.arange(B), q.to(dtype)]


def seeded(function, *arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return function(*arguments)


def both(value_of, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = s.clone().requires_grad_()
    value = seeded(value_of, s)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    return value.detach().double(), gradient.double()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_is_the_definition_on_the_noise_of_the_operator(name, dtype):
    loss, s = LOSSES[name], scores(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for target in targets(wide):
        value, gradient = both(lambda x, t=target: row_losses(loss, x, t), s)
        wanted = both(lambda x, t=target: loss.definition(x, t), s.to(wide))
        # the definition rounds the threshold, the gap and their sum
        size = 8 * torch.finfo(wide).eps * wanted[0].abs().max().clamp(min=1.0)
        torch.testing.assert_close(value, wanted[0], rtol=0.0, atol=float(size))
        stored = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4 * torch.finfo(wide).eps
        torch.testing.assert_close(gradient, wanted[1], rtol=stored, atol=float(size))


def test_a_nan_spoils_its_row_alone():
    s = scores(torch.float32)
    s[1, 3] = torch.nan
    for target in targets(torch.float32):
        value, gradient = both(lambda x, t=target: row_losses(LOSSES["plain"], x, t), s)
        assert value.isnan().tolist() == [False, True, *[False] * (B - 2)]
        assert gradient[1].isnan().all()
        assert gradient[2:].isfinite().all()


def test_second_derivatives_are_of_the_noise_that_was_drawn():
    """The gradient with a graph is the one without, and only the incoming gradient has a derivative."""
    s, g = scores().requires_grad_(), torch.ones(B, dtype=torch.float64).requires_grad_()
    plain = both(lambda x: row_losses(LOSSES["plain"], x, torch.arange(B)), s.detach())[1]
    value = seeded(row_losses, LOSSES["plain"], s, torch.arange(B))
    (gradient,) = torch.autograd.grad(value, s, g, create_graph=True)
    assert torch.equal(gradient, plain)
    (of_g,) = torch.autograd.grad(gradient[:, 0].sum(), g)
    assert torch.equal(of_g, plain[:, 0])


def test_a_call_takes_one_number_from_the_generator():
    torch.manual_seed(0)
    row_losses(LOSSES["plain"], scores(), torch.arange(B))
    after = torch.randint(2**63 - 1, ())
    torch.manual_seed(0)
    assert torch.equal(torch.randint(2**63 - 1, (2,))[1], after)


def test_without_noise_it_is_the_plain_hinge():
    loss = perturbed_hinge_rows(2, epsilon=0.0)
    assert isinstance(loss, RowLoss)
    assert loss.kernel is None
    value = row_losses(loss, torch.tensor([[2.0, 1.5, -3.0]]), torch.tensor([1]))
    assert value.tolist() == [1.0]


@pytest.mark.parametrize(("options", "message"), [({"k": 0}, "k must be"), ({"k": 1, "epsilon": -1.0}, "epsilon")])
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        perturbed_hinge_rows(**options)
