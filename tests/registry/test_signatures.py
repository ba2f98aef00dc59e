"""Rule 6: a factory is given the context that its signature names, and nothing else."""

from functools import partial

import pytest
import torch

from topk_registry import accepted_context
from topk_registry.registry.signatures import CONTEXT, check_options, parameters, tuning_grid

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
    ],
)
def test_context_goes_where_it_is_named(builder, names):
    assert set(accepted_context(builder, EVERYTHING)) == names


def test_a_factory_that_takes_anything_is_not_second_guessed():
    check_options("it", anything, {"whatever": 1})
    check_options("it", AnyOptions, ["split", "whatever"])


def test_options_that_pass_on_to_torchs_own_class_are_not_second_guessed():
    class Passing(torch.nn.CrossEntropyLoss):
        def __init__(self, *, gamma=1.0, **options): ...

    assert (list(parameters(Passing)[0]), parameters(Passing)[1]) == (["gamma"], True)


def test_what_a_partial_binds_is_no_longer_needed():
    check_options("it", partial(function, 10), {})
    check_options("it", partial(function, num_classes=10), {"num_classes": 20})
    with pytest.raises(TypeError, match="it needs num_classes"):
        check_options("it", function, {})
    with pytest.raises(TypeError, match="it takes no option 'num_classes'"):
        check_options("it", positional, {"num_classes": 1})


class Declared:
    tuning_grid = {"tau": (0.1, 1.0)}  # noqa: RUF012


@pytest.mark.parametrize(
    ("factory", "grid"),
    [(Declared, {"tau": [0.1, 1.0]}), (partial(partial(Declared, k=3), k=4), {"tau": [0.1, 1.0]}), (function, {})],
)
def test_a_factory_declares_the_values_to_tune(factory, grid):
    assert tuning_grid(factory) == grid


class Base:
    def __init__(self, *, weight=None, reduction="mean"): ...


class Middle(Base):
    def __init__(self, gamma=2.0, **common):
        super().__init__(**common)


class Bottom(Middle):
    def __init__(self, tau=1.0, **common):
        super().__init__(**common)


class AnyOptions:
    def __init__(self, split, **options): ...


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        (Middle, ["gamma", "weight", "reduction"]),
        (Bottom, ["tau", "gamma", "weight", "reduction"]),
        (partial(Bottom, tau=3.0), ["tau", "gamma", "weight", "reduction"]),
    ],
)
def test_common_options_are_those_of_the_bases(factory, names):
    found, takes_any = parameters(factory)
    assert not takes_any
    assert list(found) == names
    check_options("it", factory, names)
    with pytest.raises(TypeError, match=r"no option 'reducton'; did you mean 'reduction'\?"):
        check_options("it", factory, ["reducton"])
