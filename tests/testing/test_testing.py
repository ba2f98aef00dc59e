"""The conformance kit: it passes what is right, and says readably what is wrong with each of a row of wrong losses."""

import functools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topk_registry import ClassificationLoss, LabelMixture
from topk_registry.testing import LossCheckError, check_loss, iter_checks, parametrize_with_checks, run_checks

pytest_plugins = ["pytester"]


class Wrong(nn.Module):
    """Cross-entropy, to be spoilt in one way each below."""

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, weight=self.weight, reduction=self.reduction)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def wrong_sign(logits, target):
    return F.cross_entropy(Reversed.apply(logits), target)


def wrong_for_distributions(logits, target):
    return F.cross_entropy(Reversed.apply(logits) if target.is_floating_point() else logits, target)


def nan_in_half(logits, target):
    """exp in the dtype of the scores: float16 ends at exp(11.1), and infinity over infinity is NaN."""
    if logits.dtype == torch.float16:
        logits = (logits.exp() / logits.exp().sum(-1, keepdim=True)).log()
    return F.cross_entropy(logits, target)


def order_dependent(logits, target):
    rows = F.cross_entropy(logits, target, reduction="none")
    return (rows * torch.linspace(1.5, 0.5, len(rows))).mean()


def mutating(logits, target):
    value = F.cross_entropy(logits, target)
    with torch.no_grad():
        logits -= logits.amax(-1, keepdim=True)
    return value


def ignoring_dense_targets(logits, target):
    return F.cross_entropy(logits, target.argmax(-1) if target.is_floating_point() else target)


class Repelling(Wrong):
    """Says that it takes k-hot targets, and pushes their labels down."""

    takes_k_hot = True

    def forward(self, logits, target):
        return super().forward(-logits if target.is_floating_point() else logits, target)


class RefusingDenseTargets(Wrong):
    def forward(self, logits, target):
        if target.is_floating_point():
            raise ValueError("class indices only")
        return super().forward(logits, target)


class IgnoringOtherLabels(ClassificationLoss):
    def per_class(self, logits):
        return -logits.log_softmax(-1)

    def forward(self, logits, target):
        return super().forward(logits, target.labels[:, 0] if isinstance(target, LabelMixture) else target)


class WrongReduction(Wrong):
    """The classical one: the sum is asked for and the mean comes."""

    def forward(self, logits, target):
        return F.cross_entropy(
            logits, target, weight=self.weight, reduction="mean" if self.reduction == "sum" else self.reduction
        )


class LostBuffer(Wrong):
    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(None, reduction)
        self.factors = [weight]

    def forward(self, logits, target):
        return F.cross_entropy(logits, target, weight=self.factors[0], reduction=self.reduction)


