"""timm's own names pass through to timm."""

import pytest
import timm.loss
import torch

import topk_registry as tr
from topk_registry.registry import timm_losses
from topk_registry.registry.options import CONTEXT
from topk_registry.train.loss import Facts, LossSpec


def test_the_reserved_names_are_timms_loss_types():
    assert tuple(timm_losses.SUMMARIES) == tuple(timm.loss.LOSS_TYPES)


def test_they_are_built_by_timm():
    logits, target = torch.randn(4, 10), torch.arange(4)
    loss = tr.create_loss("ce", smoothing=0.1)
    assert type(loss) is timm.loss.LabelSmoothingCrossEntropy
    torch.testing.assert_close(loss(logits, target), timm.loss.LabelSmoothingCrossEntropy(0.1)(logits, target))
    assert type(tr.create_loss("timm:bce")) is timm.loss.BinaryCrossEntropy
    assert tr.loss_info("ce").distribution == "timm"
    assert tr.loss_info("ce").version == timm.__version__


@pytest.mark.parametrize("name", ["ce", "bce", "asl", "poly"])
def test_a_trainers_context_builds_them(name):
    build = tr.get_loss_builder(name)
    context = {"num_classes": 10, "class_counts": [3] * 10, "smoothing": 0.1, "soft_targets": False, "total_epochs": 2}
    loss = tr.create_loss(name, **tr.accepted_context(build, context))
    assert torch.isfinite(loss(torch.randn(4, 10), torch.arange(4)))


def test_the_distribution_balanced_loss_gets_the_counts():
    build = tr.get_loss_builder("db")
    wanted = {"class_counts", "smoothing", "soft_targets"}
    assert set(tr.accepted_context(build, dict.fromkeys(CONTEXT, 1))) == wanted


def test_draws_are_not_the_number_of_training_images():
    facts = Facts(3, class_counts=[5, 2, 1], num_samples=8)
    for name in ("noised_topk", "noised_topk_imbalanced"):
        spec = LossSpec.resolve(name, {})
        assert spec.build(facts).num_samples == spec.record["defaults"]["num_samples"] == 5


def test_the_names_that_take_k_hot_targets_are_timms():
    from timm.loss import MULTI_LABEL_LOSS_TYPES

    assert timm_losses.TAKE_K_HOT == MULTI_LABEL_LOSS_TYPES
    target = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    for name in timm_losses.TAKE_K_HOT:
        counts = {"class_counts": [5, 2, 1], "num_samples": 8} if name == "db" else {}
        loss = timm_losses.builder(name, several=True)(**counts)
        assert loss(torch.zeros(2, 3), target).isfinite()


def test_timms_own_complaints_pass_through():
    with pytest.raises(ValueError, match="multi-label"):
        tr.create_loss("zlpr")
    with pytest.raises(TypeError, match="loss 'ce' takes no option 'loss_type'"):
        tr.create_loss("ce", loss_type="bce")
