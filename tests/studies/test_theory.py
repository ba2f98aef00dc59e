"""The theory study's numbers against closed forms, and its verdicts."""

import math
from itertools import cycle

import pytest
import torch

from topk_studies.engine.catalogue import load_study
from topk_studies.engine.study import Options, Record
from topk_studies.experiments import theory
from topk_studies.experiments.theory_findings import POSTERIORS, findings, verdict

pytestmark = pytest.mark.slow
STEPS = next(case for case in POSTERIORS if case["case"] == "even steps")


def run(check: str, **configuration: object) -> dict:
    return theory.run({"check": check, **configuration}, None, lambda share, words: None)


@pytest.mark.parametrize("case", POSTERIORS, ids=lambda case: case["case"])
def test_every_posterior_has_a_true_top_k(case):
    p = sorted(case["posterior"], reverse=True)
    assert math.isclose(sum(p), 1.0, rel_tol=1e-12)
    assert p[case["k"] - 1] > p[case["k"]]


@pytest.mark.parametrize("case", POSTERIORS, ids=lambda case: case["case"])
def test_cross_entropy_is_minimised_by_log_p(case):
    p, k = case["posterior"], case["k"]
    found = run("calibration", loss="ce", starts=2, **case)
    last, first = p[k - 1], p[k]
    middle = (last + first) / 2
    assert found["risk"] == pytest.approx(-sum(q * math.log(q) for q in p), rel=1e-12)
    assert found["ahead"] == pytest.approx(math.log(last / first), abs=1e-6)
    assert found["gap"] == pytest.approx(last * math.log(last / middle) + first * math.log(first / middle), rel=1e-6)
    assert verdict(found) == "ranked"


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("sigmoid_mse", "ranked"),  # its minimiser has sigmoid(s_y) = p_y
        ("sigmoid_mae", "tie"),  # linear in sigmoid(s_y): all classes below 1/2 go to minus infinity
        ("log_spherical_softmax", "wrong"),  # even in the scores: a minimum with a sign turned is as good
        ("topk_svm", "undecided"),  # it has kinks
        ("noised_topk", "it is random"),
        ("db", "cannot be asked"),  # timm's, for several labels a row
    ],
)
def test_verdicts_of_known_losses(loss, wanted):
    assert verdict(run("calibration", loss=loss, starts=3, **STEPS)) == wanted


@pytest.mark.parametrize(
    ("factors", "wanted"),
    [
        ([math.nan], {"problem": "it is NaN"}),
        ([math.nan, 1.0], {"problem": "it is random"}),
        ([1.0, math.nan], {"problem": "it is random"}),
    ],
)
def test_a_loss_is_random_where_its_answers_differ_and_not_where_all_are_nan(monkeypatch, factors, wanted):
    factor = cycle(factors)
    monkeypatch.setattr(theory.registered, "build", lambda *_, **__: lambda s, y: s[:, 0] * next(factor))
    assert run("calibration", loss="ce", starts=2, **STEPS) == wanted


def test_the_minimiser_of_the_topk_likelihood_has_the_posterior_as_marginals_scaled():
    """With sum_i pi_i = k, -sum_y p_y log pi_y is least at pi = k p, as long as no k p_y is above 1."""
    p = torch.tensor(STEPS["posterior"])
    found = run("calibration", loss="topk_nll", starts=2, **STEPS)
    assert found["risk"] == pytest.approx(-float((p * (2 * p).log()).sum()), rel=1e-6)


def test_gradients_are_counted():
    shape = {"B": 50, "n": 100, "k": 5, "share": 0.99}
    assert run("sparsity", loss="ce", **shape)["nonzero"] == 100
    hinge = run("sparsity", loss="topk_hinge", **shape)
    assert (hinge["nonzero"], hinge["most"]) == (2, 2)


@pytest.mark.parametrize("tau", [1.0, 0.01, 1e-8])
def test_the_smooth_svm_is_near_its_hinge(tau):
    found = run("limit", B=100, n=30, k=3, tau=tau)
    assert found["bound"] == pytest.approx(tau * math.log(math.comb(30, 3)))
    assert 0.0 < found["difference"] <= found["bound"] + 1e-12


def test_the_hinge_is_that_of_all_subsets():
    s, y, k = torch.randn(20, 6, dtype=torch.float64), torch.arange(20) % 6, 3
    subsets = torch.combinations(torch.arange(6), k)
    mean = s[:, subsets].mean(-1)  # [B, C(6, 3)]
    has = (subsets == y[:, None, None]).any(-1)
    wanted = (mean + (~has).double()).amax(-1) - mean.masked_fill(~has, -math.inf).amax(-1)
    assert torch.allclose(theory._hinge(s, y, k), wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("loss", ["log_spherical_softmax", "log_taylor_softmax"])
def test_the_ceiling_is_the_best_that_features_reach(loss):
    found = run("ceiling", loss=loss, n=7, d=1)
    torch.manual_seed(0)
    weight = torch.randn(7, 1, dtype=torch.float64)
    h = torch.linspace(-200.0, 200.0, 400_001, dtype=torch.float64)[:, None]
    o = h @ weight.T
    w = o.square() + 1.0 if loss == "log_spherical_softmax" else (o + 1.0).square() + 1.0
    best = float((w / w.sum(-1, keepdim=True)).amax(0).sum())
    assert found["sum"] <= 2.0 + 1e-12
    assert found["sum"] == pytest.approx(best, rel=1e-3)
    assert found["sum"] >= best - 1e-12
    assert found["reached"] == pytest.approx(found["sum"], rel=1e-6)


def test_the_bound_is_above_cross_entropy():
    found = run("bound", B=100, n=10, scale=3.0)
    assert 0.0 <= found["least"] < found["mean"] < found["greatest"]


def test_a_pass_over_some_losses_becomes_findings():
    study = load_study("theory")
    wanted = study.configurations(Options(losses=("ce", "sigmoid_mae", "noised_topk")), [])
    records = [Record("theory", 1, c, study.run(c, None, lambda *_: None), 0.0, "2026", {}) for c in wanted]
    report = study.report(records)
    assert [len(table.rows) for table in report.tables] == [3, 3, 18, 8, 6]
    assert {note.verdict for note in report.notes} == {"agrees"}
    wrong = [
        Record("theory", 1, r.configuration, {**r.result, "difference": 99.0, "least": -1.0, "sum": 99.0}, 0.0, "", {})
        if r.configuration["check"] in ("limit", "bound", "ceiling")
        else r
        for r in records
    ]
    assert [note.verdict for note in findings(wrong).notes].count("differs") == 3
    assert findings([]).notes == ()


def test_a_loss_that_ranks_wrongly_is_named_with_its_cases():
    loss = "log_spherical_softmax"
    configuration = {"check": "calibration", "loss": loss, **STEPS}
    record = Record("theory", 1, configuration, {"slope": 0.0, "gap": 1.0, "ahead": -1.0}, 0.0, "", {})
    (note,) = findings([record]).notes
    assert note.verdict == "differs"
    assert note.evidence == "On 0 of 1 posteriors; not on even steps (wrong)."
