"""Training for small prediction sets: the loss by its definition, row by row, and what a user may get wrong."""

import math
from fractions import Fraction

import pytest
import torch

from topk_registry import create_loss
from topk_registry.errors import TrainError
from topk_registry.train import TrainConfig, Trainer

N = 7


def batch(rows: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, N, generator=g, dtype=torch.float64), torch.randint(N, (rows,), generator=g)


def by_rows(s, label, *, alpha=0.1, tau=1.0, kappa=1.0, size_weight=0.1, cross_entropy_weight=0.0, calibration=0.5):
    """The loss in plain Python, and the row at the quantile."""
    first = int(calibration * len(s))
    log_p = [[x - math.log(sum(math.exp(y) for y in row)) for x in row] for row in s.tolist()]
    own = sorted((log_p[i][label[i]], i) for i in range(first))
    quantile, row = own[max(1, math.floor(alpha * (first + 1))) - 1]
    cost = 0.0
    for i in range(first, len(s)):
        chosen = [1 / (1 + math.exp(-(x - quantile) / tau)) for x in log_p[i]]
        cost += 1 - chosen[label[i]] + size_weight * max(0.0, sum(chosen) - kappa)
    value = math.log(cost / (len(s) - first) + 1e-8)
    entropy = -sum(log_p[i][label[i]] for i in range(len(s))) / len(s)
    return value + cross_entropy_weight * entropy, row


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.3, "tau": 0.05, "kappa": 0.0, "size_weight": 2.0},
        {"calibration": 0.25, "cross_entropy_weight": 0.5, "kappa": 2.5},
        {"alpha": 0.001},  # fewer rows than that asks for: the lowest score
    ],
)
def test_is_the_definition(options):
    s, label = batch()
    value = create_loss("conformal_training", **options)(s, label)
    assert value.item() == pytest.approx(by_rows(s, label, **options)[0], rel=1e-12)


def test_the_quantile_is_that_of_split_conformal_prediction():
    """A new score is below it in at most a share alpha of all orders, and in more than alpha - 1 / (m + 1)."""
    loss = create_loss("conformal_training", alpha=0.3)
    alpha = 0.3
    m = 11
    scores = torch.arange(m + 1, dtype=torch.float64)
    below = 0
    for left_out in range(m + 1):
        others = torch.cat((scores[:left_out], scores[left_out + 1 :]))
        below += int(scores[left_out] < loss.quantile(others, torch.ones(m, dtype=torch.bool)))
    assert alpha - 1 / (m + 1) < below / (m + 1) <= alpha


@pytest.mark.parametrize("neighbours", [1, 4, 999])
def test_the_gradient_of_the_quantile_is_the_mean_of_the_nearest_rows(neighbours):
    loss = create_loss("conformal_training", neighbours=neighbours)
    own = torch.tensor([-3.0, -1.0, -1.2, -0.1, -0.9, -7.0], dtype=torch.float64, requires_grad=True)
    counted = torch.tensor([True, True, True, True, True, False])
    value = loss.quantile(own, counted)
    assert value.item() == -3.0
    (gradient,) = torch.autograd.grad(value, own)
    nearest = {1: [0], 4: [0, 1, 2, 4], 999: [0, 1, 2, 3, 4]}[neighbours]
    wanted = torch.zeros(6, dtype=torch.float64)
    wanted[nearest] = 1 / len(nearest)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)


def test_more_neighbours_have_less_variance():
    """The gradient of the quantile to a shift of all scores, over many batches: its mean stays, its noise falls."""
    noise = {}
    for neighbours in (1, 10):
        loss = create_loss("conformal_training", neighbours=neighbours, alpha=0.2)
        found = []
        for seed in range(200):
            g = torch.Generator().manual_seed(seed)
            rates = torch.rand(100, generator=g, dtype=torch.float64)
            theta = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
            own = torch.randn(100, generator=g, dtype=torch.float64) + theta * rates
            (slope,) = torch.autograd.grad(loss.quantile(own, torch.ones(100, dtype=torch.bool)), theta)
            found.append(slope)
        noise[neighbours] = torch.stack(found)
    # rates are uniform and independent of the scores: the slope of the quantile is 1/2
    for neighbours, slopes in noise.items():
        error = slopes.std() / math.sqrt(len(slopes))
        assert abs(slopes.mean() - 0.5) < 4 * error, neighbours
    ratio = noise[1].var() / noise[10].var()
    assert 5 < ratio < 20  # ten rows, of independent rates


def test_ignored_rows_neither_calibrate_nor_count():
    s, label = batch()
    label[[1, 3, 25]] = -100
    kept = label != -100
    share = int(kept[:20].sum()) / int(kept.sum())
    value = create_loss("conformal_training")(s, label)
    wanted, _ = by_rows(s[kept], label[kept], calibration=share)
    assert value.item() == pytest.approx(wanted, rel=1e-12)


def test_it_makes_sets_smaller():
    """A linear model that outliers mislead: its sets, of the same coverage, shrink from what cross-entropy leaves."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(N, 12, generator=g)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        label = torch.randint(N, (count,), generator=g)
        x = centres[label] + 0.5 * torch.randn(count, 12, generator=g)
        outlier = torch.rand(count, 1, generator=g) < 0.15
        return torch.where(outlier, 6 * torch.randn(count, 12, generator=g), x), label

    def mean_size(model: torch.nn.Module) -> float:
        (x, y), (new, _) = draw(4000), draw(4000)
        with torch.no_grad():
            own = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
            threshold = own.kthvalue(int(0.1 * (len(y) + 1))).values
            return (model(new).log_softmax(-1) >= threshold).sum(-1).double().mean().item()

    model = torch.nn.Linear(12, N)
    torch.nn.init.zeros_(model.weight)
    sizes = []
    for loss, lr in ((torch.nn.CrossEntropyLoss(), 0.05), (create_loss("conformal_training_low_variance"), 0.02)):
        optimizer = torch.optim.Adam(model.parameters(), lr)
        for _ in range(300):
            x, y = draw(256)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        sizes.append(mean_size(model))
    assert sizes[1] < sizes[0] - 0.5, sizes


CONFIG = {
    "loss": "conformal_training", "dataset": "topk/hierarchy",
    "dataset_opt": {"size": 96, "superclasses": 2, "fine": 2},
    "model": "topk_convnet", "model_kwargs": {"width": 2}, "batch_size": 32, "workers": 0, "no_aug": True,
    "epochs": 1, "smoothing": 0.0, "device": "cpu",
}  # fmt: skip


def test_the_trainer_refuses_mixup(tmp_path):
    with pytest.raises(TrainError, match="conformal_training"):
        Trainer(TrainConfig(**{**CONFIG, "mixup": 0.2, "output": str(tmp_path)}), quiet=True).fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alpha", [0.21, 0.39, 0.42, 0.52, 0.99999999, 1 - 1e-13, 1e-13])
def test_the_rank_is_that_of_alpha_in_decimals(alpha):
    """The rank is in whole numbers: 0.21 of 300 are 63. It never lies outside of the rows."""
    loss = create_loss("conformal_training", alpha=alpha)
    for m in (1, 4, 149, 224, 299):
        rank = max(1, math.floor(Fraction(repr(alpha)) * (m + 1)))
        assert loss.quantile(torch.arange(1.0, m + 1), torch.ones(m, dtype=torch.bool)).item() == rank
