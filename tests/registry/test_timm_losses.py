"""timm's own names pass through to timm."""

import inspect

import pytest
import timm.loss
import torch

import topk_registry as tr
from topk_registry.registry import timm_losses
from topk_registry.registry.signatures import CONTEXT
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


def test_every_option_of_timms_function_belongs_to_a_loss():
    named = set(inspect.signature(timm.loss.create_classification_loss).parameters) - {"loss_type", "multi_label"}
    tables = [*timm_losses.OPTIONS.values(), *timm_losses.SEVERAL.values()]
    assert {option for table in tables for option in table} == named
    assert tuple(timm_losses.OPTIONS) == tuple(timm.loss.LOSS_TYPES)


VALUES = {  # another value than the default for each option
    "smoothing": 0.3,
    "soft_targets": True,
    "class_weight": [1.0, 2.0, 5.0],
    "pos_weight": 3.0,
    "bce_target_thresh": 0.6,
    "bce_sum": True,
    "asl_gamma_pos": 2.0,
    "asl_gamma_neg": 2.0,
    "asl_clip": 0.2,
    "asl_reduction": "sum",
    "poly_epsilon": 1.0,
    "poly_gamma": 1.0,
    "poly_alpha": 0.3,
    "jsd_splits": 4,
    "twoway_tp": 2.0,
    "twoway_tn": 2.0,
    "class_counts": [4, 1, 7],
    "num_samples": 20,
    "db_neg_scale": 3.0,
    "db_init_bias": 0.2,
    "db_focal_gamma": 1.0,
}
GIVEN = {"jsd": {"jsd_splits": 2}, "db": {"class_counts": [5, 2, 1], "num_samples": 8}}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", timm_losses.OPTIONS)
def test_options_of_the_table_and_no_others_have_an_effect(name, several):
    """An option has an effect if it changes the loss, with or without smoothing. timm refuses some of the others."""
    if name not in timm_losses.TAKE_K_HOT if several else name in ("twoway", "zlpr", "db"):
        return
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    target = torch.eye(3)[torch.arange(8) % 3] if several else torch.arange(8) % 3

    def outcome(options):
        try:
            return timm.loss.create_classification_loss(name, several, **options)(logits, target).item()
        except (ValueError, RuntimeError):
            return None

    bases = [GIVEN.get(name, {}), {**GIVEN.get(name, {}), "smoothing": 0.1}]
    effective, refused = set(), set()
    for option, value in VALUES.items():
        pairs = [(outcome(base), outcome({**base, option: value})) for base in bases]
        if all(after is None for _, after in pairs):
            refused.add(option)
        elif any(before != after for before, after in pairs if None not in (before, after)):
            effective.add(option)
    own = {*timm_losses.OPTIONS[name], *(timm_losses.SEVERAL.get(name, ()) if several else ())}
    assert effective == own - refused


def test_an_option_of_another_loss_names_its_owner():
    with pytest.raises(TypeError, match=r"'ce' takes no option 'twoway_tp', which belongs to twoway .it takes smooth"):
        tr.create_loss("ce", twoway_tp=2.0)
    with pytest.raises(TypeError, match="'asl' takes no option 'asl_clip', which belongs to asl with --task multilab"):
        tr.create_loss("asl", asl_clip=0.1)
    with pytest.raises(TypeError, match="'poly' takes no option 'pos_weight', which belongs to bce, asl with --task m"):
        tr.create_loss("poly", pos_weight=2.0)
