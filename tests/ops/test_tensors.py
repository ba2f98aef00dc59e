"""No tensor reaches a kernel in another layout than the kernel reads, whatever it is a view of."""

import ast
from pathlib import Path

import pytest
import torch

import topk_registry
from topk_registry import create_loss
from topk_registry.functional import linear_smooth_topk, perturbed_topk, topk_label_margins, topk_margins
from topk_registry.ops.ksubset import smooth_topk_hinge
from topk_registry.ops.tensors import Route, address, operand, route

B, N = 8, 12


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layouts(x):
    """Views with the numbers of x that lie otherwise in memory, by name."""
    wide = torch.stack((x, torch.full_like(x, 7)), -1)
    yield "strided", wide[..., 0]
    yield "sliced", torch.cat((torch.full_like(x, 3), x))[len(x) :]
    yield "transposed", x.T.contiguous().T if x.ndim > 1 else x[:, None].expand(-1, 5)[:, 2]
    yield "reversed", torch.as_strided(x.flip(0), x.shape, x.stride()).flip(0)
    column = torch.stack((torch.full_like(x, 1), x, torch.full_like(x, 2)), 1)
    yield "column", column[:, 1]
    if x.is_floating_point():
        yield "negated", torch.complex(torch.zeros_like(x), -x).conj().imag


LABEL = torch.tensor([3, 0, 11, 5, 5, 7, 1, 9])
FUNCTIONS = {
    "label_margins": lambda s, y, impl: topk_label_margins(s, y, 3, temperature=0.7, impl=impl),
    "hinge": lambda s, y, impl: smooth_topk_hinge(s, y, 3, tau=0.2, alpha=torch.linspace(0.5, 1.5, 24)[::2], impl=impl),
    "mean": lambda s, y, impl: smooth_topk_hinge(
        s, y, 3, reduction="mean", weight=torch.linspace(1, 2, 36)[::3], impl=impl
    ),
    "margins": lambda s, y, impl: topk_margins(s, 3, impl=impl).gather(1, y[:, None])[:, 0],
    "complement": lambda s, y, impl: topk_label_margins(s, y, 9, impl=impl),
}


def results(f, *args):
    s = args[0].detach().requires_grad_()
    value = f(s, *args[1:])
    cotangent = torch.linspace(1, 2, 2 * value.numel(), dtype=value.dtype)[::2].view(value.shape)
    return value.detach(), torch.autograd.grad(value, s, cotangent)[0]


