"""The head: ONNX nodes that compute marginals, probabilities and the top-k classes from the logits of a model.

The head consists of standard ONNX operators, so it fits behind any model that computes logits. The marginals follow the
same formulas as ``topk_registry.ops.ksubset.graph``:

1. A binary tree of polynomial products multiplies the factors of the *top group*, the classes with the largest scores.
2. All other classes, the *tail*, have small odds. Power sums of these odds give the polynomial of the tail.
3. The marginal of a class follows from the product of the factors of all other classes.

A polynomial is a tensor [coefficients, B, classes], with the coefficient of the lowest degree first. Long rows are
split into chunks of classes, so that the temporary tensors of one chunk fit into the cache of a CPU.

The head contains no Sigmoid, because onnxruntime computes Sigmoid inaccurately far below zero. The head contains no
MatMul, because GPUs round the inputs of MatMul to TF32, and because quantizers convert MatMul to integers. The head
adds the numbers of a long row in blocks, because onnxruntime adds the numbers of a row in order. The head contains no
Loop, If and Scan, which CUDA graphs do not support. So that onnxruntime's WebGPU provider runs all nodes except
arithmetic with shapes, the head contains no Sum, no Or, no Slice of integers, and no Split with many outputs.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from topk_export.graph import PREFIX, Nodes, optional_input, value_shape
from topk_export.runtime.metadata import ALLOWED, LOGITS, Metadata

BLOCK = 128  # number of classes per block of a sum
CHUNK = 4096  # number of classes per chunk of the tail
SMALL_K = 64  # up to this k, the tilt in closed form prevents overflow in single precision
WITH_TAIL = 500  # above this k, all classes belong to the top group
MAX_GAP = 80.0  # larger odds than exp(80) give the same probabilities, and exp(80) is finite in single precision
HALVINGS = 20  # number of bisection steps for the tilt; the first interval has a length of about 2 log(2n)
BITS = 50.0  # powers of odds are replaced by 0 from 2^-BITS on, before they become denormal numbers, which are slow
SMALLEST = 126.0  # 2^-126 is the smallest number that is not denormal
PRODUCTS = 4096  # above this number of products, one polynomial product becomes a sum over coefficients
INF = float("inf")
LOWEST = -3e38  # score of an excluded class: WebGPU's TopK returns the index -1 for scores of at most -3.4e38


def add_head(model: Any, metadata: Metadata) -> None:
    """Append the head to an ONNX model (a ModelProto), in place.

    The graph has a float32 tensor ``logits`` of the shape [B, n] or [B, T, n]. The function adds the optional input
    ``allowed``, and the outputs that ``metadata.outputs`` lists, except ``logits``: ``marginals``, ``probabilities``
    and ``indices``. A class with the score -inf is excluded: its marginal and its probability are 0, and ``indices``
    does not contain the class. If fewer than k classes remain, the last entries of ``indices`` are -1. If no class
    remains, or if a score is NaN or plus infinity, the marginals and the probabilities of the row are NaN.
    """
    from onnx import TensorProto

    *axes, last = value_shape(model.graph, LOGITS)
    n = int(last)
    k, wanted, add = metadata.k, metadata.outputs, Nodes(model, PREFIX)
    flat = len(axes) == 1
    optional_input(model, ALLOWED, np.ones((1, n) if flat else (1, 1, n), bool), ["rows", *["positions_"][flat:], n])
    scores = add("Where", ALLOWED, LOGITS, LOWEST)
    if metadata.multilabel:
        odds = add("Exp", add("Min", _over(add, scores, metadata.temperature), 60.0))
        results = {"probabilities": add("Mul", odds, add("Div", 1.0, add("Add", odds, 1.0)))}
    else:
        if len(axes) > 1:
            scores = add("Reshape", scores, [-1, n])
        results = _results(add, scores, n, k, metadata.temperature, "marginals" in wanted)
    for name in [name for name in wanted if name in results]:
        integer = name == "indices"
        width = k if integer else n
        if len(axes) > 1 and not metadata.multilabel:
            add("Reshape", results[name], add("Concat", _leading_axes(add), [width], axis=0), out=name)
        else:
            add("Identity", results[name], out=name)
        add.output(name, TensorProto.INT64 if integer else TensorProto.FLOAT, [*axes, width])


def _leading_axes(add: Nodes) -> str:
    return add("Slice", add("Shape", LOGITS), [0], [-1])


def _results(add: Nodes, s: str, n: int, k: int, theta: float, with_marginals: bool) -> dict[str, str]:
    with_tree = with_marginals and k > 1
    # the (k + 1)-th score shows whether more than one set of k classes is possible
    size = max(k + 1, _group_size(k, n)) if with_tree and 2 * k <= n else k + with_tree
    if with_tree:
        s = add("Max", s, LOWEST)
    top, where = add("TopK", s, [size], axis=-1, outputs=2)
    excluded = _excluded(add, top)
    top, classes = add("Where", excluded, -INF, top), add("Where", excluded, -1, where)
    # Gather, because the WebGPU provider cannot slice integers
    results = {"indices": classes if size == k else add("Gather", classes, np.arange(k), axis=1)}
    largest = top if size == 1 else add("Slice", top, [0], [1], [1])
    if with_tree and theta == 1 and 2 * k <= n:
        return results | _marginals_and_softmax(add, s, top, where, size, n, k)
    results["probabilities"], total = _softmax(add, s, largest, n, 1.0)
    if not with_marginals:
        return results
    if k == 1:
        marginals = results["probabilities"] if theta == 1 else _softmax(add, s, largest, n, theta)[0]
    else:
        certain = _excluded(add, add("Slice", top, [k], [k + 1], [1]))
        poison = add("Sub", total, total)  # 0, or NaN
        if 2 * k > n:
            marginals = _of_the_complement(add, s, certain, poison, n, k, theta)
        else:
            group = _solve(add, s, _usual(add, certain, top), where, size, n, k, theta)
            marginals = _inside(add, group, certain, poison, top, where, n)
    return results | {"marginals": marginals}


def _excluded(add: Nodes, scores: str) -> str:
    return add("LessOrEqual", scores, LOWEST)


def _over(add: Nodes, x: str, theta: float) -> str:
    return x if theta == 1 else add("Div", x, theta)


def _usual(add: Nodes, certain: str, x: str) -> str:
    return add("Where", certain, 0.0, x)


def _softmax(add: Nodes, s: str, largest: str, n: int, theta: float) -> tuple[str, str]:
    """Return softmax(s / theta) [B, n], and the sum [B, 1] by which the exponentials were divided."""
    e = add("Exp", _over(add, add("Sub", s, largest), theta))
    total = _poisoned(add, _total(add, _split(add, e, _parts(n, n))))
    return add("Div", e, total), total


def _poisoned(add: Nodes, total: str) -> str:
    # some GPUs compute exp(NaN) = inf, and x / inf is 0
    return add("Add", total, add("Sub", total, total))


def _marginals_and_softmax(
    add: Nodes, s: str, top: str, where: str, size: int, n: int, k: int
) -> dict[str, str]:  # fmt: skip
    # at temperature 1, the odds of the tail give the softmax, too
    certain = _excluded(add, add("Slice", top, [k], [k + 1], [1]))
    group = _solve(add, s, _usual(add, certain, top), where, size, n, k, 1.0)
    largest = add("Slice", top, [0], [1], [1])
    e = add("Exp", add("Sub", top, largest))
    total = add.reduce("ReduceSum", e, 1)
    softmax, ratio = s, ""  # without a tail, ScatterElements replaces all entries
    if group.odds:
        ratio = add("Exp", add("Min", add("Sub", group.a, largest), 0.0))
        total = add("Add", total, add("Mul", ratio, group.mass))
    total = _poisoned(add, total)
    if group.odds:
        softmax = add("Mul", group.odds, add("Div", ratio, total))
    softmax = add("ScatterElements", softmax, where, add("Div", e, total), axis=1)
    marginals = _inside(add, group, certain, add("Sub", total, total), top, where, n)
    return {"marginals": marginals, "probabilities": softmax}


def _inside(add: Nodes, f: "_Solution", certain: str, poison: str, top: str, where: str, n: int) -> str:
    """Return the probability of each class to be in the set [B, n]."""
    cases = add("Mul", f.p, f.outside[0]), add("Mul", f.q, f.outside[1])  # in the set, outside of it
    in_top = add("Div", cases[0], add("Add", *cases))
    in_top = add("Where", certain, add("Where", _excluded(add, top), 0.0, 1.0), in_top)
    in_top = add("Add", in_top, poison)
    if not f.odds:  # ScatterElements replaces all entries
        return add("ScatterElements", top, where, in_top, axis=1)
    quotients = _divide_out(add, f, poison, f.k - 1)
    of_tail = _join(add, [add("Mul", w, d) for w, d in zip(f.tail, quotients, strict=True)], n)
    return add("ScatterElements", of_tail, where, in_top, axis=1)


def _of_the_complement(add: Nodes, s: str, certain: str, poison: str, n: int, k: int, theta: float) -> str:
    """Return the marginals for 2k > n, from the probability that a random set of n - k classes lacks the class."""
    z = add("Neg", _usual(add, certain, s))
    size = _group_size(n - k, n)
    top, where = add("TopK", z, [size], axis=-1, outputs=2)
    f = _solve(add, z, top, where, size, n, n - k, theta)
    cases = add("Mul", f.p, f.outside[0]), add("Mul", f.q, f.outside[1])
    in_top = add("Div", cases[1], add("Add", *cases))
    out = _join(add, _divide_out(add, f, poison, f.k), n) if f.odds else s
    out = add("ScatterElements", out, where, in_top, axis=1)
    out = add("Where", certain, 1.0, out)
    return add("Add", add("Where", _excluded(add, s), 0.0, out), poison)


# --- long rows


def _parts(n: int, limit: int) -> list[tuple[int, int]]:
    """Cut n classes into parts of at most ``limit`` classes. Return (number of blocks, block length) of each part."""
    parts, rest = [], n
    while rest:
        size = min(rest, limit)
        divisors = [i for i in range(BLOCK // 4, 2 * BLOCK + 1) if size % i == 0]
        length = divisors[-1] if divisors else min(size, BLOCK)
        parts.append((size // length, length))
        rest -= parts[-1][0] * length
    return parts


def _split(add: Nodes, x: str, parts: list[tuple[int, int]]) -> list[str]:
    """Cut x [B, n] into parts [B, blocks, length]."""
    tensors, start = [], 0
    for blocks, length in parts:
        end = start + blocks * length
        row = x if len(parts) == 1 else add("Slice", x, [start], [end], [1])
        tensors.append(add("Reshape", row, [0, blocks, length]))
        start = end
    return tensors


def _join(add: Nodes, tensors: list[str], n: int) -> str:
    """Concatenate the parts [B, blocks, length] of the tail to rows [B, n]."""
    sizes = [blocks * length for blocks, length in _parts(n, CHUNK)]
    rows = [add("Reshape", x, [0, size]) for x, size in zip(tensors, sizes, strict=True)]
    return rows[0] if len(rows) == 1 else add("Concat", *rows, axis=1)


def _total(add: Nodes, parts: list[str]) -> str:
    """Return the sum [B, 1] of each row whose parts [B, blocks, length] are ``parts``."""
    sums = [add.reduce("ReduceSum", x, 2, keepdims=False) for x in parts]
    return add.reduce("ReduceSum", sums[0] if len(sums) == 1 else add("Concat", *sums, axis=1), 1)


# --- polynomials


class _Polynomial(NamedTuple):
    tensor: str  # [length, B, classes]
    length: int


class _Solution(NamedTuple):
    k: int
    a: str  # [B, 1], reference score
    odds: str  # [B, n], odds of the tail before the tilt, 0 at the classes of the top group; "" without a tail
    mass: str  # [B, 1], the sum of these odds
    tail: list[str]  # parts [B, blocks, length] of the odds of the tail
    p: str  # [B, T], w / (1 + w) for the odds w of the top group
    q: str  # [B, T], 1 / (1 + w)
    outside: tuple[str, str]  # [B, T], coefficients k - 1 and k of the product without each class of the top group
    c: _Polynomial  # [k + 1, B, 1], the whole product


def _group_size(k: int, n: int) -> int:
    # the odds of all classes after the 2k largest are below 1/2; with a power of two, each level of the tree is even
    return min(n, 1 << (2 * k - 1).bit_length()) if k <= WITH_TAIL else n


def _solve(add: Nodes, s: str, top: str, where: str, size: int, n: int, k: int, theta: float) -> _Solution:
    """Compute the polynomials for sets of k classes. ``top`` and ``where`` [B, size] are the largest scores of s."""
    a = add("Slice", top, [k - 1], [k], [1])
    x = _over(add, add("Sub", top, a), theta)
    odds, mass, parts, tail = "", "", [], []
    if size < n:
        e = add("Exp", _over(add, add("Sub", s, a), theta))
        nothing = add("Expand", 0.0, add("Shape", where))
        odds = add("ScatterElements", e, where, nothing, axis=1)
        parts = _split(add, odds, _parts(n, CHUNK))
        mass = _total(add, parts)
    t = _tilt(add, x, mass, size, k)
    start = _Polynomial(add.constant(np.ones((1, 1, 1))), 1)
    if size < n:
        factor = add("Exp", add("Neg", t))
        tail = [add("Mul", part, add("Unsqueeze", factor, [2])) for part in parts]
        start = _from_power_sums(add, _power_sums(add, tail, add("Mul", mass, factor), k), k)
    w = add("Exp", add("Min", add("Sub", x, t), MAX_GAP))
    q = add("Div", 1.0, add("Add", w, 1.0))
    p = add("Mul", w, q)
    outside, c = _products(add, p, q, size, start, k)
    return _Solution(k, a, odds, mass, tail, p, q, outside, c)


def _tilt(add: Nodes, x: str, mass: str, size: int, k: int) -> str:
    """Return the number t [B, 1] that is subtracted from all scores, so that no product overflows.

    Let R_m be the sum of exp(x_i) over all classes except the m largest. For k up to ``SMALL_K``, t is the minimum of
    log(R_m / (k - m)) over m = 0..k-1. For larger k, the sum of sigmoid(x_i - t) is about k - 1/2, by bisection.
    """
    if k <= SMALL_K:
        R = add("CumSum", add("Exp", add("Min", x, 60.0)), np.int64(1), reverse=1)
        R = R if size == k else add("Slice", R, [0], [k], [1])
        R = add("Add", R, mass) if mass else R
        return add("Log", add.reduce("ReduceMin", add("Div", R, np.arange(k, 0, -1, dtype=np.float32)), 1))
    counted = add("Add", mass, 2.0 * k + size) if mass else 2.0 * k + size
    reach = add("Add", add("Log", counted), math.log(2))  # t is between -reach and reach
    t = add("Mul", add("Slice", x, [k - 1], [k], [1]), 0.0)
    for step in range(HALVINGS):
        w = add("Exp", add("Min", add("Sub", x, t), MAX_GAP))
        drawn = add.reduce("ReduceSum", add("Div", w, add("Add", w, 1.0)), 1)
        if mass:
            drawn = add("Add", drawn, add("Mul", mass, add("Exp", add("Neg", t))))
        direction = add("Sign", add("Sub", drawn, k - 0.5))
        t = add("Add", t, add("Mul", add("Mul", reach, 0.5 ** (step + 1)), direction))
    return t


def _power_sums(add: Nodes, tail: list[str], first: str, k: int) -> str:
    """Return the sums of w^j over the odds w of the tail, for j = k, ..., 1 [B, k]. ``first`` is the sum for j = 1."""
    if k == 1:
        return first
    of_parts = []
    for w in tail:
        sums, power, base, reach = [], w, w, 1.0
        for j in range(2, k + 1):
            if j > reach:
                base, reach = add("ThresholdedRelu", w, alpha=2.0 ** (-BITS / j)), SMALLEST * j / BITS
                power = base if j == 2 else power
            power = add("Mul", power, base)
            sums.insert(0, add.reduce("ReduceSum", power, 2))  # [B, blocks, 1]
        blocks = sums[0] if len(sums) == 1 else add("Concat", *sums, axis=2)
        of_parts.append(add.reduce("ReduceSum", blocks, 1, keepdims=False))
    total = of_parts[0]
    for part in of_parts[1:]:
        total = add("Add", total, part)
    return add("Concat", total, first, axis=1)


def _from_power_sums(add: Nodes, P: str, k: int) -> _Polynomial:
    """Return the product of all 1 + w X to degree k, from the power sums P_k, ..., P_1 [B, k], by Newton's identities.

    For k above ``SMALL_K``, all coefficients are multiplied by exp(-P_1 / 2), which prevents overflow.
    """
    signed = add("Mul", P, np.asarray([(-1.0) ** (j - 1) for j in range(k, 0, -1)]))
    first = add("Slice", P, [k - 1], [k], [1])
    b = add("Exp", add("Mul", first, -0.5 if k > SMALL_K else 0.0))
    for j in range(1, k + 1):  # j b_j = sum_i (-1)^(i - 1) P_i b_{j - i}
        last = signed if j == k else add("Slice", signed, [k - j], [k], [1])
        b = add("Concat", b, add.reduce("ReduceMean", add("Mul", b, last), 1), axis=1)
    return _Polynomial(add("Unsqueeze", add("Transpose", b, perm=[1, 0]), [2]), k + 1)


def _products(
    add: Nodes, p: str, q: str, size: int, start: _Polynomial, k: int
) -> tuple[tuple[str, str], _Polynomial]:  # fmt: skip
    """Multiply ``start`` by the factors q + p X of the top group.

    Return the coefficients k - 1 and k [B, T] of the products of all factors but one, and the product of all factors.
    """
    factors = add("Concat", add("Unsqueeze", q, [0]), add("Unsqueeze", p, [0]), axis=0)
    width = 1 << (size - 1).bit_length()
    if width > size:  # the factor 1 + 0 X fills the last places
        filler = np.zeros((2, 1, 1))
        filler[0] = 1
        shape = add("Concat", [2], add("Shape", add("Slice", p, [0], [1], [1])), axis=0)  # [2, B, 1]
        one = add("Expand", filler, shape)
        factors = add("Concat", factors, *[one] * (width - size), axis=2)
    level, halves = _Polynomial(factors, 2), []
    while width > 1:
        width //= 2
        left, right = add("Split", level.tensor, [width, width], axis=2, outputs=2)
        halves.append((left, right, level.length))
        high = min(k, 2 * level.length - 2)
        level = _product(add, _Polynomial(left, level.length), _Polynomial(right, level.length), 0, 0, high)
    needed = [k - 1]  # the lowest degree that each level needs
    for _, _, length in halves:
        needed.append(max(0, needed[-1] - length + 1))
    outside, first = start, 0
    for (left, right, length), low in zip(reversed(halves), reversed(needed[:-1]), strict=True):
        siblings = _Polynomial(add("Concat", right, left, axis=2), length)
        parents = _Polynomial(add("Concat", outside.tensor, outside.tensor, axis=2), outside.length)
        outside, first = _product(add, siblings, parents, first, low, k), low
    below, last = (add("Gather", outside.tensor, np.int64(i), axis=0) for i in range(2))
    if 1 << (size - 1).bit_length() > size:
        below, last = (add("Slice", x, [0], [size], [1]) for x in (below, last))
    return (below, last), _product(add, level, start, 0, 0, k)


def _product(add: Nodes, a: _Polynomial, b: _Polynomial, first: int, low: int, high: int) -> _Polynomial:
    """Return the coefficients of degree ``low`` to ``high`` of a b. The coefficients of b start at degree ``first``."""
    if a.length > b.length and first == 0:
        a, b = b, a
    index = np.asarray([[j - i - first for i in range(a.length)] for j in range(low, high + 1)])
    outside = (index < 0) | (index >= b.length)
    padded = add("Pad", b.tensor, [0, 0, 0, 1, 0, 0]) if outside.any() else b.tensor
    index = np.where(outside, b.length, index)
    if index.size <= PRODUCTS:
        terms = add("Mul", a.tensor, add("Gather", padded, index, axis=0))
        return _Polynomial(add.reduce("ReduceSum", terms, 1, keepdims=False), len(index))
    total = ""
    for i in range(a.length):
        term = add("Mul", add("Slice", a.tensor, [i], [i + 1], [0]), add("Gather", padded, index[:, i], axis=0))
        total = add("Add", total, term) if total else term
    return _Polynomial(total, len(index))


def _divide_out(add: Nodes, f: _Solution, poison: str, degree: int) -> list[str]:
    """Divide c / c_k by 1 + w X for each class of the tail, and return this coefficient of the quotients per part.

    The quotient has the coefficients d_0 = c_0 and d_j = c_j - w d_{j-1}. For w < 1, each step reduces the rounding
    error of d_{j-1}.
    """
    last = add("Add", add("Slice", f.c.tensor, [f.k], [f.k + 1], [0]), add("Unsqueeze", poison, [0]))
    c = add("Transpose", add("Div", f.c.tensor, last), perm=[1, 0, 2])  # [B, k + 1, 1]
    coefficients = [add("Slice", c, [j], [j + 1], [1]) for j in range(degree + 1)]
    quotients = []
    for w in f.tail:
        d = coefficients[0]
        for j in range(1, degree + 1):
            d = add("Sub", coefficients[j], add("Mul", w, d))
        quotients.append(d)
    return quotients
