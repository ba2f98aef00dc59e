import math

import pytest
import torch

from tests import formulas
from tests.plugins.rows import batch
from topk_plugins.encouraging import Encouraging

N = 5


@pytest.mark.parametrize("gap", [8.0, 11.0, 20.0, 60.0, 1e4])
def test_the_normal_bonus_keeps_the_gradient_alive_up_to_its_floor(gap):
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(Encouraging(log_end=1)(logits, torch.tensor([0])), logits)
    # minus the log-odds has a slope of 1 whatever p; where 1 - p is below 1e-5 cross-entropy is left alone
    expected = 1.0 if gap < -math.log(1e-5) else 1 / (1 + math.exp(min(gap, 700.0)))
    # p is rounded to 6e-8, so 1 - p and the slope of its logarithm are right to 6e-8 / (1 - p), here below 2 percent
    rounding = 4 * 2.0**-24 * (1 + math.exp(min(gap, -math.log(1e-5))))
    assert gradient.tolist() == [[pytest.approx(-expected, abs=rounding), pytest.approx(expected, abs=rounding)]]


@pytest.mark.parametrize("gap", [2.0, 15.0, 30.0, 60.0])
def test_the_tangent_has_a_finite_gradient_where_p_rounds_to_one(gap):
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(Encouraging()(logits, torch.tensor([0])), logits)
    # d/dl (softplus(-l) - 4 p) = -(1 - p) - 4 p (1 - p)
    lost = 1 / (1 + math.exp(gap))
    assert gradient[0, 0].item() == pytest.approx(-lost * (1 + 4 * (1 - lost)), rel=1e-5, abs=6 * 2.0**-24)


@pytest.mark.parametrize("log_end", [0.5, 0.99, 0.9999, 1.0])
def test_with_two_classes_the_slope_is_minus_one_before_the_tangent(log_end):
    logits = torch.tensor([[-0.3, 0.0]], requires_grad=True)  # there, the loss is minus the log-odds of the label
    for scheduled in ("bonus", "log_end"):
        loss = Encouraging(log_end=log_end, scheduled=scheduled)(logits, torch.tensor([0]))
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0]]), rtol=4 * 2.0**-24, atol=0)


def test_a_tensor_of_epochs_gives_a_loss_for_each_epoch_in_single_precision():
    logits = torch.randn(3, 5)
    target = torch.tensor([0, 1, 2])
    epochs = torch.tensor([0.0, 3.0, 10.0]).double()
    for scheduled in ("bonus", "log_end"):
        loss = Encouraging(log_end=1.0, schedule="linear", scheduled=scheduled, total_epochs=10)
        found = torch.vmap(lambda e, loss=loss: torch.func.functional_call(loss, {"epoch": e}, (logits, target)))(
            epochs
        )
        expected = []
        for epoch in (0, 3, 10):
            loss.set_epoch(epoch)
            expected.append(loss(logits, target))
        torch.testing.assert_close(found, torch.stack(expected))


def test_the_bonus_is_continuous_where_its_tangent_starts():
    for log_end in (0.25, 0.5, 0.75, 0.9):
        end = math.log(log_end / (1 - log_end))
        scores = [[end - 1e-6, 0.0], [end, 0.0], [end + 1e-6, 0.0]]  # at log_end = 0.5, the second row has p = log_end
        logits = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
        loss = Encouraging(log_end=log_end, reduction="none")(logits, torch.tensor([0, 0, 0]))
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(loss, loss[:1].expand(3), rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient[:, 0], gradient[:1, 0].expand(3), rtol=0, atol=1e-5)


SHARES = {
    "linear": lambda t: t,
    "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
    "exponential": lambda t: math.exp(5 * (t - 1)),
}


@pytest.mark.parametrize("schedule", SHARES)
@pytest.mark.parametrize("scheduled", ["bonus", "log_end"])
def test_schedules_grow_with_the_epochs(schedule, scheduled):
    logits, target = batch(N)
    loss = Encouraging(schedule=schedule, scheduled=scheduled, total_epochs=10, start_epoch=2)
    for epoch in (0, 1, 2, 5, 9, 10, 3):
        loss.set_epoch(epoch)
        share = SHARES[schedule](epoch / 10)
        options = {"rho": share} if scheduled == "bonus" else {"log_end": 0.75 * share}
        options = options if epoch >= 2 else {"rho": 0.0}
        table = formulas.encouraging(logits, **{"log_end": 0.75, "bonus_start": 0.0, "rho": 1.0, **options})
        torch.testing.assert_close(loss(logits, target), table.gather(1, target[:, None]).mean())


def test_a_negative_rate_grows_fast_first():
    loss, (logits, target) = Encouraging(schedule="exponential", rate=-5.0, total_epochs=100), batch(N)
    loss.set_epoch(20)
    torch.testing.assert_close(loss(logits, target), Encouraging(rho=1 - math.exp(-1.0))(logits, target))


def test_a_schedule_of_the_log_end_up_to_one_stays_finite():
    loss = Encouraging(log_end=1, schedule="linear", scheduled="log_end", total_epochs=4)
    logits = torch.tensor([[50.0, 0.0], [3.0, 0.0]], requires_grad=True)
    for epoch in range(5):
        loss.set_epoch(epoch)
        (gradient,) = torch.autograd.grad(loss(logits, torch.tensor([0, 0])), logits)
        assert gradient.isfinite().all()


def test_a_compiled_loss_follows_its_schedule_without_compiling_anew():
    loss = Encouraging(schedule="linear", total_epochs=20)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, target = batch(N, dtype=torch.float32)
    compiled(logits, target)
    with torch.compiler.set_stance("fail_on_recompile"):
        for epoch in (5, 10, 20):
            loss.set_epoch(epoch)
            torch.testing.assert_close(compiled(logits, target), loss(logits, target))


@pytest.mark.parametrize("dense", [False, True])
def test_without_a_tangent_the_bonus_ends_where_it_is_published_to(dense):
    """log(max(1 - p, 1e-5)): 1 - p is 2e-5 at log-odds of 10.82, and 5e-6 at 12.2."""
    loss = Encouraging(log_end=1.0, reduction="none")
    for odds, bonus in ((10.82, math.log(1 / (1 + math.exp(10.82)))), (12.2, math.log(1e-5)), (40.0, math.log(1e-5))):
        logits, label = torch.tensor([[odds, 0.0]], dtype=torch.float64), torch.tensor([0])
        target = torch.eye(2, dtype=torch.float64)[label] if dense else label
        expected = math.log1p(math.exp(-odds)) + bonus
        assert loss(logits, target).item() == pytest.approx(expected, rel=1e-12)


def test_a_log_end_between_the_clamp_and_one_counts_as_the_clamp():
    logits = torch.tensor([[gap, 0.0] for gap in (0.0, 5.0, 11.4, 11.6, 13.0, 20.0)], dtype=torch.float64)
    labels = torch.zeros(6, dtype=torch.int64)
    steep, steepest = (Encouraging(log_end=end, reduction="none")(logits, labels) for end in (1 - 1e-5, 1 - 1e-6))
    torch.testing.assert_close(steepest, steep, rtol=1e-9, atol=1e-12)
