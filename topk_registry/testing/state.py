"""A loss as an object: it moves, is saved, copied, sent to workers and compiled."""

import copy
import functools
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from topk_registry.ops.backend import use_backend
from topk_registry.testing.expect import NotApplicableError, expect, expect_close
from topk_registry.testing.subject import Loss, Subject, evaluate, value_and_gradient


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


def follows_its_buffers(subject: Subject) -> None:
    """Buffers move between two calls (``share_memory``, workers, ``.data``), are replaced or changed in place; a kernel
    that remembers their numbers or their address then computes with stale values."""
    loss, logits, labels = _stateful(subject), subject.logits(), subject.labels()
    if not isinstance(loss, nn.Module) or not list(_floating(loss)):
        raise NotApplicableError("has no floating-point buffers")
    before = value_and_gradient(loss, logits, labels)
    loss.share_memory()
    for got, wanted in zip(value_and_gradient(loss, logits, labels), before, strict=True):
        expect_close(got, wanted, "result after share_memory()", tolerance=0.0)
    for how, change in _CHANGES.items():
        for path, owner, name in list(_floating(loss)):
            change(owner, name)
            for when, reference in (("a new loss", None), ("a new loss in torch operations", "torch")):
                if reference and subject.is_random:
                    continue  # it draws other numbers
                with use_backend(reference) if reference else nullcontext():
                    wanted = value_and_gradient(_new_with_numbers_of(loss, subject), logits, labels)
                got = value_and_gradient(loss, logits, labels)
                for kind, mine, its in zip(("loss", "gradient"), got, wanted, strict=True):
                    expect_close(mine, its, f"{kind} after {path} was {how}, as of {when},", floor=1.0)


def _floating(loss: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every floating-point buffer: the way to it, its module and its name there."""
    for path, module in loss.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield f"{path}.{name}".lstrip("."), module, name


def _new_with_numbers_of(loss: nn.Module, subject: Subject) -> Loss:
    """A loss that was never called, with the numbers of the buffers and parameters of another."""
    new = _stateful(subject)
    assert isinstance(new, nn.Module)
    with torch.no_grad():
        for mine, its in zip((*new.parameters(), *new.buffers()), (*loss.parameters(), *loss.buffers()), strict=True):
            mine.copy_(its)
    return new


def _other(buffer: Tensor) -> Tensor:
    """Other numbers of the same signs, each by a factor of its own: a mean knows no common factor of its weights."""
    return buffer * torch.linspace(1.25, 1.5, buffer.numel(), dtype=buffer.dtype).view_as(buffer)


def _replace_data(owner: nn.Module, name: str) -> None:
    buffer = getattr(owner, name)
    old, buffer.data = buffer.detach(), _other(buffer.detach())
    old.fill_(torch.nan)  # what lay there is free for others


_CHANGES: dict[str, Callable[[nn.Module, str], object]] = {
    "changed in place": lambda owner, name: getattr(owner, name).copy_(_other(getattr(owner, name))),
    "changed in place through .data": lambda owner, name: getattr(owner, name).data.copy_(_other(getattr(owner, name))),
    "given other .data": _replace_data,
    "replaced": lambda owner, name: setattr(owner, name, _other(getattr(owner, name))),
}


def can_be_pickled(subject: Subject) -> None:
    """Spawned workers and whole-object checkpoints pickle the loss; a lambda or local class in it forbids that."""
    loss = _stateful(subject)
    _expect_equal(pickle.loads(pickle.dumps(loss)), loss, subject, "after pickling")


def can_be_copied(subject: Subject) -> None:
    """Averaged models and sweeps deep-copy what holds the loss."""
    loss = _stateful(subject)
    _expect_equal(copy.deepcopy(loss), loss, subject, "of the copy")


def compiles(subject: Subject) -> None:
    """torch.compile(fullgraph=True): data-dependent Python breaks the graph, and with it the compiled training step."""
    from torch._dynamo.eval_frame import is_dynamo_supported

    if not is_dynamo_supported():
        raise NotApplicableError("torch.compile does not support this Python")
    loss, logits = _stateful(subject), subject.logits()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own; what the loss warns of shows in every other check
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        got = value_and_gradient(compiled, logits, subject.labels())
    wanted = value_and_gradient(loss, logits, subject.labels())
    expect_close(got[0], wanted[0], "compiled loss", floor=1.0)
    expect_close(got[1], wanted[1], "compiled gradient")


def tensors_in(holder: Any, path: str = "loss", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor reachable through attributes, containers, partials and closures, with the way to it."""
    seen = set() if seen is None else seen
    if id(holder) in seen or isinstance(holder, type | types.ModuleType):
        return
    seen.add(id(holder))
    if isinstance(holder, Tensor):
        yield path, holder
        return
    for step, value in _inside(holder):
        yield from tensors_in(value, path + step, seen)


def _inside(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, dict):
        yield from ((f"[{key!r}]", value) for key, value in holder.items())
    elif isinstance(holder, list | tuple | set | frozenset):
        yield from ((f"[{i}]", value) for i, value in enumerate(holder))
    elif isinstance(holder, functools.partial):
        yield from (("", holder.args), ("", holder.keywords), (".func", holder.func))
    elif isinstance(holder, types.FunctionType):
        names = holder.__code__.co_freevars
        yield from (
            (f".{name}", cell.cell_contents) for name, cell in zip(names, holder.__closure__ or (), strict=True)
        )
    elif isinstance(holder, types.MethodType):
        yield "", holder.__self__
    elif isinstance(holder, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from ((f".{name}", value) for name, value in vars(holder)[kind].items())
        yield from ((f".{name}", value) for name, value in vars(holder).items() if name not in _MODULE_STATE)
    elif hasattr(holder, "__dict__"):
        yield from ((f".{name}", value) for name, value in vars(holder).items())


_MODULE_STATE = frozenset(vars(nn.Module()))


def _stateful(subject: Subject) -> Loss:
    """A build with class weights where they are taken, so that there is state to lose."""
    if subject.takes("weight") and "weight" not in subject.options:
        return subject.build(weight=torch.linspace(0.5, 2.0, subject.num_classes))
    return subject.build()


def _expect_equal(got: Loss, wanted: Loss, subject: Subject, when: str) -> None:
    logits, labels = subject.logits(), subject.labels()
    left, right = evaluate(got, logits, labels), evaluate(wanted, logits, labels)
    expect_close(left, right, f"loss {when}", tolerance=0.0)


CHECKS = (
    state_moves_with_the_loss,
    runs_on_cuda,
    state_dict_round_trip,
    follows_its_buffers,
    can_be_pickled,
    can_be_copied,
    compiles,
)
