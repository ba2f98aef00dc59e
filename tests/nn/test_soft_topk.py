"""The soft top-k of a linear layer, in chunks and over ranks: loss and gradients of all logits at once."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests import ranks
from topk_registry import LabelMixture, create_loss
from topk_registry.functional import linear_soft_topk

D, N, B = 6, 37, 5
DOUBLE = torch.float64
OPTIONS = (
    {"k": 3}, {"k": 20.5, "tau": 0.3}, {"k": 36.5, "reduction": "sum"}, {"k": 0.4, "reduction": "none"},
    {"k": 5, "tau": 1e-3}, {"k": 5, "weighted": True},
)  # fmt: skip
KINDS = ("smoothed", "distribution", "distribution smoothed", "half precision", "mixture", "mixture smoothed", "mixup")


def problem(n: int = N, dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(n)
    x, W, bias = (torch.randn(shape, generator=g, dtype=DOUBLE).to(dtype) for shape in ((B, D), (n, D), (n,)))
    target = torch.randint(n, (B,), generator=g)
    target[1] = -100
    return x, W, bias, target


def soft_target(kind: str) -> tuple[torch.Tensor | LabelMixture, dict[str, float]]:
    """A target of a kind with masses of 0 among it, and the smoothing on top of it."""
    label = problem()[3]
    labels, q = label.clamp(min=0), torch.rand(B, N, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    q = torch.where(q < 0.5, 0.0, q) / q.sum(1, keepdim=True)
    mixture = LabelMixture.mixed(labels, labels.flip(0), 0.7)
    kinds = {
        "smoothed": (label, 0.3),
        "distribution": (q, 0.0),
        "distribution smoothed": (q, 0.2),
        "half precision": (q.half(), 0.2),
        "mixture": (mixture, 0.0),
        "mixture smoothed": (mixture, 0.2),
        "mixup": (LabelMixture.mixed(labels, labels.flip(0), 0.3, smoothing=0.1), 0.0),
    }
    target, smoothing = kinds[kind]
    return target, {"label_smoothing": smoothing}


def soft_cases():
    for kind in KINDS:
        target, smoothing = soft_target(kind)
        for more in ({"k": 3}, {"k": 20.5, "tau": 0.3, "weighted": True, "reduction": "none"}):
            yield target, {**smoothing, **more}


def by_logits(x, W, bias, target, weighted: bool = False, **options):
    weight = torch.linspace(0, 2, len(W), dtype=DOUBLE) if weighted else None
    leaves = [t.detach().clone().requires_grad_() for t in (x, W, bias)]
    dense = target.dense(len(W), DOUBLE) if isinstance(target, LabelMixture) else target
    loss = create_loss("soft_topk", weight=weight, **options)(F.linear(*leaves), dense)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaves)


def by_layer(x, W, bias, target, weighted: bool = False, **options):
    weight = torch.linspace(0, 2, len(W), dtype=DOUBLE) if weighted else None
    leaves = [t.detach().clone().requires_grad_() for t in (x, W, bias)]
    loss = linear_soft_topk(*leaves, target, class_weight=weight, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaves)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [None, 1, 10])
def test_chunks_are_all_logits(options, chunk):
    tight = 1e-11 if options.get("tau", 1) >= 0.1 else 1e-8  # across a gap of 1000s, b has the rounding of those
    found, wanted = by_layer(*problem(), chunk=chunk, **options), by_logits(*problem(), **options)
    torch.testing.assert_close(found, wanted, rtol=tight, atol=tight)


@pytest.mark.parametrize("kind", KINDS)
def test_soft_targets_are_those_of_all_logits(kind):
    x, W, bias, _ = problem()
    target, smoothing = soft_target(kind)
    for more in ({"k": 3}, {"k": 20.5, "tau": 0.3}, {"k": 0.4, "weighted": True}, {"k": 36.5, "reduction": "none"}):
        wanted = by_logits(x, W, bias, target, **smoothing, **more)
        for chunk in (None, 10):
            found = by_layer(x, W, bias, target, chunk=chunk, **smoothing, **more)
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_a_class_without_mass_may_have_no_score():
    x, W, bias, _ = problem()
    target, _ = soft_target("distribution")
    bias[4], target[:, 4] = -torch.inf, 0.0
    found = by_layer(x, W, bias, target, k=3, chunk=10)
    torch.testing.assert_close(found, by_logits(x, W, bias, target, k=3), rtol=1e-11, atol=1e-11)
    assert found[0].isfinite()


def test_ignored_rows_may_hold_anything():
    x, W, bias, target = problem()
    for smoothing in (0.0, 0.2):
        wanted = by_layer(x, W, bias, target, k=3, label_smoothing=smoothing)
        spoiled = x.clone()
        spoiled[1] = torch.nan
        torch.testing.assert_close(by_layer(spoiled, W, bias, target, k=3, label_smoothing=smoothing), wanted)


def test_of_linear_is_the_layer():
    x, W, bias, target = problem()
    options = {"k": 2.5, "tau": 0.3, "label_smoothing": 0.1, "weight": torch.linspace(0, 2, N, dtype=DOUBLE)}
    loss = create_loss("soft_topk", **options)
    torch.testing.assert_close(loss.of_linear(x, W, bias, target, chunk=5), loss(F.linear(x, W, bias), target))
    with pytest.raises(ValueError, match=r"sample must be None, got 0.5"):
        loss.of_linear(x, W, bias, target, sample=0.5)


def test_single_precision():
    found = by_layer(*problem(500, torch.float32), k=50, chunk=100)
    x, W, bias, target = problem(500, torch.float32)
    wanted = by_logits(x.double(), W.double(), bias.double(), target, k=50)
    for one, exact in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6)


def test_clusters_of_scores():
    """Every step is taken from somewhere, with gaps of thousands."""
    g = torch.Generator().manual_seed(0)
    centre = torch.randn(200, 4, generator=g, dtype=DOUBLE) * 10 ** (4 * torch.rand(200, 1, generator=g) - 1)
    s = centre.gather(1, torch.randint(4, (200, 30), generator=g)) + 0.1 * torch.randn(200, 30, generator=g)
    label = torch.randint(30, (200,), generator=g)
    eye = torch.eye(30, dtype=DOUBLE)
    for k in (1, 7, 12.5, 29):
        wanted = create_loss("soft_topk", k=k, reduction="none")(s, label)
        torch.testing.assert_close(
            linear_soft_topk(s, eye, None, label, k=k, reduction="none", chunk=7), wanted, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(("n", "k"), [(300, 150), (2000, 999.5)])
def test_hundreds_of_scores_far_apart(n, k):
    """A step of Newton's crosses one of them, and a row that is done waits for the others."""
    s = 1e4 * torch.randn(4, n, generator=torch.Generator().manual_seed(n), dtype=DOUBLE)
    s[0] *= 1e-4
    s[1, 0] = -1e9
    label, eye = torch.tensor([5, 6, 7, n - 1]), torch.eye(n, dtype=DOUBLE)
    leaves = [s.clone().requires_grad_() for _ in range(2)]
    found = linear_soft_topk(leaves[0], eye, None, label, k=k, reduction="none", chunk=n // 3)
    wanted = create_loss("soft_topk", k=k, reduction="none")(leaves[1], label)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-6)
    gradients = (torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in zip((found, wanted), leaves, strict=True))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_bad_arguments():
    x, W, bias, target = problem()
    with pytest.raises(ValueError, match="k must be below the number of classes: k = 37, weight has 37"):
        linear_soft_topk(x, W, bias, target, k=37)
    with pytest.raises(ValueError, match="tau must be a finite number above 0, got 0"):
        linear_soft_topk(x, W, bias, target, tau=0)
    with pytest.raises(ValueError, match="target must be class indices"):
        linear_soft_topk(x, W, bias, torch.rand(B, N + 1))
    with pytest.raises(ValueError, match=r"label_smoothing must be a finite number from 0 to 1, got 2"):
        linear_soft_topk(x, W, bias, target, label_smoothing=2)
    with pytest.raises(ValueError, match="weight has 37 rows, num_classes is 38"):
        linear_soft_topk(x, W, bias, target, num_classes=38)
    with pytest.raises(ValueError, match=r"class_weight must be one factor a class \[37\], got \[3\]"):
        linear_soft_topk(x, W, bias, target, class_weight=torch.ones(3))


