"""A spherical layer is exported with its link: the file's marginals are those of the probabilities that it learned."""

import numpy as np
import pytest
import torch
from torch import nn

import topk_registry as tr
from tests.export.conftest import DATA
from topk_export import Predictor, export_onnx
from topk_export.verification import reference
from topk_registry import SphericalLinear

N, K = 40, 5


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "options"), [("log_taylor_softmax", {}), ("log_spherical_softmax", {"epsilon": 0.3})])
def test_marginals_are_those_of_the_link(loss, options, tmp_path):
    torch.manual_seed(0)
    layer = SphericalLinear(6, N, True, loss=loss, loss_options=options)
    with torch.no_grad():
        layer.factors.V.mul_(8)  # scores of several units, of both signs
        layer.factors.fold()
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    path = export_onnx(nn.Sequential(backbone, layer.to_classifier()), tmp_path, k=K, data_config=DATA)
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    out = Predictor(path, device="cpu", threads=1).run(x)

    with torch.no_grad():
        scores = layer.to_linear().double()(backbone(torch.from_numpy(x)).double())
    # the registered loss of class c is minus the logarithm of its probability
    criterion = tr.create_loss(loss, **options, reduction="none")
    log_p = torch.stack([-criterion(scores, torch.full((4,), c)) for c in range(N)], 1).numpy()
    assert np.exp(log_p).sum(-1) == pytest.approx(np.ones(4), rel=1e-12)
    np.testing.assert_allclose(out["marginals"], reference.marginals(log_p, K), rtol=1e-4)
    best = np.argsort(-log_p, -1)[:, :K]
    assert (np.sort(out["indices"]) == np.sort(best)).all()
    plain = reference.marginals(scores.numpy(), K)
    assert np.abs(out["marginals"] - plain).max() > 0.05
