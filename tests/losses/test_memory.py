"""Where the tensors of a call lie: memory layouts in every dtype, default devices, other devices."""

import copy

import pytest
import torch
from torch import Tensor

from tests import needs
from topk_registry import LabelMixture, create_loss
from topk_registry.functional import perturbed_hinge, smooth_topk, smooth_topk_loss
from topk_registry.ops.masses import Masses

B, N = 6, 24
LABELS = torch.tensor([0, 5, 23, 7, 7, 1])
KERNELS = ("smooth_topk_svm", "topk_nll", "noised_topk", "noised_topk_imbalanced")
HALVES = (torch.bfloat16, torch.float16)
LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "every other": lambda x: torch.stack([x, -x], dim=2)[..., 0],
    "reversed rows of a stack": lambda x: torch.stack([x.flip(0), x], dim=1).flatten(0, 1)[1::2],
    "negated view": lambda x: torch._neg_view(-x),
}


def loss_of(name: str, **options):
    if name == "noised_topk_imbalanced":
        options["class_counts"] = list(range(1, N + 1))
    if name != "focal":
        options["k"] = 3
    return create_loss(name, **options)


def value_and_gradient(loss, logits: Tensor, target) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    torch.manual_seed(0)  # of the noised losses
    value = loss(leaf, target)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_does_not_depend_on_the_memory_layout(name, smoothing, layout, dtype):
    logits = (3 * torch.randn(B, N, generator=torch.Generator().manual_seed(1))).to(dtype)
    if name.startswith("noised") and dtype == torch.float64:
        dtype = torch.float32  # in double precision, torch draws the noise in the order of the memory
        logits = logits.to(dtype)
    loss = loss_of(name, label_smoothing=smoothing)
    strange = LAYOUTS[layout](logits)
    assert torch.equal(strange, logits)
    for found, expected in zip(
        value_and_gradient(loss, strange, LABELS), value_and_gradient(loss, logits, LABELS), strict=True
    ):
        tolerance = 1e-12 if dtype == torch.float64 else 0  # torch adds up rows in another order
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_gradient_of_a_map_of_logits_is_right_in_half_precision(dtype):
    maps = torch.randn(1, N, 2, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    loss = create_loss("smooth_topk_svm", k=3)
    rows = maps[0].flatten(1).t().contiguous()
    value, gradient = value_and_gradient(loss, maps, LABELS.view(1, 2, 3))
    expected = value_and_gradient(loss, rows, LABELS)
    assert torch.equal(value, expected[0])
    assert torch.equal(gradient[0].flatten(1).t(), expected[1])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [B, 37])
def test_a_default_device_does_not_reach_later_calls(name, rows):
    logits = torch.randn(rows, N, generator=torch.Generator().manual_seed(rows), device="cpu")
    target = torch.arange(rows) % N
    expected = loss_of(name, label_smoothing=0.1)
    wanted = value_and_gradient(expected, logits, target)
    Masses.of.__globals__["_equal"].cache_clear()
    with torch.device("meta"):
        loss = copy.deepcopy(expected)
        leaf = logits.clone().requires_grad_()
        torch.manual_seed(0)
        inside = loss(leaf, target)
    assert inside.device.type == "cpu"
    assert torch.equal(inside.detach(), wanted[0])
    assert torch.equal(value_and_gradient(expected, logits, target)[0], wanted[0])


def test_masses_made_while_torch_traces_are_not_kept():
    from torch._subclasses import FakeTensorMode

    rows = 41
    with FakeTensorMode(allow_non_fake_inputs=True):
        Masses.of(torch.zeros(rows, N), torch.arange(rows) % N)
    shares = Masses.of(torch.zeros(rows, N), torch.arange(rows) % N).shares
    assert shares.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["focal", *KERNELS])
def test_class_weights_on_another_device_raise_the_error_of_cross_entropy(name):
    loss = loss_of(name, weight=[1.0] * N).to("meta")
    with pytest.raises(RuntimeError, match="same device"):
        loss(torch.zeros(B, N), LABELS)


