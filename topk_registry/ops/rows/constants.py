"""Numbers that a compiled graph keeps as constants."""

import torch


def fixed_number(number: float) -> float:
    """A number, as a constant of the graph where one is compiled.

    After a second value ``torch.compile`` makes a symbol of a float. It burns its value into the code wherever an
    operator takes a plain number, but the caches of compiled code know the symbol alone: a third value would be given
    the code of the second.
    """
    if not torch.compiler.is_compiling() or not isinstance(number, float):
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # it brings in the compiler

    return guard_scalar(number)  # pyright: ignore[reportReturnType]
