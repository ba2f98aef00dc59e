"""Scores of installed distributions: found by name, never in the place of ours, with nodes of their own."""

import pytest

from topk_export.calibration.check_nodes import check_score_nodes
from topk_export.calibration.score_nodes import NODES, nodes_of
from topk_export.commands.calibrate import _parser
from topk_export.errors import ExportError
from topk_registry import refresh_plugins, registry
from topk_registry.conformal import create_score, score_names
from topk_registry.conformal.scores import Lac, score_kind
from topk_registry.registry.errors import BrokenPluginError
from topk_registry.train.engine.sets import SetEvaluation
from topk_registry.train.errors import TrainError

SCORE = """
from topk_registry.conformal import Score
class Gap(Score):
    name = "acme_gap"
    def __call__(self, values, u=0.0):
        return values.max(-1, keepdims=True) - values if hasattr(values, "astype") else values.amax(-1, True) - values
    def largest(self, n):
        return 1.0
class Learned(Gap):
    name = "acme_learned"
    learned = ("prior",)
class Misnamed(Gap):
    name = "another"
"""
NODES_OF_IT = """
import numpy as np
from topk_export.calibration.score_nodes import ScoreNodes
class GapNodes(ScoreNodes):
    def of_classes(self, values, classes=None):
        best = self.add("ReduceMax", values, self.add.constant("along", [1], np.int64), keepdims=1)
        return self.add("Sub", best, values)
class WrongNodes(ScoreNodes):
    def of_classes(self, values, classes=None):
        return self.add("Neg", values)
def no_nodes(): ...
"""


@pytest.fixture
def acme(site, monkeypatch):
    site.module("acme_score", SCORE)
    site.module("acme_nodes", NODES_OF_IT)
    site.distribution(
        "acme-scores",
        {
            "acme_gap": "acme_score:Gap",
            "acme_learned": "acme_score:Learned",
            "acme_misnamed": "acme_score:Misnamed",
            "lac": "acme_score:Gap",
        },
        group="topk_registry.scores",
    )
    monkeypatch.setattr("topk_export.calibration.score_nodes.NODES", dict(NODES))
    refresh_plugins()
    return site


def nodes(site, value):
    site.distribution("acme-nodes", {"acme_gap": value}, group="topk_registry.score_nodes")
    refresh_plugins()


def test_its_name_is_known_without_an_import_and_ours_stay_ours(acme):
    assert "acme_gap" in score_names()
    assert score_names().count("lac") == 1
    assert registry.scores.info("acme_gap").status == "available"
    (action,) = (action for action in _parser()._actions if action.dest == "score")
    assert "acme-gap" in action.choices
    assert score_kind("lac") is Lac
    assert create_score("acme-gap").name == "acme_gap"
    assert create_score("acme-scores:acme-gap") == create_score("acme_gap")


def test_one_of_another_name_or_kind_is_broken(acme):
    with pytest.raises(BrokenPluginError, match="expected a subclass of Score whose name is 'acme_misnamed'"):
        create_score("acme_misnamed")
    with pytest.raises(ValueError, match=r"no score is called 'acme_gpa'; there are lac, .*acme_gap"):
        create_score("acme_gpa")


def test_one_that_learns_is_refused_where_nothing_is_learned(acme):
    with pytest.raises(TrainError, match="learns its options from labels"):
        SetEvaluation("acme_learned", 0.1, {}, seed=0)
    assert SetEvaluation("acme-gap", 0.1, {}, seed=0).score.name == "acme_gap"


def test_its_nodes_come_by_the_same_name(acme):
    with pytest.raises(ExportError, match=r"name it as an entry point 'acme_gap' of topk_registry\.score_nodes"):
        nodes_of(score_kind("acme_gap"))
    nodes(acme, "acme_nodes:GapNodes")
    check_score_nodes("acme_gap")


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ("acme_nodes:WrongNodes", AssertionError, r"expected WrongNodes.of_classes to give .*, as the score does"),
        ("acme_nodes:no_nodes", BrokenPluginError, "is no subclass of .*ScoreNodes"),
    ],
)
def test_wrong_nodes_are_told(acme, value, error, said):
    nodes(acme, value)
    with pytest.raises(error, match=said):
        check_score_nodes("acme_gap")


@pytest.mark.parametrize("name", ["lac", "aps", "raps", "saps", "topk", "log_odds"])
def test_our_nodes_pass(name):
    check_score_nodes(create_score("log_odds", k=3) if name == "log_odds" else name)
