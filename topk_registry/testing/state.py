"""A loss as an object: it moves, is saved, copied and sent to workers."""

import copy
import functools
import pickle
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.testing.expect import NotApplicableError, check, expect, expect_close
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


@check
def state_moves_with_the_loss(subject: Subject) -> None:
    """``loss.to(device)`` moves parameters and buffers only; any other tensor stays behind and fails on a GPU."""
    loss = _stateful(subject)
    if not isinstance(loss, nn.Module):
        loss = subject.build()  # tensors it was given by its user are its user's to move
    evaluate(loss, subject.logits(), subject.labels())  # a first call may cache tensors
    if isinstance(loss, nn.Module):
        stayed = [path for path, tensor in tensors_in(loss.to("meta")) if not tensor.is_meta]
        expect(not stayed, f"expected every tensor to move with .to(device), got left behind: {', '.join(stayed)}")
    else:
        held = [path for path, _ in tensors_in(loss)]
        expect(not held, f"expected tensors to be buffers of an nn.Module, got held without a .to(): {', '.join(held)}")


@check
def runs_on_cuda(subject: Subject) -> None:
    """A loss moved to a GPU must work there and give the same results."""
    if not torch.cuda.is_available():
        raise NotApplicableError("there is no CUDA device here")
    loss, logits, labels = _stateful(subject), subject.logits(), subject.labels()
    loss = loss if isinstance(loss, nn.Module) else subject.build()
    value, gradient = value_and_gradient(loss, logits, labels)
    loss = loss.to("cuda") if isinstance(loss, nn.Module) else loss
    cuda_value, cuda_gradient = value_and_gradient(loss, logits.cuda(), labels.cuda())
    expect(cuda_value.is_cuda, f"expected a loss on the device of its logits, got {cuda_value.device}")
    if not subject.is_random:  # the devices draw different numbers from one seed
        expect_close(cuda_value.cpu(), value, "loss on CUDA", floor=1.0)
        expect_close(cuda_gradient.cpu(), gradient, "gradient on CUDA")


@check
def state_dict_round_trip(subject: Subject) -> None:
    """A resumed run must go on with the state it was saved with, running averages included."""
    saved, loaded = _stateful(subject), _stateful(subject)
    if not (isinstance(saved, nn.Module) and isinstance(loaded, nn.Module)):
        raise NotApplicableError("is no nn.Module")
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.125)
    for _ in range(2):
        evaluate(saved, subject.logits(), subject.labels())
    loaded.load_state_dict(saved.state_dict())
    _expect_equal(loaded, saved, subject, "after load_state_dict")


@check
def follows_its_buffers(subject: Subject) -> None:
    """Buffers are replaced or changed between two calls; a loss that remembers them computes with old values."""
    loss, new, logits, labels = _stateful(subject), _stateful(subject), subject.logits(), subject.labels()
    if not isinstance(loss, nn.Module) or not isinstance(new, nn.Module) or not list(loss.buffers()):
        raise NotApplicableError("has no buffers")
    for how in ("changed in place", "replaced"):
        evaluate(loss, logits, labels)
        for module in loss.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():  # other numbers of the same signs: a mean knows no common factor
                    other = buffer * torch.linspace(1.25, 1.5, buffer.numel(), dtype=buffer.dtype).view_as(buffer)
                    buffer.copy_(other) if how == "changed in place" else setattr(module, name, other)
        with torch.no_grad():
            for mine, its in zip(new.buffers(), loss.buffers(), strict=True):
                mine.copy_(its)
        got, wanted = (value_and_gradient(one, logits, labels) for one in (loss, copy.deepcopy(new)))
        for kind, mine, its in zip(("loss", "gradient"), got, wanted, strict=True):
            expect_close(mine, its, f"{kind} after buffers were {how}, as of a new loss,", floor=1.0)


@check
def can_be_pickled(subject: Subject) -> None:
    """Spawned workers and whole-object checkpoints pickle the loss; a lambda or local class in it forbids that."""
    loss = _stateful(subject)
    _expect_equal(pickle.loads(pickle.dumps(loss)), loss, subject, "after pickling")


@check
def can_be_copied(subject: Subject) -> None:
    """Averaged models and sweeps deep-copy what holds the loss."""
    loss = _stateful(subject)
    _expect_equal(copy.deepcopy(loss), loss, subject, "of the copy")


def tensors_in(holder: Any, path: str = "loss", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every tensor that is reachable through attributes, containers and partials."""
    seen = set() if seen is None else seen
    if id(holder) in seen or isinstance(holder, type | types.ModuleType):
        return
    seen.add(id(holder))
    if isinstance(holder, Tensor):
        yield path, holder
    elif isinstance(holder, dict):
        for key, value in holder.items():
            yield from tensors_in(value, f"{path}[{key!r}]", seen)
    elif isinstance(holder, list | tuple | set):
        for i, value in enumerate(holder):
            yield from tensors_in(value, f"{path}[{i}]", seen)
    elif isinstance(holder, functools.partial):
        yield from tensors_in([*holder.args, *holder.keywords.values(), holder.func], path, seen)
    elif hasattr(holder, "__dict__"):
        attributes = {k: v for k, v in vars(holder).items() if k not in ("_parameters", "_buffers", "_modules")}
        if isinstance(holder, nn.Module):
            attributes |= {**vars(holder)["_parameters"], **vars(holder)["_buffers"], **vars(holder)["_modules"]}
        for name, value in attributes.items():
            yield from tensors_in(value, f"{path}.{name}", seen)


def _stateful(subject: Subject) -> Loss:
    """Return a loss with class weights where they are taken, so that there is state to lose."""
    if subject.takes("weight") and "weight" not in subject.options:
        return subject.build(weight=torch.linspace(0.5, 2.0, subject.num_classes))
    return subject.build()


def _expect_equal(got: Loss, wanted: Loss, subject: Subject, when: str) -> None:
    logits, labels = subject.logits(), subject.labels()
    left, right = evaluate(got, logits, labels), evaluate(wanted, logits, labels)
    expect_close(left, right, f"loss {when}", tolerance=0.0)
