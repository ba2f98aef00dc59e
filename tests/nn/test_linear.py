"""The linear layer in chunks of classes: loss, gradients and predictions are those of the definition on all logits."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import topk_registry as tr
from tests.nn.reference import log_odds_by_recursion
from topk_registry import LabelMixture, LinearSmoothTopK
from topk_registry.functional import linear_smooth_topk
from topk_registry.nn.linear import linear_topk

N = 60
B = 12
D = 8
TAILS = ("uniform", "drop", "renormalize")
DOUBLE = torch.float64


def layer(n=N, *, rows=B, dtype=DOUBLE, scale=1.0):
    generator = torch.Generator().manual_seed(n)
    shapes = ((rows, D), (n, D), (n,))
    tensors = [(scale * torch.randn(shape, dtype=DOUBLE, generator=generator)).to(dtype) for shape in shapes]
    return *(t.requires_grad_() for t in tensors), torch.randint(n, (rows,), generator=generator)


def definition(logits, target, *, k=5, tau=0.1, alpha=1.0, class_weight=None, reduction="mean", label_smoothing=0.0):
    """The loss from its formula in double precision, with a table of masses."""
    n, logits = logits.shape[1], logits.double()
    w = torch.ones(n, dtype=DOUBLE) if class_weight is None else class_weight.double()
    divisor, counts = torch.tensor(float(len(logits)), dtype=DOUBLE), 1.0
    if isinstance(target, LabelMixture):
        q = target.dense(n, DOUBLE)
    elif target.is_floating_point():
        q = target.double()
    else:
        counts = (target != -100).double()[:, None]
        q = F.one_hot(target.clamp(min=0), n).double()
        divisor = (w[target.clamp(min=0)] * counts[:, 0]).sum()
    q = ((1 - label_smoothing) * q + label_smoothing / n * q.sum(1, keepdim=True)) * counts
    violation = torch.as_tensor(alpha).double() / tau - log_odds_by_recursion(logits / (k * tau), k)
    losses = (q * w * tau * F.softplus(violation, threshold=700)).sum(1)
    return losses if reduction == "none" else losses.sum() / (divisor if reduction == "mean" else 1)


def targets(label):
    q = torch.randn(len(label), N, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).softmax(1)
    ignored = label.masked_fill(torch.arange(len(label)) % 3 == 0, -100)
    return {
        "labels": (label, {}),
        "ignored": (ignored, {}),
        "smoothed": (label, {"label_smoothing": 0.1}),
        "ignored and smoothed": (ignored, {"label_smoothing": 0.1}),
        "distribution": (q, {}),
        "distribution smoothed": (q, {"label_smoothing": 0.2}),
        "mixup": (LabelMixture.mixed(label, label.flip(0), 0.7), {}),
        "mixup smoothed": (LabelMixture.mixed(label, label.flip(0), 0.7).smooth(0.1), {}),
    } | {f"teacher, tail {tail}": (LabelMixture.from_topk(*q.topk(4)[::-1], N, tail), {}) for tail in TAILS}


OPTIONS = {
    "default": {},
    "k = 1": {"k": 1, "tau": 0.3},
    "wide": {"tau": 10.0, "alpha": 0.0},
    "k = 20": {"k": 20, "tau": 0.05, "reduction": "sum"},
    "alpha per class": {"k": 3, "tau": 0.5, "alpha": torch.linspace(0, 2, N), "reduction": "none"},
    "weights": {"k": 3, "tau": 0.5, "class_weight": torch.linspace(0.1, 3, N)},
}


@pytest.mark.parametrize("kind", targets(torch.zeros(B, dtype=torch.int64)))
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [DOUBLE, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_the_definition(kind, name, dtype):
    *tensors, label = layer(dtype=dtype)
    target, more = targets(label)[kind]
    options = {**OPTIONS[name], **more}
    found = linear_smooth_topk(*tensors, target, chunk=17, **options)
    expected = definition(F.linear(*(t.double() for t in tensors)), target, **options)
    assert found.dtype == dtype
    tolerance = 1e-11 if dtype == DOUBLE else 2e-5  # scores of about ten, rounded once, in units of tau
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.linspace(0.5, 2, found.numel(), dtype=DOUBLE).view_as(expected)
    gradients = (torch.autograd.grad(loss, tensors, cotangent.to(loss)) for loss in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("chunk", [2, 59, None])
@pytest.mark.parametrize("k", [1, 28, 40])
def test_any_chunk_and_any_k(chunk, k):
    """Of more than half of the classes, or in one chunk, the loss of the logits serves."""
    *tensors, label = layer()
    for target, more in (targets(label)[kind] for kind in ("labels", "mixup smoothed")):
        found = linear_smooth_topk(*tensors, target, k=k, tau=0.25, chunk=chunk, **more)
        torch.testing.assert_close(
            found,
            definition(F.linear(*(t.double() for t in tensors)), target, k=k, tau=0.25, **more),
            rtol=1e-10,
            atol=1e-11,
        )


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("tau", [1e-36, 1e-3, 1e3])
def test_scales_far_apart(scale, tau):
    *tensors, label = layer(scale=scale)
    for target, more in (targets(label)[kind] for kind in ("labels", "smoothed")):
        loss = linear_smooth_topk(*tensors, target, tau=tau, chunk=17, **more)
        dense = tr.create_loss("smooth_topk_svm", tau=tau, **more)(F.linear(*tensors), target)
        torch.testing.assert_close(loss, dense, rtol=1e-9, atol=1e-9)
        for a, b in zip(*(torch.autograd.grad(one, tensors) for one in (loss, dense)), strict=True):
            assert (a - b).abs().max() <= 1e-8 * b.abs().max() + 1e-12


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["ignored", "ignored and smoothed"])
@pytest.mark.parametrize("chunk", [17, None])
def test_features_of_ignored_rows_may_hold_anything(bad, kind, chunk):
    features, *parameters, label = layer()
    target, options = targets(label)[kind]

    def gradients(x):
        x = x.detach().requires_grad_()
        loss = linear_smooth_topk(x, *parameters, target, chunk=chunk, **options)
        return loss.detach(), *torch.autograd.grad(loss, (x, *parameters))

    expected, ignored = gradients(features), target == -100
    assert not expected[1][ignored].any()
    torch.testing.assert_close(gradients(features.masked_fill(ignored[:, None], bad)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["labels", "smoothed"])
@pytest.mark.parametrize("chunk", [17, None])
def test_without_a_row_the_mean_is_nan_and_the_gradient_is_0(kind, chunk):
    *tensors, label = layer()
    target, options = torch.full_like(label, -100), targets(label)[kind][1]
    loss = linear_smooth_topk(*tensors, target, chunk=chunk, **options)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("alpha", [-1.0, torch.ones(N + 1), torch.ones(1)])
@pytest.mark.parametrize("chunk", [17, None])
def test_a_wrong_alpha_is_an_error_with_and_without_chunks(alpha, chunk):
    *tensors, label = layer()
    with pytest.raises(ValueError, match=f"alpha must be at least 0, one number or one per class .{N}"):
        linear_smooth_topk(*tensors, label, alpha=alpha, chunk=chunk)


def test_a_temperature_without_a_reciprocal_in_single_precision():
    *tensors, label = layer(dtype=torch.float32)
    loss, limit = (linear_smooth_topk(*tensors, label, tau=t, label_smoothing=0.1, chunk=17) for t in (1e-40, 1e-30))
    torch.testing.assert_close(loss, limit)
    for got, wanted in zip(*(torch.autograd.grad(one, tensors) for one in (loss, limit)), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["labels", "smoothed"])
def test_nan_stays_in_its_row(kind):
    features, weight, bias, label = layer()
    target, options = targets(label)[kind]
    options = {**options, "reduction": "none", "chunk": 17}
    clean = linear_smooth_topk(features, weight, bias, target, **options)
    with torch.no_grad():
        features[3, 0] = math.nan
    losses = linear_smooth_topk(features, weight, bias, target, **options)
    others = torch.arange(B) != 3
    assert losses[3].isnan()
    assert torch.equal(losses[others], clean[others])
    assert torch.autograd.grad(losses.sum(), features)[0][others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["labels", "smoothed"])
def test_half_precision(dtype, kind):
    *tensors, label = layer(dtype=torch.float32)
    target, options = targets(label)[kind]
    with torch.autocast("cpu", dtype=dtype):
        found, logits = linear_smooth_topk(*tensors, target, chunk=17, **options), F.linear(*tensors)
    torch.testing.assert_close(found.double(), definition(logits, target, **options), rtol=1e-5, atol=1e-5)
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    found = linear_smooth_topk(*tensors, target, chunk=17, **options)
    expected = definition(F.linear(*tensors), target, **options)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.backward()
    assert found.dtype == torch.float32
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("kind", ["labels", "smoothed"])
def test_gradients_in_single_precision_also_if_the_backward_pass_runs_within_autocast(kind):
    *tensors, label = layer(dtype=torch.float32)
    target, options = targets(label)[kind]
    loss = linear_smooth_topk(*tensors, target, chunk=17, **options)
    plain = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(loss, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(definition(F.linear(*exact), target, **options), exact)
    for found in (plain, within):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("chunk", [17, None])
def test_without_targets_it_is_what_the_loss_of_logits_is(reduction, rows, chunk):
    features, weight, bias, _ = layer()
    target = torch.full((rows,), -100)
    found = linear_smooth_topk(features[:rows], weight, bias, target, reduction=reduction, chunk=chunk)
    loss = tr.create_loss("smooth_topk_svm", reduction=reduction)
    torch.testing.assert_close(found, loss(F.linear(features[:rows], weight, bias), target), equal_nan=True)
    found.nansum().backward()
    assert not weight.grad.nan_to_num().any()


def test_classes_that_are_ruled_out_by_their_bias():
    features, weight, bias, label = layer()
    out = torch.arange(N) % 4 == 1
    label = label.masked_fill(out[label], 0)
    rest, position = (~out).nonzero()[:, 0], (~out).cumsum(0) - 1
    with torch.no_grad():
        bias[out] = -math.inf
    for chunk in (17, 2):
        found = linear_smooth_topk(features, weight, bias, label, chunk=chunk)
        torch.testing.assert_close(found, definition(F.linear(features, weight[rest], bias[rest]), position[label]))
        assert torch.autograd.grad(found, weight)[0].isfinite().all()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("kind", ["labels", "smoothed"])
def test_only_the_gradients_that_are_needed(needed, kind):
    *tensors, label = layer()
    target, options = targets(label)[kind]
    expected = torch.autograd.grad(linear_smooth_topk(*tensors, target, chunk=17, **options), tensors)
    for i, t in enumerate(tensors):
        t.requires_grad_(i in needed)
    linear_smooth_topk(*tensors, target, chunk=17, **options).backward()
    for i, t in enumerate(tensors):
        assert (t.grad is None) == (i not in needed)
        assert t.grad is None or torch.equal(t.grad, expected[i])
    assert not linear_smooth_topk(*(t.detach() for t in tensors), target, chunk=17, **options).requires_grad


@pytest.mark.parametrize("k", [1, 5, 27, 29])
@pytest.mark.parametrize("chunk", [4, 17, None])
@pytest.mark.parametrize("temperature", [0.02, 1.0, 50.0])
def test_the_best_classes_with_their_marginals(k, chunk, temperature):
    features, weight, bias, _ = layer()
    found = linear_topk(features, weight, bias, k, temperature=temperature, chunk=chunk)
    logits = F.linear(features, weight, bias)
    top, indices = logits.topk(k)
    expected = torch.sigmoid(log_odds_by_recursion(logits / temperature, k)).gather(1, indices)
    assert torch.equal(found.indices, indices)
    torch.testing.assert_close(found.logits, top)
    torch.testing.assert_close(found.marginals, expected, rtol=1e-10, atol=1e-12)
    assert not found.marginals.requires_grad
    assert linear_topk(features[:0], weight, bias, k, chunk=chunk).indices.shape == (0, k)


def test_the_module_is_a_linear_layer_and_its_loss():
    linear = nn.Linear(D, N)
    torch.manual_seed(0)
    head = LinearSmoothTopK(D, N, k=3, tau=0.1, chunk=17, ignore_index=59)
    assert torch.equal(head.weight, linear.weight)
    head.load_state_dict(linear.state_dict())
    *_, target = layer()
    features = torch.randn(B, D)
    expected = definition(linear(features), torch.where(target == 59, -100, target), k=3, tau=0.1)
    torch.testing.assert_close(head(features, target).double(), expected, rtol=1e-5, atol=1e-5)
    for temperature in (None, 2.0):
        found = head.topk(features, temperature=temperature)
        expected = tr.TopKHead(3, temperature=temperature or 3 * 0.1)(linear(features))
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.marginals, expected.marginals.gather(1, expected.indices), rtol=0, atol=1e-6)
    assert "k=3, tau=0.1" in repr(head)
    assert LinearSmoothTopK(D, N, bias=False).bias is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"k": 60}, "k must be"),
        ({"tau": 0.0}, "tau"),
        ({"reduction": "median"}, "median"),
        ({"chunk": 0}, "chunk"),
        ({"target": torch.full((B,), N)}, "60"),
        ({"target": torch.zeros(B, N + 1)}, "target"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"weight": torch.zeros(N, D - 1)}, "weight"),
        ({"weight": torch.zeros(N, D).half()}, "dtype"),
    ],
)
def test_bad_input(options, word):
    features, weight, bias, target = layer()
    arguments = {"features": features, "weight": weight, "bias": bias, "target": target, **options}
    with pytest.raises(ValueError, match=word):
        linear_smooth_topk(**arguments)


@pytest.mark.parametrize(
    ("options", "word"), [({"k": N}, "k must"), ({"alpha": [-1.0] * N}, "alpha"), ({"class_weight": [1.0]}, "weight")]
)
def test_bad_options_of_the_module(options, word):
    with pytest.raises(ValueError, match=word):
        LinearSmoothTopK(D, N, **options)


def peak_bytes(step):
    """Most bytes that tensors made by ``step()`` held at one time."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), order, event.nbytes()) for order, event in enumerate(events))
    return max(itertools.accumulate((nbytes for _, _, nbytes in changes), initial=0))


