"""The compiled step: torch's formulas, the definition's rounding bit for bit, and random bits by number."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from tests.ops.perturbed.noise import philox
from topk_registry.ops import backend
from topk_registry.ops.update import api
from topk_registry.ops.update.backends import OPERATOR, Kernels, State, Update
from topk_registry.ops.update.definition import LOW, RandomBits, from_8_bits, scale_shape
from topk_registry.ops.update.numba import backend as numba
from topk_registry.ops.update.rules import RULES
from topk_registry.ops.update.torch.backend import write
from topk_registry.ops.update.trial import trial

pytest.importorskip("numba")

CPU, UNIT = torch.device("cpu"), 2.0**-24
PLAIN = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
PLAIN |= {"betas": (0.9, 0.999), "eps": 1e-8}
CASES = {
    "plain": (SGD, {"momentum": 0.0}),
    "decay": (SGD, {"momentum": 0.0, "weight_decay": 0.3}),
    "momentum": (SGD, {"weight_decay": 0.3, "dampening": 0.4}),
    "nesterov": (SGD, {"weight_decay": 0.3, "nesterov": True}),
    "adam": (Adam, {"weight_decay": 0.3}),
    "slow start": (Adam, {"betas": (0.4, 0.8), "eps": 1e-3}),
    "adam, decoupled": (Adam, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "adamw": (AdamW, {"weight_decay": 0.3}),
}
STORED = ("float32", "bfloat16", "int8")


class BitsByNumber(RandomBits):
    """The kernel's random bits for torch operations: of rows from ``first`` on, in the order in which they are used."""

    def place(self, first, m, d, states):
        low, high = words(self.seed, self.update, self.rank, first + np.arange(m), d)
        weight = (low >> np.uint64(LOW)) | ((high >> np.uint64(LOW)) << np.uint64(12))
        self.left = [*(low, high)[:states], weight]

    def like(self, x):
        return torch.from_numpy(self.left.pop(0).astype(np.uint32).view(np.int32)).view(x.shape)


