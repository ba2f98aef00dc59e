"""One launch of each Triton kernel under Triton's interpreter, in the default level.

`tests/ops/ksubset/test_triton.py` has more shapes, targets and dtypes. It belongs to the slow level.
"""

import pytest
import torch

from tests.formulas import smooth_topk
from tests.ops.triton_runs import compiles, interprets, pass_under_the_interpreter
from topk_registry.ops.gpu import layout
from topk_registry.ops.gpu.scale import scale
from topk_registry.ops.ksubset.triton import backend
from topk_registry.ops.masses import Masses
from topk_registry.ops.perturbed.triton import kth

B, N, K = 3, 37, 4  # 37: an odd number, so that rows are not aligned
# the interpreter computes with infinities that kernels leave out afterwards
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scores() -> torch.Tensor:
    s = torch.randn(B, N, generator=torch.Generator().manual_seed(0))
    s[1] = s[1].round()  # a row with ties
    return s


def targets() -> dict[str, Masses]:
    label, share = torch.tensor([0, 36, 7]), torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64)
    two = torch.stack([label, label.flip(0)], 1)
    table = torch.rand(B, N, generator=torch.Generator().manual_seed(1))
    return {
        "label_rows": Masses(label[:, None], share[:, None], None, None),
        "mass_rows of two labels": Masses(two, torch.stack([share, 1 - share / 2], 1), None, None),
        "mass_rows of smoothed labels": Masses(two, torch.stack([share, 1 - share / 2], 1), 0.1 / N * share, None),
        "mass_rows of a table": Masses(None, None, None, table),
    }


@interprets
@pytest.mark.parametrize("kind", targets())
@pytest.mark.parametrize(("tile", "tau"), [(8, 0.1), (256, 0.1), (256, 1.0)])  # read again from memory; in registers
def test_losses_and_gradients(kind, tile, tau, monkeypatch):
    monkeypatch.setattr(layout, "TILE_OF_A_WARP", tile)
    around = torch.full((B + 2, N), -7.0)  # the gradient, and the memory before and after it
    monkeypatch.setattr(backend, "like_rows", lambda *_: (around[1:-1], around[1:-1]))
    s, masses, alpha = scores(), targets()[kind], torch.linspace(0, 1, N)
    value, gradient = backend.losses(s, masses, K, tau, alpha)
    assert gradient is not None
    assert (around[[0, -1]] == -7).all()
    wide = s.double().requires_grad_()
    table = masses.table(N, torch.float64)
    expected = (table * smooth_topk(wide, K, tau, alpha.double())).sum(1)
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=0, atol=1e-6 * float(table.sum(1).max().clamp(min=1)))


@interprets
@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_multiply(factor):
    g = torch.randn(2100, generator=torch.Generator().manual_seed(0))  # more than a block
    found = g.clone()
    scale(found, torch.tensor(factor))
    assert torch.equal(found, g * factor)


@interprets
def test_kth_of_draw():
    s, draws = scores(), 4
    s[2, 5] = torch.nan
    value, index = kth(s, torch.tensor(0), 6, 0.0, draws)
    expected = s.sort(1, descending=True).values[:, 5].masked_fill(s.isnan().any(1), torch.nan)
    torch.testing.assert_close(value, expected, equal_nan=True, rtol=1e-6, atol=0)
    assert torch.equal(s.gather(1, index)[:2], expected[:2, None].expand(2, draws))


@interprets
def test_the_noise_of_kth_of_draw():
    rows, epsilon = 60, 0.5
    s = torch.full((rows, 9), -1e3)
    s[:, 3] = 2.0
    value, _ = kth(s, torch.tensor(5), 1, epsilon, 1)
    assert value.mean().item() == pytest.approx(2.0, abs=4 * epsilon / rows**0.5)
    assert value.std().item() == pytest.approx(epsilon, rel=4 / (2 * rows) ** 0.5)


@compiles
def test_each_kernel_runs_under_the_interpreter():
    pass_under_the_interpreter(__file__, "not slow")
