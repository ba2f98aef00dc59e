"""Compiled rows of LapSum, ALDR-KL and the sparse masks against their definitions in double precision."""

import pytest
import torch

from topk_registry import RowLoss, aldr_loss, backend, lapsum_loss, row_losses, sparse_topk_loss

pytest.importorskip("numba")

B, N = 8, 150
LOSSES = {
    "lapsum flat": (lapsum_loss(5, tau=1.0), 1.0),
    "lapsum cold": (lapsum_loss(3.7, tau=0.1), 0.1),
    "lapsum below one": (lapsum_loss(0.3, tau=0.2), 0.2),
    "lapsum nearly all": (lapsum_loss(N - 0.5, tau=1.0), 1.0),
    "aldr": (aldr_loss(), 0.5),
    "aldr cold": (aldr_loss(temperature=0.5, alpha=3.0, gap=0.0), 0.3),
    "sparse one": (sparse_topk_loss(1, tau=0.5), 0.5),
    "sparse": (sparse_topk_loss(5, tau=0.3), 0.3),
    "sparse warm": (sparse_topk_loss(5, tau=20.0), 20.0),
}


def scores(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    s = torch.randn(B, N, generator=g, dtype=torch.float64)
    if kind == "tied":
        return s.round()
    if kind == "ruled out":
        s[:, 1] = -torch.inf
    return {"flat": 1e-3 * s, "leaders": s + 40 * (torch.arange(N) < 2)}.get(kind, s)


def targets(s: torch.Tensor) -> list[torch.Tensor]:
    label = torch.arange(2, B + 2)
    label[:3] = s[:3].argmax(-1)
    q = torch.linspace(-1, 1, N, dtype=torch.float64).softmax(-1).repeat(B, 1)
    q[:, 1], q[0] = 0, 0  # a class and a row without mass
    return [label, 0.5 * q]


def both(loss: RowLoss, s: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = s.clone().requires_grad_()
    value = row_losses(loss, s, target)
    (gradient,) = torch.autograd.grad(value.sum(), s)
    return value.detach().double(), gradient.double()


@pytest.mark.parametrize("kind", ["gaussian", "flat", "tied", "leaders", "ruled out"])
@pytest.mark.parametrize("name", LOSSES)
def test_agree_with_the_definition(name, kind):
    loss, temperature = LOSSES[name]
    if kind == "ruled out" and name == "lapsum nearly all":
        pytest.skip("the weights of N - 1 classes cannot add up to more")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        s = scores(kind).to(dtype)
        # scores over the temperature are rounded, and exponentials are as wrong as their arguments; so are those of a
        # plain computation in this precision
        eps = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
        spread = float((s[s.isfinite()].double().max() - s[s.isfinite()].double().min()) / temperature)
        allowed = 8 * eps * (1 + spread)
        for target in targets(s):
            value, gradient = both(loss, s, target.to(dtype) if target.is_floating_point() else target)
            with backend("torch"):
                wanted = both(loss, s.double(), target.to(dtype).double() if target.is_floating_point() else target)
            torch.testing.assert_close(value, wanted[0], rtol=allowed, atol=allowed * temperature)
            largest = max(1.0, float(wanted[1].abs().max()))
            stored = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(gradient, wanted[1], rtol=stored, atol=allowed * largest)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_row_alone(name, wrong):
    s = scores("gaussian").float()
    s[1, 3] = wrong
    for target in targets(s):
        target = target.float() if target.is_floating_point() else target
        value, gradient = both(LOSSES[name][0], s, target)
        assert value[1].isnan()
        assert gradient[1].isnan().all()
        rest = torch.arange(B) != 1
        assert value[rest].isfinite().all()
        assert gradient[rest].isfinite().all()


def test_too_few_scores_are_not_ruled_out():
    s = torch.full((1, 9), -torch.inf)
    s[0, :2] = 0.0
    for loss in (lapsum_loss(3), sparse_topk_loss(3)):
        value, gradient = both(loss, s, torch.tensor([0]))
        assert value.isnan().all()
        assert gradient.isnan().all()


def test_the_threshold_of_lapsum_at_a_score():
    """Of equal scores half are chosen, by a threshold that equals them: every class has a part in the gradient."""
    s, y = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0])
    wanted = torch.tensor([[-0.75, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for name in ("numba", "torch"):
        with backend(name):
            torch.testing.assert_close(both(lapsum_loss(2), s, y)[1], wanted)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("k", [2, 60, N - 1])
def test_sparse_masks_that_hold_many_classes(k, scale):
    """Each class inside has a threshold of its own, all of them from one pass; masks add up to k, and are as exact."""
    s, loss = scale * scores("gaussian"), sparse_topk_loss(k, tau=1.5)
    s[0] = 0.0
    s[1, :9] = s[1, 9:18]
    q = targets(s)[1]
    found = both(loss, s, q)
    with backend("torch"):
        wanted = both(loss, s, q)
    tolerance = 8 * k * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=tolerance)
