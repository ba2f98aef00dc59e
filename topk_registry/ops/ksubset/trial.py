"""Try a backend on a few scores before it serves."""

import torch
from torch import Tensor

from topk_registry.ops.hinge import Hinge
from topk_registry.ops.ksubset.backends import LARGE_K_OF_LABEL, OPERATOR, Kernels
from topk_registry.ops.ksubset.torch.expected import expected_hinges
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Options, Reduction


def trial(kernels: Kernels, device: torch.device, large: bool, double: bool) -> bool:
    """Whether kernels give on a few scores what torch operations give.

    Tests try the kernels themselves. This tries what they need on this machine: compilers, a driver, a place for what
    is compiled.
    """
    k, label, theta = LARGE_K_OF_LABEL if large and device.type == "cpu" else 2, torch.tensor([0, 6, 12]), 0.5
    n = 6 * k + 1
    s = torch.linspace(0, 30, 3 * n).sin().view(3, n)
    if device.type == "cpu":
        return _of_loss(s.double() if double else s, label, k, theta)
    dtype = torch.float64 if double else torch.float32
    one = torch.ones((), dtype=dtype, device=device)
    own = kernels.label_margins(s.to(device, dtype), label.to(device), k, theta)
    exact, s, hinge = OPERATOR["torch"].kernels(), s.double(), Hinge(one.cpu().double(), 0.5, 0.25)
    wanted = exact.label_margins(s, label, k, theta)
    if device.type == "cuda" and kernels.expected_hinges is not None:  # other kernels, which may not run
        for target in label, LabelMixture.smoothed(label, 0.1):
            given = s.to(device, dtype), target.to(device), k, theta, Hinge(one, 0.5, 0.25)
            own = *own, *kernels.expected_hinges(*given, None, 0.5)
            wanted = *wanted, *expected_hinges(exact, s, target, k, theta, hinge, None, 0.5)
        own, wanted = (*own, *_of_chunk(s.to(device, dtype), k, theta)), (*wanted, *_of_chunk(s, k, theta))
    return all(torch.allclose(x.cpu().double(), y, rtol=1e-4, atol=1e-5) for x, y in zip(own, wanted, strict=True))


def _of_loss(s: Tensor, label: Tensor, k: int, theta: float) -> bool:
    """The same of the kernel of the loss: what most first calls need is then all that is compiled."""
    from topk_registry.ops.ksubset.row_loss import smooth_topk_rows

    loss = smooth_topk_rows(k, tau=theta / k)
    assert loss.kernel is not None
    kernel = loss.kernel()
    assert kernel is not None
    value, gradient, *_ = kernel.run(loss.own, Options(label, None, 0.0, -100, Reduction.SUM), s, True)
    hinge = Hinge(torch.ones((), dtype=torch.float64), 1 / k, theta / k)
    margin, of_margin = OPERATOR["torch"].kernels().label_margins(s.double(), label, k, theta)
    wanted, slope = hinge.definition(margin, label)
    assert value is not None
    assert gradient is not None
    return torch.allclose(value.double(), wanted.sum(), rtol=1e-4) and torch.allclose(
        gradient.double(), slope[:, None] * of_margin, rtol=1e-4, atol=1e-5
    )


def _of_chunk(s: Tensor, k: int, theta: float) -> tuple[Tensor, ...]:
    """A state and a gradient by the kernels of linear classifiers for the device of s."""
    from topk_registry.ops.ksubset.chunked.layer import module_of
    from topk_registry.ops.ksubset.torch.rows import finish

    kernels = module_of("triton" if s.is_cuda else "torch", k)
    label = torch.tensor([0, 6, 12], device=s.device)
    flat = torch.cat((s.flatten(), s.new_zeros(1)))
    state, score = kernels.extend(None, None, flat[:-1].view(s.shape), label, k, theta, 0, flat)
    f = finish(state, theta)
    return score, f.shift, kernels.gradient(s, label, f, theta, torch.ones_like(score), 0)
