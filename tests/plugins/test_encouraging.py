import math

import pytest
import torch
import torch.nn.functional as F

from tests.plugins.rows import B, batch, mixtures, softmax
from topk_plugins.encouraging import Encouraging, Mirror

pytestmark = pytest.mark.usefixtures("seeded")

N = 5


def bonus(p, log_end):
    if p <= log_end:
        return math.log(max(1 - p, 1e-5))
    return math.log(1 - log_end) - (p - log_end) / (1 - log_end)


def encouraging(row, y, *, log_end=0.75, start=0.0, rho=1.0):
    p = softmax(row)[y]
    return -math.log(p) + rho * (bonus(max(p, start), log_end) - bonus(start, log_end))


def mirror(row, y, *, power=2, gamma=2.0, rho=1.0, link="sigmoid"):
    ps = softmax(row) if link == "softmax" else [1 / (1 + math.exp(-s)) for s in row]
    error = sum((1 - p) ** power if c == y else p**power for c, p in enumerate(ps)) / len(ps)
    reward = sum(p**gamma if c == y else (1 - p) ** gamma for c, p in enumerate(ps)) / len(ps)
    return error - rho * reward


LOSSES = [
    (Encouraging(), encouraging),
    (Encouraging(log_end=0.5), lambda row, y: encouraging(row, y, log_end=0.5)),
    (Encouraging(log_end=1), lambda row, y: encouraging(row, y, log_end=1)),
    (Encouraging(log_end=1, bonus_start=0.5), lambda row, y: encouraging(row, y, log_end=1, start=0.5)),
    (Encouraging(bonus_start=0.3, rho=0.4), lambda row, y: encouraging(row, y, start=0.3, rho=0.4)),
    (Encouraging(log_end=0.0), lambda row, y: encouraging(row, y, log_end=0.0)),
    (Mirror(), mirror),
    (Mirror(base="mae", gamma=3.0), lambda row, y: mirror(row, y, power=1, gamma=3.0)),
    (Mirror(gamma=0.5, rho=0.7), lambda row, y: mirror(row, y, gamma=0.5, rho=0.7)),
    (Mirror(link="softmax"), lambda row, y: mirror(row, y, link="softmax")),
]


def each_loss():
    return pytest.mark.parametrize(("loss", "formula"), LOSSES, ids=[str(loss).split(", red")[0] for loss, _ in LOSSES])


