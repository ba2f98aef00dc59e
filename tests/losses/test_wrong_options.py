"""Values that no option takes: each loss of ours names the option, and speaks no Python."""

import inspect
import math

import pytest
import torch

import topk_registry as tr

OF_PYTHON = ("not supported between", "invalid literal", "not iterable", "new():", "unhashable", "could not convert")
WRONG = ("x", (0, 1), True, None, math.nan, math.inf, ["mean"], 2**70, -(2**70), 10**400, {})
LISTS = {"weight", "alpha", "class_counts", "k_weights"}  # one number a class, or a size
COUNTS = [3, 2, 1, 1, 1, 1]


def takes(option: str, value: object, parameter: inspect.Parameter) -> bool:
    """Whether a value of WRONG is right for an option."""
    if value is None:
        return parameter.default is None or option == "candidates"
    if isinstance(value, tuple):
        return option in LISTS - {"k_weights"} and "Sequence" in str(parameter.annotation)
    of_floats = "float" in str(parameter.annotation) and option not in LISTS - {"alpha"}
    return of_floats and not isinstance(value, bool) and value in (2**70, -(2**70))  # within some ranges, not in others


@pytest.mark.parametrize("name", tr.list_losses("topk-registry:*"))
def test_wrong_values_are_refused_by_name(name):
    builder = tr.get_loss_builder(name)
    parameters = inspect.signature(builder).parameters
    base = {"class_counts": COUNTS} if "class_counts" in parameters else {}
    for option, parameter in parameters.items():
        for value in WRONG:
            if takes(option, value, parameter):
                continue
            with pytest.raises((ValueError, TypeError)) as caught:
                tr.create_loss(name, **(base | {option: value}))
            said = str(caught.value)
            assert said.startswith(option), f"{option}={value!r}: {said}"
            assert not any(words in said for words in OF_PYTHON), f"{option}={value!r}: {said}"


@pytest.mark.parametrize("name", tr.list_losses("topk-registry:*"))
def test_wrong_values_cannot_be_set(name):
    builder = tr.get_loss_builder(name)
    parameters = inspect.signature(builder).parameters
    base = {"class_counts": COUNTS} if "class_counts" in parameters else {}
    loss = tr.create_loss(name, **base)
    shown = repr(loss)
    for option, parameter in parameters.items():
        for value in WRONG:
            if takes(option, value, parameter):
                continue
            with pytest.raises((ValueError, TypeError, AttributeError)) as caught:
                setattr(loss, option, value)
            said = str(caught.value)
            assert said.startswith(option), f"{option}={value!r}: {said}"
            assert not any(words in said for words in OF_PYTHON), f"{option}={value!r}: {said}"
    assert repr(loss) == shown


def test_a_method_of_weights_is_the_trainers():
    with pytest.raises(ValueError, match="got 'inv_freq'; for weights by name, a trainer has --class-weight"):
        tr.create_loss("smooth_topk_svm", weight="inv_freq")


@pytest.mark.parametrize("k", ["true", True])
def test_one_size_is_an_integer(k):
    with pytest.raises(ValueError, match=f"k must be an integer of at least 1, got {k!r}"):
        tr.create_loss("smooth_topk_svm", k=k)


@pytest.mark.parametrize("candidates", [2**31, 2**62, 2**63 - 1, 2**63, 1e308])
def test_candidates_that_kernels_cannot_count_are_refused(candidates):
    with pytest.raises(ValueError, match=r"candidates must be .*below 2\*\*31"):
        tr.create_loss("differentiable_topk", candidates=candidates)


def test_as_many_candidates_as_kernels_can_count_are_all_classes():
    logits, label = torch.randn(8, 20), torch.arange(8)
    most, every = (tr.create_loss("differentiable_topk", candidates=c) for c in (2**31 - 1, 20))
    torch.testing.assert_close(most(logits, label), every(logits, label), rtol=0, atol=0)
