"""Every score against its formula, class by class, in numpy and in torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.conformal.rows import HARD, model_rows
from topk_registry.conformal import (
    SCORES,
    PredictionSets,
    Thresholds,
    create_score,
    inputs_of,
    log_odds,
    probabilities,
)
from topk_registry.conformal.scores import ranks
from topk_registry.conformal.tuning import fit_softmax_temperature
from topk_registry.functional import topk_marginals

OPTIONS = {"lac": {}, "aps": {}, "raps": {"penalty": 0.07, "k_reg": 2}, "saps": {"weight": 0.3}, "topk": {}}
ROWS = {**HARD, "random": model_rows(6, 7)[0]}


def softmax(row):
    e = [np.exp(x - max(row)) for x in row]
    return [x / sum(e) for x in e]


def by_formula(name, p, y, u, penalty=0.0, k_reg=0, weight=0.0):
    """The issue's formulas, for one class y of one row of probabilities."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    r = order.index(y) + 1
    if name == "lac":
        return 1 - p[y]
    if name == "topk":
        return r - u
    if name == "saps":
        return u * p[order[0]] if r == 1 else p[order[0]] + (r - 1 - u) * weight
    return sum(p[i] for i in order[:r]) - u * p[y] + penalty * max(0, r - k_reg)


def test_every_score_has_a_formula_here():
    assert {*OPTIONS, "log_odds", "pas", "tree"} == set(SCORES)  # the tree's are in test_tree.py


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("u", [0.0, 0.4])
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_follow_their_formulas(name, u, rows):
    score = create_score(name, **OPTIONS[name])
    expected = [[by_formula(name, softmax(row), y, u, **OPTIONS[name]) for y in range(len(row))] for row in rows]
    got = score(probabilities(rows), u)
    # sums of at most seven terms of size one
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-15 + 2e-15 * (name == "topk"))
    labels = np.arange(len(rows)) % rows.shape[1]
    np.testing.assert_array_equal(score.of_labels(probabilities(rows), labels, u), got[np.arange(len(rows)), labels])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_and_numpy_agree(name, rows):
    score = create_score(name, **OPTIONS[name])
    u = np.linspace(0.1, 0.9, len(rows))[:, None]
    ours = score(probabilities(torch.from_numpy(rows)), torch.from_numpy(u))
    assert isinstance(ours, torch.Tensor)
    np.testing.assert_allclose(ours.numpy(), score(probabilities(rows), u), rtol=0, atol=4e-15)
    single = score(probabilities(torch.from_numpy(rows).float()))
    assert single.dtype == torch.float32
    seen = probabilities(rows) > 1e-30  # below, single precision knows no order
    np.testing.assert_allclose(single.numpy()[seen], score(probabilities(rows))[seen], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_single(dtype):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = probabilities(logits)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, logits.float().softmax(-1))


def test_ranks_break_ties_by_index():
    np.testing.assert_array_equal(ranks(np.array([[0.2, 0.5, 0.2, 0.1]])), [[2, 1, 3, 4]])
    np.testing.assert_array_equal(ranks(torch.zeros(1, 4)).numpy(), [[1, 2, 3, 4]])