def test_a_step_takes_the_gradients_and_a_few_chunks():
    *tensors, target = layer(20_000, rows=256, dtype=torch.float32)

    def step():
        linear_smooth_topk(*tensors, target, chunk=1000).backward()

    step()
    for t in tensors:
        t.grad = None
    gradients = sum(t.nbytes for t in tensors)
    assert peak_bytes(step) <= gradients + 10 * 256 * 1000 * 4


@pytest.mark.slow
def test_distillation_over_the_vocabulary_of_a_language_model_stores_no_logits():
    rows = 256
    n = 128_256
    d = 256
    head = LinearSmoothTopK(d, n, bias=False, k=1, tau=1.0, alpha=0.0)
    features = torch.randn(rows, d, requires_grad=True)
    target = LabelMixture.from_topk(torch.randint(n, (rows, 1)), torch.rand(rows, 1), n)
    held = features.nbytes + head.weight.nbytes
    allowed = 1.3 * (held + head.weight.nbytes)
    assert held + head.weight.nbytes + 4 * rows * n > allowed  # one tensor of logits would not fit
    assert held + peak_bytes(lambda: head(features, target).backward()) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [17, None])
def test_it_is_part_of_a_compiled_model(chunk):
    *tensors, target = layer(dtype=torch.float32)
    head = LinearSmoothTopK(D, N, chunk=chunk)
    results = []
    for module in (head, torch.compile(head, backend="aot_eager")):
        loss = module(tensors[0], target)
        results.append((loss, *torch.autograd.grad(loss, [tensors[0], *head.parameters()])))
    torch.testing.assert_close(*results)
