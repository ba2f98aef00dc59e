"""Classes on several ranks give the loss, the gradients and the predictions of one process, in double precision."""

import functools
import os
import shutil
import tempfile
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests import ranks
from topk_registry import LabelMixture, LinearSmoothTopK, create_loss
from topk_registry.functional import linear_smooth_topk
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.ksubset.chunked.api import linear_topk
from topk_registry.ops.ksubset.chunked.parallel import layout

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

D = 6
DOUBLE = torch.float64
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def whole(n, B):
    """A layer and a batch, the same in every process."""
    generator = torch.Generator().manual_seed(n)
    shapes = ((B, D), (n, D), (n,))
    features, weight, bias = (torch.randn(shape, dtype=DOUBLE, generator=generator) for shape in shapes)
    target = torch.randint(n, (B,), generator=generator)
    target[1] = -100
    q = torch.randn(B, n, dtype=DOUBLE, generator=generator).softmax(1)
    return features, weight, bias, target, q


def own(t, sizes, dim=0):
    return t.split(sizes, dim)[dist.get_rank()].contiguous()


def batches(world):
    """Rows of each rank: not the same number, and none on the last but one."""
    return {1: [5], 2: [3, 2], 3: [2, 0, 3], 4: [3, 2, 0, 4]}[world]


def close(found, wanted, what, factor=1.0):
    scale = 1e-30 + (float(wanted.detach().abs().max()) if wanted.numel() else 0.0)
    torch.testing.assert_close(
        found, wanted * factor, rtol=0, atol=1e-11 * scale * factor, msg=lambda m: f"{what}: {m}"
    )


def same_bits(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.detach().contiguous())
    assert all(torch.equal(part, parts[0]) for part in parts)


def targets(target, q, n):
    """Targets of all kinds, with the options they take."""
    other = (target.clamp(min=0) + 3) % n
    labels = target.clamp(min=0)
    return {
        "labels": (target, {}),
        "ignored class": (target, {"ignore_index": int(target[0])}) if (target >= 0).all() else (target, {}),
        "smoothed": (target, {"label_smoothing": 0.1}),
        "distribution": (q, {}),
        "distribution smoothed": (q, {"label_smoothing": 0.2}),
        "distribution in half precision": (q.half(), {"label_smoothing": 0.2}),
        "mixture": (LabelMixture.mixed(labels, other, 0.7), {}),
        "mixture smoothed": (LabelMixture.mixed(labels, other, 0.7), {"label_smoothing": 0.2}),
        "mixup smoothed": (LabelMixture.mixed(labels, other, 0.3, smoothing=0.1), {}),
    }


def reference(features, weight, bias, target, *, k, tau, alpha, class_weight, **options):
    """The loss on the logits of one process."""
    n = len(weight)
    logits = F.linear(features, weight, bias)
    if isinstance(target, LabelMixture):
        target = target.dense(n, DOUBLE)
    loss = create_loss("smooth_topk_svm", k=k, tau=tau, alpha=alpha, weight=class_weight, **options).double()
    if class_weight is not None:
        loss.weight, loss.alpha = class_weight, alpha  # in double precision, as given
    return loss(logits, target)


def rows_of(target, sizes):
    if isinstance(target, LabelMixture):
        return LabelMixture(*(None if part is None else own(part, sizes) for part in target))
    return own(target, sizes)


def compare_layer(n, k, options, averaged):
    world, sizes = dist.get_world_size(), batches(dist.get_world_size())
    features, weight, bias, target, q = whole(n, sum(sizes))
    shards = layout(n, world)
    for name, (goal, more) in targets(target, q, n).items():
        for reduction in ("mean", "sum", "none"):
            what = f"{n} {k} {name} {reduction} {sorted(options)}"
            everything = {
                "k": k,
                "tau": 0.4,
                "alpha": 0.75,
                "class_weight": None,
                "reduction": reduction,
                **more,
                **options,
            }
            tensors = [t.clone().requires_grad_() for t in (features, weight, bias)]
            expected = reference(*tensors, goal, **everything)
            wanted = torch.autograd.grad(expected.square().sum(), tensors)
            mine = [
                own(t, split).requires_grad_()
                for t, split in zip((features, weight, bias), (sizes, shards, shards), strict=True)
            ]
            found = linear_smooth_topk(
                *mine, rows_of(goal, sizes), process_group=dist.group.WORLD, num_classes=n, chunk=5, averaged=averaged,
                **everything,
            )  # fmt: skip
            close(found, own(expected.detach(), sizes) if reduction == "none" else expected.detach(), what)
            if reduction != "none":
                same_bits(found)
            gradients = torch.autograd.grad(found.square().sum(), mine)
            for g, right, split in zip(gradients, wanted, (sizes, shards, shards), strict=True):
                factor = world if averaged and split is sizes else 1.0
                close(g, own(right, split), what, factor)


