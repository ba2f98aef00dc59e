import math

import pytest
import torch

from tests.plugins.rows import batch
from topk_plugins.imbalance import LDAM, Focal, effective_number_weights

COUNTS = [400, 81, 16, 5, 1, 1]
N = len(COUNTS)


def test_margins_in_half_precision_stay_finite():
    """A module is turned into half precision with the network it is a part of; exp(15) is beyond float16."""
    logits, target = batch(N, scale=0.3)
    wanted = LDAM(class_counts=COUNTS)(logits, target)
    found = LDAM(class_counts=COUNTS).half()(logits, target)
    # margins of up to 0.5, times the scale of 30, are rounded to 11 bits
    assert abs(found - wanted) <= 30 * 0.5 * 2**-11


@pytest.mark.parametrize("gamma", [0.25, 0.5, 1.0, 2.0, 3.7])
@pytest.mark.parametrize("gap", [0.0, 15.0, 40.0, 90.0, 1e4])
def test_focal_is_finite_where_p_rounds_to_one(gamma, gap):
    # With two classes 1 - p = sigmoid(-gap), and -log p = softplus(-gap), which is 1 - p to first order.
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    for target in (torch.tensor([0]), torch.tensor([[1.0, 0.0]])):
        loss = Focal(gamma=gamma)(logits, target)
        (gradient,) = torch.autograd.grad(loss, logits)
        lost = 1 / (1 + math.exp(gap)) if gap < 700 else 0.0
        rounding = 4 * 2.0**-24  # of p, whose rounding 1 - p and -log p have
        exact = lost**gamma * -math.log1p(-lost)
        assert loss.item() == pytest.approx(
            exact, rel=1e-5 * (1 + gamma), abs=(1 + gamma) * rounding ** min(1 + gamma, 1)
        )
        assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", [Focal(), Focal(gamma=0.5), LDAM(class_counts=COUNTS)], ids=str)
def test_a_class_ruled_out_by_its_score_costs_nothing(loss):
    logits = torch.tensor([[1.0, 2.0, -math.inf, 0.0, 0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.25, 0.5, 0.0, 0.0, 0.25, 0.0]], dtype=torch.float64)
    for target in (torch.tensor([1]), q):
        value = loss(logits, target)
        (gradient,) = torch.autograd.grad(value, logits)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient[0, 2] == 0
    value = loss(logits, torch.tensor([2]))  # the label itself is ruled out
    (gradient,) = torch.autograd.grad(value, logits)
    assert value == torch.inf
    assert gradient.isfinite().all()
    assert gradient[0, 2] < 0 < gradient[0, 1]


@pytest.mark.parametrize(("scale", "max_margin"), [(1.0, 0.0), (30.0, 0.5), (64.0, 3.0)])
@pytest.mark.parametrize("lead", [0.0, 0.3, 1.0, 5.0, 100.0])
def test_ldam_of_each_class_is_precise_where_the_probability_rounds_to_one(lead, scale, max_margin):
    """Also with probabilities below the smallest normal number, and with margins whose exponential overflows."""
    logits = torch.tensor([[lead, 0.0, -0.1, -0.5, -4.0, -100.0], [lead] + [-math.inf] * 5]).requires_grad_()
    table = LDAM(class_counts=COUNTS, scale=scale, max_margin=max_margin).per_class(logits)
    wide = logits.detach().double().requires_grad_()
    rest = torch.stack([wide[:, [j for j in range(N) if j != c]].mul(scale).logsumexp(1) for c in range(N)], 1)
    margins = torch.tensor([scale * max_margin / count**0.25 for count in COUNTS], dtype=torch.float64)
    gap = margins - (scale * wide - rest)
    expected = torch.where(gap > 40, gap, torch.log1p(gap.clamp(max=40).exp()))
    rounding = 2.0**-23 * (margins + 2 * scale * (wide.detach().abs().nan_to_num(posinf=0.0).amax(1, keepdim=True) + 1))
    assert ((table - expected).nan_to_num().abs() <= rounding).all()
    assert torch.equal(table[1, 1:], torch.full((5,), math.inf))
    assert table[1, 0] == 0
    for c in range(N):  # a gradient is scale times a probability, and rounding bounds the error of the probability
        (found,) = torch.autograd.grad(table[0, c], logits, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected[0, c], wide, retain_graph=True)
        assert ((found[0] - wanted[0]).abs() <= scale * rounding.amax()).all()


def test_drw_starts_at_its_epoch_and_means_its_weights():
    logits, target = batch(N, scale=0.1)
    plain = LDAM(class_counts=COUNTS)
    drw = LDAM(class_counts=COUNTS, drw_epoch=3, beta=0.99)
    raw = [(1 - 0.99) / (1 - 0.99**n) for n in COUNTS]
    weight = torch.tensor([w * N / sum(raw) for w in raw])
    late = LDAM(class_counts=COUNTS, weight=weight)
    for epoch in (0, 1, 2, 3, 4, 7, 2):
        drw.set_epoch(epoch)
        expected = late if epoch >= 3 else plain
        torch.testing.assert_close(drw(logits, target), expected(logits, target), rtol=1e-6, atol=0)


def test_drw_multiplies_the_users_weights():
    weight = torch.rand(N)
    loss = LDAM(class_counts=COUNTS, drw_epoch=1, weight=weight)
    assert torch.equal(loss.class_weight, weight.double())
    loss.set_epoch(1)
    torch.testing.assert_close(
        loss.class_weight, weight.double() * effective_number_weights(torch.tensor(COUNTS), 0.9999)
    )
    assert torch.equal(loss.weight, weight.double())


@pytest.mark.parametrize(
    ("drw_epoch", "total", "first"), [(0.8, 200, 160), (0.29, 100, 29), (0.5, 5, 2), (0, None, 0), (1, 9, 1)]
)
def test_drw_epoch_is_a_number_or_a_share(drw_epoch, total, first):
    assert LDAM(class_counts=COUNTS, drw_epoch=drw_epoch, total_epochs=total).drw_epoch == first


def test_a_checkpoint_loads_in_either_phase():
    weight = torch.linspace(0.5, 2, N)
    early, late = (LDAM(class_counts=COUNTS, drw_epoch=5, weight=weight) for _ in range(2))
    late.set_epoch(9)
    after = late.class_weight.clone()
    late.load_state_dict(early.state_dict())
    assert torch.equal(late.class_weight, after)
    early.load_state_dict(late.state_dict())
    assert torch.equal(early.class_weight, weight.double())


def test_effective_number_weights_keep_their_digits():
    weight = effective_number_weights(torch.tensor([10**6, 0, 2, 1]), 0.9999)
    raw = [1e-4 / (1 - 0.9999**n) for n in (10**6, 1, 2, 1)]
    assert weight.tolist() == pytest.approx([w * 4 / sum(raw) for w in raw], rel=1e-6)
    assert effective_number_weights(torch.tensor(COUNTS), 0.0).tolist() == [1.0] * N


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_counts": COUNTS, "drw_epoch": 1.5}, "drw_epoch"),
        ({"class_counts": COUNTS, "drw_epoch": -1}, "drw_epoch"),
        ({"class_counts": COUNTS, "drw_epoch": 0.5}, "total_epochs"),
        ({"class_counts": COUNTS, "drw_epoch": 1, "beta": 1.0}, "beta"),
    ],
)
def test_wrong_ldam_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LDAM(**options)
