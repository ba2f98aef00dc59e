"""Peak memory of a process that takes training steps of a classifier with very many classes, as JSON; for Linux.

``python -m tests.linear_peak 1000000`` for a million classes; ``--logits`` for the loss on the logits instead.
"""

import argparse
import json
import re
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import topk_registry as tr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", type=int)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--logits", action="store_true")
    options = parser.parse_args()
    step(*layer(options.batch, options.features, 2000), options.logits)  # what is loaded and compiled once
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    before = memory("VmRSS")
    tensors = layer(options.batch, options.features, options.classes)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = step(*tensors, options.logits)
        seconds.append(time.perf_counter() - start)
    parameters = sum(t.nbytes for t in tensors[:3])
    figures = {
        "before": before,
        "peak": memory("VmHWM"),
        "parameters": parameters,
        "logits": 4 * options.batch * options.classes,
    }
    print(json.dumps({**figures, "seconds": seconds, "loss": loss}))


def layer(B: int, d: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    features, weight = torch.randn(B, d), torch.empty(n, d).uniform_(-(d**-0.5), d**-0.5)
    return *(t.requires_grad_() for t in (features, weight, torch.zeros(n))), torch.randint(n, (B,))


def step(features, weight, bias, target, logits: bool) -> float:
    if logits:
        loss = tr.create_loss("smooth_topk_svm", tau=0.1)(F.linear(features, weight, bias), target)
    else:
        loss = tr.functional.linear_smooth_topk(features, weight, bias, target, tau=0.1)
    loss.backward()
    features.grad = weight.grad = bias.grad = None
    return loss.item()


def memory(name: str) -> int:
    """Bytes of this process's memory: VmRSS as it is now, VmHWM at its most since that was last cleared."""
    (line,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(line)


if __name__ == "__main__":
    main()
