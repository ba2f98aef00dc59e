"""The kit of scores: ours pass, and each check finds its fault."""

from dataclasses import dataclass

import pytest

from topk_registry.conformal import SCORES, Score
from topk_registry.conformal.scores import Lac, Rank
from topk_registry.testing import ChecksFailedError, check_score
from topk_registry.testing.scores import CALIBRATION, CHECKS, CLASSES

OPTIONS = {"raps": {"penalty": 0.05, "k_reg": 1}, "pas": {"prior": (1 / CLASSES,) * CLASSES}}


@pytest.mark.parametrize("name", SCORES)
def test_ours_pass(name):
    check_score(name, options=OPTIONS.get(name))


class Nameless(Lac):
    name = ""


@dataclass(frozen=True)
class HoldsATensor(Lac):
    scale: object = object()


class ScoresTheLabelOnly(Lac):
    def __call__(self, values, u=0.0):
        return super().__call__(values, u)[:, :1]


class GivesNan(Lac):
    def __call__(self, values, u=0.0):
        return (values - values) / (values - values)


class TakesTensorsAlone(Lac):
    def __call__(self, values, u=0.0):
        return 1 - values.clone()


class LooksAtTheBatch(Lac):
    def __call__(self, values, u=0.0):
        return super().__call__(values, u) - values.max()


class GivesLabelsAnother(Lac):
    def of_labels(self, values, labels, u=0.0):
        return super().of_labels(values, labels, u) + 1


class ExceedsItsBound(Lac):
    def largest(self, n):
        return 0.5


class BoundsTooFew(Rank):
    def _largest_rank(self, threshold, n):
        return 1


class FallsWithTheRank(Lac):
    ranked = True

    def __call__(self, values, u=0.0):
        return values


class MissesLabels(Lac):
    def __call__(self, values, u=0.0):
        return super().__call__(values, u) + (len(values) > CALIBRATION)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Nameless, "has_a_name_and_plain_options"),
        (HoldsATensor, "has_a_name_and_plain_options"),
        (ScoresTheLabelOnly, "scores_every_class"),
        (GivesNan, "scores_every_class"),
        (TakesTensorsAlone, "takes_arrays_as_tensors"),
        (LooksAtTheBatch, "looks_at_one_row_at_a_time"),
        (GivesLabelsAnother, "gives_labels_their_own_score"),
        (ExceedsItsBound, "stays_below_its_bound"),
        (BoundsTooFew, "bounds_the_rank_that_it_says"),
        (FallsWithTheRank, "bounds_the_rank_that_it_says"),
        (MissesLabels, "covers_as_promised"),
        (Score, "scores_every_class"),
    ],
)
def test_a_fault_is_found_by_its_check(kind, check):
    with pytest.raises(ChecksFailedError) as caught:
        check_score(kind)
    assert check in {result.name for result in caught.value.failed}
    assert check in {one.__name__ for one in CHECKS}
