"""Run a kernel for rows over a batch: targets, class weights, ignored rows, reduction and half precision.

A family's kernel writes the losses of all rows and their gradient in one launch. For a sum or a mean a second kernel,
of one program, adds the losses up in order, so that results repeat bit for bit. The mean of labels divides by the
weights of those that count, which are known when all rows are done: losses and gradient are divided by the number of
rows meanwhile, and the second kernel gives the factor that is left. Nothing waits for the device. A label out of range
makes its row NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from topk_registry.ops.gpu.layout import compiled_for, in_rows, like_rows, tiles
from topk_registry.ops.rows.backends import Own
from topk_registry.ops.rows.triton.add_up import add_up
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.ops.targets.masses import Options, Reduction
from topk_registry.ops.tensors import laid_out, launch, operand

BLOCK = 4096  # losses that are added up together


def run(
    kernel: Any,
    options: Options,
    s: Tensor,
    wanted: bool,
    numbers: Mapping[str, float],
    tensors: Mapping[str, Tensor | None],
    choices: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The losses or their sum or mean, the gradient, and the factor that it has yet to be multiplied by, if any.

    Args:
        kernel: of a family, see for example softmax/triton/rows.py.
        s: scores [B, n] in half or single precision; all is computed in single.
        wanted: whether there is to be a gradient.
        numbers: the kernel's own, by name.
        tensors: the kernel's own, None for one that it does not read.
        choices: the constants that the kernel is compiled for.

    The gradient of float16 scores is in float32: in float16 it may underflow before the loss scaler multiplies it.
    """
    target, weight, smoothing, ignore_index, reduction = options
    B, n = s.shape
    shares = uniform = None
    if mixed := isinstance(target, LabelMixture):
        target, *parts = target
        shares, uniform = (None if part is None else laid_out(part, torch.float32).view(-1) for part in parts)
    dense = target.is_floating_point()
    few = target.shape[1] if mixed else 0 if dense else 1  # labels a row
    target = laid_out(target, target.dtype if dense else torch.int64).view(-1)
    memory, stride = (laid_out(s, s.dtype), n) if dense else in_rows(s)
    weight = None if weight is None else operand(weight.detach(), (n,), weight.dtype, s.device)
    losses = torch.empty(B, dtype=torch.float32, device=s.device)
    gradient = out = None
    if wanted:
        out, gradient = like_rows(s.shape, stride, torch.float32 if s.dtype == torch.float16 else s.dtype, s.device)
    part = part_of_row(reduction, B)
    given = {"weight_ptr": weight, "gradient_ptr": out, "share_ptr": shares, "uniform_ptr": uniform, **tensors}
    if B:
        sizes = tiles(n, stride, s.element_size())
        launch(
            kernel, (-(-B // sizes["R"]),), memory, target,
            value_ptr=losses, **{name: losses if one is None else one for name, one in given.items()},
            B=B, share=part * (1 - smoothing), even=part * smoothing / n, ignore_index=ignore_index, **numbers,
            M=few, MIXED=mixed, EVEN=smoothing != 0 or uniform is not None,
            WEIGHTED=weight is not None, GRADIENT=wanted, **choices, **sizes,
        )  # fmt: skip
    value, factor = reduced(losses, None if dense or mixed else target, weight, n, ignore_index, reduction)
    return value, gradient, factor


def part_of_row(reduction: Reduction, B: int) -> float:
    """Return the factor that kernels apply to each row before :func:`reduced`: 1 / B for a mean, else 1."""
    return 1 / B if reduction is Reduction.MEAN and B else 1.0


def reduced(
    losses: Tensor, label: Tensor | None, weight: Tensor | None, n: int, ignore_index: int, reduction: Reduction
) -> tuple[Tensor, Tensor | None]:
    """The losses [B] or their sum or mean, and the factor that their gradient has yet to be multiplied by, if any.

    Args:
        losses: of the rows, multiplied by :func:`part_of_row`.
        label: the labels [B] whose weights the mean divides by, None if it divides by the number of rows.
        weight: a factor a class [n], which the losses hold already.
    """
    if reduction is Reduction.NONE:
        return losses, None
    B, mean = len(losses), reduction is Reduction.MEAN
    value, counts = torch.empty((), dtype=torch.float32, device=losses.device), label if mean else None
    factor = value if counts is None else torch.empty_like(value)
    launch(
        add_up, (1,), losses, losses if counts is None else counts, losses if weight is None else weight, value, factor,
        B, n, ignore_index, COUNTS=counts is not None, WEIGHTED=weight is not None, EMPTY=mean and not B, BLOCK=BLOCK,
        **compiled_for(16),
    )  # fmt: skip
    return value, None if counts is None else factor


class TritonRows:
    """A family's kernel with its numbers, see :class:`topk_registry.ops.rows.api.Kernel`.

    Args:
        kernel: of the family.
        numbers: its own, by name.
        tensors: the names of the loss's own tensors, which hold one number a class.
        choices: the constants that it is compiled for.
    """

    def __init__(
        self,
        kernel: Any,
        numbers: Mapping[str, float],
        tensors: Sequence[str],
        choices: Mapping[str, Any],
    ) -> None:
        self.kernel, self.numbers, self.tensors, self.choices = kernel, numbers, tensors, choices

    def run(
        self, own: Own, options: Options, scores: Tensor, wanted: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :func:`run`."""
        there = {
            name: None if one is None else one.detach().to(scores.device, torch.float32).contiguous()
            for name, one in zip(self.tensors, own, strict=True)
        }
        return run(self.kernel, options, scores, wanted, self.numbers, there, self.choices)


kernels = TritonRows
