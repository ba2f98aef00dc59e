"""Options of losses as attributes: kept in double precision, set afterwards, or refused."""

from collections.abc import Sequence
from typing import Annotated

import pytest
import torch
from torch import Tensor

import topk_registry as tr
from topk_registry import ClassificationLoss, create_loss

N = 6
COUNTS = [100, 30, 10, 3, 1, 1]


def batch() -> tuple[Tensor, Tensor]:
    logits = torch.randn(5, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits, torch.tensor([0, 3, 5, 2, 1])


DECIMALS = [0.1, 0.2, 0.3, 0.6, 0.7, 1.1]  # none of which single precision holds
PRECISE = {
    "smooth_topk_svm": {"k": 2, "alpha": 0.1},
    "smooth_topk_svm of classes": {"k": 2, "alpha": DECIMALS},
    "topk_svm": {"k": 2, "alpha": DECIMALS},
    "ldam": {"class_counts": COUNTS, "max_margin": 0.1, "scale": 3.0, "drw_epoch": 0},
    "ldam with large gaps": {"class_counts": COUNTS, "scale": 200.0},
    "logit_adjustment": {"class_counts": COUNTS, "tau": 0.7},
    "balanced_softmax": {"class_counts": COUNTS},
    "noised_topk_imbalanced": {"k": 2, "class_counts": COUNTS, "epsilon": 0.0},
    "encouraging": {"schedule": "cosine", "total_epochs": 7},
    "focal": {},
}


@pytest.mark.parametrize("name", PRECISE)
def test_numbers_are_kept_as_given(name):
    """Whatever a loss is cast to: the weighted mean is that of the rows and of the weights in double precision."""
    (logits, label), weight = batch(), torch.tensor(DECIMALS, dtype=torch.float64)
    options = PRECISE[name] | {"drw_epoch": None} if "ldam" in name else PRECISE[name]
    rows = create_loss(name.split()[0], **options, reduction="none")(logits, label)
    wanted = (rows * weight[label]).sum() / weight[label].sum()
    loss = create_loss(name.split()[0], **options, weight=DECIMALS)
    for cast in ("type", "double", "half", "bfloat16", "float"):
        loss = loss if cast == "type" else getattr(loss, cast)()
        assert all(buffer.dtype == torch.float64 for buffer in loss.buffers())
        for implementation in ("auto", "torch"):
            with tr.use_backend(implementation):
                torch.testing.assert_close(loss(logits, label), wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["smooth_topk_svm", "topk_svm"])
def test_checkpoints_in_single_precision_load(name):
    loss, other = (create_loss(name, k=2, alpha=alpha, weight=DECIMALS) for alpha in (DECIMALS, DECIMALS[::-1]))
    other.load_state_dict({key: value.float() for key, value in loss.state_dict().items()})
    assert torch.equal(other.alpha, torch.tensor(DECIMALS).double())  # rounded
    assert other.alpha.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("smooth_topk_svm", "tau", -1.0, r"tau must be a finite number above 0, got -1.0"),
        ("smooth_topk_svm", "tau", float("nan"), "tau must be a finite number above 0"),
        ("encouraging", "schedule", "linear", "schedule = 'linear' needs total_epochs, got None"),
        ("smooth_topk_svm", "alpha", [-1.0] * N, "alpha must be a finite number of at least 0, or a list"),
        ("smooth_topk_svm", "combine", "sum", "combine must be one of 'mean', 'likelihood', got 'sum'"),
        ("smooth_topk_svm", "k", 0, "k must be an integer of at least 1, got 0"),
        *(("topk_hinge", "k", k, "k must be an integer of at least 1, got ") for k in (0, -1, 2.5, True, "3", None)),
        ("focal", "reduction", "average", "reduction must be one of 'none', 'mean', 'sum', got 'average'"),
        ("focal", "label_smoothing", 2.0, "label_smoothing must be a finite number from 0 to 1"),
        ("focal", "label_smoothing", float("nan"), "label_smoothing must be a finite number from 0 to 1, got nan"),
        ("focal", "weight", [-1.0] * N, "weight must be a list of finite numbers of at least 0, one per class"),
        ("focal", "weight", [1.0, float("nan")], "weight must be a list of finite numbers of at least 0"),
        ("focal", "weight", [1.0, float("inf")], "weight must be a list of finite numbers of at least 0"),
        ("focal", "weight", [[1.0, 1.0]], r"of at least 0, one per class, got \[\[1.0, 1.0\]\]"),
        ("noised_topk", "num_samples", 1.5, "num_samples must be an integer of at least 1, got 1.5"),
        ("differentiable_topk", "candidates", 3, "candidates must be 'auto', a whole number above k = 5"),
    ],
)
def test_values_that_are_not_allowed(name, option, value, message):
    with pytest.raises(ValueError, match=message):
        create_loss(name, **{option: value})
    loss = create_loss(name)
    before = repr(loss)
    with pytest.raises(ValueError, match=message):
        setattr(loss, option, value)
    assert repr(loss) == before


