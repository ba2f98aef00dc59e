"""The contract of every family's kernel, on the CPU and on GPUs: the definition's results, row by row."""

from pathlib import Path

import pytest
import torch

from tests.ops import families
from tests.ops.families import FAMILIES, RULED_OUT, Family
from tests.ops.kernels import (
    MIXTURES,
    TARGETS,
    assert_agree,
    by_definition,
    by_kernel,
    scores,
    target_for,
    target_of,
)
from tests.ops.triton_runs import INTERPRETED, KERNEL_MARKS, interprets, pass_under_the_interpreter
from topk_registry import LabelMixture, rows

# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CLASSES = {"numba": 150, "triton": 30}  # of the interpreter fewer
KINDS = {**TARGETS, **MIXTURES}
CPU = [(name, "numba") for name in FAMILIES]
GPU = [(name, "triton") for name, family in FAMILIES.items() if family.on_gpu]
HALF = (torch.bfloat16, torch.float16)
DTYPES = {"numba": (torch.float64, torch.float32, *HALF), "triton": (torch.float32,)}


def over(cases: list[tuple[str, str]]) -> list:
    """Parameters ``(name, backend)``, each where its kernels run."""
    on_cpu = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels for GPUs")
    found = [pytest.param(name, backend, marks=on_cpu) for name, backend in cases if backend == "numba"]
    gpu = [pytest.param(name, backend, marks=KERNEL_MARKS) for name, backend in cases if backend == "triton"]
    return found + gpu


def rows_of(family: Family, backend: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of the kinds that the contract takes of this family."""
    if backend == "numba":
        pytest.importorskip("numba")
    s = scores(CLASSES[backend])[list(family.rows)].to(dtype)
    return s.cpu() if backend == "numba" else s


def target_on(kind: str, s: torch.Tensor) -> torch.Tensor | LabelMixture:
    return target_for(kind, s).to(s.device)


def may_rule_out(family: Family, kind: str) -> bool:
    """Whether a class may be ruled out: with mass on it, it would cost infinitely much."""
    return RULED_OUT not in family.rows or kind in ("labels", "distribution", "mixed", "a share each")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "backend"), over(CPU + GPU))
def test_values_and_gradients_are_the_definition_s(name, backend, kind):
    family = FAMILIES[name]
    for dtype in DTYPES[backend]:
        s = rows_of(family, backend, dtype)
        if not may_rule_out(family, kind):
            s[-1, 1] = 0.0
        loss, target = family.build(s.shape[1]), target_on(kind, s)
        found = by_kernel(loss, s, target, **KINDS[kind], backend=backend)
        wanted = by_definition(loss, s, target, **KINDS[kind])
        assert_agree(found, wanted, s, family.temperature, family.factor, family.untied)


@pytest.mark.parametrize(("name", "backend"), over(CPU + GPU))
def test_nan_affects_only_its_row(name, backend):
    family = FAMILIES[name]
    s = rows_of(family, backend)[:4]
    s[1, 3], s[2, 7] = torch.nan, torch.nan
    label = torch.tensor([0, -100, 7, 3], device=s.device)
    loss = family.build(s.shape[1])
    for target, bad in ((s.nan_to_num().softmax(-1), [1, 2]), (label, [2])):
        value, gradient = by_kernel(loss, s, target, backend=backend)
        assert value.isnan().tolist() == [row in bad for row in range(4)]
        spoilt = gradient.isnan().all(1) if family.spoils_all else gradient.isnan().any(1)
        assert spoilt.tolist() == value.isnan().tolist()
        assert gradient[[row for row in range(4) if row not in bad]].isfinite().all()
    assert value[1] == 0, "an ignored row costs nothing"
    assert (gradient[1] == 0).all()


@pytest.mark.parametrize(("name", "backend"), over(CPU + GPU))
def test_rows_do_not_depend_on_each_other(name, backend):
    family = FAMILIES[name]
    s = rows_of(family, backend)
    loss, q = family.build(s.shape[1]), target_on("distribution", s)
    value, gradient = by_kernel(loss, s, q, backend=backend)
    alone, of_alone = by_kernel(loss, s[2:4], q[2:4], backend=backend)
    torch.testing.assert_close((value[2:4], gradient[2:4]), (alone, of_alone), rtol=0.0, atol=0.0)


SOME_ON_GPU = [(name, "triton") for name in ("cross-entropy", "focal", "bound", "mean")]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("name", "backend"), over(CPU + SOME_ON_GPU))
def test_half_precision_is_computed_in_single(name, backend, dtype):
    family = FAMILIES[name]
    s = rows_of(family, backend, dtype)[:4]
    loss, target = family.build(s.shape[1]), target_of("labels", s).to(s.device)
    value, gradient = by_kernel(loss, s, target, backend=backend)
    wanted, wide = by_kernel(loss, s.float(), target, backend=backend)
    assert gradient.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert torch.equal(value, wanted)
    torch.testing.assert_close(gradient, wide.to(gradient.dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize(("name", "backend"), over([*CPU, ("cross-entropy", "triton")]))
def test_rows_of_any_strides(name, backend):
    family = FAMILIES[name]
    s = rows_of(family, backend)[:4]
    loss, label = family.build(s.shape[1]), target_of("labels", s).to(s.device)
    wide = torch.cat((s, s.flip(1)), 1)
    n = s.shape[1]
    views = [
        s.T.contiguous().T, s.flip(1), s[:1].expand(4, n), wide[:, :n], wide[:, n - 3 : 2 * n - 3],
        s[::2].repeat(1, 3)[:, ::3], torch._neg_view(s),
    ]  # fmt: skip
    for view in views:
        found, wanted = (
            by_kernel(loss, rows, label[: len(view)], backend=backend) for rows in (view, view.clone().contiguous())
        )
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("name", "backend"), over([*CPU, ("cross-entropy", "triton")]))
def test_a_mean_of_no_labels(name, backend):
    family = FAMILIES[name]
    s = rows_of(family, backend)[:2]
    loss = family.build(s.shape[1])
    none = torch.full((2,), -100, device=s.device)
    value, gradient = by_kernel(loss, s, none, reduction="mean", backend=backend)
    assert value.isnan()  # as cross-entropy's
    assert (gradient == 0).all()
    for target in (none[:0], s[:0]):
        for reduction, wanted in (("none", []), ("sum", 0.0), ("mean", torch.nan)):
            value, gradient = by_kernel(loss, s[:0], target, reduction=reduction, backend=backend)
            assert gradient.shape == s[:0].shape
            torch.testing.assert_close(value, torch.tensor(wanted, device=s.device), equal_nan=True)


def test_every_public_builder_is_in_the_table():
    """A family that is added joins the contract."""
    source = Path(families.__file__).read_text()
    builders = {name for name in rows.__all__ if name.endswith("_rows") and name != "row_losses"}
    by_name = {
        "sigmoid_rows",
        "ldr_rows",
        "perturbed_hinge_rows",
    }  # through a registered loss, or left out with a reason
    assert {name for name in builders - by_name if name not in source} == set()


@pytest.mark.slow
@interprets
def test_under_the_interpreter():
    pytest.importorskip("triton")
    pass_under_the_interpreter(__file__)
