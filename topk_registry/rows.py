"""Losses of one row at a time, with kernels: what a plug-in's ``row_loss(logits)`` is made from.

A function called ``*_rows`` returns a :class:`RowLoss`, which holds the loss's definition and its kernels.
:func:`row_losses` computes one on scores and targets. :func:`array_kernel` makes a kernel of a plug-in's own.
"""

from topk_registry.losses.own_kernel import array_kernel
from topk_registry.ops.ksubset.row_loss import smooth_topk_rows
from topk_registry.ops.lapsum.api import lapsum_rows
from topk_registry.ops.perturbed.row_loss import perturbed_hinge_rows
from topk_registry.ops.ranking.api import ranking_rows
from topk_registry.ops.robust.api import aldr_rows
from topk_registry.ops.rows.api import RowLoss, row_losses
from topk_registry.ops.rows.curve import Curve
from topk_registry.ops.selection.api import topk_hinge_rows
from topk_registry.ops.sigmoid.api import sigmoid_rows
from topk_registry.ops.softmax.api import softmax_rows
from topk_registry.ops.softmax.ldr import ldr_rows
from topk_registry.ops.sparse.api import sparse_topk_rows
from topk_registry.ops.squares.api import quadratic_bound_rows, squares_rows
from topk_registry.ops.squares.definition import quadratic_bound_of_sums
from topk_registry.ops.threshold.api import soft_topk_rows

__all__ = [
    "Curve",
    "RowLoss",
    "aldr_rows",
    "array_kernel",
    "lapsum_rows",
    "ldr_rows",
    "perturbed_hinge_rows",
    "quadratic_bound_of_sums",
    "quadratic_bound_rows",
    "ranking_rows",
    "row_losses",
    "sigmoid_rows",
    "smooth_topk_rows",
    "soft_topk_rows",
    "softmax_rows",
    "sparse_topk_rows",
    "squares_rows",
    "topk_hinge_rows",
]