class NotPicklable(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda logits: logits


class ReturningFloat(Wrong):
    def forward(self, logits, target):
        return super().forward(logits, target).item()


class BreaksOnOne(Wrong):
    """squeeze() takes the batch dimension along when there is one row."""

    def forward(self, logits, target):
        return super().forward(logits.squeeze(), target)


class Noisy(nn.Module):
    """A random loss whose expectation is well behaved: cross-entropy of scores with noise."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits + 0.1 * torch.randn_like(logits), target)


class NoisyInOrder(nn.Module):
    """Noise hides what depends on the order; the mean over seeds does not."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        rows = F.cross_entropy(logits + 0.02 * torch.randn_like(logits), target, reduction="none")
        return (rows * torch.linspace(1.5, 0.5, len(rows))).mean()


class WithSchedule(ClassificationLoss):
    """Factories that ask for context get it, need not keep it, and options go with it."""

    first_change = 1

    def __init__(self, num_classes: int, class_counts, total_epochs: int = 9, *, power: float = 0.0, **options) -> None:
        super().__init__(**options)
        assert len(class_counts) == num_classes
        self.rate = 1 / total_epochs
        self.power = power
        self.factor = 1.0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.factor = (1 + epoch * self.rate) ** self.power

    def per_class(self, logits):
        return -self.factor * logits.log_softmax(-1)


class Growing(WithSchedule):
    """A schedule that leaves the range of numbers in its last epoch."""

    first_change = None

    def set_epoch(self, epoch: int) -> None:
        self.factor = 1.0 if epoch < 9 else torch.inf


class Undeclared(Growing):
    """A schedule that does not say when it begins: nobody is warned who leaves the epochs out."""

    def set_epoch(self, epoch: int) -> None:
        self.factor = 1 + (epoch >= 2)


class WithTemperature(nn.Module):
    """A learned parameter: state that must survive saving, copying and moving."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.log_scale.exp().to(logits.dtype) * logits, target)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functools.partial(F.cross_entropy, label_smoothing=0.1),
        Noisy,
        WithTemperature,
    ],
    ids=lambda loss: getattr(loss, "__name__", type(loss).__name__),
)
@pytest.mark.slow
def test_right_losses_pass(loss):
    check_loss(loss)


def test_context_and_options_reach_the_factory():
    checks = iter_checks(WithSchedule, options={"power": 2.0}, num_classes=8)
    chosen = ("returns_differentiable_scalar", "set_epoch_is_harmless", "options_can_be_set")
    assert {check.run().status for check in checks if check.name in chosen} == {"passed"}


class Forgetful(WithTemperature):
    """Its parameter is saved, but loading does not put it back."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(prefix + "log_scale")


class Locked(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def of_one_dtype(logits, target):
    if target.is_floating_point():
        return -torch.einsum("bn,bn->b", target, logits.log_softmax(-1)).mean()
    return F.cross_entropy(logits, target)


class Rereading(ClassificationLoss):
    """It reads an option of the base class when it is built."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.factor = 1 + self.label_smoothing

    def per_class(self, logits):
        return -self.factor * logits.log_softmax(-1)


def negative(logits, target):
    return -F.cross_entropy(logits, target)


def summing(logits, target):
    return F.cross_entropy(logits, target, reduction="sum")


def detached(logits, target):
    return F.cross_entropy(logits.detach(), target)


def dropping_at_random(logits, target):
    return F.cross_entropy(logits, target) * (1 + random.random())


def another_without_grad(logits, target):
    return F.cross_entropy(logits, target) * (1 if torch.is_grad_enabled() else 2)


def assuming_strides(logits, target):
    return F.cross_entropy(logits.as_strided(logits.shape, (logits.shape[1], 1)), target)


def dense_over_classes(logits, target):
    return F.cross_entropy(logits, target) / (logits.shape[1] if target.is_floating_point() else 1)


def wrapping_labels(logits, target):
    return F.cross_entropy(logits, target if target.is_floating_point() else target % logits.shape[1])


def float32_inside(logits, target):
    return F.cross_entropy(logits.float(), target.float() if target.is_floating_point() else target)


def shifted(logits, target):
    return F.cross_entropy((logits + 1000) - 1000, target)


def overflowing(logits, target):
    return F.cross_entropy(logits - logits.exp().sum(-1, keepdim=True).log(), target)


def multiplying(logits, target):
    return F.cross_entropy(logits @ torch.eye(logits.shape[1], dtype=logits.dtype), target)


def centred_over_the_batch(logits, target):
    return F.cross_entropy(logits - logits.mean(0), target)


def hiding_nan(logits, target):
    return F.cross_entropy(logits, target).nan_to_num()


def hiding_infinity(logits, target):
    return F.cross_entropy(logits.clamp(max=1e4), target) + 0 * logits.sum().detach()


def needing_rows(logits, target):
    return F.cross_entropy(logits - logits.detach().amax().to(logits.dtype), target)


def counting_ignored_rows(logits, target, *, ignore_index=-100):
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum") / len(target)


def dividing_by_the_counted_rows(logits, target, *, ignore_index=-100):
    counted = target != ignore_index
    rows = F.cross_entropy(logits, target.masked_fill(~counted, 0), reduction="none")
    return (rows * (counted / counted.sum())).sum()


def nan_in_double_precision(logits, target):
    return F.cross_entropy(logits, target) * (torch.nan if logits.dtype == torch.float64 else 1.0)


def averaging_by_rows(logits, target, *, weight=None, reduction="mean"):
    rows = F.cross_entropy(logits, target, weight=weight, reduction="none")
    return F.l1_loss(rows, torch.zeros_like(rows), reduction=reduction)


def smoothing_over_the_others(logits, target, *, label_smoothing=0.0, reduction="mean"):
    n = logits.shape[1]
    return F.cross_entropy(logits, target, label_smoothing=label_smoothing * n / (n - 1), reduction=reduction)


def branching_on_data(logits, target):
    return F.cross_entropy(logits.clamp(max=100) if logits.max() > 100 else logits, target)


class Restarting(Wrong):
    """It counts its calls, and forgets the count when it is saved."""

    calls = 0

    def forward(self, logits, target):
        self.calls += 1
        return super().forward(logits, target) * (1 + 1 / self.calls)


def assuming_strides_of_labels(logits, target):
    """It reads labels by the address of the first one."""
    if not target.is_floating_point():
        target = torch.as_strided(target, target.shape, (1,))
    return F.cross_entropy(logits, target)


class Misspelt(Wrong):
    tuning_grid = {"redaction": ("mean",)}  # noqa: RUF012


class WrittenInForward(torch.autograd.Function):
    """Cross-entropy whose forward pass keeps the gradient as a number, not as a function of the logits."""

    @staticmethod
    def forward(logits, target):
        return F.cross_entropy(logits, target), logits.softmax(-1) - F.one_hot(target, logits.shape[1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, g, _):
        (gradient,) = ctx.saved_tensors
        return g * gradient / len(gradient), None


def differentiable_once(logits, target):
    return WrittenInForward.apply(logits, target)[0]


def row_by_row(logits, target):
    return sum(F.cross_entropy(logits[i], target[i]) for i in range(len(logits))) / len(logits)


class TwoHooks(ClassificationLoss):
    """An option that came later: the table knows it, the loss of a label does not."""

    def per_class(self, logits):
        return 2 * -logits.log_softmax(-1)

    def per_label(self, logits, label):
        return -logits.log_softmax(-1).gather(1, label[:, None])[:, 0]


class RoundedHook(TwoHooks):
    """The loss of a label has four digits."""

    def per_class(self, logits):
        return -logits.log_softmax(-1)

    def per_label(self, logits, label):
        return super().per_label(logits, label) * (1 + 1e-4)

    def losses_of(self, logits, masses):
        return (masses.table(logits.shape[1], logits.dtype) * self.per_class(logits)).sum(1)


class WithoutInit(ClassificationLoss):
    """Its constructor forgets the base's."""

    def __init__(self):
        self.tau = 1.0


class WeightingTwice(ClassificationLoss):
    """Its weights of rows are squared."""

    def per_class(self, logits):
        return -logits.log_softmax(-1)

    def forward(self, logits, target, *, sample_weight=None):
        return super().forward(logits, target, sample_weight=None if sample_weight is None else sample_weight**2)


def of_one_shape(logits, target, *, reduction="mean"):
    return F.cross_entropy(logits, target, reduction="mean" if reduction == "none" else reduction)


class Remembering(Wrong):
    """It computes with the class weights of its first call."""

    def forward(self, logits, target):
        if not hasattr(self, "first"):
            self.first = None if self.weight is None else self.weight.clone()
        return F.cross_entropy(logits, target, weight=self.first)


class Stubborn(Wrong):
    """It shows an option that the constructor alone reads."""

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power, self.factor = power, power

    def forward(self, logits, target):
        return self.factor * super().forward(logits, target)


# one defect for each check; the message says what is wrong in the check's own terms
SINGLE = [
    ("returns_differentiable_scalar", WithoutInit, "WithoutInit.__init__ must call super().__init__()"),
    ("returns_differentiable_scalar", detached, "expected a loss that requires grad"),
    ("prefers_the_label", negative, "expected less loss with the label first (-"),
    ("repeats_under_a_seed", dropping_at_random, "expected the same loss under the same seed, got "),
    ("leaves_inputs_alone", mutating, "expected the logits unchanged, got them written to"),
    ("works_without_grad", another_without_grad, "expected loss under no_grad = 2.77466, got 5.5493"),
    ("accepts_any_strides", assuming_strides, "expected loss of strided logits in torch.float32 = "),
    ("accepts_any_strides", assuming_strides_of_labels, "expected loss of strided targets = "),
    ("row_order_is_irrelevant", order_dependent, "expected loss of the shuffled batch = "),
    ("row_order_is_irrelevant", NoisyInOrder, "to have the same mean over 64 seeds"),
    ("nan_stays_in_its_row", hiding_nan, "expected a NaN loss for a whole row of NaN and labels, got 0"),
    ("nan_stays_in_its_row", centred_over_the_batch, "gradient of the other rows with a whole row of NaN and labels"),
    ("infinity_stays_in_its_row", hiding_infinity, "NaN in both loss and gradient or in neither with a logit of +inf"),
    ("infinity_stays_in_its_row", centred_over_the_batch, "gradient of the other rows with a logit of +inf at the"),
    ("batch_of_one", BreaksOnOne, "expected no error, got "),
    ("averages_the_batch", summing, "expected a mean over the rows, not a sum, got 11.0987 for 4 rows and 22.1973"),
    ("empty_batch", needing_rows, "expected no error, got "),
    ("reduction_is_consistent", of_one_shape, "reduction='none' must give a loss of shape [4], got []"),
    ("reduction_is_consistent", WrongReduction, "expected loss of reduction 'sum' = 11.0987, got 2.77466"),
    ("weights_scale_rows", averaging_by_rows, "expected weighted mean loss = "),
    ("weights_scale_rows", WeightingTwice, "mean of rows with a sample_weight"),
    ("ignore_index_skips_rows", counting_ignored_rows, "expected loss with a row of ignore_index = -100 = "),
    ("ignore_index_skips_rows", dividing_by_the_counted_rows, "expected no gradient if all rows have ignore_index = "),
    ("gradient_equals_differences", nan_in_double_precision, "expected a finite float64 loss of labels, got nan"),
    ("label_smoothing_is_a_soft_target", smoothing_over_the_others, "expected loss with label_smoothing at ["),
    ("declared_options_work", Misspelt, "expected options of the loss in tuning_grid, got 'redaction'"),
    ("options_can_be_set", Stubborn, "expected loss after power was set to 2.0 = 5.54933, got 2.77466"),
    ("options_can_be_set", Rereading, "expected loss after label_smoothing was set to 1.0 = "),
    ("set_epoch_is_harmless", Growing, "expected a finite loss and gradient in epoch 9, got inf"),
    ("set_epoch_is_harmless", Undeclared, "expected first_change = 2, the first epoch whose loss is not"),
    ("takes_distributions", dense_over_classes, "expected loss of one-hot targets = 2.77466, got 0.173416"),
    ("takes_distributions", ignoring_dense_targets, "expected targets mixed 70:30 to change the loss"),
    ("takes_distributions", IgnoringOtherLabels, "expected loss of a LabelMixture = "),
    ("k_hot_targets_pull_up_their_labels", Repelling, "expected a step down the gradient to raise 1 labels above"),
    ("bad_targets_raise", wrapping_labels, "expected an error for a label of 16 with 16 classes, got the loss "),
    ("hooks_agree", TwoHooks, "per_class at the labels"),
    ("hooks_agree", RoundedHook, "per_label"),
    ("gradient_equals_differences", float32_inside, "expected a float64 loss of float64 logits and labels, got "),
    ("gradient_equals_differences", wrong_sign, "expected gradient of labels at ["),
    ("gradient_equals_differences", wrong_for_distributions, "expected gradient of one-hot targets at ["),
    ("gradient_descends", wrong_sign, "expected a step against the gradient to lower the loss, got +"),
    ("half_precision", shifted, "expected loss of torch.float16 logits and labels = "),
    ("half_precision", of_one_dtype, "expected no error, got RuntimeError: "),
    ("large_logits", overflowing, "expected a finite loss of torch.float32 logits around 60, got nan"),
    ("large_logits", nan_in_half, "expected a finite loss of torch.float16 logits around 300, got nan"),
    ("cpu_autocast", multiplying, "expected loss under autocast = "),
    ("moves_to_meta", LostBuffer, "expected no error, got RuntimeError: Tensor on device cpu is not on the expected"),
    ("moves_to_meta", branching_on_data, "expected no error, got "),
    ("state_dict_round_trip", Forgetful, "expected loss after load_state_dict = "),
    ("state_dict_round_trip", Restarting, "expected loss after load_state_dict = "),
    ("state_dict_round_trip", Remembering, "expected loss after load_state_dict = "),
    ("can_be_copied", NotPicklable, "expected no error, got "),
    ("can_be_copied", Locked, "expected no error, got TypeError: cannot pickle"),
    ("compiles", branching_on_data, "expected no error, got "),
    ("compiles", row_by_row, "expected one graph for every batch size, got 3"),
    ("vmap", branching_on_data, "expected no error, got RuntimeError: vmap: It looks like you're"),
    ("second_derivative", differentiable_once, "expected second derivative at ["),
    ("forward_mode", differentiable_once, "expected no error, got "),
]


@pytest.mark.parametrize(("name", "loss", "message"), SINGLE)
def test_each_check_sees_its_defect(name, loss, message):
    (check,) = (check for check in iter_checks(loss) if check.name == name)
    result = check.run()
    assert result.status == "failed"
    assert message in result.message


def test_every_check_is_seen_to_fail():
    names = {check.name for check in iter_checks(Wrong)}
    assert names - {name for name, _, _ in SINGLE} == {"runs_on_cuda"}


@pytest.mark.slow
def test_an_expected_failure_is_not_held_against_the_loss():
    reasons = {"takes_distributions": "the label must be one class"}
    results = list(run_checks(iter_checks(RefusingDenseTargets, expected_failed_checks=reasons)))
    assert {result.name for result in results if result.status == "expected"} == set(reasons)
    assert not [result for result in results if result.status == "failed"]


def test_an_expected_failure_that_passes_is_a_failure():
    checks = iter_checks(Wrong, expected_failed_checks={"batch_of_one": "rows come in pairs"})
    (result,) = (check.run() for check in checks if check.name == "batch_of_one")
    assert result.status == "failed"
    assert "expected to fail (rows come in pairs), but passes" in result.message


def test_an_expected_failure_must_name_a_check():
    with pytest.raises(ValueError, match="names no check batch_of_two; there are returns_differentiable_scalar, "):
        check_loss(Wrong, expected_failed_checks={"batch_of_two": "no such check"})


def test_where_the_call_fails_the_rest_is_skipped():
    first, *others = run_checks(iter_checks(ReturningFloat))
    assert first.status == "failed"
    assert {(other.status, other.message) for other in others} == {("skipped", f"needs {first.name}")}
    with pytest.raises(LossCheckError, match="ReturningFloat fails 1 of "):
        check_loss(ReturningFloat)


@pytest.mark.parametrize(
    ("loss", "line"), [(WrongReduction, "class WrongReduction"), (RefusingDenseTargets, "class indices only")]
)
def test_a_failure_names_the_file_and_the_line(loss, line):
    names = {"reduction_is_consistent", "takes_distributions"}
    results = [check.run() for check in iter_checks(loss) if check.name in names]
    (place,) = {result.place for result in results if result.status == "failed"}
    file, number = place.rsplit(":", 1)
    assert file == __file__
    assert line in Path(file).read_text().splitlines()[int(number) - 1]


def test_the_kit_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    next(iter_checks(Noisy)).run()
    assert torch.equal(torch.get_rng_state(), state)


@parametrize_with_checks([NotPicklable], expected_failed_checks=lambda loss: {"can_be_copied": "holds a lambda"})
def test_one_test_for_each_check(check):
    check()


def test_failing_checks_fail_the_parametrized_test(pytester: pytest.Pytester):
    pytester.makepyfile(
        """
        import torch
        from topk_registry.testing import parametrize_with_checks

        def halves(logits, target):
            return torch.nn.functional.cross_entropy(logits, target) / len(logits)

        @parametrize_with_checks([halves], expected_failed_checks=lambda loss: {"empty_batch": "is not so"})
        def test_conformance(check):
            check()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "batch or reduction")
    result.stdout.fnmatch_lines(["FAILED *test_conformance?halves-batch_of_one?*", "FAILED *halves-empty_batch?*"])
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] == 2
    assert outcomes["skipped"] == 1


def tempered(tau: Any, mode: Any = str) -> Callable[..., Any]:
    """A loss whose signature allows these values, and which itself takes tau > 0 and the modes "a" and "b"."""

    def build(*, tau: tau = 0.1, mode: mode = "a"):
        if not (tau > 0 and mode in ("a", "b")):
            raise ValueError(f"wrong: {tau}, {mode}")
        return lambda logits, target: F.cross_entropy(logits / tau, target)

    return build


@pytest.mark.parametrize(
    ("tau", "mode", "grid", "status", "message"),
    [
        (Annotated[float, "(0, inf)"], Literal["a", "b"], {"tau": (0.1, 1.0)}, "passed", ""),
        (float, str, {"tau": ()}, "failed", "got none"),
        (float, str, {"tau": (0.0,)}, "failed", "wrong: 0.0"),
        (Annotated[float, "[0, inf)"], str, {}, "failed", "wrong: 0, a"),  # the end of the range
        (Annotated[float, "(0.5, inf)"], str, {}, "failed", "expected tau=0.1 in (0.5, inf)"),  # the default
        (Annotated[float, "(0, 1]"], str, {}, "failed", "expected a ValueError for tau=2, got a loss"),
        (Annotated[float, "above 0"], str, {}, "failed", "expected an interval such as"),
        (float, Literal["a", "c"], {}, "failed", "wrong: 0.1, c"),
    ],
)
def test_declared_grids_and_ranges_are_tried(tau, mode, grid, status, message):
    factory = tempered(tau, mode)
    factory.tuning_grid = grid
    (check,) = (check for check in iter_checks(factory) if check.name == "declared_options_work")
    result = check.run()
    assert result.status == status, result.message
    assert message in result.message
