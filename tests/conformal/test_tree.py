"""Sets along a tree against brute force, and their promise and that of groups by repetition."""

import math

import numpy as np
import pytest
import torch

from tests.conformal.rows import HARD, families, model_rows
from topk_registry.conformal import (
    PredictionSets,
    Thresholds,
    calibrate,
    coverage_law,
    create_score,
    per_class,
    per_group,
    per_node,
    probabilities,
)
from topk_registry.conformal.coverage import beta_cdf
from topk_registry.conformal.thresholds import fewest, marginal

TREES = {
    "families": families(7),
    "flat": (7,) * 7 + (-1,),
    "deep": (7, 7, 8, 9, 10, 11, 12, 8, 9, 10, 11, 12, -1),
    "single children": (7, 7, 8, 9, 9, 11, 11, 8, 10, 10, 12, 12, 13, -1),
}
ROWS = {name: rows for name, rows in HARD.items() if rows.shape[1] == 5} | {"random": model_rows(12, 7)[0]}


def members_of(parents, n):
    found = [{y} if y < n else set() for y in range(len(parents))]
    for node, parent in enumerate(parents[:-1]):
        found[parent] |= found[node]
    return found


def family(p, parents, m):
    """The nested sets of a row, as the docstring says them: pairs of classes and nodes."""
    n = len(p)
    members = members_of(parents, n)
    best = sorted(range(n), key=lambda y: (-p[y], y))[: min(m, n)]
    sets = [set(best[: i + 1]) for i in range(len(best))]
    for c in range(2, n + 1):
        around = [max((s for s in members if b in s and len(s) <= c), key=len) for b in best]
        sets.append(set().union(*around))
    return sets


def by_hand(p, parents, m):
    """The score of each class: minus the mass outside the last set that is without it."""
    sets = [set(), *family(p, parents, m)]
    scores = []
    for y in range(len(p)):
        last = max(i for i, s in enumerate(sets) if y not in s)
        scores.append(-sum(p[i] for i in range(len(p)) if i not in sets[last]))
    return scores


def fitting(parents, n):
    return parents if len(members_of(parents, n)[-1]) == n else families(n)


@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("tree", TREES)
def test_scores_are_those_of_the_definition(tree, rows, m):
    n = rows.shape[1]
    parents = TREES[tree] if n == 7 else families(n)
    p, score = probabilities(rows), create_score("tree", parents=parents, nodes=m)
    expected = [by_hand(row, parents, m) for row in p]
    # sums of at most seven probabilities
    np.testing.assert_allclose(score(p), expected, rtol=0, atol=2e-15)
    np.testing.assert_allclose(score(torch.from_numpy(p)).numpy(), score(p), rtol=0, atol=2e-15)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("tree", TREES)
def test_every_threshold_gives_a_set_of_the_family_and_its_nodes(tree, m):
    parents = TREES[tree]
    p = probabilities(np.concatenate((model_rows(10, 7)[0], np.zeros((1, 7)), np.eye(7)[:2] * 3)))
    score = create_score("tree", parents=parents, nodes=m)
    members = members_of(parents, 7)
    for threshold in np.unique(np.append(score(p), -0.3)):
        inside = PredictionSets(score, Thresholds(threshold)).of_inputs(p)
        nodes = score.nodes_of(p, inside)
        assert nodes.shape == (len(p), m)
        for row, chosen, own in zip(p, inside, nodes, strict=True):
            found = set(np.flatnonzero(chosen))
            assert found in family(row, parents, m)
            told = [members[i] for i in own if i >= 0]
            assert set().union(*told) == found
            assert sum(map(len, told)) == len(found)  # no node twice, none within another
            if m == 1:  # the first node around the best class with less than t outside
                around = [s for s in family(row, parents, 1) if sum(row) - sum(row[list(s)]) < -threshold]
                if around and min(abs(row[list(s)].sum() - 1 - threshold) for s in family(row, parents, 1)) > 1e-12:
                    assert found == min(around, key=len)


def test_one_class_and_a_chain_have_one_set():
    for parents in ((-1,), (1, 2, -1)):
        score = create_score("tree", parents=parents, nodes=2)
        assert score(np.ones((2, 1))).tolist() == [[-1.0], [-1.0]]
        assert score.nodes_of(np.ones((2, 1)), np.ones((2, 1), bool)).tolist() == [[0], [0]]