def words(seed, update, rank, rows, d):
    """Two words [rows, d] of a column, by numpy: half a row from one word of a call, half from the other."""
    half, columns = 16 * -(-d // 32), np.arange(d)
    counter = np.broadcast_arrays(columns[None] % half, rows[:, None], np.int64(update), np.int64(rank))
    found = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return [np.where(columns < half, found[i], found[2 + i]) for i in (0, 1)]


def group_of(name):
    kind, options = CASES[name]
    return RULES[kind], {**PLAIN, **options}


def states_of(values, stored):
    """States with these numbers [m, d] in float32, as near as they are stored."""
    found = []
    for each, signed in zip(values, (True, False), strict=False):
        if stored == "int8":
            state = State(torch.zeros(each.shape, dtype=torch.uint8), torch.zeros(scale_shape(each.shape)), signed)
        else:
            state = State(torch.zeros_like(each, dtype=getattr(torch, stored)))
        write(state, slice(None), each, None)
        if state.values.dtype == torch.float32:
            state.values.copy_(each)
        found.append(state)
    return found


def copied(rows, states):
    return rows.clone(), [State(*(t.clone() if torch.is_tensor(t) else t for t in state)) for state in states]


def run(name, rows, gradient, states, update, first=0):
    OPERATOR[name].kernels().step(rows, gradient, states, update, first)
    return rows, *(t for state in states for t in state[:2] if t is not None)


def problem(name, m, d):
    """Rows, gradient and the states' numbers, in single precision."""
    rule, group = group_of(name)
    generator = torch.Generator().manual_seed(d)
    rows, gradient, first, second = torch.randn(4, m, d, generator=generator)
    return rule, group, rows, gradient, [first, second.square()][: len(rule.states(group))]


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_that_of_torch_to_the_last_bits(name, count):
    """Each operation of the formulas is off by 2^-24 of its result; what that is of the numbers is added up below."""
    rule, group, rows, gradient, values = problem(name, 5, 300)
    wide = rows.double(), [v.double() for v in values]
    rule.step(wide[0], gradient.double(), wide[1], group, count)
    found, states = copied(rows, states_of(values, "float32"))
    run("numba", found, gradient, states, Update(rule, group, count, RandomBits(0, CPU)))
    w, g = rows.double().abs(), gradient.double().abs()
    h = g + group["weight_decay"] * w
    if not rule.numbers(group, count).is_adam:
        u = h + sum(v.double().abs() for v in values)
        bounds = [8 * UNIT * u] * len(values)
        of_rows = 2 * UNIT * w + 16 * group["lr"] * UNIT * u
    else:
        p, q = (v.double().abs() for v in values)
        bounds = [8 * UNIT * (p + h), 8 * UNIT * (q + (1 - group["betas"][1]) * h.square())]
        correction = math.sqrt(1 - group["betas"][1] ** count)
        root = wide[1][1].sqrt() / correction
        size, below = group["lr"] / (1 - group["betas"][0] ** count), root + group["eps"]
        ratio = wide[1][0].abs() / below
        off = bounds[0] / below + ratio / below * (bounds[1] / (2 * root * correction**2))
        of_rows = 4 * UNIT * w + size * (8 * UNIT * ratio + off)
    for state, exact, bound in zip(states, wide[1], bounds, strict=True):
        assert ((state.values.double() - exact).abs() <= bound).all()
    assert ((found.double() - wide[0]).abs() <= of_rows).all()
    assert not torch.equal(found, rows)


@pytest.mark.parametrize("d", [1, 31, 32, 257, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_rounding_is_the_definitions_bit_for_bit(kind, stored, dtype, d):
    """With powers of two as settings, and gradients of few bits, no order of operations changes the states."""
    rule = RULES[kind]
    group = {**PLAIN, "lr": 0.125, "momentum": 0.5, "dampening": 0.5, "betas": (0.5, 0.5)}
    generator = torch.Generator().manual_seed(d)
    rows = torch.randn(7, d, generator=generator).to(dtype)
    values = [torch.zeros(7, d), torch.zeros(7, d)][: len(rule.states(group))]
    own, torchs = (copied(rows, states_of(values, stored)) for _ in range(2))
    bits = BitsByNumber(-5, CPU)
    for count in range(1, 5):
        gradient = torch.randint(-1000, 1000, (7, d), generator=generator) / 1024
        bits.begin(count + 2**31, 3)
        bits.place(11, 7, d, len(values) if stored != "float32" else 0)
        if stored == "float32":
            bits.left = bits.left[-1:]
        update = Update(rule, group, count, bits)
        expected = run("torch", torchs[0], gradient, torchs[1], update)
        found = run("numba", own[0], gradient, own[1], update, first=11)
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(a, b)
        if kind is SGD:
            assert torch.equal(found[0], expected[0])
        near = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(found[0].float(), expected[0].float(), rtol=near, atol=1e-6)
        own[0].copy_(torchs[0])


CHUNKED = [
    (name, stored, dtype)
    for name in ("momentum", "adamw")
    for stored in STORED
    for dtype in (torch.float32, torch.bfloat16)
]


def whole_and_in_parts(case):
    """Rows and states after one step of all rows by one thread, and of parts by three."""
    name, stored, dtype = case
    numba.LEAST_WORK = 1
    rule, group, rows, gradient, values = problem(name, 50, 70)
    bits = RandomBits(2**63 + 5, CPU)
    bits.begin(9, 1)
    update = Update(rule, group, 3, bits)
    torch.set_num_threads(1)
    whole, states = copied(rows.to(dtype), states_of(values, stored))
    run("numba", whole, gradient, states, update, first=100)
    parts, cut = copied(rows.to(dtype), states_of(values, stored))
    torch.set_num_threads(3)
    for start, stop in ((0, 7), (7, 8), (8, 50)):
        of = [State(*(t[start:stop] if torch.is_tensor(t) else t for t in state)) for state in cut]
        run("numba", parts[start:stop], gradient[start:stop], of, update, first=100 + start)
    return [
        (one.float().numpy(), other.float().numpy())
        for one, other in zip(flat(whole, states), flat(parts, cut), strict=True)
    ]


def flat(rows, states):
    return [rows, *(t for state in states for t in state[:2] if t is not None)]


@pytest.fixture(scope="module")
def chunked():
    """The cases, computed in a process of their own: it alone decides on threads."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return dict(zip(CHUNKED, pool.map(whole_and_in_parts, CHUNKED), strict=True))


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: "-".join(map(str, case)))
def test_a_number_does_not_depend_on_chunks_or_threads(case, chunked):
    for whole, parts in chunked[case]:
        np.testing.assert_array_equal(parts, whole)


def test_random_words_differ_by_seed_update_rank_and_row():
    """A weight of 16 bits far from where it goes is rounded by all of its bits: no two streams agree."""
    rule, group = group_of("plain")
    seen = set()
    streams = (0, 1, 0, 0), (1, 1, 0, 0), (2**32, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)
    for seed, update, rank, first in streams:
        bits = RandomBits(seed, CPU)
        bits.begin(update, rank)
        rows = torch.zeros(1, 64, dtype=torch.bfloat16)
        run("numba", rows, torch.full((1, 64), 1.0039), [], Update(rule, group, 1, bits), first)
        seen.add(tuple(rows[0].tolist()))
    assert len(seen) == 6


@pytest.mark.parametrize("stored", STORED)
def test_the_mean_over_updates_is_the_number(stored):
    """Of 8,000 roundings of a number the mean is off by six standard errors in one of 5e8 cases; here are 15."""
    rule, group = RULES[AdamW], {**PLAIN, "betas": (0.9, 0.75), "lr": 0.01}
    m, d = 400, 100
    gradient = torch.tensor([1.0, 0.7, -0.123, 1e-3, 3e-5]).repeat(m, d // 5)
    rows, states = torch.full((m, d), 0.7).bfloat16(), states_of([torch.zeros(m, d)] * 2, stored)
    start, bits = rows.double(), RandomBits(1, CPU)
    bits.begin(1, 0)
    run("numba", rows, gradient, states, Update(rule, group, 1, bits))
    exact = [start - 0.01 * gradient.sign(), 0.1 * gradient.double(), 0.25 * gradient.double().square()]
    found = [rows.double()]
    found += [s.values.double() if s.scales is None else from_8_bits(*s[:2], signed=s.signed).double() for s in states]
    for a, b in zip(found, exact, strict=True):
        for column in range(5):
            values, wanted = a[:, column::5].flatten(), b[0, column]
            error = (values.mean() - wanted).abs()
            single = 2.0**-21 * (wanted.abs() + b.abs().max() * 2.0**-8)  # what single precision is off by
            assert error <= 6 * values.std() / math.sqrt(len(values)) + single
            assert len(values.unique()) <= 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_nan_affects_only_its_row(name, stored, bad):
    rule, group, rows, gradient, values = problem(name, 3, 40)
    spoilt = gradient.clone()
    spoilt[1, 7] = bad
    bits = RandomBits(0, CPU)
    found = []
    for g in (gradient, spoilt):
        own, states = copied(rows.bfloat16(), states_of(values, stored))
        bits.begin(1, 0)
        found.append(run("numba", own, g, states, Update(rule, group, 2, bits)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not found[1][0][1].isfinite().all()


def chosen(monkeypatch, rows, states):
    """The backend that takes a step of these."""
    taken = []
    kernels = {name: Kernels(lambda *_, name=name: taken.append(name)) for name in ("numba", "torch")}
    monkeypatch.setattr(backend.Backend, "kernels", lambda self: kernels[self.name])
    rule, group = group_of("plain")
    api.step(rows, torch.zeros(rows.shape), states, Update(rule, group, 1, RandomBits(0, CPU)), 0)
    return taken[0]


def test_kernels_serve_where_something_is_rounded(monkeypatch):
    assert OPERATOR.choose("auto", CPU, torch.float32) == OPERATOR.choose("auto", CPU, torch.bfloat16) == "numba"
    rows = torch.zeros(4, 40)
    low, wide = [State(torch.zeros(4, 40, dtype=torch.bfloat16))], [State(torch.zeros(4, 40))]
    assert chosen(monkeypatch, rows, low) == chosen(monkeypatch, rows.bfloat16(), wide) == "numba"
    assert chosen(monkeypatch, rows, wide) == chosen(monkeypatch, rows.double(), low) == "torch"
    assert chosen(monkeypatch, rows.half(), low) == chosen(monkeypatch, rows.T.contiguous().T, low) == "torch"
    assert chosen(monkeypatch, torch.zeros(4).bfloat16(), []) == "torch"
    with backend.use_backend("torch"):
        assert chosen(monkeypatch, rows, low) == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_finds_a_wrong_kernel(dtype):
    step = OPERATOR["numba"].kernels().step
    assert trial(Kernels(step), CPU, dtype)

    def off(rows, gradient, states, update, first):
        step(rows, 1.3 * gradient, states, update, first)

    def late(rows, gradient, states, update, first):
        step(rows, gradient, states, update._replace(count=update.count + 1), first)

    assert not trial(Kernels(off), CPU, dtype)
    assert not trial(Kernels(late), CPU, dtype)
    assert not trial(Kernels(lambda *_: None), CPU, dtype)
