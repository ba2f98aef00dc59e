"""Ranges of options: how they are written, inherited and read."""

from functools import partial
from typing import Annotated, Literal

import pytest

import topk_registry as tr
from topk_registry.registry.ranges import Interval, option_ranges


@pytest.mark.parametrize("text", ["(0, inf)", "[0, 1)", "(0, 1]", "[1, n)", "[-2.5, 3]"])
def test_an_interval_is_shown_as_it_is_written(text):
    assert str(Interval.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0, 1", "(0; 1)", "(a, 1)", "[1, 0]", "(1, 1)", "(0, nan)", "{0, 1}"])
def test_what_is_no_interval_is_an_error(text):
    with pytest.raises(ValueError, match="an interval"):
        Interval.parse(text)


@pytest.mark.parametrize(
    ("text", "held", "others", "inside", "outside"),
    [
        ("(0, inf)", [1e-9, 3], [0, -1], [], [0]),
        ("[0, 1)", [0, 0.5], [-0.1, 1], [0], [-1, 1]),
        ("(0, 1]", [1], [0, 1.1], [1], [0, 2]),
        ("[1, n)", [1, 99], [0], [1], [0, 16]),
        ("[0.5, n]", [0.5], [0.4], [0.5, 16], [-0.5, 17]),
    ],
)
def test_an_interval_knows_its_values(text, held, others, inside, outside):
    interval = Interval.parse(text)
    assert all(value in interval for value in held)
    assert not any(value in interval for value in others)
    assert interval.examples(16) == (inside, outside)


class Base:
    def __init__(self, scale: Annotated[float, "(0, inf)"] = 1.0, mode: Literal["a", "b"] = "a", power: int = 1):
        pass


class Derived(Base):
    def __init__(self, mode: Literal["a"] = "a", power: "Annotated[int | None, 5, '[1, 2]']" = 1):
        pass


class Forwarding(Base):
    def __init__(self, scale: float = 2.0, **options):
        super().__init__(scale, **options)


def function(tau: Annotated[float, "(0, inf)"] = 1.0, sigma: "Absent" = 1):  # noqa: F821
    pass


def test_ranges_of_a_base_hold_where_its_option_is_taken():
    positive = Interval.parse("(0, inf)")
    assert option_ranges(Base) == option_ranges(Forwarding) == {"scale": positive, "mode": ("a", "b")}
    assert option_ranges(Derived) == {"mode": ("a",), "power": Interval.parse("[1, 2]")}


def test_functions_and_partials_state_ranges_too():
    assert option_ranges(function) == option_ranges(partial(function)) == {"tau": Interval.parse("(0, inf)")}
    assert option_ranges(len) == option_ranges(lambda tau: None) == {}
    assert set(option_ranges(partial(Base, scale=2.0))) == {"scale", "mode"}


@pytest.mark.parametrize("name", tr.list_losses("topk-registry:*"))
def test_every_number_that_a_loss_of_ours_takes_has_a_range(name):
    import inspect

    builder = tr.get_loss_builder(name)
    parameters = inspect.signature(builder).parameters.items()
    told = {"ignore_index", "rate", "drw_epoch", "candidates", "total_epochs"}  # any number, or bound to another option
    numbers = {option for option, p in parameters if isinstance(p.default, (int, float)) and option not in told}
    assert numbers <= set(option_ranges(builder))
