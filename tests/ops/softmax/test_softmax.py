"""What is peculiar to curves of a softmax: digits, and vector instructions."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import topk_registry as tr
from tests.ops.cpu_rows import N, both, scores, targets
from topk_registry.rows import Curve, softmax_rows

pytest.importorskip("numba")


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


@pytest.mark.parametrize("best", [1, 3, 149])
def test_a_curve_is_told_which_classes_are_the_best(best):
    """Beside what other classes add, a scale and a shift."""
    for kind in ("gaussian", "tied", "leaders"):
        s = scores(kind)
        shift = torch.linspace(-1, 1, N, dtype=torch.float64)
        loss = softmax_rows(Curve(_both_by_rank, _by_rank, (0.5,), others=True), scale=0.7, shift=shift, best=best)
        for target in targets(s):
            with tr.use_backend("torch"):
                wanted = both(loss, s, target)
            torch.testing.assert_close(both(loss, s, target), wanted, rtol=1e-13, atol=1e-14)


def test_the_best_classes_take_the_place_of_own_numbers():
    own = Curve(lambda log_p, log_not, own: -own * log_p, own=torch.ones(3))
    for curve in (None, own):
        with pytest.raises(ValueError, match="best needs a curve without numbers of its own"):
            softmax_rows(curve, best=1)


def _both_by_rank(log_p, log_not, own):
    return -(1 - 0.5 * own) * log_p, -(1 + own) * log_not


def _by_rank(log_p, log_not, p, not_p, own, numbers):
    on, off = 1.0 - numbers[0] * own, 1.0 + own
    return -on * log_p, -on * not_p, -off * log_not, off * p


def _less_power(log_p, log_not, p, not_p, own, numbers):
    x = numbers[0] * log_p
    return -math.expm1(x), -numbers[0] * math.exp(x) * not_p


def _softplus(log_p, log_not, p, not_p, own, numbers):
    return math.log1p(not_p / p), -not_p


def _log_not(log_p, log_not, p, not_p, own, numbers):
    return -log_not, p
