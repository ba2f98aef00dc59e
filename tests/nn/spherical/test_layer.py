"""The layer against the dense one under torch's own SGD: loss, feature gradients, gradient norm and weights."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import topk_registry as tr
from topk_registry.nn.spherical import SingularStepError, SphericalLinear, SphericalSGD

LOSSES = {"log_taylor_softmax": {}, "log_spherical_softmax": {"epsilon": 0.3}, "spherical_bound": {}, "mse": {}}
RATES = {"mse": 0.005}  # the squared error is a sum over classes
N = 300
D = 12
M = 10


def dense_loss(name, scores, labels, weights=None):
    """The definition, on all scores."""
    weights = torch.ones_like(labels, dtype=scores.dtype) if weights is None else weights
    dense = torch.zeros_like(scores).scatter_add_(1, labels, weights)
    if name == "mse":
        return (scores - dense).square().sum(1).mean()
    return tr.create_loss(name, **LOSSES[name])(scores, dense)


def pair(name, bias=False, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(D, N, bias, dtype=dtype)
    loss = name if name == "mse" else tr.create_loss(name, **LOSSES[name])
    return linear, SphericalLinear.from_linear(linear, loss=loss)


def both(name, linear, layer, features, labels, weights=None):
    """Losses and feature gradients of the dense layer and of ours; gradients of the weights are left where they lie."""
    results = []
    target = labels[:, 0] if weights is None else (labels, weights)
    for loss in (lambda h: dense_loss(name, linear(h), labels, weights), lambda h: layer(h, target)):
        h = features.clone().requires_grad_()
        value = loss(h)
        value.backward()
        results.append((value.detach(), h.grad))
    return results


def close(ours, dense, tolerance=1e-9):
    torch.testing.assert_close(ours, dense, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow
def test_two_hundred_steps_are_those_of_sgd_on_the_dense_layer(name, bias):
    linear, layer = pair(name, bias=bias)
    rate = RATES.get(name, 0.3)
    decay = 0.01
    most = 1.0
    sgd = torch.optim.SGD(linear.parameters(), lr=rate, weight_decay=decay)
    ours = SphericalSGD(layer, lr=rate, weight_decay=decay, max_norm=most)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200) for optimizer in (sgd, ours)]
    for step in range(200):
        labels = torch.randint(N, (M, 1))
        labels[: step % 4] = labels[0].clone()  # labels repeat within a batch
        sgd.zero_grad()
        dense, found = both(name, linear, layer, torch.randn(M, D, dtype=torch.float64), labels)
        close(found, dense)
        norm = nn.utils.clip_grad_norm_(linear.parameters(), most)
        assert layer.gradient_norm() == pytest.approx(float(norm), rel=1e-9)
        for optimizer in (sgd, ours, *schedules):
            optimizer.step()
    close(layer.to_linear().weight, linear.weight)
    if bias:
        close(layer.to_linear().bias, linear.bias)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_with_several_labels(name):
    linear, layer = pair(name)
    sgd = torch.optim.SGD(linear.parameters(), lr=RATES.get(name, 0.3))
    for _ in range(20):
        labels, weights = torch.randint(N, (M, 3)), torch.rand(M, 3, dtype=torch.float64)
        labels[:, 2] = labels[:, 1]  # a class that is named twice has the sum of its weights
        labels[0] = labels[1]
        sgd.zero_grad()
        dense, found = both(name, linear, layer, torch.randn(M, D, dtype=torch.float64), labels, weights)
        close(found, dense)
        sgd.step()
        layer.step(RATES.get(name, 0.3))
    close(layer.to_linear().weight, linear.weight)


@pytest.mark.parametrize("m", [1, D, 3 * D])
def test_accumulated_batches_are_one_step_at_any_batch_size(m):
    linear, layer = pair("log_taylor_softmax")
    sgd = torch.optim.SGD(linear.parameters(), lr=0.2, weight_decay=0.1)
    for _ in range(5):
        sgd.zero_grad()
        for _ in range(3):
            both("log_taylor_softmax", linear, layer, torch.randn(m, D, dtype=torch.float64), torch.randint(N, (m, 1)))
        sgd.step()
        layer.step(0.2, weight_decay=0.1)
    close(layer.to_linear().weight, linear.weight)


def test_a_step_touches_the_rows_of_the_labels_alone():
    _, layer = pair("log_taylor_softmax")
    before = layer.factors.V.clone()
    labels = torch.tensor([3, 7, 7, 250])
    layer(torch.randn(4, D, dtype=torch.float64), labels).backward()
    layer.step(0.5)
    changed = (before != layer.factors.V).any(1).nonzero().flatten().tolist()
    assert changed == [3, 7, 250]


@pytest.mark.parametrize("off", [0.0, 1e-13, 1e-9, 1e-5])
def test_a_singular_step_is_exact(off):
    """One sample of squared error: A = I - 2 lr h h^T is singular at lr = 1 / (2 |h|^2)."""
    linear, layer = pair("mse")
    features, labels = torch.randn(1, D, dtype=torch.float64), torch.tensor([[5]])
    rate = (1 + off) / (2 * float(features.square().sum()))
    both("mse", linear, layer, features, labels)
    torch.optim.SGD(linear.parameters(), lr=rate).step()
    layer.step(rate)
    close(layer.to_linear().weight, linear.weight, 1e-10)
    dense, found = both("mse", linear, layer, torch.randn(M, D, dtype=torch.float64), torch.randint(N, (M, 1)))
    close(found, dense)
    # with the wrong branch the weight would be lost: there U has a vanishing singular value
    assert layer.factors.condition() < 1e4


def test_decay_that_takes_all_of_the_weight_is_exact():
    linear, layer = pair("log_taylor_softmax")
    both("log_taylor_softmax", linear, layer, torch.randn(M, D, dtype=torch.float64), torch.randint(N, (M, 1)))
    torch.optim.SGD(linear.parameters(), lr=0.5, weight_decay=2.0).step()
    layer.step(0.5, weight_decay=2.0)
    close(layer.to_linear().weight, linear.weight, 1e-12)


def test_factors_are_folded_before_rounding_is_magnified():
    """Steps along one direction stretch U; in single precision the dense weight must not suffer from it."""
    linear, layer = pair("mse", dtype=torch.float32)
    exact = copy.deepcopy(linear).double()
    direction = torch.randn(1, D)
    worst = 0.0
    folds = 0
    rate = 0.475 / float(direction.square().sum())
    sgd = torch.optim.SGD(exact.parameters(), lr=rate)
    for step in range(60):
        labels = torch.tensor([[step]])
        sgd.zero_grad()
        dense_loss("mse", exact(direction.double()), labels).backward()
        sgd.step()
        layer(direction, labels[:, 0]).backward()
        layer.step(rate)
        worst, folds = max(worst, layer.factors.condition()), folds + (layer.factors.condition() < 1.0 + 1e-12)
    assert worst <= 100
    assert folds >= 5
    # 60 steps and some folds, each rounding entries of at most 2 once: 6e-8 apiece, magnified by at most the condition
    assert (layer.to_linear().weight - exact.weight).abs().max() < 60 * 100 * 6e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_single_precision_storage(name):
    linear, layer = pair(name, dtype=torch.float32)
    exact = copy.deepcopy(linear).double()
    parameters, plain = exact.parameters(), torch.optim.SGD(linear.parameters(), lr=RATES.get(name, 0.3))
    sgd = torch.optim.SGD(parameters, lr=RATES.get(name, 0.3))
    for _ in range(100):
        features, labels = torch.randn(M, D), torch.randint(N, (M, 1))
        for model, optimizer, h in ((linear, plain, features), (exact, sgd, features.double())):
            optimizer.zero_grad()
            dense_loss(name, model(h), labels).backward()
            optimizer.step()
        layer(features, labels[:, 0]).backward()
        layer.step(RATES.get(name, 0.3))
    theirs = (linear.weight - exact.weight).abs().max()
    ours = (layer.to_linear().weight - exact.weight).abs().max()
    assert ours <= 2 * theirs + 6e-8  # no worse than dense single precision, within the rounding of one store


def test_the_sum_of_squares_is_held_above_what_no_vector_can_go_below():
    _, layer = pair("log_taylor_softmax")
    layer.factors.Q.zero_()  # as if all its digits had cancelled
    H, labels = torch.randn(M, D, dtype=torch.float64), torch.tensor([[1, 1, 2]]).expand(M, 3)
    _, s, q, a = layer.factors.sums(H, labels)
    assert torch.equal(q, torch.maximum(s.square() / N, a[:, 0].square() + a[:, 2].square()))
    assert layer(H, torch.randint(N, (M,))).isfinite()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_ignored_rows_cost_nothing_and_train_nothing(name, bias):
    """Ten steps are those of a layer that is given the other rows alone, also where ignored features are not finite."""
    _, layer = pair(name, bias=bias)
    _, other = pair(name, bias=bias)
    generator = torch.Generator().manual_seed(3)
    for step in range(10):
        h = torch.randn(M, D, dtype=torch.float64, generator=generator)
        target = torch.randint(N, (M,), generator=generator)
        target[step % M] = target[0] = -100
        h[0] = torch.nan
        kept = target != -100
        ours, rest = h.clone().requires_grad_(), h[kept].requires_grad_()
        layer(ours, target).backward()
        other(rest, target[kept]).backward()
        assert torch.equal(ours.grad[~kept], torch.zeros(int((~kept).sum()), D, dtype=torch.float64))
        assert torch.equal(ours.grad[kept], rest.grad)
        assert layer.gradient_norm() == other.gradient_norm()
        layer.reduction = other.reduction = "none"
        apart = layer(h, target)
        assert torch.equal(apart[kept], other(h[kept], target[kept]))
        assert torch.equal(apart[~kept], torch.zeros(int((~kept).sum()), dtype=torch.float64))
        layer.reduction = other.reduction = "mean"
        for one in (layer, other):
            one.step(0.005, weight_decay=0.01, max_norm=1.0)
    assert torch.equal(layer.to_linear().weight, other.to_linear().weight)
    before = layer.to_linear().weight
    assert layer(h, torch.full_like(target, -100)).isnan()  # a mean over no rows, as in cross-entropy
    layer(h.requires_grad_(), torch.full_like(target, -100)).backward()
    assert not h.grad.any()
    layer.step(0.1)
    assert torch.equal(layer.to_linear().weight, before)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_ignored_rows_and_class_weights(reduction):
    torch.manual_seed(1)
    linear = nn.Linear(D, N, dtype=torch.float64)
    weight, target = torch.rand(N).double(), torch.randint(N, (M,))
    target[::3] = -7
    options = {"epsilon": 0.5, "weight": weight}
    loss = tr.create_loss("log_spherical_softmax", **options)
    layer = SphericalLinear.from_linear(linear, loss=loss, reduction=reduction, ignore_index=-7)
    dense = tr.create_loss("log_spherical_softmax", **options, reduction=reduction, ignore_index=-7)
    h = torch.randn(M, D, dtype=torch.float64, requires_grad=True)
    close(layer(h, target), dense(linear(h), target))
    cotangent = torch.rand_like(layer(h, target))
    ours, theirs = (torch.autograd.grad(f, h, cotangent)[0] for f in (layer(h, target), dense(linear(h), target)))
    close(ours, theirs)


def test_half_precision_features_under_autocast_and_a_scaled_loss():
    _, layer = pair("log_taylor_softmax", dtype=torch.float32)
    other = copy.deepcopy(layer)
    features, target = torch.randn(M, D).bfloat16(), torch.randint(N, (M,))
    h = features.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(h, target)
    (1024 * loss).backward()
    wide = features.float().requires_grad_()
    other(wide, target).backward()
    assert h.grad.dtype == torch.bfloat16
    torch.testing.assert_close(h.grad.float() / 1024, wide.grad, rtol=2**-7, atol=1e-7)
    layer.step(0.1, grad_scale=1024.0)
    other.step(0.1)
    torch.testing.assert_close(layer.factors.V, other.factors.V, rtol=0, atol=2e-5)


def test_prediction_is_that_of_the_dense_layer_and_its_link():
    for name in LOSSES:
        _, layer = pair(name, bias=True, seed=3)
        layer(torch.randn(M, D, dtype=torch.float64), torch.randint(N, (M,))).backward()
        layer.step(0.01)
        h = torch.randn(M, D, dtype=torch.float64)
        scores = layer.to_linear()(h)
        logits = scores if layer.loss is None else layer.loss.predictive_logits(scores)
        marginals = tr.functional.topk_marginals(logits, 5)
        for chunk in (None, 1, 50):
            best = layer.topk(h, 5, chunk=chunk)
            expected = logits.topk(5)
            close(best.logits, expected.values)
            assert torch.equal(best.indices, expected.indices)
            close(best.marginals, marginals.gather(1, best.indices), 1e-8)


def test_state_is_saved_copied_moved_and_sent():
    _, layer = pair("log_taylor_softmax", dtype=torch.float32)
    layer(torch.randn(M, D), torch.randint(N, (M,))).backward()
    layer.step(0.2)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = SphericalLinear(D, N, loss="log_taylor_softmax")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    h, target = torch.randn(M, D), torch.randint(N, (M,))
    for other in (fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(h, target), layer(h, target))
    wide = copy.deepcopy(layer).double()
    assert wide.factors.V.dtype == torch.float64
    narrow = copy.deepcopy(layer).bfloat16()
    assert {buffer.dtype for name, buffer in narrow.factors.named_buffers() if name != "steps"} == {torch.float64}
    assert torch.equal(narrow.factors.Q, layer.factors.Q)  # not rounded on the way


def test_the_optimizer_takes_one_layer_and_nothing_else():
    layer, backbone = SphericalLinear(D, 50), nn.Linear(8, D)
    with pytest.raises(TypeError, match="SphericalLinear"):
        SphericalSGD(backbone, lr=0.1)
    with pytest.raises(TypeError, match="another optimizer"):
        SphericalSGD(layer, lr=0.1).add_param_group({"params": list(backbone.parameters())})


def test_backward_passes_without_a_step_are_reported(monkeypatch):
    monkeypatch.setattr("topk_registry.nn.spherical.layer.MAX_PENDING", 3)
    layer = SphericalLinear(D, 50)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(torch.randn(2, D), torch.tensor([1, 2])).backward()
        optimizer.step()
    loss = layer(torch.randn(2, D), torch.tensor([1, 2]))
    with pytest.warns(UserWarning, match="SphericalSGD"):
        loss.backward()


def test_a_step_that_overflows_leaves_all_as_it_was():
    _, layer = pair("mse", dtype=torch.float32)
    state = copy.deepcopy(layer.state_dict())
    layer(torch.randn(M, D) * 1e30, torch.randint(N, (M,))).backward()
    with pytest.raises(SingularStepError, match="weights are unchanged"):
        layer.step(1e250)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layer.zero_grad()
    assert layer.gradient_norm() == 0


def test_misuse_raises():
    layer = SphericalLinear(D, N, loss="log_taylor_softmax")
    h, target = torch.randn(2, D, requires_grad=True), torch.tensor([1, 2])
    for features, wrong, word in [
        (h[:, 1:], target, "features"),
        (h, torch.tensor([1, N]), "300"),
        (h, torch.tensor([-1, 2]), "-1"),
        (h, torch.rand(2, N), "dense"),
        (h, (torch.tensor([[1], [2]]), torch.rand(2, 2)), "shares"),
        (h, tr.LabelMixture(target[:, None], torch.rand(2, 1), torch.rand(2)), "dense"),
        (h, (target, torch.rand(2)), "labels"),
    ]:
        with pytest.raises(ValueError, match=word):
            layer(features, wrong)
    for options, word in [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay"),
        ({"lr": 0.1, "max_norm": 0.0}, "max_norm"),
    ]:
        with pytest.raises(ValueError, match=word):
            layer.step(**options)
    for k in (N, 2.5):
        with pytest.raises(ValueError, match="k must be"):
            layer.topk(h, k)
    for options, word in [
        ({"loss": "focal"}, "from_sums"),
        ({"loss": tr.create_loss("log_taylor_softmax", label_smoothing=0.1)}, "label_smoothing"),
        ({"loss": tr.create_loss("log_taylor_softmax", reduction="sum")}, "reduction"),
        ({"loss": tr.create_loss("spherical_bound", ignore_index=0)}, "ignore_index"),
        ({"dtype": torch.float16}, "float32"),
        ({"reduction": "median"}, "reduction"),
    ]:
        with pytest.raises(ValueError, match=word):
            SphericalLinear(D, N, **options)
    loss = layer(h, target)
    layer(h, target).backward()
    layer.step(0.1)
    with pytest.raises(RuntimeError, match="backward pass"):
        loss.backward()


def test_empty_batches_and_steps_without_a_backward_pass():
    layer = SphericalLinear(D, N, loss="log_taylor_softmax", reduction="sum")
    before = layer.factors.V.clone()
    h = torch.zeros(0, D, requires_grad=True)
    layer(h, torch.zeros(0, dtype=torch.int64)).backward()
    assert h.grad.shape == (0, D)
    layer.step(0.1)
    with pytest.warns(UserWarning, match="no backward pass since"):
        layer.step(0.1, weight_decay=0.5)
    assert torch.equal(layer.factors.V, before)
    assert F.linear(torch.ones(1, D), layer.to_linear().weight).isfinite().all()
