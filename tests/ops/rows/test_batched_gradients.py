"""Many gradients at once, by ``is_grads_batched``: the incoming gradient is no plain number."""

import pytest
import torch

import topk_registry as tr


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["smooth_topk_svm", "focal", "topk_svm"])
def test_batched_gradients_are_those_of_one_at_a_time(name, reduction):
    s = torch.randn(4, 20, requires_grad=True)
    value = tr.create_loss(name, reduction=reduction)(s, torch.arange(4))
    g = torch.linspace(-1, 2, 3 * value.numel()).view(3, *value.shape)
    (found,) = torch.autograd.grad(value, s, g, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(value, s, one, retain_graph=True)[0] for one in g]
    torch.testing.assert_close(found, torch.stack(wanted))
