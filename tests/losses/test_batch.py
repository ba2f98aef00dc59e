"""Losses of a batch as a whole: what they take, on one process and on two."""

import pytest
import torch
import torch.distributed as dist

import topk_registry as tr
from tests import ranks
from topk_registry.testing import check_loss

CHECKS = ranks.Checks()  # tests/test_two_ranks.py calls them


class Spread(tr.BatchLoss):
    """Variance of the labels' scores over the batch."""

    def of_batch(self, logits, label, counted):
        own = self.all_rows(logits.gather(1, label[:, None])[:, 0])
        counted = self.all_rows(counted)
        mean = own.masked_fill(~counted, 0.0).sum() / counted.sum()
        return (own - mean).square().masked_fill(~counted, 0.0).sum() / counted.sum()


def batch(rows: int = 7, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.randn(rows, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return s, torch.arange(rows) % n


def test_rows_that_are_ignored_are_as_if_they_were_not_there():
    s, label = batch()
    label[[2, 5]] = -100
    kept = label != -100
    torch.testing.assert_close(Spread()(s, label), Spread()(s[kept], label[kept]), rtol=1e-12, atol=0)
    other = label.masked_fill(~kept, 99)
    torch.testing.assert_close(Spread(ignore_index=99)(s, other), Spread()(s, label), rtol=0, atol=0)


def test_what_has_no_label_is_refused():
    s, label = batch()
    for target in (s.softmax(-1), tr.LabelMixture.mixed(label, label.flip(0), 0.7)):
        with pytest.raises(ValueError, match=r"Spread needs one label per image .* Mixup, CutMix"):
            Spread()(s, target)
    with pytest.raises(ValueError, match="Spread needs at least 2 rows in a batch, got 1"):
        Spread()(s[:1], label[:1])
    with pytest.raises(ValueError, match=r"target must be in \[0, 5\].*got 6"):
        Spread()(s, label + 1)
    with pytest.raises(TypeError, match="BatchLoss must define of_batch"):
        tr.BatchLoss()(s, label)


def test_half_precision_is_computed_in_single():
    s, label = batch()
    for dtype in (torch.bfloat16, torch.float16):
        value = Spread()(s.to(dtype), label)
        torch.testing.assert_close(value, Spread()(s.to(dtype).float(), label), rtol=0, atol=0)
        assert value.dtype == torch.float32


def test_the_conformance_kit_knows_them():
    check_loss(Spread, expected_failed_checks={"prefers_the_label": "a variance does not"})


@CHECKS.add
def two_ranks_have_the_loss_and_the_gradient_of_the_whole_batch():
    (s, label), rank = batch(9), dist.get_rank()
    label[4] = -100
    own = slice(0, 5) if rank == 0 else slice(5, 9)  # ranks may have different numbers of rows
    start = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # the losses' halves are those of each rank, so that of one process gets its rows in that order
    cases = [(Spread, torch.arange(9))]
    for options in ({"neighbours": 1}, {"neighbours": 3, "cross_entropy_weight": 0.5}):
        order = torch.tensor([0, 1, 5, 6, 2, 3, 4, 7, 8])
        cases.append((lambda given=options: tr.create_loss("conformal_training", calibration=0.5, **given), order))
    for build, order in cases:
        layers = [torch.nn.Linear(6, 6, bias=False).double() for _ in range(2)]
        for layer in layers:
            layer.weight.data.copy_(start)
        wanted = build()(layers[0](s[order]), label[order])
        wanted.backward()
        model = torch.nn.parallel.DistributedDataParallel(layers[1])
        value = build().over_ranks()(model(s[own]), label[own])
        value.backward()
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layers[1].weight.grad, layers[0].weight.grad, rtol=1e-10, atol=1e-12)


@CHECKS.add
def weighted_cross_entropy_has_the_gradient_of_torch_on_the_whole_batch():
    from topk_registry.train.loss import Facts, LossSpec, build_loss, over_ranks

    (s, label), rank = batch(9), dist.get_rank()
    label[4] = -100
    own = slice(0, 5) if rank == 0 else slice(5, 9)
    weight = [0.125, 5, 1, 2, 0.25, 7]  # exact in single precision
    for smoothing in (0.0, 0.1):
        torchs = torch.nn.CrossEntropyLoss(torch.tensor(weight).double(), label_smoothing=smoothing)
        ours = build_loss(LossSpec.resolve("ce", {}), Facts(6, smoothing=smoothing, class_weight=weight))
        layers = [torch.nn.Linear(6, 6, bias=False).double() for _ in range(2)]
        for layer in layers:  # the same on both ranks
            layer.weight.data.copy_(torch.arange(36.0).sin().view(6, 6))
        torchs(layers[0](s), label).backward()
        model = torch.nn.parallel.DistributedDataParallel(layers[1])
        over_ranks(ours)(model(s[own]), label[own]).backward()
        torch.testing.assert_close(layers[1].weight.grad, layers[0].weight.grad, rtol=1e-10, atol=1e-12)


@CHECKS.add
def the_mean_over_ranks_is_of_the_whole_batch_and_leaves_the_reduction():
    (s, label), rank = batch(9), dist.get_rank()
    label[[0, 1, 4]] = -100
    own = slice(0, 2) if rank == 0 else slice(2, 9)  # all rows of the first rank are ignored
    sample_weight, weight = torch.linspace(0.2, 2, 9, dtype=torch.float64), [0.1, 5, 1, 2, 0.3, 7]
    dense = s.roll(1, 0).softmax(1)
    cases = [("focal", {}, label, None), ("focal", {"weight": weight}, label, sample_weight)]
    cases += [("smooth_topk_svm", {"k": 2, "label_smoothing": 0.1}, label, None), ("focal", {}, dense, sample_weight)]
    cases += [("ksubset_nll", {"weight": weight, "label_smoothing": 0.1}, label, None)]
    for name, options, target, factor in cases:
        loss = tr.mean_over_ranks(tr.create_loss(name, **options))
        assert loss.reduction == "mean"
        layers = [torch.nn.Linear(6, 6, bias=False).double() for _ in range(2)]
        for layer in layers:  # the same on both ranks
            layer.weight.data.copy_(torch.arange(36.0).sin().view(6, 6))
        tr.create_loss(name, **options)(layers[0](s), target, factor).backward()
        model = torch.nn.parallel.DistributedDataParallel(layers[1])
        loss(model(s[own]), target[own], None if factor is None else factor[own]).backward()
        torch.testing.assert_close(layers[1].weight.grad, layers[0].weight.grad, rtol=1e-10, atol=1e-12)


@CHECKS.add
def a_rank_evaluates_the_mean_of_its_own_rows_without_waiting():
    if dist.get_rank():
        return
    s, label = batch()
    own, alone = tr.mean_over_ranks(tr.create_loss("focal")), tr.create_loss("focal")
    with torch.no_grad():
        torch.testing.assert_close(own(s.requires_grad_(), label), alone(s, label), rtol=0, atol=0)
    torch.testing.assert_close(own.eval()(s, label), alone(s, label), rtol=0, atol=0)


@CHECKS.add
def without_gradients_a_rank_is_by_itself():
    if dist.get_rank():
        return
    s, label = batch()
    with torch.no_grad():
        torch.testing.assert_close(Spread().over_ranks()(s, label), Spread()(s, label), rtol=0, atol=0)
