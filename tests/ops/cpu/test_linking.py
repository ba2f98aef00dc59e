"""Functions that kernels call are optimised within them, once."""

import numpy as np
from numba.core.ccallback import CFunc
from numba.core.codegen import CPUCodeLibrary
from numba.core.sigutils import normalize_signature

from topk_registry.ops.cpu import linking
from topk_registry.ops.cpu.functions import BODY
from topk_registry.ops.cpu.memory import array
from topk_registry.ops.cpu.numbers import compiled


@compiled
def leaf(x):
    return x * 2 + 1


@compiled
def middle(x):
    return leaf(x) + leaf(x + 1)


def test_only_the_kernel_is_optimised(monkeypatch):
    optimised, optimise = [], CPUCodeLibrary._optimize_final_module
    monkeypatch.setattr(
        CPUCodeLibrary, "_optimize_final_module", lambda one: (optimised.append(one.name), optimise(one))[1]
    )

    def body(job):
        numbers = array(job, 2, np.float64)
        numbers[1] = middle(numbers[0])

    code, name = linking.code_of(CFunc(body, normalize_signature(BODY.signature), locals={}, options={}))
    assert name in code
    assert len(optimised) == 1
    assert optimised[0].endswith("body")
    assert "call" not in code.split(f"{name}(")[1].split("\n}")[0]  # what it calls has become part of it
