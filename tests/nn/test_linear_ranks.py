"""Classes on several ranks give the loss, the gradients and the predictions of one process, in double precision."""

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from topk_registry import LinearSmoothTopK
from topk_registry.functional import linear_smooth_topk
from topk_registry.nn.linear import linear_topk
from topk_registry.ops.ksubset.chunks import classes_per_rank

D = 6
DOUBLE = torch.float64
CHECKS = ranks.Checks()
ROWS = {2: [3, 2], 4: [3, 2, 0, 4]}  # of each rank: not the same number, and none


def whole(n, B):
    """A layer and a batch, the same in every process."""
    generator = torch.Generator().manual_seed(n)
    tensors = [torch.randn(shape, dtype=DOUBLE, generator=generator) for shape in ((B, D), (n, D), (n,))]
    target = torch.randint(n, (B,), generator=generator)
    target[1] = -100
    return *tensors, target


def own(t, sizes):
    return t.split(sizes)[dist.get_rank()].contiguous()


def compare(n, k, **options):
    sizes = ROWS[dist.get_world_size()]
    *tensors, target = whole(n, sum(sizes))
    split = (sizes, *2 * [classes_per_rank(n, len(sizes))])
    for reduction in ("mean", "sum", "none"):
        everything = {"k": k, "tau": 0.4, "reduction": reduction, "chunk": 5, **options}
        leaves = [t.clone().requires_grad_() for t in tensors]
        expected = linear_smooth_topk(*leaves, target, **everything)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        mine = [own(t, part).requires_grad_() for t, part in zip(tensors, split, strict=True)]
        found = linear_smooth_topk(*mine, own(target, sizes), process_group=dist.group.WORLD, **everything)
        torch.testing.assert_close(found, own(expected, sizes) if reduction == "none" else expected)
        gradients = torch.autograd.grad(found.square().sum(), mine)
        factors = (len(sizes), 1, 1)
        for g, right, part, factor in zip(gradients, wanted, split, factors, strict=True):
            torch.testing.assert_close(g, factor * own(right, part), rtol=1e-10, atol=1e-11)


@CHECKS.add
def losses_and_gradients():
    compare(23, 3)


@CHECKS.add
def options_of_classes():
    alpha, weight = torch.linspace(0, 2, 23, dtype=DOUBLE), torch.linspace(0.5, 2, 23, dtype=DOUBLE)
    compare(23, 3, alpha=alpha, class_weight=weight)


@CHECKS.add
def ranks_with_fewer_classes_than_the_top_group_and_none():
    compare(9, 4)  # 3, 3, 3, 0 on four ranks


@CHECKS.add
def single_precision_and_half():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        sizes, n = ROWS[dist.get_world_size()], 50
        *tensors, target = whole(n, sum(sizes))
        tensors = [t.to(dtype) for t in tensors]
        expected = linear_smooth_topk(*(t.double() for t in tensors), target, tau=0.3)
        split = (sizes, *2 * [classes_per_rank(n, len(sizes))])
        mine = [own(t, part).requires_grad_() for t, part in zip(tensors, split, strict=True)]
        found = linear_smooth_topk(*mine, own(target, sizes), tau=0.3, process_group=dist.group.WORLD)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        found.backward()
        assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in mine)


@CHECKS.add
def predictions():
    for n, k in ((40, 3), (9, 4)):
        sizes = ROWS[dist.get_world_size()]
        features, weight, bias, _ = whole(n, sum(sizes))
        head = LinearSmoothTopK(D, n, k=k, tau=0.3, process_group=dist.group.WORLD, dtype=DOUBLE, chunk=4)
        classes = classes_per_rank(n, len(sizes))
        head.load_state_dict({"weight": own(weight, classes), "bias": own(bias, classes)})
        expected = linear_topk(features, weight, bias, k, temperature=0.3 * k)
        for found, wanted in zip(head.topk(own(features, sizes)), expected, strict=True):
            torch.testing.assert_close(found, own(wanted, sizes), rtol=1e-10, atol=1e-12)


@CHECKS.add
def bad_input_on_one_rank_is_an_error_on_all():
    n = 23
    sizes = ROWS[dist.get_world_size()]
    rank = dist.get_rank()
    features, weight, bias, target = whole(n, sum(sizes))
    classes = classes_per_rank(n, len(sizes))
    mine = {"features": own(features, sizes), "weight": own(weight, classes), "bias": own(bias, classes),
            "target": own(target, sizes), "process_group": dist.group.WORLD}  # fmt: skip
    for wrong, word in (
        ({"tau": 0.0 if rank == 0 else 0.1}, "tau"),
        ({"k": 3 + (rank == 1)}, "k"),
        ({"weight": mine["weight"][: 4 + rank], "bias": None}, "divided"),
        ({"label_smoothing": 0.1}, "class indices"),
        ({"k": 12}, "half"),
        ({"reduction": "none" if rank == 0 else "mean"}, "reduction"),
        ({"alpha": 1.0 + rank}, "alpha"),
        ({"target": mine["target"][: 3 - (rank == 0)]}, "class indices"),
        ({"target": mine["target"].double() if rank == 0 else mine["target"]}, "class indices"),
        ({"target": mine["target"] + 100 * (rank == 0)}, "target"),
    ):
        with pytest.raises(ValueError, match=word):
            linear_smooth_topk(**{**mine, **wrong})


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def errors(request, tmp_path_factory):
    return ranks.run(request.param, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(errors, name):
    ranks.expect_none(errors[name])


@pytest.mark.parametrize(("n", "ranks", "expected"), [(9, 4, [3, 3, 3, 0]), (8, 3, [3, 3, 2]), (1, 2, [1, 0])])
def test_classes_are_divided_as_dtensor_does(n, ranks, expected):
    assert classes_per_rank(n, ranks) == expected
    assert [len(part) for part in torch.zeros(n).chunk(ranks)] == [size for size in expected if size]
