"""Every loss that this distribution registers passes every check of the conformance kit."""

import pytest
import torch

import topk_registry as tr
from topk_registry.testing import check_loss, iter_checks
from topk_registry.testing.expect import NotApplicableError

DISTRIBUTION = "topk-registry"
NAMES = [name for name in tr.list_losses() if DISTRIBUTION in tr.loss_info(name).distribution.split(", ")]


def run_check(check, name, options=None):
    (one,) = (one for one in iter_checks(f"{DISTRIBUTION}:{name}", options=options) if one.name == check)
    try:
        one()
    except NotApplicableError as reason:
        pytest.skip(str(reason))


def test_the_losses_are_there():
    assert len(NAMES) >= 17


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_conformance(name):
    check_loss(f"{DISTRIBUTION}:{name}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_gives_what_the_cpu_gives(name):
    run_check("runs_on_cuda", name)


# options that lead to other code than the defaults do
BESIDE = [
    ("aldr_kl", {"temperature": 50.0}),
    ("ldr_kl", {"temperature": 50.0}),
    ("differentiable_topk", {"k": 1}),
    ("differentiable_topk", {"candidates": None}),
    ("differentiable_topk", {"relaxation": "softsort", "candidates": None}),
    ("differentiable_topk", {"relaxation": "odd_even"}),
    ("differentiable_topk", {"relaxation": "bitonic", "candidates": None}),
    ("smooth_topk_svm", {"k": [1, 3], "combine": "likelihood"}),
    ("sparse_topk", {"k": 1}),
]
ALL = [(name, {}) for name in NAMES] + BESIDE


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_nan_stays_in_its_row_on_every_backend(name, options, kernels):
    with tr.use_backend(kernels):
        run_check("nan_stays_in_its_row", name, options)


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("name", "options"), [*ALL, ("smooth_topk_svm", {"k": [1, 3]})], ids=str)
def test_an_ignored_row_may_hold_anything(name, options, smoothing, kernels):
    with tr.use_backend(kernels):
        run_check("ignore_index_skips_rows", name, options)
        builder = tr.get_loss_builder(name)
        loss = builder(**tr.accepted_context(builder, {"class_counts": [3.0] * 12}), **options)
        if hasattr(loss, "label_smoothing"):  # losses of a batch have none
            loss.label_smoothing = smoothing
        logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
        target = torch.tensor([3, -100, 5, -100, 0, -100])
        logits[1], logits[3, 4], logits[5, 2] = torch.nan, torch.inf, -torch.inf
        logits.requires_grad_()
        value = loss(logits, target)
        value.backward()
        assert torch.isfinite(value)
        assert logits.grad.isfinite().all()
        assert not logits.grad[1::2].any()


OF_SETS = ("lapsum", "smooth_topk_svm", "soft_topk", "sparse_topk", "topk_hinge", "topk_hinge_convex", "topk_nll")


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("name", OF_SETS)
@pytest.mark.parametrize(("n", "k"), [(10, 2), (10, 7), (150, 100)])
def test_a_class_far_below_is_as_if_it_were_not_there(n, k, name, kernels):
    """Masks of models are often the least number of a type, and other scores are one number from there."""
    s = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + k))
    label, q = torch.tensor([0, 3, n - 1]), torch.softmax(s.flip(0), -1)
    loss, pad = tr.create_loss(name, k=k), torch.nn.functional.pad
    with tr.use_backend(kernels):
        for target, same in ((label, label), (q, pad(q, (0, 1)))):
            for far in (1e9, 1e20, torch.finfo(torch.float32).max):
                torch.testing.assert_close(
                    loss(pad(s, (0, 1), value=-far), same), loss(s, target), rtol=1e-9, atol=1e-9
                )


# torch's own decompositions for forward mode are still written in it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("check", ["vmap", "per_sample_gradients", "forward_mode"])
@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_every_transform_takes_every_loss_and_target(name, options, check):
    """So say docs/losses.md."""
    run_check(check, name, options)