def rows_of(target: torch.Tensor | LabelMixture, mine: slice) -> torch.Tensor | LabelMixture:
    if isinstance(target, LabelMixture):
        return LabelMixture(*(None if part is None else part[mine] for part in target))
    return target[mine]


def over_ranks():
    world, rank = dist.get_world_size(), dist.get_rank()
    x, W, bias, label = problem()
    most = -(-N // world)
    rows = [3, 0, 2][:world] if world == 3 else [3, 2]
    for target, options in (*((label, options) for options in OPTIONS), *soft_cases()):
        weighted = torch.linspace(0, 2, N, dtype=DOUBLE) if options.get("weighted") else None
        given = {name: value for name, value in options.items() if name != "weighted"}
        wanted, exact = by_logits(x, W, bias, target, **options)
        tight = 1e-11 if options.get("tau", 1) >= 0.1 else 1e-8
        for replicated, averaged in ((False, False), (False, True), (True, True)):
            mine = slice(None) if replicated else slice(sum(rows[:rank]), sum(rows[: rank + 1]))
            own = slice(rank * most, (rank + 1) * most)
            leaves = [t.detach().clone().requires_grad_() for t in (x[mine], W[own], bias[own])]
            loss = linear_soft_topk(
                *leaves, rows_of(target, mine), class_weight=weighted, chunk=4, process_group=dist.group.WORLD,
                num_classes=None if replicated else N, replicated=replicated, averaged=averaged, **given,
            )  # fmt: skip
            found = torch.autograd.grad(loss.sum(), leaves)
            rows_wanted = wanted[mine] if given.get("reduction") == "none" else wanted
            torch.testing.assert_close(loss.detach(), rows_wanted, rtol=tight, atol=tight)
            of_features = exact[0][mine] * (world if averaged and not replicated else 1)
            for one, whole in zip(found, (of_features, exact[1][own], exact[2][own]), strict=True):
                torch.testing.assert_close(one, whole, rtol=tight, atol=tight)
    with pytest.raises(
        ValueError, match="tau must be a finite number above 0"
    ):  # one rank's bad option is an error on all
        linear_soft_topk(x, W[:1], bias[:1], label, process_group=dist.group.WORLD, tau=0.0 if rank else 1.0)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    spread = distribute_tensor(W, init_device_mesh("cpu", (world,)))
    with pytest.raises(ValueError, match="weight must be a plain tensor with the rows of this rank's classes, got a D"):
        linear_soft_topk(x, spread, None, label)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks(world, tmp_path):
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    ranks.expect_none(ranks.run(world, {"over_ranks": over_ranks}, tmp_path)["over_ranks"])
