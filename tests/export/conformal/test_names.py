"""Names of scores and rules are in one place each, and a score that a graph does not know is refused."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.conformal.rows import score_of
from topk_export.calibration.graph import add_sets, score_model
from topk_export.calibration.plan import Plan
from topk_export.calibration.run import calibrate_file
from topk_export.calibration.score_nodes import NODES, LacNodes, nodes_for, nodes_of
from topk_export.commands.calibrate import _parser
from topk_export.errors import ExportError
from topk_export.samples import Samples
from topk_registry.conformal import RULES, SCORES, PredictionSets, Score, Thresholds, create_score, register_score
from topk_registry.conformal.rules import Rule
from topk_registry.conformal.scores import Aps, Lac, spelled
from topk_registry.conformal.tuning import CHOICES
from topk_registry.train.config.validate_flags import create_parser

PAGE = (Path(__file__).parents[3] / "docs/sets.md").read_text(encoding="utf-8")


@pytest.fixture
def numpy_only(monkeypatch):
    """A score that someone wrote for arrays, a kind of APS, and forgot in the graph."""

    @dataclasses.dataclass(frozen=True)
    class Squared(Aps):
        name = "squared"

        def ordered(self, p, u):
            return super().ordered(p, u) ** 2

    monkeypatch.setitem(SCORES, "squared", Squared)
    assert register_score(Squared) is Squared
    return Squared


def test_every_score_has_nodes_of_its_own():
    assert set(NODES) == set(SCORES.values())
    assert len(set(NODES.values())) == len(NODES)
    assert set(CHOICES) <= set(SCORES.values())


def test_a_score_without_nodes_is_refused_and_named(numpy_only, export):
    message = r"score squared \(.*Squared\) has no nodes, .* lac, .*register a class of .* @nodes_for\(Squared\)"
    model, score = onnx.load(str(export(24, k=5))), create_score("squared")
    with pytest.raises(ExportError, match=message):
        nodes_of(numpy_only)
    with pytest.raises(ExportError, match=message):
        add_sets(model, PredictionSets(score, Thresholds(0.9)), 24, max_size=24)
    with pytest.raises(ExportError, match=message):
        score_model(model, score, temperature=1.0, max_size=24)


def test_calibration_refuses_it_before_any_image_is_read(numpy_only, colours_file, tmp_path):
    class Unread:
        def __getitem__(self, i):
            raise AssertionError("an image was read")

    samples = Samples("none", Unread(), np.arange(120) % 12)
    with pytest.raises(ExportError, match=r"score squared .* has no nodes"):
        calibrate_file(colours_file, tmp_path / "out.onnx", samples, Plan("squared"), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_taken_once(numpy_only):
    with pytest.raises(ValueError, match=r"score 'lac' is topk_registry\.conformal\.scores\.Lac already"):
        register_score(type("Mine", (Score,), {"name": "lac"}))
    with pytest.raises(ValueError, match="score lac has the nodes LacNodes already"):
        nodes_for(Lac)(LacNodes)
    with pytest.raises(ValueError, match="has its options already, got penalty besides"):
        create_score(score_of("raps", 10), penalty=2.0)


def test_commands_read_the_names(numpy_only, monkeypatch):
    monkeypatch.setitem(RULES, "new_rule", Rule(lambda samples, alpha: Thresholds(0.5), "nothing"))
    actions = {action.dest: action for action in _parser()._actions}
    assert tuple(actions["score"].choices) == spelled(SCORES)
    assert "squared" in actions["score"].choices
    assert set(actions["rule"].choices) == set(spelled(RULES)) - {"average-size"}
    assert "new-rule" in actions["rule"].choices


def test_the_help_of_validation_names_the_scores_that_need_no_labels():
    (action,) = (action for action in create_parser()._actions if action.dest == "sets")
    named = re.split(", | or ", action.help.partition(": ")[2].partition("; with --task")[0])
    assert named == list(spelled(name for name, kind in SCORES.items() if not kind.learned))
    assert len(named) == len(SCORES) - 1


def test_the_page_has_a_row_for_each():
    scores = PAGE.partition("| `--score` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", scores, re.M) == list(spelled(SCORES))
    rules = PAGE.partition("| `--rule` |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| `(?:--)?([\w-]+)(?: K)?` \|", rules, re.M)
    assert found == list(spelled(RULES))


def test_plans_know_what_is_chosen_by_data():
    assert {name for name in SCORES if Plan(name).tunes} == {"raps", "saps", "pas"}
    assert not Plan("raps", options={"penalty": 0.1}).tunes
    assert Plan("lac", temperature=None).tunes
    assert Plan("log-odds").tunes is False
