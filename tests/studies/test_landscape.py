"""Landscapes against values that are known in closed form, and losses of every kind."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import topk_registry as tr
from topk_registry import registry
from topk_studies.engine.registered import each_row
from topk_studies.engine.study import Options, Record
from topk_studies.experiments import landscape
from topk_studies.experiments.landscape_findings import DRAWS, EPSILONS, HINGE, NOISED, at, grid, is_convex, rms
from topk_studies.report import plots

SHAPE = {"k": 2, "scale": 2.0, "label": 0, "divisions": 6, "class_counts": [100, 30, 10], "replications": 100}


def drawn(loss: str, **changes: object) -> dict:
    return landscape.run({"loss": loss, "options": {}, **SHAPE, **changes}, None, lambda share, words: None)


@pytest.fixture
def register() -> Iterator[Callable]:
    """Losses of a third party, for the time of a test."""
    names = []

    def add(name: str, factory: Callable) -> str:
        tr.register_loss(name)(factory)
        names.append(name)
        return name

    yield add
    for name in names:
        registry.losses.unregister(name)


def test_the_grid_covers_the_simplex_evenly() -> None:
    points = grid(6)
    assert len(set(points)) == 28
    assert all(sum(point) == pytest.approx(1) and min(point) >= 0 for point in points)
    assert {(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)} <= set(points)


@pytest.mark.parametrize(
    ("loss", "corner", "middle", "across"),
    [
        ("ce", math.log(1 + 2 * math.exp(-2)), math.log(3), math.log(2 * math.e + 1)),
        (HINGE, 0.0, 1.0, 1.0),  # (1 + the least score - s_y)_+
        ("topk_hinge", 0.0, 1.0, 2.0),  # (1 + the lesser of the other two - s_y)_+
        ("log_spherical_softmax", math.log(7 / 5), math.log(3), math.log(5)),  # log (q + 3) - log (s_y^2 + 1)
        ("sigmoid_mae", (1 / (1 + math.exp(2)) + 1) / 3, None, None),
    ],
)
def test_losses_at_points_where_they_are_known(
    loss: str, corner: float, middle: float | None, across: float | None
) -> None:
    values = drawn(loss)["values"]
    for wanted, point in ((corner, (1, 0, 0)), (middle, (1 / 3, 1 / 3, 1 / 3)), (across, (0, 0.5, 0.5))):
        if wanted is not None:
            assert at(values, 6, point) == pytest.approx(wanted, abs=2e-6)


def test_the_noised_loss_is_the_mean_over_draws_and_close_to_its_expectation() -> None:
    found = drawn(NOISED, options={"epsilon": 0.5, "num_samples": 50})
    assert found["random"]
    scores = torch.full((3,), 2 / 3)
    draws = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(1))
    wanted = 1 + (scores + 0.5 * draws).amin(-1).mean() - 2 / 3
    # 100 means over 50 draws each: six standard errors of the least of three normal numbers
    assert at(found["values"], 6, (1 / 3, 1 / 3, 1 / 3)) == pytest.approx(float(wanted), abs=6 * 0.5 * 0.75 / 70)


def test_single_evaluations_are_rough_and_means_share_their_draws() -> None:
    options = {"epsilon": 1.0, "num_samples": 1}
    single, again = (drawn(NOISED, options=options, replications=1)["values"] for _ in range(2))
    assert single == again  # of a seed
    mean = drawn(NOISED, options=options)["values"]
    # along an edge from one corner on, a step of the mean is small beside the noise of single evaluations
    assert max(abs(a - b) for a, b in pairwise(mean[:7])) < 0.5 * max(abs(a - b) for a, b in pairwise(single))


def test_convexity_is_told_apart() -> None:
    points = grid(12)
    assert is_convex([a * a + b for a, b, _ in points], 12)
    assert is_convex([2 * a - b for a, b, _ in points], 12)
    assert not is_convex([min(point) for point in points], 12)
    assert not is_convex(drawn(HINGE, divisions=12)["values"], 12)
    assert is_convex(drawn("ce", divisions=12)["values"], 12)


def test_a_third_partys_loss_without_options_is_drawn(register: Callable) -> None:
    name = register("first_score", lambda: lambda logits, target: logits[:, 0].mean())
    found = drawn(name)
    assert not found["random"]
    assert found["values"] == pytest.approx([2 * a for a, _, _ in grid(6)], abs=1e-6)


def test_a_loss_gets_the_context_and_the_k_that_its_signature_names(register: Callable) -> None:
    seen = {}

    def factory(k: int = 7, num_classes: int = 0, class_counts: list | None = None, scale: float = 5.0):
        seen.update(k=k, num_classes=num_classes, class_counts=class_counts, scale=scale)
        return lambda logits, target: logits.sum()

    drawn(register("curious", factory))
    assert seen == {"k": 2, "num_classes": 3, "class_counts": [100, 30, 10], "scale": 5.0}


def test_a_loss_that_takes_no_three_scores_says_why(register: Callable) -> None:
    def refuse(logits, target):
        raise ValueError("needs\nfour classes")

    assert drawn(register("four", lambda: refuse)) == {"problem": "ValueError: needs"}
    nowhere = register("nowhere", lambda: lambda logits, target: logits.sum() * math.nan)
    assert drawn(nowhere) == {"problem": "it is not finite everywhere on the simplex"}


@pytest.mark.parametrize(("weight", "calls"), [(None, 1), ([1.0, 2.0, 4.0], 6)])
def test_the_loss_of_each_row_is_that_of_a_call_with_it_alone(weight: list[float] | None, calls: int) -> None:
    loss, asked = tr.create_loss("smooth_topk_svm", k=2, weight=weight), []
    loss.register_forward_pre_hook(lambda module, given: asked.append(len(given[0])))
    logits, target = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2, 0, 1])
    found = each_row(loss, logits, target)
    assert asked == [6 // calls] * calls
    alone = torch.stack([loss(logits[i : i + 1], target[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(found, alone)
    assert loss.reduction == "mean"
    with pytest.raises(ValueError, match="target"):
        each_row(loss, logits, target + 1)
    assert loss.reduction == "mean"


def test_every_registered_loss_is_drawn_by_default(register: Callable) -> None:
    register("someone_elses", lambda: lambda logits, target: logits.sum())
    wanted = landscape.configurations(Options(), [])
    assert {c["loss"] for c in wanted if not c["options"]} == set(tr.list_losses())
    assert "someone_elses" in tr.list_losses()
    assert len([c for c in wanted if c["options"]]) == len(EPSILONS) * (len(DRAWS) + 1)
    assert [c["loss"] for c in landscape.configurations(Options(losses=("ce",)), []) if not c["options"]] == ["ce"]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    wanted = landscape.configurations(Options(losses=("ce", HINGE, "db", NOISED)), [])
    return [
        Record("landscape", 1, c, landscape.run(c, None, lambda *_: None), 1.0, "2026-01-01T00:00:00", {})
        for c in ({**c, "divisions": 10} for c in wanted)
    ]


def test_the_tables_hold_what_was_computed(records: list[Record]) -> None:
    shape, noise, refused = landscape.report(records).tables
    assert [row[0] for row in shape.rows] == ["ce", HINGE, NOISED]
    values = records[0].result["values"]
    row = dict(zip(shape.columns, shape.rows[0], strict=True))
    assert (row["least"], row["greatest"]) == (min(values), max(values))
    assert row["in the middle"] == at(values, 10, (1 / 3, 1 / 3, 1 / 3))
    assert row["convex"] == "yes"
    assert dict(zip(shape.columns, shape.rows[1], strict=True))["convex"] == "no"
    assert refused.rows == (("db", "ValueError: Loss type 'db' requires multi-label targets."),)
    by_noise = {
        (c["options"]["epsilon"], c["options"]["num_samples"], c["replications"]): r.result["values"]
        for r in records
        if (c := r.configuration)["options"]
    }
    first = dict(zip(noise.columns, noise.rows[0], strict=True))
    mean = by_noise[0.1, 50, 100]
    assert first["spread, B = 5"] == pytest.approx(rms(by_noise[0.1, 5, 1], mean))
    assert first["from the hinge"] == pytest.approx(rms(mean, records[1].result["values"]))


def test_the_claims_follow_the_numbers(records: list[Record]) -> None:
    notes = {note.claim.split()[0] + str(note.beyond): note for note in landscape.report(records).notes}
    assert notes["TheFalse"].verdict == "agrees"
    assert notes["MoreFalse"].verdict == "agrees"
    assert notes["WithTrue"].verdict == "agrees"  # at eps = 3 the loss is 0 on the whole simplex
    plain = [record for record in records if record.configuration["loss"] == HINGE]
    flat = [replace(record, result={**record.result, "values": [1.0] * 66}) for record in plain]
    assert {note.verdict for note in landscape.report(flat).notes if "not convex" in note.claim} == {"differs"}


def test_the_figures_have_a_panel_for_every_loss_and_every_noise(records: list[Record]) -> None:
    losses, noises = (plots.svg(figure, name="x") for figure in landscape.report(records).figures)
    assert [name for name in ("ce", HINGE, NOISED) if f">{name}<" not in losses] == []
    low, high = min(records[0].result["values"]), max(records[0].result["values"])
    assert f"{low:.3g} to {high:.3g}" in losses
    assert [e for e in EPSILONS for B in DRAWS if f"eps = {e:g}, B = {B}<" not in noises] == []
    assert noises.count("0 to 0<") == 2  # at eps = 3: a flat loss is drawn, too


def test_a_report_of_nothing_is_a_report() -> None:
    assert landscape.report([]).tables == ()
