"""The same thresholds and sets as TorchCP and MAPIE, on the same scores."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.conformal.rows import model_rows
from topk_registry.conformal import PredictionSets, calibrate

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'temperature' parameter is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The value of quantile exceeds 1:UserWarning"),
]
ALPHAS = (0.05, 0.1, 0.3)


@pytest.fixture(scope="module")
def torchcp():
    """TorchCP's scores and predictors, without the packages around them, which import optional dependencies."""
    spec = importlib.util.find_spec("torchcp")
    if spec is None or spec.origin is None:
        pytest.skip("torchcp is not installed")
    root = Path(spec.origin).parent
    added = []
    for name in ("torchcp", "torchcp.classification"):
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module
            added.append(name)
    try:
        yield (
            importlib.import_module("torchcp.classification.score"),
            importlib.import_module("torchcp.classification.predictor"),
        )
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchcp"]:
            del sys.modules[name]


SHARED = {
    "lac": ({}, "LAC", {}),
    "aps": ({}, "APS", {"randomized": False}),
    "raps": ({"penalty": 0.02, "k_reg": 2}, "RAPS", {"randomized": False, "penalty": 0.02, "kreg": 2}),
    "saps": ({"weight": 0.2}, "SAPS", {"randomized": False, "weight": 0.2}),
    "topk": ({}, "TOPK", {"randomized": False}),
}


def held_out(count=700, n=12):
    logits, labels = model_rows(2 * count, n, seed=4)
    logits, labels = torch.from_numpy(logits), torch.from_numpy(labels)
    return logits[:count], labels[:count], logits[count:]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.slow
def test_torchcp_split(torchcp, name, alpha):
    scores, predictors = torchcp
    options, theirs, their_options = SHARED[name]
    logits, labels, new = held_out()
    ours = calibrate(logits, labels, alpha=alpha, score=name, allow_empty=True, **options)
    peer = predictors.SplitPredictor(getattr(scores, theirs)(**their_options), device=torch.device("cpu"))
    peer.calculate_threshold(logits, labels, alpha)
    assert ours.thresholds.scores == pytest.approx(float(peer.q_hat), rel=1e-7)  # they round penalties to single
    # a little above the threshold the last digits of the scores do not matter
    given = PredictionSets(ours.score, type(ours.thresholds)(float(peer.q_hat) + 5e-7), allow_empty=True)
    assert torch.equal(given(new), peer.predict_with_logits(new, torch.tensor(float(peer.q_hat) + 5e-7)).bool())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_torchcp_class_by_class(torchcp, alpha):
    scores, predictors = torchcp
    logits, labels, new = held_out()
    labels[labels == 3] = 0
    ours = calibrate(logits, labels, alpha=alpha, rule="per_class", allow_empty=True)
    peer = predictors.ClassConditionalPredictor(scores.LAC(), device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="number of scores is 0"):
        peer.calculate_threshold(logits, labels, alpha)
    np.testing.assert_allclose(ours.thresholds.scores, peer.q_hat.numpy(), rtol=1e-6)  # they keep single precision
    assert torch.isinf(peer.q_hat[3])
    assert torch.equal(ours(new), peer.predict_with_logits(new, torch.from_numpy(ours.thresholds.scores)).bool())


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_torchcp_rc3p(torchcp, alpha):
    scores, predictors = torchcp
    logits, labels, new = held_out()
    ours = calibrate(logits, labels, alpha=alpha, score="aps", rule="rc3p", allow_empty=True)
    peer = predictors.RC3PPredictor(scores.APS(randomized=False), device=torch.device("cpu"))
    peer.num_classes = logits.shape[1]
    peer.calculate_threshold(logits, labels, alpha)
    np.testing.assert_array_equal(ours.thresholds.max_rank, peer.class_rank_limits.numpy())
    np.testing.assert_allclose(ours.thresholds.scores, peer.class_thresholds.numpy(), rtol=1e-6)
    peer.class_thresholds = torch.from_numpy(ours.thresholds.scores) + 1e-12
    given = type(ours.thresholds)(ours.thresholds.scores + 1e-12, ours.thresholds.max_rank)
    sets = PredictionSets(ours.score, given, allow_empty=True)
    assert np.bincount(labels).min() >= 9  # classes with fewer samples are in every set of ours
    assert torch.equal(sets(new), peer.predict_with_logits(new).bool())


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ["lac", "topk"])
def test_mapie_split(name, alpha):
    mapie = pytest.importorskip("mapie.classification")
    base = pytest.importorskip("sklearn.base")

    class Fixed(base.ClassifierMixin, base.BaseEstimator):
        """An estimator that is fitted and whose probabilities are its inputs."""

        def fit(self, X, y):
            self.classes_ = np.arange(X.shape[1])
            self.fitted_ = True
            return self

        def predict_proba(self, X):
            return X

        def predict(self, X):
            return X.argmax(-1)

    logits, labels, new = held_out()
    p, p_new = logits.softmax(-1).numpy(), new.softmax(-1).numpy()
    estimator = Fixed().fit(p, labels.numpy())
    peer = mapie.SplitConformalClassifier(
        estimator=estimator, confidence_level=1 - alpha, conformity_score={"topk": "top_k"}.get(name, name), prefit=True
    )
    peer.conformalize(p, labels.numpy())
    _, sets = peer.predict_set(p_new)
    ours = calibrate(logits, labels, alpha=alpha, score=name, allow_empty=True)
    their = float(peer._mapie_classifier.quantiles_[0]) + (name == "topk")  # they count ranks from 0
    assert ours.thresholds.scores == pytest.approx(their, rel=1e-12)
    np.testing.assert_array_equal(sets[:, :, 0], ours(new).numpy())