@check
def layers_with_every_target():
    compare_layer(23, 3, {}, False)


@check
def bytes_of_one_row_and_of_one_number_a_row():
    """States are sent as bytes: rows of one number, and single rows, lie in memory in ways of their own."""
    n, world = 23, dist.get_world_size()
    shards = layout(n, world)
    for dtype, tolerance in ((DOUBLE, 1e-11), (torch.float32, 1e-5)):
        for B, k in ((4, 1), (1, 1), (1, 3), (2, 1), (6, 5)):
            features, weight, bias, target, _ = whole(n, max(B, 2))
            features, weight, bias = (t.to(dtype) for t in (features[:B], weight, bias))
            tensors = [t.clone().requires_grad_() for t in (features, weight, bias)]
            expected = linear_smooth_topk(*tensors, target[:B], k=k, tau=0.4, reduction="sum")
            wanted = torch.autograd.grad(expected, tensors)
            mine = [features.clone().requires_grad_(), *(own(t, shards).requires_grad_() for t in (weight, bias))]
            options = {"process_group": dist.group.WORLD, "replicated": True, "reduction": "sum"}
            found = linear_smooth_topk(*mine, target[:B], k=k, tau=0.4, **options)
            right = expected.detach(), wanted[0], *(own(g, shards) for g in wanted[1:])
            got = found.detach(), *torch.autograd.grad(found, mine)
            for one, other in zip(got, right, strict=True):
                scale = 1.0 + float(other.abs().max() if other.numel() else 0.0)
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, msg=f"{dtype} {B} {k}")


@check
def layers_with_options_of_classes():
    options = {
        "alpha": torch.linspace(0, 2, 23, dtype=DOUBLE),
        "class_weight": torch.linspace(0.5, 2, 23, dtype=DOUBLE),
    }
    compare_layer(23, 3, options, True)


@check
def shards_shorter_than_the_top_group_and_empty_ones():
    compare_layer(9, 4, {}, False)  # 3, 3, 3, 0 on four ranks


@check
def more_than_half_of_the_classes():
    compare_layer(9, 6, {}, False)


@check
def logits_sharded_by_class():
    n, world = 23, dist.get_world_size()
    features, weight, bias, target, q = whole(n, 5)
    logits, sizes, target = F.linear(features, weight, bias), layout(n, world), target.clamp(min=0)
    w = torch.linspace(0.5, 2, n, dtype=DOUBLE)
    mixture = LabelMixture.smoothed(target, 0.1)
    for goal, mine in ((target, target), (q, q), (q, own(q, sizes, 1)), (mixture, mixture)):
        for reduction in ("mean", "sum", "none"):
            for class_weight in (None, w):
                options = {"tau": 0.4, "alpha": 0.7, "weight": class_weight, "reduction": reduction}
                s = logits.clone().requires_grad_()
                expected = smooth_topk_hinge(s, goal, 3, **options)
                (wanted,) = torch.autograd.grad(expected.square().sum(), s)
                part = own(logits, sizes, 1).requires_grad_()
                found = smooth_topk_hinge(part, mine, 3, process_group=dist.group.WORLD, num_classes=n, **options)
                same_bits(found)
                close(found, expected.detach(), reduction)
                close(torch.autograd.grad(found.square().sum(), part)[0], own(wanted, sizes, 1), reduction)


@check
def rows_that_all_ranks_hold():
    n, world = 23, dist.get_world_size()
    features, weight, bias, target, _ = whole(n, 5)
    sizes = layout(n, world)
    tensors = [t.clone().requires_grad_() for t in (features, weight, bias)]
    options = {"k": 3, "tau": 0.4, "label_smoothing": 0.1}
    expected = linear_smooth_topk(*tensors, target, **options)
    wanted = torch.autograd.grad(expected, tensors)
    mine = [features.clone().requires_grad_(), *(own(t, sizes).requires_grad_() for t in (weight, bias))]
    found = linear_smooth_topk(*mine, target, process_group=dist.group.WORLD, replicated=True, **options)
    close(found, expected.detach(), "loss")
    gradients = torch.autograd.grad(found, mine)
    close(gradients[0], wanted[0], "features")
    for g, right in zip(gradients[1:], wanted[1:], strict=True):
        close(g, own(right, sizes), "layer")