def test_rows_that_are_sure_keep_their_order():
    """Mass outside of 1e-20 and of 1e-30 are different scores: told from inside both were 1."""
    row = np.log(np.array([[1.0, 1e-20, 1e-20, 1e-30, 1e-30]]))
    score = create_score("tree", parents=(5, 5, 5, 6, 6, 7, 7, -1))
    np.testing.assert_allclose(
        score(probabilities(row))[0], [-1, -2e-20 - 2e-30, -2e-20 - 2e-30, -2e-30, -2e-30], rtol=1e-12
    )


@pytest.mark.parametrize("parents", [(2, 2), (1, -1, -1), (0, -1), (3, 3, -1, 2), (2, 2, 4, 4, -1)])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(ValueError, match="parents must be larger than their nodes"):
        create_score("tree", parents=parents)


def test_rows_of_other_classes_are_refused():
    with pytest.raises(ValueError, match="the tree has 7 classes, the rows have 5"):
        create_score("tree", parents=TREES["families"])(np.full((1, 5), 0.2))
    with pytest.raises(ValueError, match="nodes must be an integer from 1, got 0"):
        create_score("tree", nodes=0)


N, SPLITS, POOL, ALPHA = 104, 1500, 20_000, 0.1
CRITICAL = math.sqrt(-math.log(0.001 / 2) / 2 / SPLITS)  # Kolmogorov-Smirnov at level 0.001


@pytest.mark.parametrize("m", [1, 3])
def test_coverage_over_many_calibrations_follows_its_law(m):
    """With scores that are never equal: not below 1 - alpha, and not above 1 - alpha + 1 / (N + 1)."""
    logits, labels = model_rows(POOL, 12)
    score = create_score("tree", parents=families(12), nodes=m)
    own = score.of_labels(probabilities(logits), labels, np.random.default_rng(1).random((POOL, 1)))
    assert len(np.unique(own)) == POOL
    rng, population = np.random.default_rng(2), np.sort(own)
    drawn = [marginal(rng.choice(own, N), ALPHA) for _ in range(SPLITS)]
    found = np.sort(np.searchsorted(population, drawn, side="right") / POOL)
    a, b = coverage_law(N, ALPHA)
    law, i = np.array([beta_cdf(x, a, b) for x in found]), np.arange(SPLITS)
    assert max((law - i / SPLITS).max(), ((i + 1) / SPLITS - law).max()) < CRITICAL
    error = 3.3 * math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)) / SPLITS)
    assert 1 - ALPHA - error <= found.mean() <= 1 - ALPHA + 1 / (N + 1) + error


def test_hits_of_finite_splits_follow_the_beta_binomial_law():
    """Calibration and test drawn without replacement: exact for ties in neither, and only more hits with ties."""
    count, tested = 39, 60
    logits, labels = model_rows(4000, 12, seed=5)
    score = create_score("tree", parents=families(12))
    p, rng = probabilities(logits), np.random.default_rng(3)
    smooth, plain = (score.of_labels(p, labels, u) for u in (rng.random((4000, 1)), 0.0))
    a, b = coverage_law(count, ALPHA)
    hits = {"smooth": [], "plain": []}
    for _ in range(SPLITS):
        order = rng.permutation(4000)[: count + tested]
        for name, own in (("smooth", smooth), ("plain", plain)):
            limit = marginal(own[order[:count]], ALPHA)
            hits[name].append((own[order[count:]] <= limit).sum())
    mean, share = tested * a / (a + b), a / (a + b)
    spread = math.sqrt(tested * share * (1 - share) * (a + b + tested) / (a + b + 1))
    assert abs(np.mean(hits["smooth"]) - mean) < 3.3 * spread / math.sqrt(SPLITS)
    assert np.std(hits["smooth"]) == pytest.approx(spread, rel=0.08)  # 3.3 standard errors of about 1 / sqrt(2 SPLITS)
    assert np.mean(hits["plain"]) >= mean - 3.3 * spread / math.sqrt(SPLITS)


def grouped(count, seed):
    """Scores whose law differs from group to group, and the groups."""
    rng = np.random.default_rng(seed)
    groups = rng.choice(3, count, p=(0.6, 0.3, 0.1))
    return rng.standard_normal(count) * (1 + groups) + groups, groups


