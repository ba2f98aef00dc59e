"""Suspicious labels: against cleanlab, against the definition, and at ties and absent classes."""

import itertools

import numpy as np
import pytest

from topk_registry.analysis import class_thresholds, confident_joint, label_issues


def softmax(logits):
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def drawn(seed, rows=600, n=7, absent=()):
    """Scores of a fair model, of which a tenth of the labels are wrong."""
    rng = np.random.default_rng(seed)
    present = [c for c in range(n) if c not in absent]
    labels = rng.choice(present, rows)
    logits = rng.normal(size=(rows, n)) + 3 * np.eye(n)[labels]
    wrong = rng.random(rows) < 0.1
    labels[wrong] = rng.choice(present, wrong.sum())
    return logits, labels


@pytest.mark.parametrize("absent", [(), (0, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_at_one_answer_the_numbers_are_those_of_cleanlab(seed, absent):
    count = pytest.importorskip("cleanlab.count")
    filters, rank = pytest.importorskip("cleanlab.filter"), pytest.importorskip("cleanlab.rank")
    logits, labels = drawn(seed, absent=absent)
    logits[:20] = np.round(logits[:20])  # ties
    probabilities = softmax(logits)
    thresholds = class_thresholds(probabilities, labels)
    theirs = count.get_confident_thresholds(labels, probabilities)
    present = np.isin(np.arange(7), labels)
    np.testing.assert_allclose(thresholds[present], theirs[present], rtol=1e-12)
    assert np.isinf(thresholds[~present]).all()

    found = label_issues(logits, labels)
    np.testing.assert_allclose(found.thresholds, thresholds, rtol=1e-12)
    np.testing.assert_allclose(
        1 / (1 + np.exp(-found.log_odds)), rank.get_self_confidence_for_each_label(labels, probabilities), rtol=1e-9
    )
    # cleanlab takes the best class of all where several reach their threshold, the paper the best that does
    reached = probabilities >= thresholds - 1e-6
    best = probabilities.argmax(axis=1)
    same = (reached.sum(axis=1) < 2) | reached[np.arange(len(labels)), best]
    assert same.mean() > 0.95
    joint = confident_joint(probabilities[same], labels[same])
    of_all = class_thresholds(probabilities[same], labels[same])
    expected = count.compute_confident_joint(
        labels[same], probabilities[same], thresholds=np.minimum(of_all, 2), calibrate=False
    )
    np.testing.assert_array_equal(np.maximum(joint, np.eye(7, dtype=int)), expected)  # which has no 0 on its diagonal
    theirs = filters.find_label_issues(labels, probabilities, filter_by="confident_learning", n_jobs=1)
    np.testing.assert_array_equal(found.suspicious[same], theirs[same])
    ranked = filters.find_label_issues(
        labels,
        probabilities,
        filter_by="confident_learning",
        return_indices_ranked_by="self_confidence",
        n_jobs=1,
    )
    both = [i for i in found.found.tolist() if same[i]]
    assert both == [i for i in ranked.tolist() if same[i]]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_log_odds_are_those_of_the_sum_over_all_sets(k):
    logits, labels = drawn(0, rows=6, n=5)
    found = label_issues(logits, labels, k=k)
    for row, label, log_odds in zip(logits, labels, found.log_odds, strict=True):
        weight = {chosen: np.exp(row[list(chosen)].sum()) for chosen in itertools.combinations(range(5), k)}
        inside = sum(value for chosen, value in weight.items() if label in chosen)
        assert log_odds == pytest.approx(np.log(inside / (sum(weight.values()) - inside)), rel=1e-9)


def test_a_label_among_the_k_best_is_not_suspicious():
    logits, labels = drawn(1)
    one, three = label_issues(logits, labels), label_issues(logits, labels, k=3)
    assert one.suspicious.sum() > three.suspicious.sum() > 0
    assert not (three.suspicious & ~one.suspicious).any()
    assert (three.rank[three.suspicious] > 3).all()
    np.testing.assert_array_equal(one.rank, three.rank)
    np.testing.assert_array_equal(one.rank == 1, logits.argmax(axis=1) == labels)


def test_the_order_has_suspicious_labels_first_and_the_least_likely_before_the_others():
    found = label_issues(*drawn(2))
    count = int(found.suspicious.sum())
    assert found.suspicious[found.order[:count]].all()
    for part in (found.order[:count], found.order[count:]):
        assert (np.diff(found.log_odds[part]) >= 0).all()
    assert sorted(found.order.tolist()) == list(range(600))
    assert found.found.tolist() == found.order[:count].tolist()


def test_a_suggestion_is_another_class():
    logits, labels = drawn(3)
    found = label_issues(logits, labels)
    assert (found.suggested != labels).all()
    others = logits.copy()
    others[np.arange(600), labels] = -np.inf
    plain = ~found.suspicious
    agree = found.suggested[plain] == others[plain].argmax(axis=1)
    assert agree.mean() > 0.9  # elsewhere a confident class comes before a likelier one that is not


def test_equal_scores_leave_the_label_among_the_best():
    found = label_issues(np.zeros((4, 3)), np.array([0, 1, 2, 2]))
    assert found.rank.tolist() == [1, 1, 1, 1]
    assert not found.suspicious.any()


def test_the_temperature_divides_the_scores():
    logits, labels = drawn(4)
    np.testing.assert_allclose(
        label_issues(logits, labels, k=2, temperature=2.0).log_odds, label_issues(logits / 2, labels, k=2).log_odds
    )


def test_scores_in_single_precision_and_many_rows_are_worked_on_in_blocks(monkeypatch):
    logits, labels = drawn(5)
    whole = label_issues(logits.astype(np.float32), labels, k=2)
    monkeypatch.setattr("topk_registry.analysis.measures.ROWS", 50)
    parts = label_issues(logits.astype(np.float32), labels, k=2)
    for name in ("rank", "suggested", "suspicious"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
    np.testing.assert_allclose(whole.log_odds, parts.log_odds, rtol=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (np.zeros((3, 4)), [0, 1], {}, "expected scores"),
        (np.zeros((2, 4)), [0.0, 1.0], {}, "whole numbers"),
        (np.zeros((2, 4)), [0, 4], {}, "labels must be from 0 to 3, got 0 to 4"),
        (np.zeros((2, 4)), [0, 1], {"k": 4}, "k must be"),
        (np.zeros((2, 4)), [0, 1], {"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(logits, labels, options, message):
    with pytest.raises(ValueError, match=message):
        label_issues(logits, np.asarray(labels), **options)
