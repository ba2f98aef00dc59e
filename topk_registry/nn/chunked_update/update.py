"""The optimizer's step of a linear layer's weight and bias, taken a chunk of classes at a time."""

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from topk_registry.nn.chunked_update import states
from topk_registry.ops.distributed import is_distributed
from topk_registry.ops.ksubset.chunked.layer import BackwardPass, multiply
from topk_registry.ops.process_group import all_reduce
from topk_registry.ops.update.api import step
from topk_registry.ops.update.backends import Update
from topk_registry.ops.update.definition import RandomBits
from topk_registry.ops.update.rules import rule_of

MARK = "_chunked_update"  # of a weight whose gradient never exists as a whole
MOMENTS = ("backward", "step")
COUNT = "updates"  # in the state of a parameter that is rounded at random, where torch keeps no count


class ChunkedUpdate:
    """Let an optimizer update a linear layer inside the backward pass, a chunk of classes at a time.

    The gradient of the whole weight [n, d] never exists. The optimizer stays the one that you have: learning rate,
    momentum, decay and all other settings are those of its parameter groups at the time, so that schedules work as
    ever. Its ``step()`` updates all other parameters. States lie in ``optimizer.state`` under torch's names.

    With ``when="backward"`` the layer changes in the backward pass itself. Nothing can then be done to the gradient as
    a whole: a second backward pass before ``step()`` is refused. With ``when="step"`` the layer changes in
    ``optimizer.step()``, which makes the scores of each chunk once more. That takes longer, by a product of features
    and weight, and serves gradient accumulation, :meth:`clip_grad_norm_` and ``torch.amp.GradScaler``. Memory is the
    same.

    The step is that of the optimizer on the whole gradient, up to the order of sums. A weight in bfloat16, and states
    in 16 or 8 bits, are rounded at random, without bias. Both come back the same from the same ``seed`` and backend.

    Args:
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` with the layer's weight and bias among its parameters.
        layer: :class:`LinearSmoothTopK`, or any module whose ``weight`` and ``bias`` go to ``linear_smooth_topk``.
        state: precision of the weight's states: ``"float32"``, ``"bfloat16"`` or ``"int8"``, 8 bits a number with a
            scale for each 256 columns of a row. The bias has its own precision, at least float32.
        when: ``"backward"`` or ``"step"``.
        scaler: the ``torch.amp.GradScaler`` that the loss is scaled by, for ``when="step"``.
        seed: of the random rounding.

    Example:
        >>> head = LinearSmoothTopK(64, 1000, k=1, tau=1.0, alpha=0.0)  # cross-entropy
        >>> optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
        >>> update = ChunkedUpdate(optimizer, head, state="int8")
        >>> head(torch.randn(8, 64), torch.randint(1000, (8,))).backward()  # changes the weight
        >>> optimizer.step()
        >>> head.weight.grad is None
        True

    Reference: Zhang, Ullah, Schultheis, Babbar, *ELMO: Efficiency via Low-precision and Peak Memory Optimization in
    Large Output Spaces*, ICML 2025.
    """

    @staticmethod
    def expand_states(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Turn states in 8 bits into float32: a hook for ``register_load_state_dict_pre_hook`` of a plain optimizer."""
        return states.expand_states(optimizer, saved)

    def __init__(
        self,
        optimizer: Optimizer,
        layer: nn.Module,
        *,
        state: str = "float32",
        when: str = "backward",
        scaler: Any = None,
        seed: int = 0,
    ) -> None:
        for name, value, known in (("state", state, states.KINDS), ("when", when, MOMENTS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if scaler is not None and when == "backward":
            raise ValueError(
                "a gradient scaler needs when='step': it looks at all gradients for an overflow before any weight "
                "changes, and with when='backward' the layer has changed by then"
            )
        self.optimizer: Optimizer = optimizer
        self.state: str = state
        self.when: str = when
        self.scaler: Any = scaler
        self.seed: int = seed
        self._rule = rule_of(optimizer)
        self._weight, self._bias = _parameters(layer)
        self._learned = [p for p in (self._weight, self._bias) if p is not None and p.requires_grad]
        places = self._places()
        if not self._weight.requires_grad or any(id(p) not in places for p in self._learned):
            raise ValueError("the optimizer must have the layer's weight, and its bias if that is learned")
        for parameter in self._learned:
            if getattr(parameter, MARK, None) is not None:
                raise ValueError("the layer has a ChunkedUpdate already: remove() it first")
        self._bits = RandomBits(seed, self._weight.device)
        self._updated = False
        self._pending: list[tuple[BackwardPass, float | Tensor]] = []
        self._loaded: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = partial(_zero_grad, weakref.ref(self), optimizer.zero_grad)
        for parameter in self._learned:
            setattr(parameter, MARK, self)
            if optimizer.state.get(parameter):
                optimizer.state[parameter] = self._converted(parameter, optimizer.state[parameter])

    def remove(self) -> None:
        """Give the layer back to the optimizer, with its states in float32."""
        self._pending = []
        for handle in self._handles:
            handle.remove()
        self.optimizer.zero_grad = self._zero_grad
        for parameter in self._learned:
            setattr(parameter, MARK, None)
            if saved := self.optimizer.state.get(parameter):
                names = self._rule.states(self._group(parameter))
                self.optimizer.state[parameter] = states.converted(saved, names, parameter, "float32")

    def enter(self) -> None:
        """Begin a backward pass; called by the layer's loss.

        Raises:
            RuntimeError: the layer has changed since the last step.
        """
        if self.when == "backward" and self._updated:
            raise RuntimeError(
                "a second backward pass before optimizer.step(): the first one has changed the layer already, and this "
                "one's gradient would be of other weights. For gradient accumulation, or for a loss that uses the "
                "layer several times, take ChunkedUpdate(..., when='step'); or call step() after each backward pass"
            )

    def backward(self, done: BackwardPass, wants_features: bool) -> Tensor | None:
        """Update the layer, or keep what the step will need; return the gradient of the features where it is wanted."""
        p = done.problem
        if p.dtype == torch.float16 and self.scaler is None:
            raise RuntimeError(
                "products in float16 need a gradient scaler: pass it as ChunkedUpdate(..., when='step', scaler=), or "
                "use bfloat16"
            )
        sums = p.like.new_zeros(done.x.shape) if wants_features else None
        if self.when == "step":
            finite: Tensor | None = None
            for _, W, ds in done.chunks(p.chunk):
                if sums is not None:
                    sums += ds @ W
                if self.scaler is not None:
                    size = _product(ds, done.x.to(p.dtype)).float().abs().sum()
                    finite = size if finite is None else finite + size
            if sums is not None and finite is not None:  # the scaler then sees what overflows in the layer alone
                sums += torch.where(finite.isfinite(), 0.0, torch.inf).to(sums)
            self._pending.append((done, 1.0 if self.scaler is None else 1.0 / self.scaler.get_scale()))
        else:
            self._updated = True
            counts = self._begin(done)
            x = done.x.to(p.dtype)
            for first, W, ds in done.chunks(p.chunk):
                if sums is not None:
                    sums += ds @ W
                self._change(first, self._of_chunk(ds, x), counts)
        return None if sums is None else sums.to(done.x.dtype)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of the layer's gradient over all ranks, from all backward passes since the last step."""
        if self.when == "backward":
            raise RuntimeError(
                "the norm of a gradient is known only when the whole backward pass is done, and with when='backward' "
                "the layer has changed by then: take ChunkedUpdate(..., when='step'), or clip the other parameters "
                "alone by torch.nn.utils.clip_grad_norm_"
            )
        total = torch.zeros((), dtype=torch.float64, device=self._weight.device)
        for _, gradients in self._gradients():
            for gradient in gradients:
                total += gradient.double().square().sum()
        if self._pending and self._pending[0][0].problem.group is not None:
            all_reduce(total, self._pending[0][0].problem.group, "adding norms of gradients")
        return total.sqrt()

    @property
    def passes(self) -> int:
        """Number of backward passes that the next step will take, with ``when="step"``."""
        return len(self._pending)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the layer's gradient of all backward passes since the last step."""
        self._pending = [(done, before * factor) for done, before in self._pending]

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_``, by the norm of these parameters' gradients and the layer's.

        Call it in place of that function, which does not see the layer's gradient.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = [p for p in parameters if p.grad is not None]
        others = torch.nn.utils.get_total_norm([p.grad for p in given if p.grad is not None]).to(self._weight.device)
        own = self.gradient_norm()
        total = (others.double().square() + own.square()).sqrt()
        total = total.to(states.wide_dtype(self._weight))
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
        self.scale_gradients((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    def bytes_of_states(self) -> int:
        """Bytes of the optimizer's states of the layer."""
        kept = (self.optimizer.state.get(parameter, {}) for parameter in self._learned)
        return sum(value.nbytes for state in kept for value in state.values() if isinstance(value, Tensor))

    def _of_chunk(self, ds: Tensor, x: Tensor) -> list[Tensor]:
        """The gradients of the weight's rows [m, d] and of the bias [m], each where it is learned."""
        gradients = [_product(ds, x).to(states.wide_dtype(self._weight))]
        if len(self._learned) > 1:
            assert self._bias is not None
            gradients.append(ds.sum(0).to(states.wide_dtype(self._bias)))
        return gradients

    def _gradients(self) -> Iterator[tuple[int, list[Tensor]]]:
        """For each chunk its first class, and the sum of the gradients of all passes that are pending."""
        if not self._pending:
            return
        size = min(done.problem.chunk for done, _ in self._pending)
        device = self._weight.device.type
        with torch.autocast(device, enabled=False):
            passes = [done.chunks(size) for done, _ in self._pending]
            for chunks in zip(*passes, strict=True):
                total: list[Tensor] = []
                for (_, _, ds), (done, factor) in zip(chunks, self._pending, strict=True):
                    gradients = self._of_chunk(ds, done.x.to(done.problem.dtype))
                    gradients = (
                        gradients if isinstance(factor, float) and factor == 1.0 else [g * factor for g in gradients]
                    )
                    total = [a.add_(b) for a, b in zip(total, gradients, strict=True)] if total else gradients
                yield chunks[0][0], total

    def _begin(self, done: BackwardPass) -> list[int]:
        """Begin an update: states where there are none yet, and the number of the update for each parameter."""
        counts = []
        for parameter in self._learned:
            names = self._rule.states(self._group(parameter))
            if not names and not self._rounds(parameter):  # torch keeps nothing, either
                counts.append(1)
                continue
            state = self.optimizer.state[parameter]
            fresh = [name for name in names if not states.is_kept(state, name)]
            if fresh and self._rule.counts:
                state["step"] = torch.tensor(0.0)
            for name in fresh:
                states.create(state, name, parameter, self._kind(parameter))
            counts.append(self._counted(state, first=bool(fresh) or not names, rounds=self._rounds(parameter)))
        group = done.problem.group
        self._bits.begin(counts[0], 0 if group is None else dist.get_rank(group))
        return counts

    def _counted(self, state: dict[str, Any], *, first: bool, rounds: bool) -> int:
        """Count an update; where nothing asks for the number, only whether it is the first."""
        if self._rule.counts:
            state["step"] += 1
            return int(state["step"])
        if not rounds:
            return 1 if first else 2
        state[COUNT] = int(state.get(COUNT, 0 if first else 1)) + 1
        return state[COUNT]

    def _change(self, first: int, gradients: list[Tensor], counts: list[int]) -> None:
        """Take the step of the rows from ``first`` on."""
        for parameter, gradient, count in zip(self._learned, gradients, counts, strict=True):
            group, rows = self._group(parameter), slice(first, first + len(gradient))
            state = self.optimizer.state.get(parameter, {})
            kept = [states.kept(state, name, rows) for name in self._rule.states(group)]
            update = Update(self._rule, group, count, self._bits)
            step(parameter.detach()[rows], gradient, kept, update, first)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(one is not None for one in (*args[1:], kwargs.get("closure"))):  # the first is the optimizer
            raise RuntimeError("a ChunkedUpdate takes optimizer.step() without a closure: call backward() before it")
        for parameter in self._learned:
            if parameter.grad is not None:
                raise RuntimeError(
                    "the layer has a gradient from elsewhere than its loss, such as a penalty on its weight, which a "
                    "ChunkedUpdate does not see: use the optimizer's weight_decay, or leave the ChunkedUpdate out. A "
                    "gradient from before the ChunkedUpdate goes away by optimizer.zero_grad()"
                )
        if self._pending:
            counts = self._begin(self._pending[0][0])
            with torch.no_grad():
                for first, gradients in self._gradients():
                    self._change(first, gradients, counts)
            self._pending = []
        self._updated = False

    def _before_load(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Take the layer's states out of what torch loads: it would turn all of them into the weight's precision."""
        places = [place for group in saved["param_groups"] for place in group["params"]]
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if len(places) != len(own):
            return saved  # torch says what is wrong
        of = {id(p): place for p, place in zip(own, places, strict=True)}
        state = dict(saved["state"])
        layer_states = [(p, state.pop(of[id(p)], {})) for p in self._learned]
        self._loaded = [(p, self._converted(p, one)) for p, one in layer_states]
        return {**saved, "state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        for parameter, state in self._loaded:
            if state:
                optimizer.state[parameter] = state
        self._loaded, self._pending, self._updated = [], [], False

    def _converted(self, parameter: nn.Parameter, saved: dict[str, Any]) -> dict[str, Any]:
        names = self._rule.states(self._group(parameter))
        state = states.converted(saved, names, parameter, self._kind(parameter))
        if not self._rounds(parameter):
            state.pop(COUNT, None)
        return state

    def _drop(self) -> None:
        self._pending = []

    def _kind(self, parameter: Tensor) -> str:
        return self.state if parameter.ndim > 1 else "float32"

    def _rounds(self, parameter: Tensor) -> bool:
        return self._kind(parameter) != "float32" or parameter.dtype == torch.bfloat16

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return self.optimizer.param_groups[self._places()[id(parameter)]]

    def _places(self) -> dict[int, int]:
        """The group of each of the optimizer's parameters; loading a state makes new groups."""
        return {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}


def update_of(weight: Tensor, bias: Tensor | None) -> ChunkedUpdate | None:
    """The update that takes the gradients of a layer; None where autograd does, or where there are no gradients."""
    update = getattr(weight, MARK, None)
    if update is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    if bias is not update._bias:
        raise ValueError("the weight has a ChunkedUpdate: pass it with the bias of the same layer")
    return update


def _parameters(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise TypeError(f"expected a linear layer with a weight [n, d], got {type(layer).__name__}")
    if is_distributed(weight):
        raise TypeError(
            "a ChunkedUpdate takes no DTensor weight, whose copies share a gradient: spread the classes by "
            "LinearSmoothTopK(..., process_group=)"
        )
    return weight, bias


def _product(ds: Tensor, x: Tensor) -> Tensor:
    """ds^T x [m, d] in the products' precision."""
    out = x.new_empty(ds.shape[1], x.shape[1])
    multiply(ds.T, x, out=out)
    return out


def _zero_grad(update: "weakref.ref[ChunkedUpdate]", inner: Any, set_to_none: bool = True) -> None:
    """Drop the layer's pending gradient with those of the other parameters."""
    chunked = update()
    if chunked is not None:
        chunked._drop()
    inner(set_to_none)
