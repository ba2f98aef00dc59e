"""The shared base means by its options what cross-entropy means: its table of -log_softmax is compared throughout."""

import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topk_registry import ClassificationLoss, LabelMixture, SoftmaxLoss, TopKLoss, create_loss, mean_over_ranks

B, N = 7, 5
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])


class CrossEntropy(ClassificationLoss):
    def per_class(self, logits: Tensor) -> Tensor:
        return -logits.log_softmax(-1)


class TopKTable(TopKLoss):
    def per_class(self, logits: Tensor) -> Tensor:
        return logits.topk(self.k, dim=1).values[:, -1:] - logits


def batch(kind: str, ignore_index: int = -100, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(B, N, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "dense":
        return logits, torch.randn(B, N, generator=generator, dtype=torch.float64).softmax(-1)
    target = torch.tensor([0, 1, 3, 4, 2, 1, 0])
    target[[1, 4] if kind == "index" else slice(None)] = ignore_index
    return logits, target


def value_and_gradient(loss, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, target)
    return value, torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("rows", [B, 0])
@pytest.mark.parametrize(
    ("kind", "ignore_index"), [("index", -100), ("index", 2), ("index", 255), ("ignored", -100), ("dense", -100)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_every_combination_of_options_is_cross_entropys(reduction, weight, smoothing, rows, ignore_index, kind):
    logits, target = (t[:rows] for t in batch(kind, ignore_index))
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    got = value_and_gradient(CrossEntropy(weight=weight, **options), logits, target)
    reference = nn.CrossEntropyLoss(weight=weight if weight is None else weight.double(), **options)
    wanted = value_and_gradient(reference, logits, target)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_a_target_that_is_learned_has_cross_entropys_gradient(weight, smoothing):
    """At classes without mass too: that is where a learned target would grow from."""
    logits, _ = batch("dense")
    target = torch.eye(N, dtype=torch.float64)[torch.arange(B) % N]
    options = {"label_smoothing": smoothing, "weight": weight}
    ours = CrossEntropy(**options)
    theirs = nn.CrossEntropyLoss(**options).double()
    got, wanted = (value_and_gradient(lambda q, _, f=f: f(logits, q), target, target) for f in (ours, theirs))
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["index", "dense", "mixture"])
def test_weights_of_samples_multiply_rows_and_count_in_the_mean(kind, smoothing, weight):
    logits, target = batch("dense" if kind == "dense" else "index")
    sample_weight = torch.linspace(0.2, 2.0, B, dtype=torch.float64)
    counted = sample_weight.clone()
    if kind == "mixture":
        target = LabelMixture.mixed(target.clamp(min=0), target.clamp(min=0).flip(0), 0.3)
    if kind == "index":  # ignored rows do not count, others by the weight of their class
        counted *= (target >= 0) * (1.0 if weight is None else weight.double()[target.clamp(min=0)])
    options = {"label_smoothing": smoothing, "weight": weight}
    rows = CrossEntropy(reduction="none", **options)(logits, target) * sample_weight

    def found(loss):
        return loss(logits, target, sample_weight=sample_weight)

    torch.testing.assert_close(found(CrossEntropy(reduction="none", **options)), rows, rtol=1e-13, atol=0)
    torch.testing.assert_close(found(CrossEntropy(reduction="sum", **options)), rows.sum(), rtol=1e-13, atol=0)
    mean = rows.sum() / counted.sum()
    torch.testing.assert_close(found(CrossEntropy(**options)), mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(found(mean_over_ranks(CrossEntropy(**options))), mean, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match=r"sample_weight must be \[7\] on cpu, got \[6\]"):
        CrossEntropy()(logits, target, sample_weight=sample_weight[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["index", "dense"])
def test_half_precision_is_computed_in_float32(dtype, kind):
    logits, target = batch(kind, dtype=dtype)
    value, gradient = value_and_gradient(CrossEntropy(), logits, target)
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    wanted = value_and_gradient(CrossEntropy(), logits.to(inside), target)
    assert value.dtype == inside
    assert gradient.dtype == dtype
    torch.testing.assert_close((value, gradient), (wanted[0], wanted[1].to(dtype)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_distributions_are_smoothed_and_scaled_in_the_precision_of_the_logits(target_dtype, dtype):
    logits, target = batch("dense", dtype=dtype)
    target = target.to(target_dtype)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": WEIGHT / 3}):
        loss, tolerance = CrossEntropy(**options), 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(loss(logits, target), loss(logits, target.to(dtype)), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_may_be_any_integers(dtype):
    logits, target = torch.eye(3), torch.tensor([0, 2, 1])
    assert CrossEntropy()(logits, target.to(dtype)) == CrossEntropy()(logits, target)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_ignored_rows_cost_nothing_whatever_their_scores(broken, smoothing):
    logits, target = batch("index")
    loss = CrossEntropy(label_smoothing=smoothing)
    wanted = value_and_gradient(loss, logits, target)
    logits[1] = broken
    logits[4, 3] = broken
    value, gradient = value_and_gradient(loss, logits, target)
    torch.testing.assert_close((value, gradient), wanted)
    assert not gradient[target == -100].any()


def test_a_class_without_mass_costs_nothing():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    torch.testing.assert_close(
        CrossEntropy()(logits, torch.tensor([[0.5, 0.0, 0.5]])),
        F.cross_entropy(logits[:, ::2], torch.tensor([[0.5, 0.5]])),
    )


def test_ignore_index_is_for_indices():
    logits, target = batch("dense")
    assert CrossEntropy(ignore_index=2)(logits, target) == CrossEntropy()(logits, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    class Product(ClassificationLoss):
        def per_class(self, logits):
            return logits @ torch.eye(N, dtype=logits.dtype)  # autocast would take this product in half precision

    logits, target = batch("index", dtype=torch.float32)
    wanted = Product()(logits, target)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(Product()(logits, target), wanted)


def test_the_weight_is_a_copy_and_a_buffer():
    weight = WEIGHT.clone()
    loss = CrossEntropy(weight=weight)
    weight.zero_()
    assert torch.equal(loss.state_dict()["weight"], WEIGHT)


@pytest.mark.parametrize("k", [5, 6])
def test_k_beyond_the_classes(k):
    with pytest.raises(ValueError, match=f"k must be below the number of classes: k = {k}, logits have 5"):
        TopKTable(k)(*batch("index"))


@pytest.mark.parametrize("places", [(), (2,), (3, 2), (0, 2)])
@pytest.mark.parametrize("kind", ["index", "dense"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_every_place_of_an_image_is_a_row(reduction, kind, places):
    generator = torch.Generator().manual_seed(1)
    shape = (4, N, *places) if places else (N,)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "dense":
        target = torch.randn(shape, generator=generator, dtype=torch.float64).softmax(min(1, logits.ndim - 1))
    else:
        target = torch.randint(N, (4, *places) if places else (), generator=generator)
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": WEIGHT}
    got = value_and_gradient(CrossEntropy(**options), logits, target)
    wanted = value_and_gradient(nn.CrossEntropyLoss(**options).double(), logits, target)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14, equal_nan=True)


INDICES = torch.zeros(B, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "target", "message"),
    [
        (torch.zeros(B), INDICES, r"target must be class indices \(integer, \[\]\) .* got torch.int64 \[7\]"),
        (torch.zeros(()), INDICES, r"logits must be floating point \[batch, classes\] .* got torch.float32 \[\]"),
        (torch.zeros(B, 1), INDICES, r"with at least 2 classes, got torch.float32 \[7, 1\]"),
        (torch.zeros(B, N, dtype=torch.long), INDICES, r"logits must be floating point .* got torch.int64 \[7, 5\]"),
        (torch.zeros(B, N, 2), INDICES, r"class indices \(integer, \[7, 2\]\) .* got torch.int64 \[7\]"),
        (
            torch.zeros(B, N),
            INDICES[1:],
            r"class indices \(integer, \[7\]\) or a distribution .* got torch.int64 \[6\]",
        ),
        (torch.zeros(B, N), INDICES[:, None], r"got torch.int64 \[7, 1\]"),
        (torch.zeros(B, N), INDICES.bool(), r"got torch.bool \[7\]"),
        (torch.zeros(B, N), INDICES.float(), r"got torch.float32 \[7\]"),
        (torch.zeros(B, N), torch.zeros(B, N + 1), r"a distribution \(floating point, \[7, 5\]\), got .* \[7, 6\]"),
        (torch.zeros(B, N), torch.zeros(B, N, dtype=torch.long), r"got torch.int64 \[7, 5\]"),
        (torch.zeros(B, N), INDICES + 5, r"target must be in \[0, 4\] \(or ignore_index = -100\), got 5"),
        (torch.zeros(B, N), INDICES - 1, r"target must be in \[0, 4\] \(or ignore_index = -100\), got -1"),
    ],
)
def test_bad_inputs(logits, target, message):
    with pytest.raises(ValueError, match=message):
        CrossEntropy()(logits, target)


def test_a_weight_for_other_classes():
    with pytest.raises(ValueError, match="weight has 3 entries, logits have 5 classes"):
        CrossEntropy(weight=[1.0, 2.0, 3.0])(*batch("index"))


def test_a_subclass_without_a_table():
    with pytest.raises(TypeError, match="ClassificationLoss must define per_class"):
        ClassificationLoss()(*batch("index"))


class Shaped(ClassificationLoss):
    """A loss whose table or losses have another shape than they should."""

    def __init__(self, table=lambda s: s, own=None, **common):
        super().__init__(**common)
        self.table, self.own = table, own

    def per_class(self, logits):
        return self.table(logits)

    def per_label(self, logits, labels):
        return super().per_label(logits, labels) if self.own is None else self.own(logits)


class Averaged(SoftmaxLoss):
    def curve(self, nll):
        return nll.mean()


@pytest.mark.parametrize("kind", ["index", "smoothed", "dense"])
@pytest.mark.parametrize(
    ("shape", "table"), [([], Tensor.sum), ([B, 1], lambda s: s[:, :1]), ([N], lambda s: s[0]), ([N, B], Tensor.t)]
)
def test_a_table_of_another_shape_is_an_error_and_does_not_broadcast(kind, shape, table):
    logits, target = batch("dense" if kind == "dense" else "index")
    with pytest.raises(ValueError, match=re.escape(f"Shaped.per_class must return {[B, N]}, got {shape}")):
        Shaped(table, label_smoothing=0.1 * (kind == "smoothed"))(logits, target)


@pytest.mark.parametrize(("shape", "own"), [([], Tensor.sum), ([B, 1], lambda s: s[:, :1])])
def test_losses_at_labels_of_another_shape_are_an_error(shape, own):
    with pytest.raises(ValueError, match=re.escape(f"Shaped.per_label must return {[B]}, got {shape}")):
        Shaped(own=own)(*batch("index"))


@pytest.mark.parametrize(("smoothing", "shape"), [(0.0, [B]), (0.1, [B, N])])
def test_a_curve_of_another_shape_is_an_error(smoothing, shape):
    with pytest.raises(ValueError, match=re.escape(f"Averaged.curve must return {shape}, got []")):
        Averaged(label_smoothing=smoothing)(*batch("index"))


def test_repr_names_the_options():
    expected = "TopKTable(k=3, weight=[1.0, 2.5], reduction='sum', label_smoothing=0.0, ignore_index=-100)"
    assert repr(TopKTable(3, weight=[1, 2.5], reduction="sum")) == expected


class Scheduled(CrossEntropy):
    first_change = 3


def test_a_loss_with_a_schedule_that_trains_untold_says_so_once():
    loss, (logits, target) = Scheduled(), batch("index")
    loss(logits, target)  # without gradients nothing trains
    with pytest.warns(UserWarning, match="set_epoch"):
        value_and_gradient(loss, logits, target)
    value_and_gradient(loss, logits, target)


@pytest.mark.parametrize("kind", [CrossEntropy, Scheduled])
def test_a_loss_that_was_told_the_epoch_or_has_no_schedule_says_nothing(kind):
    loss = kind()
    if loss.first_change is not None:
        loss.set_epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value_and_gradient(loss, *batch("index"))


class Named(Tensor):
    """A tensor with a name for its kind, which refuses to be mixed with other kinds, as fastai's do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class NamedImage(Named):
    pass


class NamedLabel(Named):
    pass


@pytest.mark.parametrize("name", ["smooth_topk_svm", "focal"])
@pytest.mark.parametrize("kind", ["index", "dense"])
def test_a_class_that_only_names_a_tensor_changes_nothing(name, kind):
    logits, target = batch(kind)
    loss = create_loss(name, **({"k": 2} if name == "smooth_topk_svm" else {}))
    value, gradient = value_and_gradient(loss, logits, target)
    leaf = logits.clone().as_subclass(NamedImage).requires_grad_()
    with pytest.raises(TypeError):
        F.cross_entropy(leaf, target.as_subclass(NamedLabel))
    named = loss(leaf, target.as_subclass(NamedLabel))
    named.backward()
    assert torch.equal(named, value)
    assert torch.equal(leaf.grad.as_subclass(Tensor), gradient)


@pytest.mark.slow
def test_a_first_call_does_not_import_the_compiler():
    """It takes two seconds."""
    program = (
        "import sys, torch, topk_registry as tr\n"
        "tr.create_loss('focal')(torch.randn(4, 10, requires_grad=True), torch.arange(4)).backward()\n"
        "print([name for name in ('torch._dynamo', 'timm', 'sympy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split("\n")[-2] == "[]", done.stdout
