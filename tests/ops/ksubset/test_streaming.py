"""States of disjoint classes, merged in any order, are the whole row: in extended precision, and over processes."""

import functools
import itertools

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F

from tests import oracles
from tests.ops.ksubset.scores import KINDS, TAUS, scores
from tests.workers import processes
from topk_registry.functional import topk_label_margins, topk_margins
from topk_registry.ops.ksubset.torch import rows as torch_path
from topk_registry.ops.ksubset.torch import state as streaming
from topk_registry.ops.ksubset.torch.labels import label_margins
from topk_registry.ops.ksubset.torch.rows import finish
from topk_registry.ops.ksubset.torch.state import gradient, merge, summarise, top_margins

INF = float("inf")


def chunks(n, size):
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def in_a_row(states, theta):
    first, *rest = states
    for state in rest:
        first = merge(first, state, theta)
    return first


def in_pairs(states, theta):
    """A tree, as ranks would merge, and the later classes first."""
    states = states[::-1]
    while len(states) > 1:
        merged = [merge(a, b, theta) for a, b in zip(states[0::2], states[1::2], strict=False)]
        states = merged + states[2 * len(merged) :]
    return states[0]


@pytest.fixture(params=["torch", "numba"])
def kernels(request):
    if request.param == "torch":
        return streaming
    pytest.importorskip("numba")
    from topk_registry.ops.ksubset.numba import chunks

    return chunks


def streamed(kernels, s, label, k, theta, size, order=in_a_row):
    """The label's margins and their gradient, as label_margins gives them."""
    (found,) = streamed_in_orders(kernels, s, label, k, theta, size, (order,))
    return found


def streamed_in_orders(kernels, s, label, k, theta, size, orders):
    """For each order of merging the same states, which take the most time."""
    others, spans = s.scatter(1, label[:, None], -INF), chunks(s.shape[1], size)
    states = [kernels.summarise(others[:, c].contiguous(), k, theta, c.start) for c in spans]
    for order in orders:
        f = finish(order(states, theta), theta)
        margin = s.gather(1, label[:, None])[:, 0].double() - f.a.double() + f.shift
        one = torch.ones_like(f.a)
        gradients = [kernels.gradient(s[:, c].contiguous(), label, f, theta, one, c.start) for c in spans]
        yield margin, torch.cat(gradients, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "sizes"),
    [
        (3, 1, (1,)),
        (20, 10, (1, 3, 19)),
        (64, 5, (1, 4, 11, 40)),
        (64, 25, (7, 30)),
        (120, 50, (40,)),
        (1000, 1, (300,)),
        (1000, 5, (60, 333)),
    ],
)
def test_any_chunks_in_any_order_are_the_row(kernels, kind, n, k, sizes):
    s, label = row_and_labels(kind, n)
    losses, gradients = oracles.smooth_svm(s.tolist(), label.tolist(), k, TAUS)
    exact = {tau: (torch.from_numpy(losses[i]), torch.from_numpy(gradients[i])) for i, tau in enumerate(TAUS)}
    for tau, size, margins, slopes in streamed_kinds(kernels, n, k, sizes):
        loss, gradient = exact[tau]
        violation = 1.0 - margins[KINDS.index(kind)] / k
        found = F.softplus(violation, beta=1 / tau, threshold=40.0)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-30)
        g = slopes[KINDS.index(kind)] * -torch.sigmoid(violation / tau)[:, None] / k
        assert ((g - gradient).abs() <= 2e-6 * gradient.abs().amax(1, keepdim=True) + 1e-30).all(), (tau, size)


