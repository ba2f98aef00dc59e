"""Sets in the graph against the numpy reference: ties, flat rows, one dominant class, limits of every kind."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.conformal.rows import families, model_rows
from topk_export.calibration.graph import add_sets, is_calibrated, score_model, set_model
from topk_export.verification.checks import hard_rows
from topk_export.verification.graph import FORBIDDEN_IN_HEAD
from topk_registry.conformal import SCORES, PredictionSets, Thresholds, create_score, probabilities
from topk_registry.conformal.scores import ranks

N, K = 24, 5
# thresholds that no score of the rows below comes near: scores of ties are multiples of simple fractions
CASES = {
    "lac": ({}, 0.9437),
    "aps": ({}, 0.9137),
    "raps": ({"penalty": 0.013, "k_reg": 2}, 0.9571),
    "saps": ({"weight": 0.11}, 0.7737),
    "topk": ({}, 4.5),
    "log_odds": ({"k": K}, 1.2345),
    "pas": ({"prior": tuple((np.arange(N) + 1) / 300)}, -0.61237),
    "tree": ({"parents": families(N), "nodes": 2}, -0.11237),
}


@pytest.fixture(scope="module")
def model(export):
    return onnx.load(str(export(N, k=K)))


def run(model, logits):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"logits": logits.astype(np.float32)}), strict=True))


def rows():
    return {"model": model_rows(40, N)[0].astype(np.float32), **hard_rows(N, K), **dominant()}


def dominant():
    row = np.zeros((2, N), np.float32)
    row[0, 7], row[1, 20], row[1, 3] = 60.0, 400.0, 390.0
    return {"dominant": row}


def assert_same_sets(model, sets, *, max_size=N):
    built = set_model(add_sets(model, sets, N, max_size=max_size))
    for name, logits in rows().items():
        out = run(built, logits)
        expected = sets(logits.astype(np.float64), marginals=out["marginals"])
        np.testing.assert_array_equal(out["set"], expected, err_msg=name)
        np.testing.assert_array_equal(out["set_size"], expected.sum(-1), err_msg=name)
        assert out["set_size"].dtype == np.int64
        if not sets.allow_empty:
            assert out["set_size"].min() >= 1


def test_every_score_is_tested_here():
    assert set(CASES) == set(SCORES)


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_one_threshold(model, name, allow_empty):
    options, threshold = CASES[name]
    assert_same_sets(model, PredictionSets(create_score(name, **options), Thresholds(threshold), 1.0, allow_empty))


@pytest.mark.parametrize("name", ["lac", "aps", "saps"])
def test_a_low_threshold_leaves_the_best_class_or_none(model, name):
    options, _ = CASES[name]
    for allow_empty in (False, True):
        sets = PredictionSets(create_score(name, **options), Thresholds(-0.25), 1.0, allow_empty)
        assert_same_sets(model, sets)


@pytest.mark.parametrize("name", CASES)
def test_a_threshold_for_each_class(model, name):
    options, threshold = CASES[name]
    limits = threshold + 0.0371 * np.sin(np.arange(N))
    limits[5] = math.inf  # no calibration sample: in every set
    score = create_score(name, **options)
    assert_same_sets(model, PredictionSets(score, Thresholds(limits)))
    built = set_model(add_sets(model, PredictionSets(score, Thresholds(limits)), N, max_size=8))
    assert run(built, rows()["far tail"])["set"][:, 5].all()


@pytest.mark.parametrize("name", ["lac", "aps", "topk"])
def test_ranks_limited_class_by_class(model, name):
    options, threshold = CASES[name]
    limit = 1 + np.arange(N) % 7
    score = create_score(name, **options)
    limits = threshold + 0.0371 * np.sin(np.arange(N))
    assert_same_sets(model, PredictionSets(score, Thresholds(limits, limit)), max_size=7)


@pytest.mark.parametrize("name", ["aps", "raps", "saps", "topk"])
def test_no_set_looks_beyond_its_limit(model, name):
    options, threshold = CASES[name] if name != "raps" else ({"penalty": 0.113, "k_reg": 1}, 0.9571)
    score = create_score(name, **options)
    size = score.largest_rank(threshold, N) if name != "aps" else 6
    assert size < N
    assert_same_sets(model, PredictionSets(score, Thresholds(threshold, size)), max_size=size)


@pytest.mark.parametrize("name", ["lac", "raps"])
def test_the_temperature_is_in_the_graph(model, name):
    options, threshold = CASES[name]
    hot = PredictionSets(create_score(name, **options), Thresholds(threshold), 2.5)
    assert_same_sets(model, hot)
    logits = rows()["model"]
    assert run(set_model(add_sets(model, hot, N, max_size=N)), logits)["set_size"].sum() > hot(logits / 0.2).sum()


@pytest.mark.parametrize("name", CASES)
def test_the_scores_are_those_of_the_reference_and_their_own_threshold_covers_them(model, name):
    options, _ = CASES[name]
    score = create_score(name, **options)
    logits, labels = model_rows(60, N, seed=2)
    logits = logits.astype(np.float32)
    out = run(score_model(model, score, temperature=1.3, max_size=N if score.ranked else None), logits)
    got = out["set_scores"]
    if score.ranked:
        assert (np.take_along_axis(ranks(logits), out["set_classes"], -1) == np.arange(1, N + 1)).all()
        got = np.take_along_axis(got, np.argsort(out["set_classes"], -1), -1)
    if name != "log_odds":  # which the graph keeps as marginals
        expected = score(probabilities(logits.astype(np.float64), 1.3))
        # 24 additions of numbers of this size in single precision
        np.testing.assert_allclose(got, expected, rtol=0, atol=24 * 1.2e-7 * np.abs(expected).max())
    own = got[np.arange(60), labels]
    for threshold in own[:8]:
        value = float(np.log(-1 / threshold - 1)) if name == "log_odds" else float(threshold)
        sets = PredictionSets(score, Thresholds(value), 1.3, allow_empty=True)
        inside = run(set_model(add_sets(model, sets, N, max_size=N)), logits)["set"]
        np.testing.assert_array_equal(inside[np.arange(60), labels], own <= threshold)


def test_batches_of_any_size_in_the_whole_model(model):
    sets = PredictionSets(create_score("raps", penalty=0.013, k_reg=2), Thresholds(0.957))
    built = add_sets(model, sets, N, max_size=N)
    onnx.checker.check_model(built, full_check=True)
    session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = [d if isinstance(d, int) else 5 for d in session.get_inputs()[0].shape]
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    whole = session.run(["logits", "set", "set_size"], {session.get_inputs()[0].name: x})
    for batch in (1, 2):
        part = session.run(["logits", "set", "set_size"], {session.get_inputs()[0].name: x[:batch]})
        np.testing.assert_array_equal(part[1], whole[1][:batch])
        assert part[2].shape == (batch,)


def test_standard_operators_only(model):
    for name, (options, threshold) in CASES.items():
        built = add_sets(model, PredictionSets(create_score(name, **options), Thresholds(threshold)), N, max_size=9)
        added = [node for node in built.graph.node if node.name.startswith("sets/")]
        assert added
        assert not {node.op_type for node in added} & (FORBIDDEN_IN_HEAD | {"NonZero", "Where"})
        assert {node.domain for node in added} == {""}


def test_a_second_calibration_replaces_the_first(model):
    first = add_sets(model, PredictionSets(create_score("lac"), Thresholds(0.9)), N, max_size=N)
    assert is_calibrated(first)
    assert not is_calibrated(model)
    again = PredictionSets(create_score("raps"), Thresholds(0.9))
    twice, once = (add_sets(start, again, N, max_size=9) for start in (first, model))
    assert len(twice.graph.node) == len(once.graph.node)
    assert [o.name for o in twice.graph.output] == [o.name for o in once.graph.output]
    assert len(twice.graph.initializer) == len(once.graph.initializer)


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_rows_with_nan_get_all_classes(model, name, allow_empty):
    options, threshold = CASES[name]
    sets = PredictionSets(
        create_score(name, **options), Thresholds(-0.6 if name == "tree" else threshold), 1.0, allow_empty
    )
    logits = model_rows(6, N)[0].astype(np.float32)
    usual = set_model(add_sets(model, sets, N, max_size=N // 2))
    before = run(usual, logits)
    logits[1, 3] = logits[3, :] = math.nan
    out = run(usual, logits)
    broken = np.array([False, True, False, True, False, False])
    assert np.isnan(out["marginals"][broken]).any(-1).all()
    np.testing.assert_array_equal(out["set"][broken], True)
    np.testing.assert_array_equal(out["set"][~broken], before["set"][~broken])
    np.testing.assert_array_equal(out["set_size"], out["set"].sum(-1))
    assert out["set_size"][~broken].min() < N
    wide = sets(logits.astype(np.float64), marginals=out["marginals"])
    np.testing.assert_array_equal(wide[broken], True)
    inside = sets(torch.from_numpy(logits).double())
    np.testing.assert_array_equal(inside[torch.from_numpy(broken)], True)
    assert not inside[torch.from_numpy(~broken)].all()
