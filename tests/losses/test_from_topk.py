"""Targets from a teacher's stored top-k: every loss is its plain formula at the distribution that the tail defines."""

import random

import pytest
import torch

import topk_registry as tr
from tests.formulas import LOSSES
from topk_registry import LabelMixture, create_loss

B = 6
N = 11
M = 3
TAILS = ("uniform", "drop", "renormalize")
DOUBLE = torch.float64


def stored() -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and probabilities [B, M]. Row 0 has two empty places, and row 1 a class that is not among the best."""
    teacher = (2 * torch.randn(B, N, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))).softmax(1)
    p, indices = teacher.topk(M)
    indices[0, 1:] = -1
    indices[1, 2] = teacher[1].argmin()
    p[1, 2] = teacher[1].min()
    return indices, p


def dense(indices: torch.Tensor, p: torch.Tensor, n: int, tail: str) -> torch.Tensor:
    """The distribution of each row by its definition, one class at a time."""
    rows = []
    for classes, shares in zip(indices.tolist(), p.tolist(), strict=True):
        known = {c: share for c, share in zip(classes, shares, strict=True) if c >= 0}
        total = sum(known.values())
        other = (1 - total) / (n - len(known)) if tail == "uniform" else 0.0
        scale = 1 / total if tail == "renormalize" else 1.0
        rows.append([scale * known[c] if c in known else other for c in range(n)])
    return torch.tensor(rows, dtype=DOUBLE)


def takes_mixtures(name: str) -> bool:
    options = LOSSES[name][0](random.Random(0), N) if name in LOSSES else {}
    try:
        create_loss(name, **options)(
            torch.zeros(2, N), LabelMixture.mixed(torch.tensor([0, 1]), torch.tensor([1, 2]), 0.5)
        )
    except Exception:
        return False
    return True


def test_the_formulas_are_those_of_all_losses_that_take_mixtures():
    assert {name for name in tr.list_losses() if takes_mixtures(name)} == set(LOSSES)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_dense_target(name, tail):
    draw, table = LOSSES[name]
    options = draw(random.Random(name), N)
    loss = create_loss(name, reduction="none", **options)
    logits = torch.randn(B, N, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    indices, p = stored()
    q = dense(indices, p, N, tail)
    found = loss(logits, LabelMixture.from_topk(indices, p, N, tail))
    expected = [loss(logits, q)]
    # aldr_kl is not linear in the target, and ksubset_nll is not if the probabilities have another sum than 1
    if name != "aldr_kl" and (name, tail) != ("ksubset_nll", "drop"):
        expected.append((q * table(logits, **options)).sum(1))
    cotangent = torch.linspace(0.5, 2, B, dtype=DOUBLE)
    (gradient,) = torch.autograd.grad(found, logits, cotangent)
    for other in expected:
        torch.testing.assert_close(found, other, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(gradient, *torch.autograd.grad(other, logits, cotangent), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("integer", [torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_keep_the_stored_numbers(integer, dtype):
    p, indices = torch.rand(50, N, generator=torch.Generator().manual_seed(0)).softmax(1).topk(8)
    p = p.to(dtype)
    p[0] = 0.0  # smaller than the smallest number of the type
    found = LabelMixture.from_topk(indices.to(integer), p, N)
    q = found.dense(N, DOUBLE)
    assert found.labels.dtype == torch.int64
    torch.testing.assert_close(q.gather(1, indices), p.double(), rtol=1e-14, atol=1e-16)
    torch.testing.assert_close(q.sum(1), torch.ones(50, dtype=DOUBLE))
    assert q.min() >= 0


def test_rounded_sums_and_complete_rows():
    indices = torch.arange(4).expand(2, 4)
    p = torch.tensor([[0.5, 0.25, 0.25, 0.004], [0.4, 0.3, 0.2, 0.1]])
    for n in (4, 6):
        found = LabelMixture.from_topk(indices, p, n)
        assert found.uniform is not None
        assert found.uniform.abs().max() < 1e-7
        torch.testing.assert_close(found.dense(n)[:, :4], p)


def test_rows_without_a_stored_class():
    indices, p = torch.full((1, 2), -1), torch.tensor([[0.5, torch.nan]])
    torch.testing.assert_close(LabelMixture.from_topk(indices, p, 4).dense(4), torch.full((1, 4), 0.25))
    for tail in ("drop", "renormalize"):
        assert not LabelMixture.from_topk(indices, p, 4, tail).dense(4).any()


GOOD = {"indices": torch.tensor([[2, 0]]), "probabilities": torch.tensor([[0.5, 0.25]]), "n": 4}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tail": "even"}, "'uniform', 'drop', 'renormalize'"),
        ({"indices": torch.tensor([2, 0]), "probabilities": torch.tensor([0.5, 0.25])}, r"\[B, m\]"),
        ({"indices": torch.tensor([[2, 0, 1]])}, r"\[1, 3\]"),
        ({"indices": torch.tensor([[2.0, 0.0]])}, "integer"),
        ({"indices": torch.tensor([[True, False]])}, "integer"),
        ({"probabilities": torch.tensor([[1, 0]])}, "floating point"),
        ({"indices": torch.tensor([[2, 4]])}, "below n = 4, got 4"),
        ({"indices": torch.tensor([[2, 2]])}, "differ"),
        ({"probabilities": torch.tensor([[0.9, 0.2]])}, "sums up to 1.1"),
        ({"probabilities": torch.tensor([[0.9, -0.2]])}, "at least 0"),
        ({"probabilities": torch.tensor([[0.9, torch.nan]])}, "at least 0"),
    ],
)
def test_bad_input(changes, word):
    LabelMixture.from_topk(**GOOD)
    with pytest.raises(ValueError, match=word):
        LabelMixture.from_topk(**{**GOOD, **changes})
