"""The trainer beside a loop that is written out here: accumulation, clipping, schedules, averages of weights, mixup."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data import FastCollateMixup
from timm.data.loader import PrefetchLoader
from torch.utils.data import DataLoader, TensorDataset

from topk_registry import create_loss
from topk_registry.errors import DataError
from topk_registry.train import TrainConfig, Trainer
from topk_registry.train.data import LabelMixupCollate, TrainLoader

LR, WARMUP_LR, MIN_LR, MOMENTUM, DECAY = 0.4, 0.05, 0.01, 0.9, 0.03


def batches(rows=43, size=7):
    """Seven batches; the last has one row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(5, (rows,), generator=generator)), size)


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))


def cosine(done, whole, warmup):
    """The learning rate after a share of the schedule, both counted in epochs or in updates."""
    if done < warmup:
        return WARMUP_LR + done * (LR - WARMUP_LR) / warmup
    return MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * done / whole))


def clip(parameters, mode, limit):
    gradients = [parameter.grad for parameter in parameters]
    if mode == "norm":
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for g in gradients:
            g.mul_(min(1.0, limit / (norm + 1e-6)))
    elif mode == "value":
        for g in gradients:
            g.copy_(torch.where(g > limit, limit, torch.where(g < -limit, -limit, g)))


def plain(loss, epochs, accumulated=1, mode="", limit=0.0, rate=lambda epoch, update: LR, ema_decay=None):
    """Return the network, the average of its weights, and the mean losses of the epochs."""
    model, loader = network(), batches()
    parameters = list(model.parameters())
    average, velocity, means, update = copy.deepcopy(model), [torch.zeros_like(p) for p in parameters], [], 0
    for epoch in range(epochs):
        total, rows = 0.0, 0
        for first in range(0, len(loader), accumulated):
            group = list(loader)[first : first + accumulated]
            for p in parameters:
                p.grad = torch.zeros_like(p)
            for x, y in group:
                value = loss(model(x), y)
                (value / len(group)).backward()
                total, rows = total + value.item() * len(x), rows + len(x)
            clip(parameters, mode, limit)
            with torch.no_grad():
                for p, v in zip(parameters, velocity, strict=True):
                    g = p.grad + DECAY * p if p.ndim > 1 else p.grad
                    v.copy_(g if update == 0 else MOMENTUM * v + g)
                    p -= rate(epoch, update) * v
                update += 1
                if ema_decay is not None:
                    share = ema_decay(update)
                    for old, new in zip(average.parameters(), parameters, strict=True):
                        old.copy_(share * old + (1 - share) * new)
        means.append(total / rows)
    return model, average, means


@pytest.fixture
def trained(tmp_path):
    def fit(epochs, **settings):
        common = {
            "num_classes": 5, "device": "cpu", "output": str(tmp_path), "experiment": "run", "epochs": epochs,
            "opt": "momentum", "momentum": MOMENTUM, "weight_decay": DECAY, "lr": LR, "sched": "none", "smoothing": 0.0,
            "warmup_epochs": 0, "warmup_lr": WARMUP_LR, "min_lr": MIN_LR, "eval_metric": "top1",
        }  # fmt: skip
        rates, steps = [], []

        def on_step(run, loss):
            rates.append(run.optimizer.param_groups[0]["lr"])
            steps.append(loss.item())

        trainer = Trainer(
            TrainConfig(**{**common, **settings}), model=network(), train_loader=batches(), eval_loader=batches(),
            quiet=True, on_step=on_step,
        )  # fmt: skip
        result = trainer.fit()
        return result, rates, torch.load(tmp_path / "run" / "last.pth.tar", weights_only=False), steps

    return fit


def same(model, expected):
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("accumulated", [1, 2, 3, 7, 9])
def test_accumulation(trained, accumulated):
    """The last group may be smaller than the others, and every group has the mean of the gradients of its batches."""
    result, _, _, steps = trained(2, grad_accum_steps=accumulated)
    model, _, means = plain(F.cross_entropy, 2, accumulated)
    same(result.model, model)
    assert [row["train_loss"] for row in result.history] == pytest.approx(means, rel=1e-5)
    assert len(steps) == 14