@check
def single_precision_is_within_its_rounding():
    n, sizes = 200, batches(dist.get_world_size())
    features, weight, bias, target, _ = (t.float() if t.is_floating_point() else t for t in whole(n, sum(sizes)))
    shards = layout(n, len(sizes))
    for options in ({}, {"label_smoothing": 0.1}):
        expected = linear_smooth_topk(features.double(), weight.double(), bias.double(), target, tau=0.3, **options)
        mine = own(features, sizes), own(weight, shards), own(bias, shards), own(target, sizes)
        found = linear_smooth_topk(*mine, tau=0.3, process_group=dist.group.WORLD, **options)
        # scores of about ten that are rounded once, in units of tau
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=60 * 2**-24)


@check
def predictions():
    for n, k in ((40, 3), (9, 4), (9, 6)):
        sizes = batches(dist.get_world_size())
        features, weight, bias, *_ = whole(n, sum(sizes))
        head = LinearSmoothTopK(D, n, k=k, tau=0.3, process_group=dist.group.WORLD, dtype=DOUBLE, chunk=4)
        shards = layout(n, len(sizes))
        head.load_state_dict({"weight": own(weight, shards), "bias": own(bias, shards)})
        for found, wanted in zip(
            head.topk(own(features, sizes)), linear_topk(features, weight, bias, k, temperature=0.3 * k), strict=True
        ):
            torch.testing.assert_close(found, own(wanted, sizes), rtol=1e-12, atol=1e-12)


@check
def bad_input_on_one_rank_is_an_error_on_all():
    n, world, rank = 23, dist.get_world_size(), dist.get_rank()
    features, weight, bias, target, _ = whole(n, 4)
    shards, last = layout(n, world), rank == world - 1
    weight, bias = own(weight, shards), own(bias, shards)
    loss = functools.partial(linear_smooth_topk, process_group=dist.group.WORLD, num_classes=n)
    wrong_target = torch.where(torch.arange(4) == 2, n, target) if last else target
    cases = {
        r"target must be in \[0, 22\] .*got 23": lambda: loss(features, weight, bias, wrong_target, k=3),
        r"ranks of the process group disagree on k: \[3": lambda: loss(
            features, weight, bias, target, k=4 if last else 3
        ),
        r"disagree on tau: \[0.5": lambda: loss(features, weight, bias, target, k=3, tau=0.25 if last else 0.5),
        r"disagree on labels": lambda: loss(features, weight, bias, target, k=3, label_smoothing=0.0)
        if not last
        else loss(features, weight, bias, LabelMixture.smoothed(target.clamp(min=0), 0.1), k=3),
        r"23 classes on \d ranks lie as .*24 in all": lambda: loss(
            features, torch.cat((weight, weight[:1])) if rank == 0 else weight,
            torch.cat((bias, bias[:1])) if rank == 0 else bias, target, k=3,
        ),
        r"k must be an integer from 1 to n - 1 = 22, got 23": lambda: loss(features, weight, bias, target, k=23),
        r"expected features \[B, d\]": lambda: loss(features[:, :3] if last else features, weight, bias, target, k=3),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    for k in (3, 20):
        scores = torch.zeros(4, n, dtype=DOUBLE)
        scores[2, k:] = -torch.inf
        scores = own(scores, shards, dim=1)
        for q in (torch.zeros_like(target), torch.full((4, n), 1 / n, dtype=DOUBLE)):
            with pytest.raises(ValueError, match=rf"at least k \+ 1 = {k + 1} scores above -inf"):
                smooth_topk_hinge(scores, q, k, process_group=dist.group.WORLD)


@check
def sampled_classes():
    """A rate of one is the loss; below it labels take part, and every rank draws for itself."""
    n, world = 46, dist.get_world_size()
    sizes, shards = batches(world), layout(n, world)
    features, weight, bias, target, _ = whole(n, sum(sizes))
    mine = own(features, sizes), *(own(t, shards).requires_grad_() for t in (weight, bias)), own(target, sizes)
    loss = functools.partial(linear_smooth_topk, *mine, k=3, tau=0.4, process_group=dist.group.WORLD, num_classes=n)
    assert torch.equal(loss(sample=1.0), loss())
    torch.manual_seed(0)
    found = loss(sample=0.5)
    same_bits(found)
    (g,) = torch.autograd.grad(found, mine[1])
    rows = [torch.zeros(max(shards)) for _ in range(world)]
    dist.all_gather(rows, F.pad(g.abs().sum(1).float(), (0, max(shards) - len(g))))
    taken = torch.cat([part[:size] for part, size in zip(rows, shards, strict=True)]) > 0
    assert taken[target[target >= 0]].all()
    assert 8 <= taken.sum() <= 38  # of 46 classes about half
    assert not torch.equal(rows[0] > 0, rows[1] > 0)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "classes")[-len(shape) :])


