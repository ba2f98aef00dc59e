"""Options of a loss that is compiled by the default backend, whose caches find code by its graph."""

import pytest
import torch

import topk_registry as tr
from topk_registry import create_loss

CHANGED = {
    "smooth_topk_svm": ({"k": 3}, "tau", (1.0, 0.3, 0.5, 2.0)),
    "noised_topk": ({"k": 3, "epsilon": 0.0}, "label_smoothing", (0.0, 0.1, 0.2, 0.4)),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One folder for all tests here: a header of torch's is compiled once, and code is found by more graphs."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def inductor(cache, monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    torch.compiler.reset()
    with config.patch(compile_threads=1):  # processes that compile would load torch, each of them
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("annealed", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_the_default_backend_follows_options(name, annealed, inductor):
    """One loss whose option is set, or one loss for each value: from the third on, the code of the second was taken."""
    options, option, values = CHANGED[name]
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    label = torch.tensor([1, 2, 3, 4])
    loss = create_loss(name, **options)
    compiled = torch.compile(loss)
    for value in values:
        if annealed:
            setattr(loss, option, value)
        else:
            loss = create_loss(name, **options | {option: value})
            compiled = torch.compile(loss)
        with torch.no_grad():
            torch.testing.assert_close(compiled(logits, label), loss(logits, label), msg=f"{option} = {value}")


@pytest.mark.slow
def test_the_default_backend_follows_a_temperature(inductor):
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda s, theta: tr.functional.topk_marginals(s, 3, temperature=theta))
    for theta in (1.0, 0.3, 0.5, 2.0):
        torch.testing.assert_close(compiled(logits, theta), tr.functional.topk_marginals(logits, 3, temperature=theta))


@pytest.mark.slow
def test_a_linear_layer_compiles(inductor):
    layer = tr.LinearSmoothTopK(8, 40, k=5)
    features, label = torch.randn(6, 8), torch.randint(40, (6,))
    torch.testing.assert_close(torch.compile(layer)(features, label), layer(features, label))
