"""The noised top-k losses against the paper's formula, written out in plain Python."""

from fractions import Fraction

import pytest
import torch

from topk_plugins._margins import relative_gaps
from topk_plugins.noised_topk import NoisedTopK, NoisedTopKImbalanced

COUNTS = [100, 50, 3, 7, 1, 20, 9]
N = len(COUNTS)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(loss: torch.nn.Module, seed: int = 0):
    """The loss with the same noise at every call."""

    def call(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return loss(logits, target)

    return call


def noise_of(seed: int, rows: int, draws: int, dtype: torch.dtype = torch.float64) -> list[list[list[float]]]:
    """The draws that a loss makes by the torch path after ``torch.manual_seed(seed)``."""
    source = torch.Generator().manual_seed(seed)
    return [torch.empty(rows, N, dtype=dtype).normal_(generator=source).tolist() for _ in range(draws)]


def by_hand(s: list[float], z: list[list[float]], y: int, k: int, epsilon: float, margin: float, scale: float) -> float:
    thresholds = [sorted((a + epsilon * b for a, b in zip(s, draw, strict=True)), reverse=True)[k] for draw in z]
    return max(0.0, scale * (margin + sum(thresholds) / len(thresholds) - s[y]))


def balanced(**options) -> NoisedTopK:
    return NoisedTopK(3, epsilon=0.7, num_samples=4, **options)


def imbalanced(**options) -> NoisedTopKImbalanced:
    return NoisedTopKImbalanced(3, class_counts=COUNTS, epsilon=0.2, num_samples=4, max_margin=0.4, scale=20, **options)


def margin_of(build, y: int) -> float:
    return 1.0 if build is balanced else 0.4 * (min(COUNTS) / COUNTS[y]) ** 0.25


@pytest.mark.parametrize(("build", "epsilon", "scale"), [(balanced, 0.7, 1), (imbalanced, 0.2, 20)])
def test_formula(build, epsilon, scale):
    logits, target = randn(6, N), torch.tensor([0, 1, 2, 3, 4, 5])
    loss = seeded(build(reduction="none"))(logits, target)
    z = noise_of(0, 6, 4)
    for i, y in enumerate(target.tolist()):
        draws = [draw[i] for draw in z]
        wanted = by_hand(logits[i].tolist(), draws, y, 3, epsilon, margin_of(build, y), scale)
        # the margins are kept in fp32
        assert loss[i].item() == pytest.approx(wanted, abs=scale * 2**-24)


@pytest.mark.parametrize("build", [balanced, imbalanced])
def test_gradient_is_mean_indicator_less_label(build):
    loss, target = build(reduction="sum"), torch.tensor([0, 1, 2])
    logits = torch.zeros(3, N, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(seeded(loss)(logits, target), logits)
    indicator = torch.zeros(3, N, dtype=torch.float64)
    for draw in noise_of(0, 3, 4):
        for row, z in enumerate(draw):
            indicator[row, sorted(range(N), key=lambda i, z=z: -z[i])[3]] += 1 / 4
    active = seeded(build(reduction="none"))(logits, target) > 0
    assert active.any()
    wanted = loss.scale * active[:, None] * (indicator - torch.eye(N, dtype=torch.float64)[target])
    torch.testing.assert_close(grad, wanted, rtol=1e-14, atol=0)


def test_margins():
    # fourth powers, so that every root is exact
    assert relative_gaps(torch.tensor([16, 81, 256, 16])).tolist() == pytest.approx(
        [1.0, float(Fraction(2, 3)), 0.5, 1.0], rel=2**-52
    )
    assert relative_gaps(torch.tensor([5, 5])).tolist() == [1.0, 1.0]


def test_a_class_without_samples_leaves_the_others_margins_alone():
    assert relative_gaps(torch.tensor([160, 10, 0])).tolist() == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize("counts", [[0, 0], []])
def test_impossible_counts(counts):
    with pytest.raises(ValueError, match="class_counts must have a positive entry"):
        NoisedTopKImbalanced(1, class_counts=counts)