@pytest.mark.parametrize(("name", "option"), [("logit_adjustment", "class_counts"), ("ldam", "beta")])
def test_options_that_only_the_constructor_reads_are_refused(name, option):
    loss = create_loss(name, class_counts=COUNTS)
    with pytest.raises(AttributeError, match=f"{option} of .* cannot be changed after construction"):
        setattr(loss, option, 0.5)


def test_a_plug_ins_options_are_held_to_their_ranges():
    class Powered(ClassificationLoss):
        def __init__(self, gamma: Annotated[float, "(0, inf)"] = 1.0, temperature: float = 1.0, **options):
            super().__init__(**options)
            self.gamma, self.scale = gamma, 1 / temperature

        def per_class(self, logits):
            return -self.gamma * (self.scale * logits).log_softmax(-1)

    loss, (logits, label) = Powered(), batch()
    loss.gamma = 2.0
    assert torch.equal(loss(logits, label), Powered(2.0)(logits, label))
    with pytest.raises(ValueError, match="gamma must be a finite number above 0"):
        loss.gamma = 0.0
    loss.other = 3  # no option


class Shifted(ClassificationLoss):
    fixed_options = ("margins",)

    def __init__(self, margins: Annotated[Tensor | Sequence[float], "[0, inf)"], **common):
        super().__init__(**common)
        self.set_option("margins", margins)

    def per_class(self, logits):
        return -(logits - self.margins.to(logits)).log_softmax(-1)


def test_a_tensor_with_one_number_becomes_a_number():
    loss = create_loss("focal", gamma=torch.tensor(1.5))
    assert type(loss.gamma) is float
    loss.gamma = torch.tensor(0.5)
    assert type(loss.gamma) is float


def test_an_option_of_one_number_per_class_is_a_buffer_in_double_precision():
    loss, (logits, label) = Shifted(DECIMALS).half(), batch()
    assert torch.equal(loss.margins, torch.tensor(DECIMALS, dtype=torch.float64))
    assert not loss.state_dict(), "a fixed option must not come from a checkpoint"
    with pytest.raises(ValueError, match=f"margins has {N} entries, logits have {N - 1} classes"):
        loss(logits[:, 1:], torch.zeros_like(label))
    with pytest.raises(AttributeError, match="margins of Shifted cannot be changed"):
        loss.margins = DECIMALS
    for wrong in ([-1.0] * N, 1.0, None):
        with pytest.raises(ValueError, match="margins must be a list of finite numbers of at least 0, one per class"):
            Shifted(wrong)


class Grouped(ClassificationLoss):
    """Options that are buffers, of two dimensions and of integers."""

    def __init__(self, costs, groups, **common):
        super().__init__(**common)
        self.register_buffer("costs", torch.tensor(costs))
        self.register_buffer("groups", torch.tensor(groups))

    def per_class(self, logits):
        return logits.softmax(-1) @ self.costs[self.groups].to(logits)


def test_a_plug_ins_buffers_keep_their_shape_and_dtype():
    costs, groups = torch.rand(2, N).tolist(), [0, 1, 0, 1, 0, 1]
    loss, (logits, label) = Grouped([[0.0] * N] * 2, [0] * N, weight=DECIMALS), batch()
    loss.costs, loss.groups = costs, groups
    assert torch.equal(loss(logits, label), Grouped(costs, groups, weight=DECIMALS)(logits, label))


def test_an_option_that_is_assigned_after_a_call_is_checked_against_the_classes():
    loss, (logits, label) = create_loss("smooth_topk_svm", k=2), batch()
    loss(logits, label)
    loss.k = N
    with pytest.raises(ValueError, match=f"k must be below the number of classes: k = {N}, logits have {N}"):
        loss(logits, label)
    loss.k, loss.alpha = 2, [1.0] * (N - 1)
    with pytest.raises(ValueError, match=f"alpha has {N - 1} entries, logits have {N} classes"):
        loss(logits, label)


class OnlyScale(ClassificationLoss):
    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def per_class(self, logits):
        return self.scale * -logits.log_softmax(-1)


def test_a_constructor_may_leave_out_options_of_the_base_class():
    loss = OnlyScale(scale=2.0)
    logits, labels = torch.randn(4, 5), torch.randint(5, (4,))
    torch.testing.assert_close(loss(logits, labels), 2 * torch.nn.functional.cross_entropy(logits, labels))
    assert repr(loss) == "OnlyScale(scale=2.0)"
    assert loss.weight is None