def test_margins_on_another_device_are_refused():
    masses = Masses.of(torch.zeros(B, N), LABELS)
    for operator in (smooth_topk, perturbed_hinge):
        with pytest.raises(RuntimeError, match="same device"):
            operator(torch.zeros(B, N), masses, k=3, alpha=torch.ones(N, device="meta"))


def test_the_launcher_refuses_memory_that_a_kernel_cannot_read():
    driver = needs.package("topk_registry.ops.cpu.driver")
    launcher, x = driver.kernel(lambda job: None), torch.ones(4, 6)
    launcher.body = lambda: lambda job: None  # nothing to compile
    for wrong in (x.t(), x[:, ::2], x[:1].expand(4, 6), torch._neg_view(x), x.to("meta"), x.as_subclass(Other)):
        with pytest.raises(TypeError, match="plain contiguous memory"):
            launcher.run(1, wrong)
    for right in (x, x[1:], x[:, :3], x[0], torch.ones(())):
        launcher.run(1, right)


class Other(Tensor):
    pass


@pytest.mark.parametrize("alpha", [-10.0, torch.full((N,), -10.0)], ids=["number", "tensor"])
def test_negative_margins_are_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be"):
        smooth_topk_loss(torch.zeros(B, N), LABELS, 3, alpha=alpha, tau=0.01)


def test_the_mean_over_no_sample_is_nan_and_has_no_gradient():
    logits = torch.zeros(B, N, requires_grad=True)
    loss = smooth_topk_loss(logits, torch.full_like(LABELS, -100), 3)
    assert loss.isnan()
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("ignored", [-100, 3])
def test_labels_in_uint8_are_not_confused_with_the_ignored_index(ignored):
    labels = torch.tensor([156, 3, 9])
    masses = Masses.of(torch.zeros(3, 200), labels.to(torch.uint8), ignore_index=ignored)
    assert masses.table(200).sum(1).count_nonzero() == (3 if ignored == -100 else 2)
    batch = create_loss("conformal_training")
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = batch(logits, labels)
    torch.manual_seed(0)
    assert torch.equal(batch(logits, labels.to(torch.uint8)), expected)
    assert expected.isfinite()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["smooth_topk_svm", "focal"])
def test_shares_in_half_precision_do_not_round_the_mean(name, dtype):
    rows = 257  # an odd number above 256 is no bfloat16
    logits = torch.randn(rows, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(rows)[:, None] % N
    loss = create_loss(name)
    shares = torch.ones(rows, 1)
    expected = loss(logits, LabelMixture(labels, shares.double()))
    torch.testing.assert_close(loss(logits, LabelMixture(labels, shares.to(dtype))), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["smooth_topk_svm", "focal"])
def test_shares_in_single_precision_are_smoothed_and_weighted_in_double_precision(name):
    logits = torch.randn(B, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = torch.tensor([[0.7, 0.3]]).expand(B, 2)
    labels = torch.stack((LABELS, (LABELS + 1) % N), 1)
    weight = torch.linspace(0.1, 2, N)
    loss = create_loss(name, label_smoothing=0.1, weight=weight.tolist())
    uniform = torch.full((B,), 0.1, dtype=torch.bfloat16)
    found = loss(logits, LabelMixture(labels, shares, uniform))
    expected = loss(logits, LabelMixture(labels, shares.double(), uniform.double()))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("dtype", "n"), [(torch.bfloat16, 8), (torch.float16, 64), (torch.float32, 8)], ids=str)
def test_soft_targets_of_ksubset_nll_are_interpolated_in_half_precision(dtype, n):
    target = torch.zeros(1, n, dtype=dtype)
    target[0, :3] = 0.5  # a sum of 1.5
    logits = 3 * torch.randn(1, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = create_loss("ksubset_nll")
    expected = loss(logits, target.double())
    torch.testing.assert_close(loss(logits, target), expected, rtol=1e-12, atol=0)


def test_ksubset_nll_takes_a_repeated_label_whose_shares_round_to_more_than_one():
    shares = torch.tensor([[0.6, 0.4]], dtype=torch.float32)
    assert shares.double().sum() > 1
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    mixture = LabelMixture(torch.tensor([[1, 1]]), shares)
    found = create_loss("ksubset_nll")(logits, mixture)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, torch.tensor([1])))
