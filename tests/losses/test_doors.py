"""One rule for targets at every door: the loss, compiled and not, the function, the linear layer and its shards."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

import topk_registry as tr
from topk_registry import LabelMixture

B, N, K, TAU = 6, 11, 3, 0.5
SIZES = [2, 3]
DOUBLE = torch.float64
WEIGHT = torch.linspace(0.25, 2, N).double()
LOGITS = torch.randn(B, N, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 2
LABEL = torch.tensor([0, 3, 3, 10, 7, 1])
OTHER = (LABEL + 4) % N
Q = torch.randn(B, N, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).softmax(1)
KINDS = {
    "indices": LABEL,
    "indices of 32 bits": LABEL.int(),
    "with ignored rows": LABEL.clone().index_fill_(0, torch.tensor([1, 4]), -100),
    "distribution": Q,
    "distribution in half precision": Q.half(),
    "mixture": LabelMixture.mixed(LABEL, OTHER, 0.75),
    "smoothed mixture": LabelMixture.mixed(LABEL, OTHER, 0.75, smoothing=0.25),
}


def plain(kind, weight, smoothing, reduction, k=K):
    """The loss by its sentence: sum_c q_c w_c L_c a row, and cross-entropy's rules for ignored rows and means."""
    leaf = LOGITS.clone().requires_grad_()
    table = tr.create_loss("smooth_topk_svm", k=k, tau=TAU).double().per_class(leaf)
    target, w = KINDS[kind], torch.ones(N, dtype=DOUBLE) if weight is None else weight
    rows, counts = [], []
    for b in range(B):
        if isinstance(target, LabelMixture):
            q = target.dense(N, DOUBLE)[b]
        elif target.is_floating_point():
            q = target[b].double()
        else:
            kept = int(target[b]) != -100
            q = torch.zeros(N, dtype=DOUBLE)
            q[int(target[b]) if kept else 0] = 1.0
        q = (1 - smoothing) * q + smoothing / N
        row, count = (q * w * table[b]).sum(), torch.ones((), dtype=DOUBLE)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            row, count = row * kept, w[int(target[b]) if kept else 0] * kept
        rows.append(row)
        counts.append(count)
    rows = torch.stack(rows)
    value = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / torch.stack(counts).sum()}[reduction]
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


@pytest.fixture(scope="module")
def group():
    """A group of one rank: classes spread over it take the way of those on several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def of_loss(dtype, name="auto", **more):
    def call(target, weight, smoothing, reduction, group):
        leaf = LOGITS.to(dtype).requires_grad_()
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
        loss = tr.create_loss("smooth_topk_svm", **{"k": K, "tau": TAU, **options, **more})
        with tr.use_backend(name):
            value = loss(leaf, target)
        return value, torch.autograd.grad(value.sum(), leaf)[0]

    return call


def of_layer(layer):
    def call(target, weight, smoothing, reduction, group):
        rows = LOGITS.T.clone().requires_grad_()  # the logits are those of unit features
        options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
        value = layer(torch.eye(B, dtype=DOUBLE), rows, None, target, options, group)
        return value, torch.autograd.grad(value.sum(), rows)[0].T

    return call


def linear(features, rows, bias, target, options, group, **more):
    options = {**options, "class_weight": options["weight"], **more}
    options.pop("weight")
    return tr.functional.linear_smooth_topk(features, rows, bias, target, k=K, tau=TAU, chunk=4, **options)


def spread(features, rows, bias, target, options, group):
    return linear(features, rows, bias, target, options, group, process_group=group, num_classes=N)


def several_sizes(features, rows, bias, target, options, group):
    loss = tr.create_loss("smooth_topk_svm", k=SIZES, tau=TAU, **options)
    return loss.of_linear(features, rows, bias, target, chunk=4)


def of_function(target, weight, smoothing, reduction, group):
    assert not smoothing
    leaf = LOGITS.clone().requires_grad_()
    value = tr.functional.smooth_topk_loss(leaf, target, K, tau=TAU, weight=weight, reduction=reduction)
    return value, torch.autograd.grad(value.sum(), leaf)[0]


DOORS = {
    "loss": (of_loss(DOUBLE), 1e-11),
    "loss in single precision": (of_loss(torch.float32), 64 * 2**-24),
    "loss by torch": (of_loss(DOUBLE, "torch"), 1e-11),
    "loss of several sizes": (of_loss(DOUBLE, k=SIZES), 1e-11),
    "function": (of_function, 1e-11),
    "layer": (of_layer(linear), 1e-11),
    "layer of several sizes": (of_layer(several_sizes), 1e-11),
    "layer over a group": (of_layer(spread), 1e-11),
}


# the function takes int64, and has neither smoothing nor an index that is ignored
LEFT_OUT = [("function", "indices of 32 bits"), ("function", "with ignored rows")]


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize(("door", "kind"), [pair for pair in product(DOORS, KINDS) if pair not in LEFT_OUT])
def test_every_door_takes_every_target(door, kind, weight, group):
    call, tolerance = DOORS[door]
    for smoothing in (0.0, 0.25) if door != "function" else (0.0,):
        for reduction in ("mean", "sum", "none"):
            wanted = plain(kind, weight, smoothing, reduction, SIZES if "several" in door else K)
            got = call(KINDS[kind], weight, smoothing, reduction, group)
            for one, right, what in zip(got, wanted, ("value", "gradient"), strict=True):
                message = f"{what}, smoothing {smoothing}, {reduction}"
                scale = float(right.abs().max())
                torch.testing.assert_close(
                    one.double(), right, rtol=0, atol=tolerance * scale, msg=lambda m, w=message: f"{w}: {m}"
                )


ELSEWHERE = {
    "smooth_topk_loss, none": lambda s, y: tr.functional.smooth_topk_loss(s, y, 2, reduction="none"),
    "smooth_topk_loss": lambda s, y: tr.functional.smooth_topk_loss(s, y, 2),
    "topk_label_margins": lambda s, y: tr.functional.topk_label_margins(s, y, 2),
    "row_losses": lambda s, y: tr.rows.row_losses(tr.rows.lapsum_rows(2), s, y),
    "linear_smooth_topk": lambda s, y: tr.functional.linear_smooth_topk(s, s.T @ s, None, y, k=2),
    "linear_smooth_topk, smoothed": lambda s, y: tr.functional.linear_smooth_topk(
        s, s.T @ s, None, y, k=2, label_smoothing=0.1
    ),
    "fit_temperature": lambda s, y: tr.fit_temperature(s, y, 2),
    "focal": lambda s, y: tr.create_loss("focal")(s, y),
    "smooth_topk_svm": lambda s, y: tr.create_loss("smooth_topk_svm", k=2)(s, y),
}


@pytest.mark.parametrize("function", ELSEWHERE)
def test_a_target_on_another_device_is_refused(function):
    """A kernel that was handed its address would read foreign memory."""
    logits, label = torch.randn(4, 6), torch.arange(4)
    ELSEWHERE[function](logits, label)
    with pytest.raises(ValueError, match=r"(target|label) must be on the device of the scores, cpu, got one on meta"):
        ELSEWHERE[function](logits, label.to("meta"))


@pytest.mark.parametrize("function", ["smooth_topk_loss", "row_losses", "linear_smooth_topk", "focal"])
def test_a_mixture_on_another_device_is_refused(function):
    logits, mixture = torch.randn(4, 6), LabelMixture.smoothed(torch.arange(4), 0.1)
    ELSEWHERE[function](logits, mixture)
    with pytest.raises(ValueError, match="target must be on the device of the scores, cpu, got one on meta"):
        ELSEWHERE[function](logits, mixture.to("meta"))
