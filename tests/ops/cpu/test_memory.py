"""Memory that kernels take, and the constants of a precision, against numpy's."""

import gc

import numpy as np
import pytest
from numba import njit
from numba.core.runtime import _nrt_python, rtsys

from tests.ops.compiled import for_python
from topk_registry.ops.cpu import blocks, linking, memory, numbers

empty, zeros = memory.empty, memory.zeros
eps, tiny, lowest = numbers.eps, numbers.tiny, numbers.lowest

KINDS = [np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64]


@njit
def taken(shape, kind):
    return empty(shape, kind), zeros(shape, kind)


@pytest.mark.parametrize("kind", [*KINDS, np.dtype(np.float32)])
@pytest.mark.parametrize("shape", [0, 1, 7, 100_000, (3,), (4, 5), (0, 5), (2, 3, 4)])
def test_memory_is_an_array_of_this_shape_and_kind(shape, kind):
    for _ in range(3):  # memory that was used before is not 0 by itself
        first, second = taken(shape, kind)
        for one in (first, second):
            wanted = np.empty(shape, kind)
            assert (one.shape, one.dtype) == (wanted.shape, wanted.dtype)
            assert one.flags.c_contiguous
            assert one.ctypes.data % 32 == 0
        assert not second.any()
        first[...], second[...] = 1, 1
        del first, second, one


def test_memory_of_no_kind_is_in_double_precision():
    made = njit(lambda count: (empty(count), zeros((count, 2))))(3)
    assert [one.dtype for one in made] == [np.float64, np.float64]


@pytest.fixture
def counted():
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()


def test_memory_is_given_back(counted):
    taken((1000, 1000), np.float64)  # which may compile
    before = rtsys.get_allocation_stats()
    taken((1000, 1000), np.float64)
    after = rtsys.get_allocation_stats()
    assert after.mi_alloc - before.mi_alloc == 2
    assert after.mi_free - before.mi_free == 2


def test_memory_that_there_is_not_is_an_error():
    with pytest.raises(MemoryError):
        taken(1 << 61, np.uint8)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_constants_of_a_precision(kind):
    found = njit(lambda x: (eps(x.dtype), tiny(x.dtype), lowest(x.dtype)))(np.zeros(1, kind))
    limits = np.finfo(kind)
    assert found == (limits.eps, limits.tiny, limits.min)
    np.testing.assert_array_equal(for_python(blocks.ones)(5, kind), np.ones(5, kind), strict=True)


@pytest.mark.parametrize("collects", [True, False])
def test_the_search_for_garbage_is_as_it_was_after_compiling(collects):
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with linking.linked():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()
