"""Rule 6: a factory is given the context that its signature names, and nothing else."""

from functools import partial
from typing import ClassVar

import pytest

from topk_registry import accepted_context
from topk_registry.registry.options import CONTEXT, check_options, defaults_since_changed, tuning_grid

EVERYTHING = dict.fromkeys(CONTEXT, 1)


class Class:
    def __init__(self, k=5, *, class_counts, total_epochs=None): ...


class Child(Class):
    pass


def function(num_classes, *, smoothing=0.0): ...


def anything(**options): ...


def positional(num_classes, /, soft_targets=False): ...


@pytest.mark.parametrize(
    ("builder", "names"),
    [
        (Class, {"class_counts", "total_epochs"}),
        (Child, {"class_counts", "total_epochs"}),
        (function, {"num_classes", "smoothing"}),
        (partial(function, smoothing=0.1), {"num_classes"}),
        (partial(partial(function, 10), smoothing=0.1), set()),
        (anything, set()),
        (positional, {"soft_targets"}),
        (lambda: None, set()),
        (dict, set()),
    ],
)
def test_context_goes_where_it_is_named(builder, names):
    assert set(accepted_context(builder, EVERYTHING)) == names


def test_context_has_only_the_names_of_the_rule():
    with pytest.raises(ValueError, match=r"num_classes, class_counts, .* got epochs"):
        accepted_context(function, {"epochs": 3})


def test_a_factory_that_takes_anything_is_not_second_guessed():
    check_options("it", anything, {"whatever": 1})
    check_options("it", dict, {"whatever": 1})


def test_what_a_partial_binds_is_no_longer_needed():
    check_options("it", partial(function, 10), {})
    check_options("it", partial(function, num_classes=10), {"num_classes": 20})
    with pytest.raises(TypeError, match="it needs num_classes"):
        check_options("it", function, {})
    with pytest.raises(TypeError, match="it takes no option 'num_classes'"):
        check_options("it", positional, {"num_classes": 1})


class Declared:
    tuning_grid = {"tau": (0.1, 1.0)}  # noqa: RUF012


class Computed:
    @classmethod
    def tuning_grid(cls):
        return {"k": range(2)}


@pytest.mark.parametrize(
    ("factory", "grid"),
    [
        (Declared, {"tau": [0.1, 1.0]}),
        (partial(partial(Declared, k=3), k=4), {"tau": [0.1, 1.0]}),
        (Computed, {"k": [0, 1]}),
        (function, {}),
    ],
)
def test_a_factory_declares_the_values_to_tune(factory, grid):
    assert tuning_grid(factory) == grid


class Changed:
    """A loss whose default of tau was another."""

    former_defaults: ClassVar = {"tau": 1.0}

    def __init__(self, k: int = 5, tau: float = 0.1) -> None: ...


@pytest.mark.parametrize(
    ("record", "kept"),
    [
        ({}, {"tau": 1.0}),
        ({"defaults": {"tau": 0.5, "gone": 1, "k": 5}}, {"tau": 0.5}),
        (None, {}),
        ({"defaults": None}, {}),  # of a file of settings that was edited
        ("text", {}),
    ],
    ids=str,
)
def test_defaults_that_have_changed_are_those_of_the_record(record, kept):
    assert defaults_since_changed(Changed, record) == kept
