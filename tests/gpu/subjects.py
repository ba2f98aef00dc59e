"""Losses, batches and a network for tests of training steps."""

import os

import pytest
import torch
from torch import Tensor, nn

import topk_registry as tr
from tests.bench.operators.losses import long_tail, names_of_ours
from tests.ops.triton_runs import DEVICE, ON_GPU

REHEARSAL = os.environ.get("TOPK_GPU_REHEARSAL") == "1"
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not (ON_GPU or REHEARSAL), reason="needs a GPU")]
NAMES = names_of_ours()
B, N = 96, 1000


def built(name: str) -> nn.Module:
    builder = tr.get_loss_builder(name)
    context = {"num_classes": N, "class_counts": long_tail(N)}
    return builder(**tr.accepted_context(builder, context)).to(DEVICE)


def batch(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    s = 2 * torch.randn(B, N, generator=generator)
    return s.to(DEVICE, dtype), torch.randint(N, (B,), generator=generator).to(DEVICE)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, N)).to(DEVICE)