def row_and_labels(kind, n):
    s = scores(kind, n, rows=1)[0]
    return s, torch.tensor([0, n // 2, int(s.argmin())])


@functools.cache  # rows of all kinds take as long as those of one
def streamed_kinds(kernels, n, k, sizes):
    """Margins [kinds, labels] and gradients [kinds, labels, n] at each temperature and size, in both orders."""
    rows, labels = zip(*(row_and_labels(kind, n) for kind in KINDS), strict=True)
    s, label = torch.stack(rows).repeat_interleave(3, 0), torch.cat(labels)
    return [
        (tau, size, margins.view(-1, 3), gradients.view(-1, 3, n))
        for tau, size in itertools.product(TAUS, sizes)
        for margins, gradients in streamed_in_orders(kernels, s, label, k, k * tau, size, (in_a_row, in_pairs))
    ]


@pytest.mark.parametrize("theta", [1e-36, 1e-45])
@pytest.mark.parametrize("kind", KINDS)
def test_temperature_to_zero_is_the_hard_margin(kernels, kind, theta):
    s, label, theta = scores(kind, 60), torch.tensor([0, 30]), max(theta, 4 * torch.finfo(torch.float32).tiny)
    kth = s.scatter(1, label[:, None], -INF).topk(5).values[:, -1]
    for size in (1, 7, 40):
        margin, g = streamed(kernels, s, label, 5, theta, size)
        torch.testing.assert_close(margin.float(), s.gather(1, label[:, None])[:, 0] - kth, rtol=1e-6, atol=1e-30)
        # one is pulled up, and those that tie for the k-th place pushed down
        at_kth = (s == kth[:, None]).scatter(1, label[:, None], False)
        assert torch.equal(g.scatter(1, label[:, None], -1.0) < 0, at_kth.scatter(1, label[:, None], True))
        torch.testing.assert_close(g.sum(1), torch.zeros(2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(400, 65), (1100, 500), (2100, 1001)])
def test_large_k(n, k):
    s = scores("gaussian", n).double()
    label = torch.tensor([0, n - 1])
    found = streamed(streaming, s, label, k, 3.0 * k, 150)
    for value, expected in zip(found, label_margins(s, label, k, 3.0 * k), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_hundreds_of_chunks_lose_no_digits(kernels):
    s = scores("gaussian", 40_000, rows=4)
    state = in_a_row([kernels.summarise(s[:, c].contiguous(), 5, 1.0, c.start) for c in chunks(40_000, 80)], 1.0)
    a, outside = torch_path.reference(state.top, 5), state.classes
    w = torch.exp(s.double() - a[:, None].double()).scatter_(1, outside, 0.0)
    exact = torch.stack([w.pow(j).sum(1) for j in range(1, 6)])
    # the odds of single precision, and what the bound on small odds adds: 2^-50 each
    torch.testing.assert_close(state.P, exact, rtol=4e-7, atol=40_000 * 2.0**-50)


@pytest.mark.parametrize("order", [in_a_row, in_pairs])
def test_a_label_in_any_chunk_and_ties_across_them(kernels, order):
    s = torch.tensor([[2.0, 1, 1, 0, 1, 1, 2, 0, 1, 2, 1, 0]]).expand(12, 12).contiguous()
    label = torch.arange(12)
    margin, g = streamed(kernels, s, label, 3, 0.7, 5, order)
    expected = label_margins(s.double(), label, 3, 0.7)
    torch.testing.assert_close(margin, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(g.double(), expected[1], rtol=0, atol=1e-6)


def test_chunks_of_excluded_classes_and_of_others_far_below(kernels):
    s = torch.full((2, 60), -INF)
    s[:, 20:24] = torch.tensor([3.0, 1.0, -2.0, 0.5])
    s[:, 40:] = scores("gaussian", 20) - 1e4  # their odds, relative to the k-th best of all, are nothing
    s[1, 59] = 5.0
    label = torch.tensor([20, 41])
    expected = label_margins(s.double(), label, 3, 0.5)
    for size in (1, 10, 20, 25):
        margin, g = streamed(kernels, s, label, 3, 0.5, size)
        torch.testing.assert_close(margin, expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(g.double(), expected[1], rtol=0, atol=1e-6)


def test_a_nan_row_is_nan_alone(kernels):
    s = scores("gaussian", 100, rows=3)
    label = torch.tensor([1, 50, 99])
    clean = streamed(kernels, s, label, 4, 1.0, 30)[0]
    s[1, 10] = torch.nan
    margin, g = streamed(kernels, s, label, 4, 1.0, 30)
    assert margin[1].isnan()
    assert torch.equal(margin[[0, 2]], clean[[0, 2]])
    assert g[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("n", "k", "theta"), [(40, 5, 1.0), (40, 5, 1e-3), (300, 1, 0.2), (300, 40, 3.0)])
def test_margins_of_the_top_classes(n, k, theta):
    s = scores("gaussian", n, rows=3)
    state = in_pairs([summarise(s[:, c], k + 1, theta, c.start) for c in chunks(n, 70)], theta)
    expected = topk_margins(s.double(), k, temperature=theta).gather(1, state.classes[:, :k])
    torch.testing.assert_close(top_margins(state, theta), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(state.top[:, :k], s.topk(k).values)


def shard(rank, store, results):
    """Half of the classes: O(k) numbers a sample are exchanged, and each process has the gradient to its own scores."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    s, label, k, theta = sharded_scores()
    first = 500 * rank
    mine = s[:, first : first + 500]
    others = s.scatter(1, label[:, None], -INF)[:, first : first + 500]
    local, label_score = summarise(others, k, theta, first), torch.full((len(s),), -INF)
    here = (label >= first) & (label < first + 500)
    label_score[here] = mine[here, label[here] - first]
    dist.all_reduce(label_score, dist.ReduceOp.MAX)
    gathered = [[torch.empty_like(part) for _ in range(2)] for part in local]
    for everyones, part in zip(gathered, local, strict=True):
        dist.all_gather(everyones, part)
    states = [type(local)(*parts) for parts in zip(*gathered, strict=True)]
    f = finish(in_a_row(states, theta), theta)
    results[rank] = (
        label_score.double() - f.a.double() + f.shift,
        gradient(mine, label, f, theta, torch.ones(6), first),
    )
    dist.destroy_process_group()


def sharded_scores():
    return scores("gaussian", 1000, rows=6), torch.tensor([3, 499, 500, 700, 998, 999]), 5, 0.4


@pytest.mark.slow
def test_classes_sharded_over_processes(tmp_path):
    context = processes()
    with context.Manager() as manager:
        results = manager.dict()
        arguments = (str(tmp_path / "store"), results)
        mp.start_processes(shard, arguments, nprocs=2, start_method=context.get_start_method())
        (margin, left), (again, right) = results[0], results[1]
    s, label, k, theta = sharded_scores()
    x = s.double().requires_grad_()
    expected = topk_label_margins(x, label, k, temperature=theta)
    assert torch.equal(margin, again)
    torch.testing.assert_close(margin, expected.detach(), rtol=1e-6, atol=1e-6)
    expected.sum().backward()
    torch.testing.assert_close(torch.cat((left, right), 1).double(), x.grad, rtol=0, atol=1e-6)