@each_loss()
def test_the_table_is_the_formula_for_every_label(loss, formula):
    logits, target = batch(N)
    expected = torch.tensor([[formula(row, c) for c in range(N)] for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(loss.per_class(logits), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss(logits, target), expected[torch.arange(B), target].mean(), rtol=1e-12, atol=1e-12)


@each_loss()
def test_a_mixture_of_labels_costs_the_mixture_of_losses(loss, formula):
    logits, _ = batch(N)
    q = mixtures(N)
    expected = sum(
        qc * formula(row, c) for row, qs in zip(logits.tolist(), q.tolist(), strict=True) for c, qc in enumerate(qs)
    )
    assert loss(logits, q).item() == pytest.approx(expected / B, rel=1e-12)


@each_loss()
def test_weights_and_smoothing(loss, formula):
    logits, target = batch(N)
    weight, smooth = torch.tensor([0.5, 2.0, 0.0, 1.0, 4.0]), 0.2
    loss = type(loss)(**options_of(loss), weight=weight, label_smoothing=smooth)
    total = mass = 0.0
    for row, y in zip(logits.tolist(), target.tolist(), strict=True):
        q = [smooth / N + (1 - smooth) * (c == y) for c in range(N)]
        total += sum(q[c] * weight[c].item() * formula(row, c) for c in range(N))
        mass += weight[y].item()
    assert loss(logits, target).item() == pytest.approx(total / mass, rel=1e-7)


def options_of(loss):
    names = ("log_end", "bonus_start", "rho") if isinstance(loss, Encouraging) else ("base", "gamma", "rho", "link")
    return {name: getattr(loss, name) for name in names}


@each_loss()
def test_gradients(loss, formula):
    logits, target = batch(N)
    assert torch.autograd.gradcheck(lambda s: loss(s, target), logits)
    q = mixtures(N)
    assert torch.autograd.gradcheck(lambda s: loss(s, q), logits)


@each_loss()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_widened(loss, formula, dtype):
    logits, target = batch(N, dtype=dtype, scale=20.0)
    with torch.autocast("cpu", dtype):
        value = loss(logits, target)
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.isfinite().all()
    assert value == loss(logits.float(), target)


@pytest.mark.parametrize("loss", [LOSSES[4][0], LOSSES[9][0]], ids=str)
def test_it_compiles_into_one_graph(loss):
    torch.compiler.reset()  # every loss is compiled through the same forward, which has a limit
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, target = batch(N, dtype=torch.float32)
    (expected,) = torch.autograd.grad(loss(logits, target), logits)
    (gradient,) = torch.autograd.grad(compiled(logits, target), logits)
    torch.testing.assert_close(gradient, expected)


def test_without_a_bonus_it_is_cross_entropy():
    logits, target = batch(N, scale=5.0)
    loss = Encouraging(rho=0.0)(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, target).item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected)


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


def test_the_bonus_is_continuous_where_its_tangent_starts():
    for log_end in (0.25, 0.5, 0.75, 0.9):
        end = math.log(log_end / (1 - log_end))
        logits = torch.tensor([[end - 1e-6, 0.0], [end + 1e-6, 0.0]], dtype=torch.float64, requires_grad=True)
        loss = Encouraging(log_end=log_end, reduction="none")(logits, torch.tensor([0, 0]))
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert loss[0].item() == pytest.approx(loss[1].item(), abs=1e-5)
        assert gradient[0, 0].item() == pytest.approx(gradient[1, 0].item(), abs=1e-5)


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
        rows = zip(logits.tolist(), target.tolist(), strict=True)
        expected = sum(encouraging(row, y, **options) for row, y in rows) / B
        assert loss(logits, target).item() == pytest.approx(expected, rel=1e-12)


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


def test_the_mirror_of_squared_error_is_absolute_error():
    logits, target = batch(N)
    y = F.one_hot(target, N)
    expected = (2 * (logits.sigmoid() - y).abs() - 1).mean()
    torch.testing.assert_close(Mirror()(logits, target), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (Encouraging, {"log_end": 1.5}, "log_end must be a finite number from 0 to 1"),
        (Encouraging, {"bonus_start": 1.0}, "bonus_start must be a finite number from 0 to"),
        (Encouraging, {"rho": -1}, "rho must be a finite number of at least 0"),
        (Encouraging, {"schedule": "sine"}, "schedule must be one of 'constant', 'linear', 'cosine', 'exponential'"),
        (Encouraging, {"scheduled": "rho"}, "scheduled must be one of"),
        (Encouraging, {"schedule": "linear"}, "needs total_epochs"),
        (Mirror, {"base": "ce"}, "base must be one of 'mse', 'mae'"),
        (Mirror, {"link": "probit"}, "link must be one of"),
        (Mirror, {"gamma": 0}, "gamma must be"),
    ],
)
def test_wrong_options_are_errors(factory, options, message):
    with pytest.raises(ValueError, match=message):
        factory(**options)


@pytest.mark.parametrize("dense", [False, True])
def test_without_a_tangent_the_bonus_ends_where_it_is_published_to(dense):
    """log(max(1 - p, 1e-5)): 1 - p is 2e-5 at log-odds of 10.82, and 5e-6 at 12.2."""
    loss = Encouraging(log_end=1.0, reduction="none")
    for odds, bonus in ((10.82, math.log(1 / (1 + math.exp(10.82)))), (12.2, math.log(1e-5)), (40.0, math.log(1e-5))):
        logits, label = torch.tensor([[odds, 0.0]], dtype=torch.float64), torch.tensor([0])
        target = torch.eye(2, dtype=torch.float64)[label] if dense else label
        expected = math.log1p(math.exp(-odds)) + bonus
        assert loss(logits, target).item() == pytest.approx(expected, rel=1e-12)
