"""Checks of the loss as an object, because a trainer moves, saves, copies and pickles the loss."""

import copy
import pickle

import torch
from torch import Tensor, nn

from topk_registry.testing.expect import NotApplicableError, check, expect, expect_same
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


@check
def moves_to_meta(subject: Subject) -> None:
    """Check that ``loss.to("meta")`` moves all tensors of the loss, and that a call does not read values of tensors."""
    loss = _stateful(subject)
    kinds = [(kind, target) for kind, target in subject.targets(loss) if isinstance(target, Tensor)]
    loss = loss.to("meta") if isinstance(loss, nn.Module) else loss
    logits = subject.logits().to("meta").requires_grad_()
    for kind, target in kinds:
        value = loss(logits, target.to("meta"))
        expect(value.shape == (), f"expected a meta loss of {kind} of shape [], got {list(value.shape)}")
        expect(value.is_meta, f"expected a loss of {kind} on the meta device, got it on {value.device}")
        torch.autograd.grad(value, logits)


@check
def runs_on_cuda(subject: Subject) -> None:
    """Check that the loss gives the same results on a GPU as on the CPU. Without a GPU, the check is skipped."""
    if not torch.cuda.is_available():
        raise NotApplicableError("there is no CUDA device here")
    loss = _stateful(subject)
    logits = subject.logits()
    labels = subject.labels()
    wanted = value_and_gradient(loss, logits, labels)
    loss = loss.to("cuda") if isinstance(loss, nn.Module) else loss
    value, gradient = value_and_gradient(loss, logits.cuda(), labels.cuda())
    expect(value.is_cuda, f"expected a loss on the device of its logits, got {value.device}")
    if not subject.is_random:  # random numbers differ between devices
        expect_same((value.cpu(), gradient.cpu()), wanted, "on CUDA")


@check
def state_dict_round_trip(subject: Subject) -> None:
    """Check that ``load_state_dict`` restores the loss, because a resumed run must continue with the saved state."""
    saved = _stateful(subject)
    loaded = _stateful(subject)
    logits = subject.logits()
    labels = subject.labels()
    if not (isinstance(saved, nn.Module) and isinstance(loaded, nn.Module)):
        raise NotApplicableError("is no nn.Module")
    for state in saved.state_dict().values():
        if state.is_floating_point():  # factors differ between entries, because a mean would cancel a common factor
            state.mul_(1.25).add_(torch.linspace(0.125, 0.25, state.numel(), dtype=state.dtype).view_as(state))
    for loss in (saved, saved, loaded):
        evaluate(loss, logits, labels)
    loaded.load_state_dict(saved.state_dict())
    _expect_equal(loaded, saved, subject, "after load_state_dict")


@check
def can_be_copied(subject: Subject) -> None:
    """Check that the loss can be pickled and deep-copied. pickle fails if an attribute is a lambda or a local class."""
    loss = _stateful(subject)
    _expect_equal(pickle.loads(pickle.dumps(loss)), loss, subject, "after pickling")
    _expect_equal(copy.deepcopy(loss), loss, subject, "of the copy")


def _stateful(subject: Subject) -> Loss:
    if subject.takes("weight") and "weight" not in subject.options and isinstance(subject.build(), nn.Module):
        return subject.build(weight=subject.class_weight())
    return subject.build()


def _expect_equal(got: Loss, wanted: Loss, subject: Subject, when: str) -> None:
    left, right = (value_and_gradient(loss, subject.logits(), subject.labels()) for loss in (got, wanted))
    expect_same(left, right, when, tolerance=0.0)
