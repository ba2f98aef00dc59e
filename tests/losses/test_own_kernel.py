"""A kernel of a plug-in's own: the function gets masses, and everything around it is as of any other loss."""

import pytest
import torch

from topk_registry import ClassificationLoss, LabelMixture
from topk_registry.rows import RowLoss, array_kernel, row_losses

CALLS = []


def squares(scores, masses, losses, gradient):
    """sum_c m_c (s_c - 1)^2."""
    CALLS.append((scores.dtype, gradient is not None))
    losses[:] = (masses * (scores - 1) ** 2).sum(-1)
    if gradient is not None:
        gradient[:] = 2 * masses * (scores - 1)


def definition(scores, target):
    table = (scores - 1).square()
    if target is None:
        return table
    return (target * table).sum(-1) if target.is_floating_point() else table.gather(1, target[:, None])[:, 0]


class Plain(ClassificationLoss):
    def per_class(self, logits):
        return (logits - 1).square()


class Own(ClassificationLoss):
    def row_loss(self, logits):
        return RowLoss(definition, kernel=array_kernel(squares))


LABELS = torch.tensor([0, 3, -100, 2])
TARGETS = {
    "labels": LABELS,
    "distributions": torch.rand(4, 5, generator=torch.Generator().manual_seed(1)),
    "a mixture": LabelMixture.mixed(LABELS.clamp(min=0), LABELS.clamp(min=0).roll(1), 0.7, 0.1),
}
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"weight": [1.0, 2.0, 0.0, 0.5, 3.0]},
]


@pytest.fixture(autouse=True)
def _counted():
    CALLS.clear()


def found(kind, target, dtype, **options):
    logits = torch.linspace(-2, 2, 20, dtype=dtype).reshape(4, 5).flip(0).requires_grad_()
    value = kind(**options)(logits, target)
    (value * torch.arange(1.0, 5.0) if value.ndim else 3 * value).sum().backward()
    return value.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_it_is_the_table_in_value_and_gradient(target, options, dtype):
    wanted, wanted_gradient = found(Plain, TARGETS[target], dtype, **options)
    value, gradient = found(Own, TARGETS[target], dtype, **options)
    assert [wanted_for for _, wanted_for in CALLS] == [True]
    assert value.dtype == wanted.dtype
    torch.testing.assert_close(value, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient, wanted_gradient)


def test_a_gradient_is_written_only_where_it_is_wanted():
    Own()(torch.zeros(4, 5), LABELS)
    assert [wanted for _, wanted in CALLS] == [False]


def test_no_rows_and_no_labels_are_as_in_the_table():
    for logits, target in ((torch.zeros(0, 5), LABELS[:0]), (torch.zeros(1, 5), torch.tensor([-100]))):
        torch.testing.assert_close(Own()(logits, target), Plain()(logits, target), equal_nan=True)


def test_a_label_out_of_range_is_an_error():
    with pytest.raises(ValueError, match=r"target must be in \[0, 4\]"):
        Own()(torch.zeros(2, 5), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="labels of a LabelMixture must be in"):
        Own()(torch.zeros(2, 5), LabelMixture.mixed(torch.tensor([0, 5]), torch.tensor([0, 1]), 0.5))


def test_second_derivatives_are_those_of_the_definition():
    logits = torch.linspace(-1, 1, 5, dtype=torch.float64)[None].requires_grad_()
    (gradient,) = torch.autograd.grad(Own()(logits, torch.tensor([1])), logits, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), logits)
    assert second.tolist() == [[0.0, 2.0, 0.0, 0.0, 0.0]]


def test_rows_of_strided_scores():
    scores = torch.randn(5, 4, dtype=torch.float64).T
    value = row_losses(RowLoss(definition, kernel=array_kernel(squares)), scores, torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(value, (scores[torch.arange(4), torch.arange(4)] - 1).square())
    assert CALLS