@pytest.mark.parametrize("k", [1, 3])
def test_log_odds_of_tensors_and_of_marginals(k):
    logits = torch.from_numpy(model_rows(20, 12)[0])
    score = create_score("log-odds", k=k)
    pi = topk_marginals(logits, k)
    values = inputs_of(score, logits, temperature=1.0)
    np.testing.assert_allclose(values.numpy(), log_odds(pi.numpy()), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(score(values).numpy(), -values.numpy())
    with pytest.raises(TypeError, match="pass marginals"):
        inputs_of(score, logits.numpy())
    with pytest.raises(ValueError, match=r"marginals have a temperature already, got temperature=2\.0 besides"):
        inputs_of(score, logits, temperature=2.0, marginals=pi)


def test_log_odds_of_one_place_give_the_sets_of_lac():
    logits = torch.from_numpy(model_rows(50, 12)[0])
    level = 0.07
    lac = PredictionSets(create_score("lac"), Thresholds(1 - level))
    ours = PredictionSets(create_score("log_odds", k=1), Thresholds(float(np.log((1 - level) / level))))
    assert torch.equal(lac(logits), ours(logits))


def test_marginals_of_zero_and_one_have_infinite_log_odds():
    np.testing.assert_array_equal(log_odds(np.array([[0.0, 1.0, 0.5]], np.float32)), [[-np.inf, np.inf, 0.0]])


def test_pas_divides_by_the_prior():
    p = probabilities(model_rows(4, 3)[0])
    prior, weights = (0.7, 0.2, 0.1), (1.0, 2.0, 3.0)
    np.testing.assert_allclose(create_score("pas", prior=prior)(p), -p / np.array(prior), rtol=1e-15)
    weighted = create_score("pas", prior=prior, weights=weights)(p)
    np.testing.assert_allclose(weighted, -np.array(weights) * p / np.array(prior), rtol=1e-15)
    with pytest.raises(ValueError, match="the prior has 3 classes, the rows have 4"):
        create_score("pas", prior=prior)(np.full((1, 4), 0.25))


@pytest.mark.parametrize("name", OPTIONS)
def test_no_score_exceeds_its_bound(name):
    score = create_score(name, **OPTIONS[name])
    for rows in ROWS.values():
        assert score(probabilities(rows)).max() <= score.largest(rows.shape[1]) + 1e-12


@pytest.mark.parametrize("name", ["raps", "saps", "topk"])
def test_no_set_goes_beyond_the_largest_rank(name):
    score = create_score(name, **OPTIONS[name])
    logits = model_rows(200, 30)[0]
    for threshold in (0.5, 0.95, 1.0, 1.4, 3.0):
        sets = PredictionSets(score, Thresholds(threshold))(logits)
        assert sets.sum(-1).max() <= score.largest_rank(threshold, 30)
    assert score.largest_rank(-np.inf, 30) == 1
    assert score.largest_rank(np.inf, 30) == 30
    assert create_score("pas", prior=(0.5, 0.5)).largest_rank(-np.inf, 2) == 2  # its best class may have any rank


def test_an_empty_set_gets_its_best_class_unless_it_may_be_empty():
    logits = np.array([[0.0, 0.2, 0.1], [0.0, 0.0, 9.0]])
    thresholds = Thresholds(0.3)
    for name in ("lac", "aps"):
        sets = PredictionSets(create_score(name), thresholds)(logits)
        np.testing.assert_array_equal(sets[0], [False, True, False])
        empty = PredictionSets(create_score(name), thresholds, allow_empty=True)(logits)
        assert not empty[0].any()
    assert PredictionSets(create_score("aps"), thresholds)(np.zeros((1, 3))).tolist() == [[True, False, False]]


def test_empty_batches_and_strides():
    sets = PredictionSets(create_score("raps", penalty=0.01, k_reg=1), Thresholds(0.9))
    assert sets(np.zeros((0, 5))).shape == (0, 5)
    logits = model_rows(6, 8)[0]
    wide = np.repeat(logits, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(sets(wide), sets(logits))
    np.testing.assert_array_equal(sets(torch.from_numpy(logits.T.copy()).T).numpy(), sets(logits))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rasp", {}, "no score is called 'rasp'; there are lac, aps, raps, saps, topk, log_odds, pas"),
        ("raps", {"lam": 1}, "score raps takes penalty, k_reg, got lam"),
        ("raps", {"penalty": -1.0}, "penalty must be at least 0, got -1.0"),
        ("raps", {"k_reg": 1.5}, "k_reg must be an integer"),
        ("saps", {"weight": 0.0}, "weight must be above 0"),
        ("pas", {"prior": (0.5, 0.0)}, "prior must be positive"),
        ("pas", {"prior": (0.5, 0.5), "weights": (1.0,)}, "for each of 2 classes"),
    ],
)
def test_bad_options_are_told(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_score(name, **options)


def test_numpy_needs_no_torch():
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from topk_registry.conformal import calibrate\n"
        "rng = np.random.default_rng(0)\n"
        "logits, labels = rng.standard_normal((50, 4)), rng.integers(0, 4, 50)\n"
        "assert calibrate(logits, labels, alpha=0.2, score='raps')(logits).any(-1).all()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize(("value", "said"), [(0.0, "0.0"), (np.inf, "nan")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_temperature_needs_finite_logits_that_differ(value, said):
    message = f"logits must be finite and differ within rows, got a mean deviation of {said}"
    with pytest.raises(ValueError, match=message):
        fit_softmax_temperature(np.full((3, 4), value), np.zeros(3, dtype=np.int64))
