"""Compiled rows of LapSum, ALDR-KL, sparse masks and cross-entropy against their definitions in double precision."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.cpu_rows import B, N, both, scores, targets
from topk_registry import use_backend
from topk_registry.rows import Curve, aldr_rows, lapsum_rows, softmax_rows, sparse_topk_rows

pytest.importorskip("numba")

LOSSES = {
    "lapsum flat": (lapsum_rows(5, tau=1.0), 1.0),
    "lapsum cold": (lapsum_rows(3.7, tau=0.1), 0.1),
    "lapsum below one": (lapsum_rows(0.3, tau=0.2), 0.2),
    "lapsum nearly all": (lapsum_rows(N - 0.5, tau=1.0), 1.0),
    "aldr": (aldr_rows(), 0.5),
    "aldr cold": (aldr_rows(temperature=0.5, alpha=3.0, gap=0.0), 0.3),
    "sparse one": (sparse_topk_rows(1, tau=0.5), 0.5),
    "sparse": (sparse_topk_rows(5, tau=0.3), 0.3),
    "sparse warm": (sparse_topk_rows(5, tau=20.0), 20.0),
}
CROSS_ENTROPIES = {
    "cross-entropy": (softmax_rows(), 1.0),
    "cross-entropy, scaled and shifted": (softmax_rows(scale=2.0, shift=torch.linspace(-1, 1, N)), 0.5),
}


@pytest.mark.parametrize("kind", ["gaussian", "flat", "tied", "leaders", "ruled out"])
@pytest.mark.parametrize("name", LOSSES | CROSS_ENTROPIES)
def test_agree_with_the_definition(name, kind):
    loss, temperature = (LOSSES | CROSS_ENTROPIES)[name]
    if kind == "ruled out" and name == "lapsum nearly all":
        pytest.skip("the weights of N - 1 classes cannot add up to more")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        s = scores(kind).to(dtype)
        # scores over the temperature are rounded, and exponentials are as wrong as their arguments; so are those of a
        # plain computation in this precision
        eps = torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
        spread = float((s[s.isfinite()].double().max() - s[s.isfinite()].double().min()) / temperature)
        allowed = 8 * eps * (1 + spread)
        for target in targets(s):
            value, gradient = both(loss, s, target.to(dtype) if target.is_floating_point() else target)
            with use_backend("torch"):
                wanted = both(loss, s.double(), target.to(dtype).double() if target.is_floating_point() else target)
            torch.testing.assert_close(value, wanted[0], rtol=allowed, atol=allowed * temperature)
            largest = max(1.0, float(wanted[1].abs().max()))
            stored = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(gradient, wanted[1], rtol=stored, atol=allowed * largest)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_row_alone(name, wrong):
    s = scores("gaussian").float()
    s[1, 3] = wrong
    for target in targets(s):
        target = target.float() if target.is_floating_point() else target
        value, gradient = both(LOSSES[name][0], s, target)
        assert value[1].isnan()
        assert gradient[1].isnan().all()
        rest = torch.arange(B) != 1
        assert value[rest].isfinite().all()
        assert gradient[rest].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_any_strides(dtype):
    wide = torch.cat((scores("gaussian"), scores("gaussian").flip(1)), 1).to(dtype)
    views = [
        wide[::2, 3 : N + 3],
        wide[:1, :N].expand(B // 2, N),
        wide[:, ::2][::2],
        wide[: B // 2, :N].T.contiguous().T,
    ]
    for view in (*views, torch._neg_view(wide[::2, :N])):
        for target in targets(view.contiguous()[:, :N]):
            target = target[: B // 2].to(dtype) if target.is_floating_point() else target[: B // 2]
            found, wanted = both(lapsum_rows(5), view, target), both(lapsum_rows(5), view.contiguous(), target)
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])


def test_too_few_scores_are_not_ruled_out():
    s = torch.full((1, 9), -torch.inf)
    s[0, :2] = 0.0
    for loss in (lapsum_rows(3), sparse_topk_rows(3)):
        value, gradient = both(loss, s, torch.tensor([0]))
        assert value.isnan().all()
        assert gradient.isnan().all()


def test_the_threshold_of_lapsum_at_a_score():
    """Of equal scores half are chosen, by a threshold that equals them: every class has a part in the gradient."""
    s, y = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0])
    wanted = torch.tensor([[-0.75, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for name in ("numba", "torch"):
        with use_backend(name):
            torch.testing.assert_close(both(lapsum_rows(2), s, y)[1], wanted)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("k", [2, 60, N - 1])
def test_sparse_masks_that_hold_many_classes(k, scale):
    """Each class inside has a threshold of its own, all of them from one pass; masks add up to k, and are as exact."""
    s, loss = scale * scores("gaussian"), sparse_topk_rows(k, tau=1.5)
    s[0] = 0.0
    s[1, :9] = s[1, 9:18]
    q = targets(s)[1]
    found = both(loss, s, q)
    with use_backend("torch"):
        wanted = both(loss, s, q)
    tolerance = 8 * k * torch.finfo(torch.float64).eps
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=tolerance)


def test_cross_entropy_of_masses_keeps_its_digits():
    """Where the label is all but certain, 1 - p is far below the rounding of p."""
    n = 600  # more than a block
    for dtype in (torch.float32, torch.float64):
        s, q = torch.zeros(2, n, dtype=dtype), torch.zeros(2, n, dtype=dtype)
        s[:, 7], q[:, 7], q[1, 550] = 40.0, 1.0, 0.25
        value, gradient = both(softmax_rows(), s, q)
        rest = (n - 1) * torch.tensor(-40.0, dtype=torch.float64).exp()
        wanted = torch.stack([rest.log1p(), 0.25 * 40 + 1.25 * rest.log1p()])
        rtol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(value, wanted, rtol=rtol, atol=0.0)
        torch.testing.assert_close(gradient[:, 7], torch.stack([-rest, 0.25 - rest]) / (1 + rest), rtol=rtol, atol=0.0)
        torch.testing.assert_close(gradient[0, 8], rest / (n - 1) / (1 + rest), rtol=rtol, atol=0.0)


def test_a_probability_of_one_half_keeps_its_digits():
    """log(1 - p) of two equal classes, by its series."""
    s, q = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), 0.5, dtype=torch.float64)
    curve = Curve(lambda log_p, log_not, own: -log_not, _log_not)
    value, gradient = both(softmax_rows(curve), s, q)
    torch.testing.assert_close(value, torch.tensor([2.0]).double().log(), rtol=4e-16, atol=0.0)
    torch.testing.assert_close(gradient, torch.zeros_like(s), rtol=0.0, atol=1e-16)


@pytest.mark.slow
def test_elementary_functions_of_a_curve_become_vector_instructions():
    """One call that is not inlined would leave the loop over classes without any."""
    from numba import cfunc

    from topk_registry.ops.cpu.functions import vectorised
    from topk_registry.ops.rows.numba import curves

    body = curves._softmax_body(vectorised(_of_every_function, np.float32), False, np.float32)
    signature: Any = curves.SOFTMAX.signature
    compiled = cfunc(signature, error_model="numpy", fastmath={"contract", "reassoc"})(body)
    code = compiled.inspect_llvm()
    assert re.search(r"fdiv [a-z ]*<\d+ x float>", code)
    assert not re.search(r"call .*@(expf?|expm1f?|logf?|log1pf?)\(", code)


def _of_every_function(log_p, log_not, p, not_p, own, numbers):
    e = math.exp(-abs(log_p - log_not))
    return math.log1p(e) - math.log(p + 1.0) - math.expm1(log_p), 1.0 / (1.0 + e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_log1p_keeps_its_digits(dtype):
    """Of numbers of every size, through the loss of a class whose log-odds are -log of them."""
    s = torch.tensor([[x, 0.0] for x in (-30.0, -9.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 12.0)], dtype=dtype)
    q = torch.zeros_like(s)
    q[:, 1] = 1.0
    value, _ = both(softmax_rows(Curve(lambda log_p, log_not, own: -log_p, _softplus)), s, q)
    wanted = s[:, 0].double().exp().log1p()
    torch.testing.assert_close(value, wanted, rtol=6 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_expm1_keeps_its_digits(dtype):
    """Of the shares 1e-4 to 3 of log p: from numbers that round to 0 beside 1 to those whose exponential does."""
    s = torch.tensor([[x, 0.0] for x in (-30.0, -3.0, -1e-3, 0.0, 0.5, 3.0, 12.0, 80.0)], dtype=dtype)
    q = torch.zeros_like(s)
    q[:, 1] = 1.0
    log_p = -s[:, 0].double().exp().log1p()
    for share in (1e-4, 0.3, 3.0):
        curve = Curve(lambda log_p, log_not, own: -(share * log_p).expm1(), _less_power, (share,))  # noqa: B023
        value, _ = both(softmax_rows(curve), s, q)
        # the product is rounded, and log p itself by up to two units
        torch.testing.assert_close(value, -(share * log_p).expm1(), rtol=6 * torch.finfo(dtype).eps, atol=0.0)


def _less_power(log_p, log_not, p, not_p, own, numbers):
    x = numbers[0] * log_p
    return -math.expm1(x), -numbers[0] * math.exp(x) * not_p


def _softplus(log_p, log_not, p, not_p, own, numbers):
    return math.log1p(not_p / p), -not_p


def _log_not(log_p, log_not, p, not_p, own, numbers):
    return -log_not, p
