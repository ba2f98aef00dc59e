"""Training with the classifier's rows spread over the processes: the step, clipping, checkpoints, evaluation.

The backbone is data-parallel, under DistributedDataParallel. The classifier's rows stay where they are, with their
gradient, their optimizer's state and their moving average. A checkpoint holds them whole, under the names and in the
places that a run in one process gives them: every tool reads it, and any number of processes goes on from it.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm import utils
from timm.task.evaluator import evaluation_sample_limit
from torch import Tensor, nn
from torch import distributed as dist

from topk_registry.nn.label_places import label_places
from topk_registry.ops.process_group import Group, all_reduce, gather_to_first
from topk_studies.old_trainer.engine.evaluate import LEAST_LIKELIHOOD, Evaluator, MeanNLL, readable
from topk_studies.old_trainer.engine.state import RegistryTask
from topk_studies.old_trainer.setup.class_rows import ClassRows, class_rows
from topk_studies.old_trainer.setup.compute import Compute


class ClassParallelTask(RegistryTask):
    """A task whose model gives features, and whose loss makes the scores of this process's classes."""

    def __init__(self, *args: Any, sample: float | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sample = sample
        self._whole: dict[str, Any] = {}  # parts of the next checkpoint, in the first process

    @property
    def rows(self) -> ClassRows:
        model: Any = self.trainable_module
        return class_rows(model)

    @property
    def group(self) -> Group:
        """The processes that hold the classes; None where one has them all."""
        return dist.group.WORLD if len(self.rows.sizes) > 1 else None

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        features, rows, criterion = self.trainable_module(input), self.rows, self.criterion
        spread = {"process_group": self.group, "num_classes": rows.num_classes, "sample": self.sample}
        loss = criterion.of_linear(features, rows.weight, rows.bias, target, **spread)  # pyright: ignore[reportCallIssue]
        return {"loss": loss, "output": features}

    def prepare_distributed(self, device_ids: list | None = None, **options: Any) -> "ClassParallelTask":
        model: Any = self.trainable_module
        own = list(_named_rows(model))  # each process has other rows
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        super().prepare_distributed(device_ids, **options)
        return self

    @torch.no_grad()
    def clip_gradients(self, value: float, mode: str) -> None:
        """Clip gradients as timm does, by the norm of the whole model."""
        if mode != "norm":
            return super().clip_gradients(value, mode)
        rows = list(self.rows.parameters())
        own = {id(parameter) for parameter in rows}
        parameters = [parameter for parameter in self.get_clip_parameters() if parameter.grad is not None]
        shared = torch.nn.utils.get_total_norm([p.grad for p in parameters if id(p) not in own and p.grad is not None])
        if self.update is not None:
            spread = self.update.gradient_norm().to(shared).square()
        else:
            spread = torch.nn.utils.get_total_norm([p.grad for p in rows if p.grad is not None]).to(shared).square()
            if self.group is not None:
                all_reduce(spread, self.group, "adding norms of gradients")
        total = (shared.square() + spread).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, value, total)
        if self.update is not None:
            self.update.scale_gradients((value / (total + 1e-6)).clamp(max=1.0))
        return None

    def prepare_checkpoint(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather what a checkpoint saves, in the first process; every process must call it."""
        self._whole = {"optimizer": self._gather_optimizer(optimizer)}
        for ema in (False, True):
            model = self.get_eval_model(ema=ema)
            if model is not None:
                model = utils.unwrap_model(model)
                self._whole[_key(ema)] = {name: self._gather(part) for name, part in _named_rows(model).items()}

    def get_checkpoint_state(self, ema: bool = False, **options: Any) -> dict[str, Any]:
        state = super().get_checkpoint_state(ema, **options)
        if _key(ema) in state:
            state[_key(ema)] = {**state[_key(ema)], **self._whole.pop(_key(ema))}
        return state

    def load_checkpoint_state(
        self, state_dict: dict[str, Any], task_state: Any = None, ema: bool = False, strict: bool = True
    ) -> None:
        model = self.get_eval_model(ema=ema)
        own = {} if model is None else _named_rows(utils.unwrap_model(model))
        parts = {name: self._own(state_dict[name]) for name in own if name in state_dict}
        super().load_checkpoint_state({**state_dict, **parts}, task_state, ema, strict)

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> "WholeOptimizer":
        return WholeOptimizer(self, optimizer)

    def _gather(self, part: Tensor) -> Tensor | None:
        return part.detach().cpu() if self.group is None else gather_to_first(part, self.rows.sizes, self.group)

    def _own(self, whole: Tensor) -> Tensor:
        """This process's part, where it is one of these classes; else as it is, to be refused by its shape."""
        return self.rows.own(whole) if len(whole) == self.rows.num_classes else whole

    def _gather_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._of_classes(optimizer, optimizer.state_dict(), self.rows.sizes[self.rows.rank], self._gather)

    def whole_optimizer(self) -> dict[str, Any]:
        """The state of the optimizer that :meth:`prepare_checkpoint` gathered."""
        return self._whole.pop("optimizer")

    def own_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """This process's part of an optimizer's whole state."""
        return self._of_classes(optimizer, saved, self.rows.num_classes, self._own)

    def _of_classes(
        self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], count: int, change: Callable[[Tensor], Any]
    ) -> dict[str, Any]:
        """Apply ``change`` to the tensors of the classifier's state that have a row for each of ``count`` classes."""
        state = dict(saved["state"])
        for place in _places(optimizer, self.rows):
            state[place] = {
                name: change(value) if isinstance(value, Tensor) and value.shape[:1] == (count,) else value
                for name, value in state.get(place, {}).items()
            }
        return {**saved, "state": {place: one for place, one in state.items() if one}}