@check
def dtensor_logits():
    n, world = 23, dist.get_world_size()
    features, weight, bias, target, q = whole(n, 5)
    logits, w = F.linear(features, weight, bias), torch.linspace(0.5, 2, n, dtype=DOUBLE)
    meshes = [(mesh_of(world), [Shard(1)])]
    if world == 4:
        meshes += [(mesh_of(2, 2), [Shard(0), Shard(1)]), (mesh_of(2, 2), [Replicate(), Shard(1)])]
    for mesh, placements in meshes:
        for goal in (target, q, target.masked_fill(target < 5, -100), distribute_tensor(target, mesh)):
            for options in ({}, {"weight": w, "label_smoothing": 0.1}, {"weight": w}, {"reduction": "none"}):
                loss = create_loss("smooth_topk_svm", k=3, tau=0.4, alpha=0.75, **options)
                s = logits.clone().requires_grad_()
                plain = goal.full_tensor() if isinstance(goal, DTensor) else goal
                expected = loss(s, plain).square().sum()
                (wanted,) = torch.autograd.grad(expected, s)
                spread = distribute_tensor(logits, mesh, placements).requires_grad_()
                with no_gathered_logits(logits.shape):
                    found = loss(spread, goal).square().sum()
                    (g,) = torch.autograd.grad(found, spread)
                assert tuple(g.placements) == tuple(placements)
                close(found.full_tensor().detach(), expected.detach(), f"{placements} {sorted(options)}")
                close(g.full_tensor(), wanted, f"{placements} {sorted(options)}")


@contextmanager
def no_gathered_logits(shape):
    """Raise where a rank is given the logits of all classes."""
    real = DTensor.to_local

    def to_local(self, **options):
        part = real(self, **options)
        assert part.shape[1:] != shape[1:] or not part.is_floating_point() or part.shape[:1] == (1,), "gathered"
        return part

    DTensor.to_local = to_local
    try:
        yield
    finally:
        DTensor.to_local = real


@check
def dtensor_weight_and_features():
    n, world, B = 23, dist.get_world_size(), 8
    features, weight, bias, target, q = whole(n, B)
    class_weight = torch.linspace(0.5, 2, n, dtype=DOUBLE)
    meshes = [(mesh_of(world), [Shard(0)], [[Shard(0)], [Replicate()]])]
    if world == 4:
        rows = [[Shard(0), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]]
        meshes.append((mesh_of(2, 2), [Replicate(), Shard(0)], rows))
    for mesh, of_weight, choices in meshes:
        for of_features in choices:
            for goal in (target, q, LabelMixture.smoothed(target.clamp(min=0), 0.1)):
                for reduction in ("mean", "sum", "none"):
                    options = {"k": 3, "tau": 0.4, "class_weight": class_weight, "reduction": reduction}
                    tensors = [t.clone().requires_grad_() for t in (features, weight, bias)]
                    expected = linear_smooth_topk(*tensors, goal, **options).square().sum()
                    wanted = torch.autograd.grad(expected, tensors)
                    lie = (of_features, of_weight, of_weight)
                    spread = [
                        distribute_tensor(t, mesh, p).requires_grad_()
                        for t, p in zip((features, weight, bias), lie, strict=True)
                    ]
                    found = linear_smooth_topk(*spread, goal, **options).square().sum()
                    close(found.full_tensor().detach(), expected.detach(), f"{of_features} {reduction}")
                    for g, right in zip(torch.autograd.grad(found, spread), wanted, strict=True):
                        close(g.full_tensor(), right, f"{of_features} {reduction}")


