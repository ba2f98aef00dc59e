"""The public names: a name that is taken away, or added without thought, is seen here."""

import importlib

import pytest

import topk_registry

PUBLIC = {
    "AmbiguousPluginError",
    "BrokenPluginError",
    "ClassificationLoss",
    "CosineClassifier",
    "Curve",
    "DisabledPluginError",
    "GumbelTopK",
    "KSubset",
    "LabelMixture",
    "LinearSmoothTopK",
    "LossInfo",
    "NameTakenError",
    "PerturbedTopK",
    "PluginError",
    "RowLoss",
    "SphericalLinear",
    "SphericalSGD",
    "TopKClassifier",
    "TopKHead",
    "TopKLoss",
    "TopKOutput",
    "UnknownPluginError",
    "accepted_context",
    "aldr_loss",
    "backend",
    "create_loss",
    "fit_temperature",
    "get_loss_builder",
    "is_loss",
    "lapsum_loss",
    "ldr_loss",
    "linear_smooth_topk",
    "list_losses",
    "loss_info",
    "mean_over_ranks",
    "normalize_classifier",
    "perturbed_hinge_loss",
    "perturbed_topk",
    "quadratic_bound_loss",
    "quadratic_bound_of_sums",
    "ranking_loss",
    "refresh_plugins",
    "register_loss",
    "row_losses",
    "sigmoid_loss",
    "smooth_topk_hinge",
    "smooth_topk_loss",
    "soft_hinge",
    "softmax_loss",
    "sparse_topk_loss",
    "squares_loss",
    "topk_hinge_loss",
    "topk_label_margins",
    "topk_log_odds",
    "topk_marginals",
    "topk_margins",
}


def test_the_public_names_are_these():
    assert set(topk_registry.__all__) == PUBLIC
    assert len(topk_registry.__all__) == len(PUBLIC)
    assert set(dir(topk_registry)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_resolves_and_has_a_docstring(name):
    value = getattr(topk_registry, name)
    assert value.__doc__
    assert value is getattr(importlib.import_module(f"topk_registry.{topk_registry._HOMES[name]}"), name)


def test_another_name_is_an_attribute_error_that_lists_them():
    with pytest.raises(AttributeError, match=r"no attribute 'creat_loss'; it has .*create_loss"):
        topk_registry.creat_loss  # noqa: B018
