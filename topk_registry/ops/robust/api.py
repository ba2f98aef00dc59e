"""The label-distributionally robust loss whose temperature adapts to each row."""

from functools import partial

from topk_registry.ops.robust.definition import aldr
from topk_registry.ops.rows.api import RowLoss
from topk_registry.ops.rows.numba.backend import row_kernel
from topk_registry.ops.values import number

# beyond this temperature the kernel in single precision loses more than 1e-6 of a loss, as it subtracts log n from a
# logarithm close to it; the definition, which does not, takes its place
WARMEST = 10.0


def aldr_rows(*, temperature: float = 1.0, alpha: float = 2.0, gap: float = 1.0) -> RowLoss:
    """The loss ALDR-KL, for :func:`topk_registry.rows.row_losses`.

    Masses are one distribution and its weight: they share one temperature, and cost their sum times the loss of the
    distribution that they are proportional to.

    Args:
        temperature: lambda_0, the largest temperature, positive; above 10 torch operations serve, whose digits do not
            depend on it.
        alpha: above 1; the larger, the less the temperature adapts.
        gap: how far the label must be ahead, at least 0.
    """
    options = (
        number(temperature, "temperature", above=0),
        number(alpha, "alpha", above=1),
        number(gap, "gap", at_least=0),
    )
    kernel = partial(row_kernel, "robust.numba.kernel:row", *options, of_label=True)
    return RowLoss(partial(aldr, *options), None if temperature > WARMEST else kernel)