@pytest.mark.parametrize(("mode", "limit"), [("norm", 0.2), ("norm", 50.0), ("value", 0.02)])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_clipping(trained, mode, limit, accumulated):
    """The sum of a group is clipped once, and not each of its gradients."""
    result, *_ = trained(2, clip_grad=limit, clip_mode=mode, grad_accum_steps=accumulated)
    model, *_ = plain(F.cross_entropy, 2, accumulated, mode, limit)
    same(result.model, model)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("by_updates", [False, True])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_cosine_schedule(trained, warmup, by_updates, accumulated):
    epochs, per_epoch = 5, math.ceil(7 / accumulated)
    settings = {"sched": "cosine", "warmup_epochs": warmup, "sched_on_updates": by_updates}
    result, rates, *_ = trained(epochs, grad_accum_steps=accumulated, **settings)

    def rate(epoch, update):
        if by_updates:
            return cosine(update, epochs * per_epoch, warmup * per_epoch)
        return cosine(epoch, epochs, warmup)

    model, *_ = plain(F.cross_entropy, epochs, accumulated, rate=rate)
    updates = [epoch * per_epoch + i // accumulated for epoch in range(epochs) for i in range(7)]
    assert rates == pytest.approx([rate(update // per_epoch, update) for update in updates])
    same(result.model, model)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_average_of_weights(trained, warmup, accumulated):
    """The first update copies the weights. With a warm-up, the decay grows with the number of updates."""

    def decay(update):
        if update == 1:
            return 0.0
        return min(0.75, 1 - update ** (-2 / 3)) if warmup else 0.75

    settings = {"model_ema": True, "model_ema_decay": 0.75, "model_ema_warmup": warmup}
    result, _, saved, _ = trained(2, grad_accum_steps=accumulated, **settings)
    model, average, _ = plain(F.cross_entropy, 2, accumulated, ema_decay=decay)
    same(result.model, model)
    for name, wanted in average.state_dict().items():
        torch.testing.assert_close(saved["state_dict_ema"][name], wanted, rtol=2e-5, atol=2e-6)


def test_a_schedule_that_drops(trained):
    _, rates, *_ = trained(6, sched="step", decay_epochs=2, decay_rate=0.5)
    assert rates[::7] == pytest.approx([LR * 0.5 ** (epoch // 2) for epoch in range(6)])


def test_the_loss_of_an_option_and_its_epochs(trained):
    options = {"schedule": "linear", "total_epochs": 3}
    result, *_ = trained(3, loss="encouraging", loss_opt={"schedule": "linear"})
    loss = create_loss("encouraging", **options)
    model, loader, means = network(), batches(), []
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ],
        LR, MOMENTUM,
    )  # fmt: skip
    for epoch in range(3):
        loss.set_epoch(epoch)
        values = []
        for x, y in loader:
            value = loss(model(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item() * len(x))
        means.append(sum(values) / 43)
    assert [row["train_loss"] for row in result.history] == pytest.approx(means, rel=1e-5)
    same(result.model, model)


N, SMOOTHING = 9, 0.2


@pytest.mark.parametrize("mode", ["batch", "pair", "elem", "half"])
@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_mixtures_are_the_targets_of_timm(mode, alphas):
    options = {"mixup_alpha": alphas[0], "cutmix_alpha": alphas[1], "prob": 0.9, "switch_prob": 0.5, "mode": mode}
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (8, 3, 6, 6), dtype=np.uint8)
    labels = [3, 0, 8, 3, 1, 7, 8, 8]
    for seed in range(4):
        np.random.seed(seed)
        timms = FastCollateMixup(**options, label_smoothing=SMOOTHING, num_classes=N)
        wanted, table = timms(list(zip(images.copy(), labels, strict=True)))  # timm writes into the images
        np.random.seed(seed)
        found, mixture = LabelMixupCollate(**options, smoothing=SMOOTHING)(
            list(zip(images.copy(), labels, strict=True))
        )
        assert torch.equal(found, wanted)
        assert len(mixture.labels) == (4 if mode == "half" else 8)
        # timm's smoothing gives a label 1 - share + share / n, and every other class share / n
        torch.testing.assert_close(mixture.dense(N, torch.float64), table.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(table.sum(1), torch.ones(len(table)))


def test_mixup_ends_at_its_epoch():
    samples = [(np.full((1, 2, 2), 30 * i, dtype=np.uint8), i) for i in range(8)]
    mixer = LabelMixupCollate(mixup_alpha=1.0, cutmix_alpha=0.0, prob=1.0, switch_prob=0.5, mode="batch", smoothing=0.0)
    device = torch.device("cpu")
    batches = PrefetchLoader(
        DataLoader(samples, 8, collate_fn=mixer), mean=(0.0,), std=(1 / 255,), channels=1, device=device
    )
    loader, mixes = TrainLoader(batches, device, mixup_off_epoch=2), []
    for epoch in range(4):
        loader.set_epoch(epoch)
        ((images, target),) = list(loader)
        mixes.append(not torch.equal(target.dense(8), torch.eye(8)))
        assert mixes[-1] == (not torch.allclose(images[:, 0, 0, 0], 30.0 * torch.arange(8)))
    assert mixes == [True, True, False, False]


@pytest.mark.parametrize(
    ("batches", "message"), [(iter([1]), "no length: pass --train-num-samples"), ([], "less than one batch")]
)
def test_a_loader_needs_a_length_and_a_batch(batches, message):
    with pytest.raises(DataError, match=message):
        TrainLoader(batches, torch.device("cpu"))
