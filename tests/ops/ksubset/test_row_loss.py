"""The smooth top-k SVM from the logits to the reduced loss in one kernel: how logits are stored changes no number."""

import pytest
import torch
from torch import Tensor

from topk_registry import create_loss, use_backend
from topk_registry.ops.rows.numba.backend import BatchKernel

NAN = float("nan")


def value_and_gradient(s: Tensor, target: Tensor, **options) -> tuple[Tensor, Tensor]:
    x = s.detach().requires_grad_()
    value = create_loss("smooth_topk_svm", k=3, **options)(x, target)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), gradient


def logits() -> Tensor:
    return 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(0))


TARGETS = {
    "labels": (torch.tensor([0, 5, 99, 7, 7, 50]), {}),
    "smoothed": (torch.tensor([0, 5, 99, 7, 7, 50]), {"label_smoothing": 0.1}),
    "dense": (torch.softmax(torch.randn(6, 100, generator=torch.Generator().manual_seed(1)), -1), {}),
}


@pytest.mark.parametrize("target", TARGETS)
def test_strides_change_no_bit(target):
    given, options = TARGETS[target]
    for view in (logits()[:, :100], logits()[:, 100:], logits()[:, ::2], logits().flip(0)[:, :100], logits().T[:100].T):
        found, wanted = (value_and_gradient(s, given, **options) for s in (view, view.contiguous()))
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_half_precision_is_that_of_the_same_numbers_in_single(dtype, target):
    given, options = TARGETS[target]
    s = logits()[:, :100].to(dtype)
    value, gradient = value_and_gradient(s, given, **options)
    wanted, exact = value_and_gradient(s.float(), given, **options)
    assert torch.equal(value, wanted)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, exact.to(dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_that_are_ignored_cost_nothing_whatever_their_scores(smoothing):
    s, label = logits()[:, :100].contiguous(), torch.tensor([0, -100, 99, -100, 7, 50])
    s[1], s[3] = NAN, -torch.inf
    weight, kept = torch.linspace(0.5, 2, 100), label != -100
    value, gradient = value_and_gradient(s, label, weight=weight, label_smoothing=smoothing)
    wanted, exact = value_and_gradient(s[kept], label[kept], weight=weight, label_smoothing=smoothing)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[kept], exact, rtol=1e-6, atol=0)
    assert (gradient[~kept] == 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_is_wrong_is_told(smoothing):
    with pytest.raises(ValueError, match=r"target must be in \[0, 99\].*got 100"):
        value_and_gradient(logits()[:2, :100], torch.tensor([3, 100]), label_smoothing=smoothing)
    few = torch.full((1, 100), -torch.inf)
    few[0, :3] = 0.0
    with pytest.raises(ValueError, match="at least k \\+ 1 = 4 scores"):
        value_and_gradient(few, torch.tensor([0]), label_smoothing=smoothing)


def test_shapes_seen_before_follow_the_switch_and_transforms(monkeypatch):
    loss, s, (label, _) = create_loss("smooth_topk_svm", k=3), logits()[:, :100].contiguous(), TARGETS["labels"]
    wanted, exact = loss(s, label), value_and_gradient(s, label)[1]

    def not_wanted(*_, **__):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(BatchKernel, "run", not_wanted)
    with pytest.raises(AssertionError, match="the kernel was called"):
        loss(s, label)
    with use_backend("torch"):
        torch.testing.assert_close(loss(s, label), wanted)
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, label))(s), exact)
    monkeypatch.setenv("TOPK_REGISTRY_BACKEND", "torch")
    torch.testing.assert_close(loss(s, label), wanted)
