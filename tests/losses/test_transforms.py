"""Row losses work where cross-entropy does: transforms, second and forward derivatives, tensors without numbers."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.losses.fused import CASES, N, batch, build

# torch's own decompositions for forward mode are still written in it
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")

ROW_LOSSES = pytest.mark.parametrize(("name", "options"), CASES)
ONE_EACH = pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))


@ROW_LOSSES
def test_gradients_of_single_samples(name, options):
    logits, target = batch("index", scale=1.0)
    loss = build(name, **options)

    def one(s, t):
        return loss(s[None], t[None])

    got = torch.func.vmap(torch.func.grad(one))(logits, target)
    wanted = torch.stack([torch.func.grad(one)(s, t) for s, t in zip(logits, target, strict=True)])
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    leaf = logits.clone().requires_grad_()
    (fused,) = torch.autograd.grad(build(name, **options, reduction="sum")(leaf, target), leaf)
    torch.testing.assert_close(got, fused, rtol=1e-11, atol=1e-13)


@ROW_LOSSES
@pytest.mark.parametrize("kind", ["index", "dense"])
def test_forward_mode_agrees_with_reverse_mode(name, options, kind):
    logits, target = batch(kind, scale=1.0)
    loss, direction = build(name, **options), torch.linspace(-1, 1, N, dtype=torch.float64).expand(len(logits), N)
    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(loss(forward_ad.make_dual(logits, direction.contiguous()), target)).tangent
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, target), leaf)
    torch.testing.assert_close(along, (gradient * direction).sum(), rtol=1e-10, atol=1e-12)


@ROW_LOSSES
def test_second_derivatives_are_those_of_differences(name, options):
    """Along one direction, by the gradients a little to either side; the losses are smooth there."""
    logits, target = batch("index", scale=1.0)
    loss, direction = build(name, **options), torch.linspace(-1, 1, N, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, target), leaf, create_graph=True)
    got = torch.zeros_like(leaf)
    if first.requires_grad:
        (got,) = torch.autograd.grad((first * direction).sum(), leaf, allow_unused=True, materialize_grads=True)

    def gradient(step):
        moved = (logits + step * direction).requires_grad_()
        return torch.autograd.grad(loss(moved, target), moved)[0]

    wanted = (gradient(1e-5) - gradient(-1e-5)) / 2e-5
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7 * max(1.0, wanted.abs().max().item()))


@ONE_EACH
def test_shapes_without_numbers(name):
    loss = build(name).to("meta") if name == "ldam" else build(name)
    target = torch.zeros(4, dtype=torch.long, device="meta")
    logits = torch.empty(4, N, device="meta", requires_grad=True)
    value = loss(logits, target)
    value.backward()
    assert value.shape == ()
    assert logits.grad is not None
    assert logits.grad.shape == (4, N)


@ONE_EACH
def test_fake_tensors(name):
    loss = build(name)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(4, N, requires_grad=True)
        value = loss(logits, torch.zeros(4, dtype=torch.long))
        value.backward()
    assert value.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encouraging", "spherical_bound", "topk_hinge_convex"])
def test_one_graph_for_batches_of_any_size(name):
    loss = build(name, label_smoothing=0.1)
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    logits, target = batch("index", torch.float32)
    for size in (6, 5):
        torch.testing.assert_close(compiled(logits[:size], target[:size]), loss(logits[:size], target[:size]))
