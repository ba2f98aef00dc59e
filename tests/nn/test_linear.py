"""The fused classifier and loss: the loss on the logits, without the logits."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import topk_registry as tr
from topk_registry import LabelMixture, LinearSmoothTopK
from topk_registry.functional import linear_smooth_topk
from topk_registry.nn import class_parallel
from topk_studies.timing.memory import peak_bytes

INF, NAN = float("inf"), float("nan")
OPTIONS = [
    {},
    {"k": 1, "tau": 0.1},
    {"tau": 1e-36},
    {"tau": 10.0, "alpha": 0.0},
    {"k": 40, "tau": 0.01, "reduction": "sum"},
    {"alpha": torch.linspace(0, 2, 60)},
]


def layer(n=60, *, B=12, d=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    features, weight, bias = (torch.randn(shape, dtype=dtype, generator=generator) for shape in ((B, d), (n, d), (n,)))
    target = torch.randint(n, (B,), generator=generator)
    return *(t.requires_grad_() for t in (features, weight, bias)), target


def on_logits(features, weight, bias, target, *, class_weight=None, **options):
    loss = tr.create_loss("smooth_topk_svm", weight=class_weight, **options)
    return loss(F.linear(features, weight, bias), target)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_loss_and_gradients_are_those_of_the_loss_on_logits(options, reduction, weighted, ignored):
    *tensors, target = layer()
    class_weight = torch.linspace(0, 3, 60) if weighted else None
    target = target.masked_fill(torch.arange(12) % 3 == 0, -100) if ignored else target
    options = {"class_weight": class_weight, **options, "reduction": reduction}
    found = linear_smooth_topk(*tensors, target, chunk=17, **options)
    expected = on_logits(*tensors, target, **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(loss.sum(), tensors) for loss in (found, expected))
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_distributions(reduction, k, weighted, dtype):
    *tensors, target = layer(dtype=dtype)
    q = torch.randn(12, 60, dtype=dtype, generator=torch.Generator().manual_seed(1)).softmax(1)
    ignored = target.masked_fill(torch.arange(12) % 3 == 0, -100)
    mixture = LabelMixture.mixed(target, target.flip(0), 0.7, smoothing=0.1)
    class_weight = torch.linspace(0, 3, 60) if weighted else None
    for goal, options in (
        (q, {}),
        (q, {"label_smoothing": 0.2}),
        (target, {"label_smoothing": 0.1}),
        (ignored, {"label_smoothing": 0.1}),
        (mixture, {}),
    ):
        options = {**options, "k": k, "tau": 0.25, "class_weight": class_weight, "reduction": reduction}
        dense = goal.dense(60, dtype) if isinstance(goal, LabelMixture) else goal
        found = linear_smooth_topk(*tensors, goal, chunk=17, **options)
        expected = on_logits(*tensors, dense, **options)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        gradients = (torch.autograd.grad(loss.sum(), tensors) for loss in (found, expected))
        for a, b in zip(*gradients, strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"sample": 0.9}, {"class_weight": torch.ones(60)}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_features_of_ignored_rows_may_hold_anything(options, reduction, bad):
    features, *parameters, target = layer()
    ignored = torch.arange(12) % 3 == 0
    target = target.masked_fill(ignored, -100)

    def loss_and_gradients(x):
        x = x.detach().requires_grad_()
        drawn = {"generator": torch.Generator().manual_seed(0)} if "sample" in options else {}
        loss = linear_smooth_topk(x, *parameters, target, chunk=17, reduction=reduction, **options, **drawn)
        return loss.detach(), *torch.autograd.grad(loss.sum(), (x, *parameters))

    wanted = loss_and_gradients(features)
    assert wanted[1][ignored].eq(0).all()
    assert all(one.isfinite().all() for one in wanted)
    found = loss_and_gradients(features.masked_fill(ignored[:, None], bad))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_polynomials_of_sampled_classes_are_unbiased(monkeypatch):
    """The mean over all draws: sigma_1 / e_y = exp(-l_y) for k = 1, and sigma_2 / sigma_1 / e_y for k = 2."""
    features, weight, bias, _ = layer(7, B=1, dtype=torch.float64)
    label, rate, theta = torch.tensor([2]), 0.3, 2.0

    def log_odds(k, **options):
        # the loss -tau log sigmoid(l) without a required gap
        loss = linear_smooth_topk(features, weight, bias, label, k=k, tau=theta / k, alpha=0.0, **options)
        return -loss.item() * k / theta - math.log(-math.expm1(-loss.item() * k / theta))

    def polynomials(**options):
        first = math.exp(-log_odds(1, **options))
        return torch.tensor([first, first * math.exp(-log_odds(2, **options))])

    mean = torch.zeros(2)
    for mask in itertools.product((False, True), repeat=6):
        if sum(mask) < 1:
            continue  # no other class, all polynomials are zero
        taken = torch.tensor([*mask[:2], False, *mask[2:]])
        monkeypatch.setattr(class_parallel, "drawn", lambda *_, taken=taken: taken)
        chance = rate ** sum(mask) * (1 - rate) ** (6 - sum(mask))
        if sum(mask) == 1:
            mean[0] += chance * math.exp(-log_odds(1, sample=rate))
        else:
            mean += chance * polynomials(sample=rate)
    torch.testing.assert_close(mean, polynomials(), rtol=1e-6, atol=0)


def test_sampling_needs_labels_and_a_rate():
    features, weight, bias, target = layer()
    for options, message in (
        ({"sample": 0.0}, "sample must be above 0 and at most 1, got 0.0"),
        ({"sample": 0.5, "label_smoothing": 0.1}, "sample needs targets that are labels"),
        ({"sample": 0.5, "k": 40}, "sampling needs at least 2 k = 80 classes, there are 60"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_smooth_topk(features, weight, bias, target, **options)


@pytest.mark.slow
def test_gradcheck_of_a_distribution():
    *tensors, _ = layer(23, B=4, dtype=torch.float64)
    q = torch.randn(4, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(1)
    assert torch.autograd.gradcheck(lambda *t: linear_smooth_topk(*t, q, k=3, tau=0.5, chunk=8), tensors)


def test_the_likelihood_is_the_loss_without_a_margin():
    *tensors, target = layer()
    expected = tr.create_loss("topk_nll", k=3, tau=0.5)(F.linear(*tensors), target)
    torch.testing.assert_close(linear_smooth_topk(*tensors, target, k=3, tau=0.5, alpha=0.0, chunk=9), expected)


def test_cross_entropy_to_rounding():
    *tensors, target = layer()
    found = linear_smooth_topk(*tensors, target, k=1, tau=1.0, alpha=0.0, chunk=9)
    torch.testing.assert_close(found, F.cross_entropy(F.linear(*tensors), target), rtol=1e-6, atol=1e-6)


def test_gradcheck():
    *tensors, target = layer(23, B=4, dtype=torch.float64)
    target[1] = -100
    assert torch.autograd.gradcheck(lambda *t: linear_smooth_topk(*t, target, k=3, tau=0.5, chunk=8), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    *tensors, target = layer()
    with torch.autocast("cpu", dtype=dtype):
        found, expected = linear_smooth_topk(*tensors, target, chunk=17), on_logits(*tensors, target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    found = linear_smooth_topk(*tensors, target, chunk=17)
    torch.testing.assert_close(found, on_logits(*tensors, target), rtol=1e-6, atol=1e-6)
    found.backward()
    assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in tensors)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("B", [0, 3])
def test_without_targets_it_is_what_cross_entropy_is(reduction, B):
    features, weight, bias, _ = layer()
    target = torch.full((B,), -100)
    found = linear_smooth_topk(features[:B], weight, bias, target, reduction=reduction)
    expected = F.cross_entropy(F.linear(features[:B], weight, bias), target, reduction=reduction)
    torch.testing.assert_close(found, expected, equal_nan=True)
    found.sum().backward()
    assert not weight.grad.any()
    assert not features.grad.any()


def test_a_nan_row_is_nan_alone():
    features, weight, bias, target = layer()
    clean = linear_smooth_topk(features, weight, bias, target, reduction="none", chunk=17)
    with torch.no_grad():
        features[3, 0] = NAN
    loss = linear_smooth_topk(features, weight, bias, target, reduction="none", chunk=17)
    others = torch.arange(12) != 3
    assert loss[3].isnan()
    assert torch.equal(loss[others], clean[others])
    (gradient,) = torch.autograd.grad(loss.sum(), features)
    assert gradient[others].isfinite().all()


def test_second_derivatives_are_those_of_the_loss_on_the_logits():
    *tensors, target = layer()
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def second(loss):
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), tensors)

    ours = second(linear_smooth_topk(*tensors, target))
    dense = second(tr.create_loss("smooth_topk_svm")(F.linear(*tensors), target))
    for one, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11 * float(other.abs().max()))


def test_the_functional_gradient_is_the_same():
    features, weight, bias, target = layer()
    (expected,) = torch.autograd.grad(linear_smooth_topk(features, weight, bias, target), features)
    rest = weight.detach(), bias.detach(), target
    found = torch.func.grad(lambda x: linear_smooth_topk(x, *rest))(features.detach())
    # transforms compute in double precision: what is left is the rounding of the kernels' single precision
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * 2**-24 * float(expected.abs().max()))


@pytest.mark.slow
def test_compiles_into_one_graph():
    *tensors, target = layer()
    target[0] = -100
    eager = LinearSmoothTopK(8, 60, tau=0.1, chunk=17, class_weight=torch.linspace(0.5, 1, 60))
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    features = tensors[0]
    results = [
        (loss, *torch.autograd.grad(loss, [features, *eager.parameters()]))
        for loss in (compiled(features, target), eager(features, target))
    ]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_module_is_a_linear_layer_and_its_loss():
    torch.manual_seed(0)
    linear = nn.Linear(8, 60)
    torch.manual_seed(0)
    head = LinearSmoothTopK(8, 60, k=3, tau=0.1, chunk=17, ignore_index=59)
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    head.load_state_dict(linear.state_dict())
    features, _, _, target = layer()
    loss = tr.create_loss("smooth_topk_svm", k=3, tau=0.1, ignore_index=59)
    torch.testing.assert_close(head(features, target), loss(linear(features), target), rtol=1e-6, atol=1e-6)
    for temperature in (None, 2.0):
        found = head.topk(features, temperature=temperature)
        expected = tr.TopKHead(3, temperature=temperature or 3 * 0.1)(linear(features))
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.marginals, expected.marginals.gather(1, expected.indices), rtol=0, atol=1e-6)
    assert "k=3, tau=0.1" in repr(head)
    assert LinearSmoothTopK(8, 60, bias=False).bias is None


def test_a_model_trains_with_it():
    torch.manual_seed(0)
    centres = torch.randn(50, 16)
    target = torch.randint(50, (256,))
    images = centres[target] + 0.1 * torch.randn(256, 16)
    head = LinearSmoothTopK(16, 50, k=3, tau=0.1, chunk=20)
    optimizer = torch.optim.SGD(head.parameters(), lr=3.0)
    for _ in range(60):
        optimizer.zero_grad()
        head(images, target).backward()
        optimizer.step()
    assert (head.topk(images).indices[:, 0] == target).float().mean() > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 60}, r"k must be an integer from 1 to n - 1 = 59, got 60"),
        ({"tau": 0.0}, r"tau must be a finite number above 0, got 0.0"),
        ({"alpha": -1.0}, r"alpha must be a finite number of at least 0, got -1.0"),
        ({"alpha": torch.ones(3)}, r"alpha must be one number, or one a class \[60\], got \[3\]"),
        ({"class_weight": torch.ones(3)}, r"class_weight must be one factor a class \[60\], got \[3\]"),
        ({"reduction": "median"}, r"reduction must be one of 'none', 'mean', 'sum', got 'median'"),
        ({"target": torch.full((12,), 60)}, r"target must be in \[0, 59\] \(or ignore_index = -100\), got 60"),
        ({"target": torch.zeros(12, 61)}, r"target must be class indices \(integer, \[12\]\) or a distribution"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be a finite number from 0 to 1, got 1.5"),
        ({"num_classes": 61}, r"weight has 60 rows, num_classes is 61"),
        ({"num_classes": 61, "label_smoothing": 0.1}, r"weight has 60 rows, num_classes is 61"),
        ({"weight": torch.zeros(60, 7)}, r"expected features \[B, d\], weight \[n, d\]"),
    ],
)
def test_bad_input_is_told_what_is_wrong(options, message):
    features, weight, bias, target = layer()
    arguments = {"features": features, "weight": weight, "bias": bias, "target": target, **options}
    with pytest.raises(ValueError, match=message):
        linear_smooth_topk(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 60}, r"k must be an integer from 1 to num_classes - 1 = 59, got 60"),
        ({"alpha": [-1.0] * 60}, r"alpha must be a finite number of at least 0"),
        ({"class_weight": [-1.0] * 60}, r"weight must be a list of finite numbers of at least 0"),
    ],
)
def test_bad_options_are_told_of_when_the_module_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        LinearSmoothTopK(8, 60, **options)


@pytest.mark.parametrize("n", [20_000, 40_000])
def test_a_step_takes_the_gradients_and_a_few_chunks(n):
    *tensors, target = layer(n, B=256)

    def step():
        linear_smooth_topk(*tensors, target, chunk=1000).backward()

    step()
    for t in tensors:
        t.grad = None
    gradients = sum(t.nbytes for t in tensors)
    assert peak_bytes(step) <= gradients + 4 * 256 * 1000 * 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_stays_far_below_the_logits():
    """By the system's own count, of everything that is allocated anywhere."""
    command = [sys.executable, "-m", "tests.linear_peak", "100000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    # the parameters, their gradients, and what else there is
    assert figures["peak"] - figures["before"] <= 2 * figures["parameters"] + 0.5 * figures["logits"]
