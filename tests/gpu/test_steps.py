"""Training steps on a GPU: repeated, on other streams, scaled, and with kernels that fail.

A rehearsal runs them on the CPU, where there is one stream.
"""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import topk_registry as tr
from tests.gpu.subjects import NAMES, B, N, batch, built, network, on_a_gpu
from tests.ops.triton_runs import DEVICE, ON_GPU
from topk_registry import LabelMixture
from topk_registry.ops import backend
from topk_registry.testing.subject import Subject

pytestmark = on_a_gpu


@pytest.fixture(autouse=True)
def forgotten():
    backend.forget_choices()
    yield
    backend.forget_choices()


def value_and_gradient(loss: nn.Module, s: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    leaf = s.detach().requires_grad_()
    value = loss(leaf, target)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["labels", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_repeat_bit_for_bit(name, kind, dtype):
    if kind == "mixed" and Subject.of(name, num_classes=N).is_of_batch:
        pytest.skip("takes one label a row")
    s, label = batch(dtype)
    loss, target = built(name), LabelMixture.mixed(label, label.flip(0), 0.7, 0.1) if kind == "mixed" else label
    value, gradient = value_and_gradient(loss, s, target)
    assert value.isfinite()
    assert gradient.dtype == dtype
    for again in (value_and_gradient(built(name), s, target) for _ in range(3)):
        assert torch.equal(again[0], value)
        assert torch.equal(again[1], gradient)


@pytest.mark.parametrize("name", NAMES)
def test_streams_do_not_race(name):
    s, label = batch(torch.bfloat16)
    loss = built(name)
    wanted = value_and_gradient(loss, s, label)
    streams = [torch.cuda.Stream() for _ in range(3)] if ON_GPU else [None]
    found = []
    if ON_GPU:
        torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream) if ON_GPU else contextlib.nullcontext():
            # scores that the stream has yet to make when the loss is launched
            late = s.repeat(40, 1)[-B:].clone()
            found.append(value_and_gradient(loss, late, label))
    if ON_GPU:
        torch.cuda.synchronize()
    for value, gradient in found:
        assert torch.equal(value, wanted[0])
        assert torch.equal(gradient, wanted[1])


def _no_image(*args: Any, **options: Any) -> Any:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.skipif(not ON_GPU, reason="kernels of a GPU are what fails")
@pytest.mark.parametrize("name", ["smooth_topk_svm", "noised_topk", "focal"])
def test_kernels_that_fail_are_told_of_once_and_torch_serves(name, monkeypatch):
    from triton.runtime.jit import JITFunction

    s, label = batch()
    monkeypatch.delenv("TOPK_REGISTRY_BACKEND", raising=False)
    with tr.use_backend("torch"):
        wanted = value_and_gradient(built(name), s, label)
    monkeypatch.setattr(JITFunction, "run", _no_image)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            found = value_and_gradient(built(name), s, label)
    monkeypatch.undo()
    messages = [str(one.message) for one in told if "triton" in str(one.message)]
    assert len(messages) == 1, messages
    assert "cannot be used" in messages[0]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_loss_has_the_unscaled_gradient(name):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    net, label = network(), batch()[1]
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(B, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss = built(name)

    def value() -> Tensor:
        torch.manual_seed(0)
        with torch.autocast(DEVICE, dtype=torch.float16):
            return loss(net(x), label)

    wanted = torch.autograd.grad(value(), list(net.parameters()))
    scaler.scale(value()).backward()
    scaler.unscale_(sgd)
    eps = torch.finfo(torch.float16).eps
    for p, g in zip(net.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert p.grad.isfinite().all()
        # each of the B rows is rounded to half precision on its way, scaled or not
        torch.testing.assert_close(p.grad, g, rtol=8 * eps, atol=8 * eps * g.abs().max().item() + 2.0**-20)
    scaler.step(sgd)
    scaler.update()
    scale = scaler.get_scale()
    sgd.zero_grad()
    scaler.scale(value() * float("inf")).backward()
    before = [p.detach().clone() for p in net.parameters()]
    scaler.step(sgd)
    scaler.update()
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(p, kept) for p, kept in zip(net.parameters(), before, strict=True))
