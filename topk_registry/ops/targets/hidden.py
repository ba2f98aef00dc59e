"""Numbers that ``torch.func.vmap`` hides."""

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor


def is_hidden(t: Tensor) -> bool:
    """Whether a tensor stands for many, so that none of its numbers can be looked at; other transforms let one look."""
    if torch.compiler.is_compiling():
        return False
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False