class WholeOptimizer:
    """The optimizer as checkpoints hold it, with the state of the classes of all processes."""

    def __init__(self, task: ClassParallelTask, optimizer: torch.optim.Optimizer) -> None:
        self.task, self.optimizer = task, optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.task.whole_optimizer()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(self.task.own_optimizer(self.optimizer, saved))


class SpreadScaler(utils.NativeScaler):
    """timm's scaler of a float16 loss; a gradient that overflows in one process skips the step in all of them."""

    def __init__(self, device: str, task: ClassParallelTask) -> None:
        super().__init__(device=device)
        self.task = task
        if task.group is not None:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._scaler = ShardedGradScaler(device, process_group=task.group)

    def __call__(
        self, loss: Tensor, optimizer: Any, clip_grad: float | None = None, clip_mode: str = "norm",
        parameters: Any = None, create_graph: bool = False, need_update: bool = True,
    ) -> None:  # fmt: skip
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad:
                self._scaler.unscale_(optimizer)
                self.task.clip_gradients(clip_grad, clip_mode)
            self._scaler.step(optimizer)
            self._scaler.update()


class SpreadEvaluator(Evaluator):
    """Metrics of a model whose classes are spread: the same numbers, without the scores of all classes."""

    @torch.inference_mode()
    def __call__(self, model: nn.Module, criterion: object = None) -> dict[str, float] | None:
        rows, nll, accuracy = class_rows(model), MeanNLL(), self._accuracy(self.sizes)
        group = dist.group.WORLD if len(rows.sizes) > 1 else None
        model.eval()
        limit = evaluation_sample_limit(self.loader)
        for images, target in readable(self.loader):
            if self.stop():
                return None
            features = self._forward(model, images)
            features = features.to(torch.promote_types(features.dtype, rows.weight.dtype))
            target = target.to(features.device)
            with self.compute.autocast():
                places = label_places(features, rows.weight, rows.bias, target, first=rows.first, group=group)
            kept = len(target) if limit is None else max(0, min(len(target), limit))
            limit = None if limit is None else limit - kept
            if kept:
                likelihood = places.log_likelihood[:kept, None].clamp(min=LEAST_LIKELIHOOD)
                nll.update(likelihood, torch.zeros_like(target[:kept]))
                accuracy.update_places(places.above[:kept], places.tied[:kept], target[:kept])
        return self._results(nll, [accuracy])


def scaler_of(compute: Compute, task: ClassParallelTask) -> utils.NativeScaler | None:
    """The scaler of a run, where it has one."""
    return None if compute.scaler is None else SpreadScaler(compute.device.type, task)


def _key(ema: bool) -> str:
    """timm's name of a model's weights in a checkpoint."""
    return "state_dict_ema" if ema else "state_dict"


def _named_rows(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of the spread classifier under their names in the model."""
    return {
        f"{name}.{each}": parameter
        for name, module in model.named_modules() if isinstance(module, ClassRows)
        for each, parameter in module.named_parameters()
    }  # fmt: skip


def _places(optimizer: torch.optim.Optimizer, rows: ClassRows) -> dict[int, Tensor]:
    """The classifier's parameters by their places in the optimizer's state."""
    own = {id(parameter) for parameter in rows.parameters()}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {place: parameter for place, parameter in enumerate(every) if id(parameter) in own}
