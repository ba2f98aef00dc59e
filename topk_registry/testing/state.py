"""Checks of the loss as an object: it is moved, saved, copied and sent to workers."""

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
    """``loss.to(device)`` moves only parameters and buffers. Any other tensor stays on the CPU and fails on a GPU."""
    loss = _stateful(subject)
    if not isinstance(loss, nn.Module):
        loss = subject.build()  # tensors that the user passed are moved by the user
    evaluate(loss, subject.logits(), subject.labels())  # a first call may cache tensors
    if isinstance(loss, nn.Module):
        stayed = [path for path, tensor in tensors_in(loss.to("meta")) if not tensor.is_meta]
        expect(not stayed, f"expected every tensor to move with .to(device), got left behind: {', '.join(stayed)}")
    else:
        held = [path for path, _ in tensors_in(loss)]
        expect(not held, f"expected tensors to be buffers of an nn.Module, got held without .to(): {', '.join(held)}")


@check
def runs_on_cuda(subject: Subject) -> None:
    """After a move to a GPU, a loss must give the same results."""
    if not torch.cuda.is_available():
        raise NotApplicableError("there is no CUDA device here")
    loss, logits, labels = _stateful(subject), subject.logits(), subject.labels()
    loss = loss if isinstance(loss, nn.Module) else subject.build()
    value, gradient = value_and_gradient(loss, logits, labels)
    loss = loss.to("cuda") if isinstance(loss, nn.Module) else loss
    cuda_value, cuda_gradient = value_and_gradient(loss, logits.cuda(), labels.cuda())
    expect(cuda_value.is_cuda, f"expected a loss on the device of its logits, got {cuda_value.device}")
    if not subject.is_random:  # random numbers differ between devices
        expect_close(cuda_value.cpu(), value, "loss on CUDA", floor=1.0)
        expect_close(cuda_gradient.cpu(), gradient, "gradient on CUDA")


@check
def state_dict_round_trip(subject: Subject) -> None:
    """A resumed run must continue with the saved state, including running averages."""
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
    """Buffers may change between two calls. A loss that caches their values computes with old values."""
    loss, new, logits, labels = _stateful(subject), _stateful(subject), subject.logits(), subject.labels()
    if not isinstance(loss, nn.Module) or not isinstance(new, nn.Module) or not list(loss.buffers()):
        raise NotApplicableError("has no buffers")
    for how in ("changed in place", "replaced"):
        evaluate(loss, logits, labels)
        for module in loss.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():  # not a common factor, which a mean would cancel
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
    """Worker processes and checkpoints pickle the loss. A lambda or a local class in the loss prevents that."""
    loss = _stateful(subject)
    _expect_equal(pickle.loads(pickle.dumps(loss)), loss, subject, "after pickling")


@check
def can_be_copied(subject: Subject) -> None:
    """Averaged models and sweeps deep-copy objects that contain the loss."""
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
    """Return a loss with class weights if it takes them, so that it has state."""
    if subject.takes("weight") and "weight" not in subject.options:
        return subject.build(weight=torch.linspace(0.5, 2.0, subject.num_classes))
    return subject.build()


def _expect_equal(got: Loss, wanted: Loss, subject: Subject, when: str) -> None:
    logits, labels = subject.logits(), subject.labels()
    left, right = evaluate(got, logits, labels), evaluate(wanted, logits, labels)
    expect_close(left, right, f"loss {when}", tolerance=0.0)
