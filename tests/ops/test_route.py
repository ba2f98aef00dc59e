"""How an operator decides whether kernels may read a tensor, and what it refuses."""

import pytest
import torch

from topk_registry.functional import perturbed_topk, topk_label_margins, topk_margins
from topk_registry.ops.backend import Route, route


def test_routes():
    x = torch.ones(3)

    class Tagged(torch.Tensor):
        pass

    assert route(x, None, torch.nn.Parameter(x)) is Route.KERNELS
    assert route(x, x.as_subclass(Tagged)) is Route.OPERATIONS
    assert route(x, x.to("meta")) is Route.GRAPH
    assert torch.func.vmap(lambda x: x * (route(x) is Route.OPERATIONS))(x).all()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:.*nested")
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x: x.to_sparse(), "sparse_coo"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantised"),
        (lambda x: torch.nested.nested_tensor([x, x]), "nested"),
    ],
)
def test_what_has_no_dense_memory_is_refused(made, message):
    logits = made(torch.randn(4, 9))
    for call in (lambda: topk_margins(logits, 2), lambda: perturbed_topk(logits, 2)):
        with pytest.raises(ValueError, match=f"must be a dense tensor, got a {message} one"):
            call()


def test_a_subclass_goes_through_torch_operations():
    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    s = torch.randn(5, 9)
    found = topk_label_margins(s.as_subclass(Logged), torch.arange(5), 3)
    expected = topk_label_margins(s, torch.arange(5), 3)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=1e-6, atol=1e-6)
