"""The launchers of kernels refuse each kind of tensor that a kernel cannot read, in the place of each argument."""

import pytest
import torch
from torch import Tensor

from tests import needs
from topk_registry.functional import perturbed_hinge, perturbed_topk, smooth_topk
from topk_registry.ops.gpu.layout import launch
from topk_registry.ops.masses import Masses

B, N = 4, 12


class Other(Tensor):
    pass


WRONG = {
    "another device": lambda t: t.to("meta"),
    "a subclass": lambda t: t.as_subclass(Other),
    "a negated view": torch._neg_view,
    "a wrapped tensor": lambda t: t,  # replaced within vmap
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}
LABELS = torch.tensor([[0], [5], [11], [7]])
ONES, TABLE = torch.ones(B, 1), torch.full((B, N), 1 / N)
CALLS = {
    "label_body": lambda s: smooth_topk(s, Masses(LABELS, ONES, None, None), k=3, alpha=torch.ones(N), sums=True),
    "mass_body of labels": lambda s: smooth_topk(s, Masses(LABELS, ONES, torch.ones(B), None), k=3, sums=True),
    "mass_body of a table": lambda s: smooth_topk(s, Masses(None, None, None, TABLE), k=3, sums=True),
    "body of kth": lambda s: perturbed_topk(s, 3),
    "body of hinge": lambda s: perturbed_hinge(
        s, Masses(LABELS, ONES, None, None), k=3, alpha=torch.ones(N), sums=True
    ),
}


@pytest.fixture
def driver():
    return needs.package("topk_registry.ops.cpu.driver")


def is_refused(run, t: Tensor, kind: str) -> None:
    def attempt(x: Tensor) -> Tensor:
        with pytest.raises(TypeError, match="plain contiguous memory"):
            run(x)
        return x

    if kind == "a wrapped tensor":
        torch.func.vmap(attempt)(t[None])
    else:
        attempt(WRONG[kind](t))


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_each_kernel_of_the_cpu_refuses(driver, call, kind, monkeypatch):
    run, seen = driver.Kernel.run, []

    def record(kernel, threads, *values):
        seen.append((kernel, values))
        run(kernel, threads, *values)

    monkeypatch.setattr(driver.Kernel, "run", record)
    CALLS[call](torch.randn(B, N, generator=torch.Generator().manual_seed(0)))
    kernel, values = seen[-1]  # after the self-test
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    assert len(places) >= 4
    for i in places:
        t = values[i]
        if (kind == "gaps" and t.ndim == 0) or (kind == "a negated view" and not t.is_floating_point()):
            continue  # a number has no gaps, and integers have no negated views
        is_refused(lambda x, i=i: run(kernel, 1, *values[:i], x, *values[i + 1 :]), t, kind)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("keyword", [False, True])
def test_the_launcher_of_the_gpu_refuses(kind, keyword):
    launched = []
    kernel = {(1,): lambda *values, **options: launched.append(values)}  # kernel[grid](...)
    first, t = torch.ones(3), torch.ones(B, N)
    launch(kernel, (1,), first, t, 5, other=t)
    assert len(launched) == 1

    def run(x: Tensor) -> None:
        if keyword:
            launch(kernel, (1,), first, 5, other=x)
        else:
            launch(kernel, (1,), first, x, 5)

    is_refused(run, t, kind)
    assert len(launched) == 1
