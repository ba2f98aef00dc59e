"""Try a backend on a few scores before it serves."""

import torch

from topk_registry.ops.perturbed.backends import Kernels


def trial(kernels: Kernels, device: torch.device) -> bool:
    """Whether kernels find the second largest score, of noise too little to matter."""
    scores = torch.linspace(0, 30, 39).sin().view(3, 13).to(device)
    value, index = kernels.perturbed_kth(scores, torch.zeros((), dtype=torch.int64, device=device), 2, 1e-20, 2)
    wanted, where = (x[:, 1] for x in scores.topk(2))
    return torch.allclose(value, wanted) and bool((index == where[:, None]).all())