def test_coverage_holds_within_every_group_by_repetition():
    found, common = np.zeros((SPLITS, 3)), np.zeros((SPLITS, 3))
    law = []
    for split in range(SPLITS):
        scores, groups = grouped(400, split)
        limits = per_group(scores, groups, ("a", "b", "c"), ALPHA)
        exact = [0.5 * (1 + math.erf((t - g) / (1 + g) / math.sqrt(2))) for g, t in enumerate(limits.scores)]
        found[split] = exact
        one = marginal(scores, ALPHA)
        common[split] = [0.5 * (1 + math.erf((one - g) / (1 + g) / math.sqrt(2))) for g in range(3)]
        law.append([len(scores[groups == g]) for g in range(3)])
    for g in range(3):
        # given the sizes of the groups, coverage has the mean ceil((N + 1)(1 - alpha)) / (N + 1)
        wanted = np.mean([math.ceil((size + 1) * 9 / 10) / (size + 1) for size in np.array(law)[:, g]])
        error = 3.3 * found[:, g].std() / math.sqrt(SPLITS)
        assert abs(found[:, g].mean() - wanted) < error
        assert found[:, g].mean() >= 1 - ALPHA - error
    assert common.mean(0)[2] < 1 - ALPHA - 0.05  # these tests see one threshold for all


def test_groups_have_thresholds_of_their_own_and_the_largest_for_no_group():
    scores, groups = grouped(300, 1)
    limits = per_group(scores, groups, ("a", "b", "c", "never"), ALPHA)
    np.testing.assert_array_equal(limits.scores[:3], [marginal(scores[groups == g], ALPHA) for g in range(3)])
    assert limits.scores[3] == math.inf
    assert limits.of_groups[-1] == math.inf
    assert limits.number_of("b") == 1
    with pytest.raises(ValueError, match="no threshold is of group 'd'; there are a, b, c, never"):
        limits.number_of("d")
    with pytest.raises(ValueError, match="the data has label 4"):
        per_group(scores, groups + 2, ("a", "b", "c"), ALPHA)


@pytest.mark.parametrize("name", ["lac", "aps", "tree"])
def test_sets_take_the_threshold_of_their_group(name):
    logits, labels = model_rows(300, 9)
    options = {"parents": families(9)} if name == "tree" else {}
    one = calibrate(logits, labels, score=name, **options)
    low, high = float(one.thresholds.scores) - 0.05, float(one.thresholds.scores)
    sets = PredictionSets(one.score, Thresholds(np.array([low, high, math.inf]), 8, ("a", "b", "c")))
    numbers = np.arange(300) % 4 - 1
    found = sets(logits, groups=numbers)
    for g, limit in enumerate([low, high]):
        expected = PredictionSets(one.score, Thresholds(limit, 8))(logits)
        np.testing.assert_array_equal(found[numbers == g], expected[numbers == g])
    assert found[numbers == 2].all()
    assert found[numbers == -1].all()  # not told: the largest threshold
    np.testing.assert_array_equal(sets(torch.from_numpy(logits), groups=torch.from_numpy(numbers)).numpy(), found)
    for wrong in (np.full(300, 3), np.full(300, -2), np.zeros(299, int)):
        with pytest.raises(ValueError, match="expected the number of a group, 0 to 2 or -1, for each of 300 rows"):
            sets(logits, groups=wrong)
    with pytest.raises(ValueError, match="these sets have no thresholds by group"):
        one(logits, groups=numbers)


def test_rare_classes_take_the_threshold_of_the_node_around_them():
    rng = np.random.default_rng(0)
    counts = {0: 30, 1: 3, 2: 12, 3: 4, 4: 2, 5: 0, 6: 0}  # parents: {0, 1} 7, {2, 3} 8, {4, 5, 6} 9, {7, 8} 10
    labels = np.repeat(list(counts), list(counts.values()))
    scores = rng.standard_normal(len(labels)) + labels
    parents = (7, 7, 8, 8, 9, 9, 9, 10, 10, 11, 11, -1)
    found = per_node(scores, labels, 7, ALPHA, parents=parents)
    assert fewest(ALPHA) == 9
    own = per_class(scores, labels, 7, ALPHA)
    np.testing.assert_array_equal(found[[0, 2]], own[[0, 2]])
    assert found[1] == marginal(scores[labels <= 1], ALPHA)
    assert found[3] == marginal(scores[(labels == 2) | (labels == 3)], ALPHA)
    for y in (4, 5, 6):  # two samples in their node: the root's
        assert found[y] == marginal(scores, ALPHA)
    assert np.isposinf(own[[1, 3, 4, 5, 6]]).all()
    few = per_node(scores[:5], labels[:5], 7, ALPHA, parents=parents)
    assert np.isposinf(few).all()
