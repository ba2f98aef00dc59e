"""Every fused loss with its options, and batches for it."""

import torch
from torch import Tensor

import topk_registry as tr

B, N = 6, 41
OPTIONS = {
    "focal": [{}, {"gamma": 0.5}],
    "encouraging": [{}, {"log_end": 1.0}, {"log_end": 0.5, "bonus_start": 0.1}, {"log_end": 1.0, "bonus_start": 0.05}],
    "mirror": [{}, {"base": "mae", "gamma": 1.5}, {"link": "softmax", "rho": 0.5}, {"link": "softmax", "gamma": 0.7}],
    "ldam": [{"scale": 3.0}],
    "ldr_kl": [{}, {"temperature": 0.3, "gap": 2.0}],
    "logit_adjustment": [{"tau": 1.3}],
    "generalised_cross_entropy": [{}, {"q": 0.05}, {"q": 1.0}],
    "epsilon_softmax": [{"m": 1.0, "alpha": 1.0}, {"k": 3, "beta": 0.1, "floor": 1e-8}, {"m": 0.0, "alpha": 1.0}],
    "smooth_topk_svm": [{"k": 3, "tau": 0.3}, {"k": 5, "alpha": torch.linspace(0, 2, N)}],
    "topk_nll": [{"k": 2}],
    "topk_svm": [{"k": 3}, {"k": 1, "alpha": torch.linspace(0, 2, N)}],
    "topk_hinge": [{"k": 7}],
    "topk_hinge_convex": [{"k": 4}, {"k": 1}, {"k": N - 1}],
    "topk_hinge_calibrated": [{"k": 3}],
    "log_spherical_softmax": [{"epsilon": 0.1}],
    "log_taylor_softmax": [{}],
    "spherical_bound": [{}],
    "sigmoid_mse": [{}],
    "sigmoid_mae": [{}],
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]


def build(name: str, **options) -> tr.ClassificationLoss:
    builder = tr.get_loss_builder(name)
    context = {"num_classes": N, "class_counts": [max(1, 500 // (c + 1)) for c in range(N)]}
    return builder(**tr.accepted_context(builder, context), **options)


def batch(kind: str, dtype: torch.dtype = torch.float64, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(B, N, generator=generator, dtype=torch.float64) * scale).to(dtype)
    if kind == "dense":
        q = torch.randn(B, N, generator=generator, dtype=torch.float64).softmax(-1)
        q[:, ::3] = 0
        return logits, q.to(torch.float64 if dtype == torch.float64 else torch.float32)
    label = torch.randint(N, (B,), generator=generator)
    label[0] = logits[0].argmax()
    return logits, label