@check
def data_parallel_backbone_and_class_parallel_head():
    """One step of DistributedDataParallel and a head over a 1-D and a 2-D mesh is the step of one process."""
    n, world, B = 23, dist.get_world_size(), 8
    features, weight, bias, target, _ = whole(n, B)
    target = target.clamp(min=0)
    sizes = [B // world] * world

    def backbone():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, D)).double()

    options = {"k": 3, "tau": 0.4, "label_smoothing": 0.1}
    one, layer = backbone(), [t.clone().requires_grad_() for t in (weight, bias)]
    linear_smooth_topk(one(features), *layer, target, **options).backward()
    meshes = [(mesh_of(world), [Shard(0)])] + ([(mesh_of(2, 2), [Replicate(), Shard(0)])] if world == 4 else [])
    for mesh, placements in meshes:
        many = nn.parallel.DistributedDataParallel(backbone())
        head = LinearSmoothTopK(D, n, dtype=DOUBLE, **options)
        for name, t in (("weight", weight), ("bias", bias)):
            setattr(head, name, nn.Parameter(distribute_tensor(t, mesh, placements)))
        loss = head(many(own(features, sizes)), own(target, sizes))
        loss.backward()
        for p, q in zip(many.module.parameters(), one.parameters(), strict=True):
            close(p.grad, q.grad, f"backbone {placements}")
        for p, q in zip((head.weight, head.bias), layer, strict=True):
            assert p.grad.placements == p.placements
            close(p.grad.full_tensor(), q.grad, f"head {placements}")
        for part in head.topk(own(features, sizes)):
            assert part.shape == (B // world, 3)


@check
def checkpoints_between_numbers_of_ranks():
    """Head and optimiser are saved on all ranks, and go on on one fewer as if nothing had happened."""
    n, world, rank, B = 23, dist.get_world_size(), dist.get_rank(), 6
    features, _, _, target, _ = whole(n, B)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    def make(mesh):
        head = LinearSmoothTopK(D, n, k=3, tau=0.4, replicated=True, dtype=DOUBLE)
        for name in ("weight", "bias"):
            setattr(head, name, nn.Parameter(distribute_tensor(getattr(head, name).detach(), mesh, [Shard(0)])))
        return head, torch.optim.AdamW(head.parameters(), lr=0.1)

    def step(head, optimizer):
        optimizer.zero_grad()
        head(features, target).backward()
        optimizer.step()
        return [p.full_tensor() for p in head.parameters()]

    head, optimizer = make(mesh_of(world))
    step(head, optimizer)
    model_state, optimizer_state = get_state_dict(head, optimizer)
    dcp.save({"head": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    wanted = step(head, optimizer)
    fewer = DeviceMesh("cpu", list(range(world - 1)))
    if rank < world - 1:
        torch.manual_seed(5)
        head, optimizer = make(fewer)
        model_state, optimizer_state = get_state_dict(head, optimizer)
        state = {"head": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder[0], process_group=fewer.get_group())
        set_state_dict(head, optimizer, model_state_dict=state["head"], optim_state_dict=state["optimizer"])
        for p, right in zip(step(head, optimizer), wanted, strict=True):
            close(p, right, "after loading")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


@check
def a_compiled_step_has_the_same_bits():
    """The graph ends before the ranks meet, and goes on after it."""
    n, world = 23, dist.get_world_size()
    features, _, _, target, _ = whole(n, 5)
    sizes = batches(world)
    head = LinearSmoothTopK(D, n, k=3, label_smoothing=0.1, process_group=dist.group.WORLD, dtype=DOUBLE)
    backbone = nn.Linear(D, D, dtype=DOUBLE)

    def step(x):
        return head(backbone(x).tanh(), own(target, sizes))

    found = []
    for run in (step, torch.compile(step, backend="aot_eager")) if world == 2 else ():
        loss = run(own(features, sizes))
        found.append((loss, *torch.autograd.grad(loss, [*backbone.parameters(), *head.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) if found else world == 4


@check
def a_rank_that_dies_ends_the_others():  # the last check: there is one rank fewer afterwards
    n, world = 23, dist.get_world_size()
    features, weight, bias, target, _ = whole(n, 4)
    group = dist.new_group(timeout=timedelta(seconds=30))
    weight, bias = (own(t, layout(n, world)).requires_grad_() for t in (weight, bias))

    def steps():
        for _ in range(2):  # what was sent before the end may still arrive
            linear_smooth_topk(features, weight, bias, target, k=3, process_group=group)

    steps()
    if dist.get_rank() == world - 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"got no answer while .*: another rank of the process group ended"):
        steps()
    assert weight.grad is None


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return ranks.run(request.param, CHECKS, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(found, name):
    errors = found[name][:-1] if name == "a_rank_that_dies_ends_the_others" else found[name]
    ranks.expect_none(errors)
