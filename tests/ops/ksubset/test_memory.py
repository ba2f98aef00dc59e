"""The loss needs memory for a few copies of the logits, whatever k is."""

from pathlib import Path

import pytest
import torch

import topk_registry as tr
from tests.linear_peak import memory
from topk_studies.timing.contest import Case
from topk_studies.timing.memory import peak_bytes
from topk_studies.timing.rounds import step


@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 1), (256, 1000, 5), (256, 1000, 50), (32, 10000, 5)])
@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_forward_and_backward_peak_at_five_times_the_logits(B: int, n: int, k: int, tau: float) -> None:
    logits, target = Case(B, n, k).inputs()
    run = step(tr.create_loss("smooth_topk_svm", k=k, tau=tau), logits, target)
    assert peak_bytes(run) <= 5 * logits.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["numba", "torch"])
@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 5), (256, 1000, 20), (256, 1000, 50), (32, 10000, 5)])
def test_margins_of_every_class_and_their_gradient(impl: str, B: int, n: int, k: int) -> None:
    logits, _ = Case(B, n, k).inputs()
    run = step(lambda s, _: tr.functional.topk_margins(s, k, impl=impl).sum(), logits, None)
    assert peak_bytes(run) <= 5 * logits.nbytes


@pytest.mark.parametrize(("B", "n", "k"), [(256, 1000, 5), (256, 1000, 50)])
def test_a_distribution_over_labels(B: int, n: int, k: int) -> None:
    logits, target = Case(B, n, k).inputs()
    q = torch.nn.functional.one_hot(target, n).float()
    run = step(tr.create_loss("smooth_topk_svm", k=k), logits, q)
    assert peak_bytes(run) <= 5 * logits.nbytes


TARGETS = {
    "labels": lambda label, n, dtype: label,
    "two labels": lambda label, n, dtype: tr.LabelMixture.mixed(label, label.flip(0), 0.7),
    "a distribution": lambda label, n, dtype: torch.full((len(label), n), 1 / n, dtype=dtype),
}


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the most memory so far is asked of Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "smoothing"), [*((kind, 0.0) for kind in TARGETS), ("labels", 0.1)])
def test_memory_of_the_process_with_that_of_the_kernels(kind, smoothing, dtype) -> None:
    """The rows that threads work on are not PyTorch's memory. Blocks of above 32 MiB go back to the system at once."""
    B, n = 2048, 10000
    torch.set_num_threads(4)
    loss = tr.create_loss("smooth_topk_svm", k=5, label_smoothing=smoothing)
    for rows in (8, B):  # the first compiles
        logits = torch.randn(rows, n, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        target = TARGETS[kind](torch.arange(rows) % n, n, dtype)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        loss(logits, target).backward()
    assert B * n * dtype.itemsize > 1 << 25
    assert memory("VmHWM") - before <= 5 * logits.nbytes