def assert_same(found, wanted, name):
    for x, y in zip(found, wanted, strict=True):
        # in single precision sums may round by where the memory lies
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("impl", ["numba", "torch"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_give_what_copies_give(name, impl):
    f, s = FUNCTIONS[name], randn(B, N)
    wanted = results(f, s, LABEL, impl)
    for kind, y in layouts(LABEL):
        assert_same(results(f, s, y, impl), wanted, f"{kind} labels")
    for kind, x in layouts(s):
        assert_same(results(f, x, LABEL, impl), wanted, f"{kind} logits")


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_one_label_expanded_over_the_batch(impl):
    s = randn(64, 1000)
    wanted = topk_label_margins(s, torch.full((64,), 3), 5, impl=impl)
    for y in (torch.full((1,), 3).expand(64), torch.tensor(3).expand(64)):
        assert torch.equal(topk_label_margins(s, y, 5, impl=impl), wanted)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_expanded_scores_and_cotangents(impl):
    row = randn(1, N)
    assert_same(
        results(FUNCTIONS["hinge"], row.expand(B, N), LABEL, impl),
        results(FUNCTIONS["hinge"], row.repeat(B, 1), LABEL, impl),
        "rows",
    )
    s = randn(B, N).requires_grad_()
    for g in (torch.ones(()).expand(B, N), randn(N, B).T, randn(B, 2 * N)[:, ::2]):
        found, wanted = (torch.autograd.grad(topk_margins(s, 3, impl=impl), s, x)[0] for x in (g, g.contiguous()))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_perturbed_scores_and_noise(impl):
    s, noise = randn(B, N), randn(5, B, N, seed=1)

    def value(s, noise=None):
        generator = torch.Generator().manual_seed(0)
        return perturbed_topk(s, 3, generator=generator, noise=noise, impl=impl)

    wanted = results(value, s)
    for kind, x in layouts(s):
        assert_same(results(value, x), wanted, kind)
    assert_same(results(value, s, noise.permute(2, 1, 0).contiguous().permute(2, 1, 0)), results(value, s, noise), "z")


def test_a_linear_layer_in_chunks():
    features, weight, bias = randn(B, 6), randn(N, 6, seed=1), randn(N, seed=2)

    def margins(features, weight, bias, label):
        return linear_smooth_topk(features, weight, bias, label, k=2, chunk=5, reduction="none")

    wanted = margins(features, weight, bias, LABEL)
    for views in zip(layouts(features), layouts(weight), layouts(bias), layouts(LABEL), strict=False):
        found = margins(*(view for _, view in views))  # products of matrices round by their layout
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=views[0][0])


def test_training_on_the_first_column_of_labels():
    """The accuracy of a run on ``labels[:, 0]`` was 0.07 where it should have been 1."""
    torch.manual_seed(0)
    label = torch.randint(10, (200, 3))
    x = torch.randn(10, 16)[label[:, 0]] + 0.1 * torch.randn(200, 16)
    layer, loss = torch.nn.Linear(16, 10), create_loss("smooth_topk_svm", k=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(40):
        optimizer.zero_grad()
        loss(layer(x), label[:, 0]).backward()
        optimizer.step()
    assert (layer(x).argmax(1) == label[:, 0]).float().mean() == 1.0


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_another_default_device_changes_nothing(impl):
    s = randn(B, N)
    wanted = [results(f, s, LABEL, impl) for f in FUNCTIONS.values()]
    device = torch.get_default_device()
    alpha = torch.linspace(0.5, 1.5, 24)[::2]
    torch.set_default_device("meta")
    try:
        for name in ("label_margins", "margins", "complement"):
            s_leaf = s.detach().requires_grad_()
            value = FUNCTIONS[name](s_leaf, LABEL, impl)
            assert torch.equal(value.detach(), wanted[list(FUNCTIONS).index(name)][0])
        assert smooth_topk_hinge(s, LABEL, 3, alpha=alpha, impl=impl).device.type == "cpu"
        assert perturbed_topk(s, 3, impl=impl, generator=torch.Generator("cpu")).device.type == "cpu"
    finally:
        torch.set_default_device(device)


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

    s = randn(B, N)
    found = topk_label_margins(s.as_subclass(Logged), LABEL, 3)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), topk_label_margins(s, LABEL, 3), rtol=1e-6, atol=1e-6)


def test_addresses_are_given_of_plain_memory_only():
    x = torch.arange(6.0).view(2, 3)
    assert address(x) == x.data_ptr()
    for wrong in (x.T, x[:, ::2], x.to("meta"), torch.complex(x, x).conj().imag):
        with pytest.raises(TypeError, match="contiguous memory"):
            address(wrong)
    with pytest.raises(ValueError, match=r"a kernel needs torch.int64 \[2, 3\] on cpu, got torch.float32"):
        operand(x, (2, 3), torch.int64, x.device)
    assert operand(x.T, (3, 2), x.dtype, x.device).is_contiguous()


def test_nobody_else_takes_an_address():
    """Every other way to memory would go around the checks."""
    root, found = Path(topk_registry.__file__).parent, []
    for file in (*root.rglob("*.py"), *(root.parent / "plugins" / "topk_plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            taken = isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "untyped_storage")
            launched = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "triton" in file.parts
            if taken or launched:
                found.append(f"{file.relative_to(root.parent)}:{node.lineno}")
    assert [place for place in found if "ops/tensors.py" not in place and "ops/cpu/threads.py" not in place] == []
