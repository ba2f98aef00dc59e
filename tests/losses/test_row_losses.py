"""A third party's loss by the fused operators: the example of ops/rows/README.md."""

import re
from pathlib import Path

import pytest
import torch

import topk_registry as tr

PAGE = Path(tr.__file__).parent / "ops" / "rows" / "README.md"


@pytest.mark.slow
def test_the_example_of_the_page(tmp_path, monkeypatch):
    """The curve is compiled from its source, so it stands in a file."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "gce_example.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    import gce_example as page  # pyright: ignore[reportMissingImports]

    scores = torch.randn(8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = tr.rows.softmax_rows(page.curve)
    for target in (torch.arange(8), torch.rand(8, 10, dtype=torch.float64)):
        got = tr.rows.row_losses(loss, scores, target)
        wanted = loss.definition(scores, target)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
        pair = [torch.autograd.grad(x.sum(), scores)[0] for x in (got, wanted)]
        torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-14)


def test_a_mixture_of_labels():
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    target = tr.LabelMixture.mixed(torch.tensor([0, 6, 2]), torch.tensor([3, 6, 1]), 0.3, 0.1)
    for loss in (
        tr.rows.softmax_rows(),
        tr.rows.squares_rows(),
        tr.rows.topk_hinge_rows(2),
        tr.rows.smooth_topk_rows(2),
    ):
        found, wanted = (tr.rows.row_losses(loss, scores, q) for q in (target, target.dense(7, torch.float64)))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(value.sum(), scores)[0] for value in (found, wanted)))


@pytest.mark.parametrize(
    ("scores", "target", "message"),
    [
        (torch.zeros(3, 4, 5), torch.zeros(3, dtype=torch.long), r"scores must be .* got torch.float32 \[3, 4, 5\]"),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.long), r"target must be .* got torch.int64 \[2\]"),
        (torch.zeros(3, 4), torch.full((3,), 4), r"target must be in \[0, 3\]"),
        (torch.zeros(3, 4), tr.LabelMixture.smoothed(torch.zeros(2).long(), 0.1), r"expected labels int64 \[3, m\]"),
    ],
)
def test_bad_input(scores, target, message):
    with pytest.raises(ValueError, match=message):
        tr.rows.row_losses(tr.rows.squares_rows(), scores, target)


def test_torch_operations_serve_where_they_are_asked_for():
    scores = torch.randn(4, 6).requires_grad_()
    with tr.use_backend("torch"):
        loss = tr.create_loss("focal")(scores, torch.arange(4))
    assert type(loss.grad_fn).__name__ != "ReducedBackward"
    torch.testing.assert_close(loss, tr.create_loss("focal")(scores, torch.arange(4)))
