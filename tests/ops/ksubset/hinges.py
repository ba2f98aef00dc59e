"""Hinges in single precision against exact arithmetic, whatever computes them."""

import mpmath
import torch

from topk_registry.ops.hinge import Hinge

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
MARGINS = [-INF, -1e300, -1e3, -30.0, -1.0, -1e-12, 0.0, 0.3, 1.0, 5.0, 30.0, 1e3, INF]


def exact(margin: float, alpha: float, scale: float, tau: float) -> tuple[float, float]:
    """The hinge and its slope to 40 digits; infinite margins by their limits."""
    if abs(margin) == INF:
        return (0.0, 0.0) if margin * scale > 0 else (INF, -scale)
    with mpmath.workdps(40):
        z = (mpmath.mpf(alpha) - mpmath.mpf(scale) * margin) / tau
        if z > 1000:
            return float(tau * z), -scale
        e = mpmath.exp(z)
        return float(tau * mpmath.log1p(e)), float(-scale * e / (1 + e))


def check_hinges(of_margins, scale: float, tau: float, device: str = "cpu") -> None:
    """``of_margins(margin, label, hinge) -> (value, slope)`` in single precision against exact arithmetic."""
    alpha = torch.linspace(0, 2, len(MARGINS))
    margin, label = torch.tensor([*MARGINS, NAN], dtype=torch.float64), torch.arange(len(MARGINS) + 1)
    for one in (alpha, alpha[3]):
        hinge = Hinge(one.to(device), scale, tau)
        value, slope = of_margins(margin.to(device), label.to(device), hinge)
        assert value.dtype == slope.dtype == torch.float32
        wanted = [exact(m, float(one[i] if one.ndim else one), scale, tau) for i, m in enumerate(MARGINS)]
        for found, numbers in zip((value, slope), zip(*wanted, strict=True), strict=True):
            # single precision's rounding, and below its normal numbers whatever the device makes of them
            torch.testing.assert_close(found[:-1].cpu(), torch.tensor(numbers), rtol=2 * EPS, atol=2e-38)
            assert found[-1].isnan()
