"""Every loss of this distribution passes every check of the conformance kit: the table loss x property."""

from collections.abc import Container

import pytest
import torch

import topk_registry as tr
from topk_registry.testing import CHECKS, LossCheck, iter_checks

DISTRIBUTION = "topk-registry"
NAMES = [name for name in tr.list_losses() if DISTRIBUTION in tr.loss_info(name).distribution.split(", ")]
COMPILED = ("compiles",)  # most of the time of the kit; three losses in the default level, all at night
COMPILED_BY_DEFAULT = ("focal", "smooth_topk_svm", "topk_hinge")
ON_KERNELS = ("smooth_topk_svm", "noised_topk_imbalanced")  # the others are the same kernels with a margin of 0 or 1
# options that take other code than the defaults do
BESIDE = [
    ("aldr_kl", {"temperature": 50.0}),
    ("ldr_kl", {"temperature": 50.0}),
    ("ldam", {"max_margin": 5.0}),
    ("focal", {"gamma": 0.5}),
    ("encouraging", {"log_end": 1.0, "bonus_start": 0.5}),
    ("epsilon_softmax", {"m": 0.01}),
    ("epsilon_softmax", {"alpha": 0.0}),
    ("mirror", {"link": "softmax", "gamma": 1.5}),
    ("differentiable_topk", {"k": 1}),
    ("differentiable_topk", {"candidates": None}),
    ("differentiable_topk", {"relaxation": "softsort", "candidates": None}),
    ("smooth_topk_svm", {"k": [1, 3], "combine": "likelihood"}),
    ("sparse_topk", {"k": 1}),
]


def run(name: str, options: dict, checks: Container[str]) -> None:
    kit = (check for check in iter_checks(f"{DISTRIBUTION}:{name}", options=options) if check.name in checks)
    failures = [result for result in map(LossCheck.run, kit) if result.status == "failed"]
    assert not failures, "\n".join(f"{result.name}: {result.message}" for result in failures)


QUICK = [name for name in CHECKS if name not in COMPILED]
NUMBERS = (  # of the same loss with options that take other code
    *("gradient_equals_differences", "second_derivative", "forward_mode", "vmap", "half_precision", "large_logits"),
    *("nan_stays_in_its_row", "infinity_stays_in_its_row", "takes_distributions", "label_smoothing_is_a_soft_target"),
    "weights_scale_rows",
)


def test_the_losses_are_there():
    assert len(NAMES) == 30


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # torch's own, in forward mode
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in NAMES), *BESIDE], ids=str)
def test_conformance(name, options):
    with tr.use_backend("torch"):
        run(name, options, NUMBERS if options else QUICK)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("name", ON_KERNELS)
def test_conformance_on_numba(name):
    with tr.use_backend("numba"):
        run(name, {}, QUICK)


@pytest.mark.parametrize("name", COMPILED_BY_DEFAULT)
def test_compiled(name):
    run(name, {}, COMPILED)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(COMPILED_BY_DEFAULT)))
def test_compiled_at_night(name):
    run(name, {}, COMPILED)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_gives_what_the_cpu_gives(name):
    run(name, {}, ["runs_on_cuda"])


OF_SETS = ("lapsum", "smooth_topk_svm", "soft_topk", "sparse_topk", "topk_hinge", "topk_hinge_convex", "topk_nll")


@pytest.mark.parametrize("name", OF_SETS)
@pytest.mark.parametrize(("n", "k"), [(10, 2), (10, 7), (150, 100)])
def test_a_class_far_below_has_no_effect(n, k, name):
    """Masks of models are often the least number of a type, and other scores are one number from there."""
    s = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + k))
    label, q = torch.tensor([0, 3, n - 1]), torch.softmax(s.flip(0), -1)
    loss, pad = tr.create_loss(name, k=k), torch.nn.functional.pad
    for target, same in ((label, label), (q, pad(q, (0, 1)))):
        for far in (1e9, 1e20, torch.finfo(torch.float32).max, torch.inf):
            x = pad(s, (0, 1), value=-far).requires_grad_()
            value = loss(x, same)
            torch.testing.assert_close(value, loss(s, target), rtol=1e-9, atol=1e-9)
            (gradient,) = torch.autograd.grad(value, x)
            assert gradient.isfinite().all()
            assert not gradient[:, n].any()
