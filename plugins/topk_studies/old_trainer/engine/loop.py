"""One epoch of training, begun at any step."""

import math

import torch
from timm import utils
from torch import Tensor
from torch import distributed as dist

from topk_registry.ops.targets.label_mixture import LabelMixture, Target
from topk_registry.train.errors import NonFiniteLossError
from topk_studies.old_trainer.engine.run import Run


def train_epoch(run: Run) -> bool:
    """Train the rest of the epoch that ``run.progress`` is in; return False if stopped, after a whole update."""
    progress, steps = run.progress, len(run.loader)
    run.model.train(not run.config.retrain_head)  # a classifier is the same in both modes, and all else is frozen then
    run.optimizer.zero_grad()
    batches = run.loader.pass_of(progress.epoch, progress.step)
    for images, target in run.report.steps(batches, epoch=progress.epoch, first=progress.step, total=steps):
        step = progress.step
        images, target = _to_device(run, images, target)
        updates = step + 1 == steps or (step + 1) % run.config.grad_accum_steps == 0
        loss, stop = _step(run, images, target, step, updates)
        progress.loss_sum += loss * len(images)
        progress.samples += len(images)
        progress.step += 1
        if updates:
            _after_update(run, images)
        _show(run, len(images), updates)
        if run.hooks.on_step is not None:
            run.hooks.on_step(run, loss)
        if updates and stop:
            return False
    sync_lookahead = getattr(run.optimizer, "sync_lookahead", None)
    if sync_lookahead is not None:
        sync_lookahead()
    return True


def mean_loss(run: Run) -> float:
    """The epoch's mean training loss, over all processes."""
    sums = torch.tensor([run.progress.loss_sum, run.progress.samples], dtype=torch.float64)
    if run.compute.distributed:
        sums = sums.to(run.compute.device)
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item() if sums[1] else math.nan


def _step(run: Run, images: Tensor, target: Target, step: int, updates: bool) -> tuple[float, bool]:
    syncs = updates or not run.compute.distributed
    with torch.enable_grad() if syncs else run.task.no_sync():
        with run.compute.autocast():
            result = run.task(images, target)
        loss = result["loss"]
        value = loss.item()
        stop, bad = agree(run, run.stopped(), not math.isfinite(value))
        if bad:
            raise NonFiniteLossError(_save_batch(run, images, target, result["output"], value))
        _backward(run, _part_of_update(run, loss, target, step), updates)
    return value, stop


def _part_of_update(run: Run, loss: Tensor, target: Target, step: int) -> Tensor:
    """The loss of one batch of an update, so that gradients add up to those of the update's mean.

    Where rows have weights, the mean of the batches so far becomes that with one batch more.
    """
    weight = run.task.weight_of(target) if run.config.grad_accum_steps > 1 else None
    if weight is None:
        return loss / _accumulated(run, step)
    before = run.weight_of_update if step % run.config.grad_accum_steps else 0.0
    run.weight_of_update = before + weight
    run.task.scale_gradients(run.optimizer, before / run.weight_of_update)
    return loss * (weight / run.weight_of_update).to(loss)


def _backward(run: Run, loss: Tensor, updates: bool) -> None:
    config = run.config
    second_order = getattr(run.optimizer, "is_second_order", False)
    if run.compute.scaler is not None:
        clipped = run.task.get_clip_parameters(exclude_head="agc" in config.clip_mode) if config.clip_grad else None
        run.compute.scaler(loss, run.optimizer, config.clip_grad, config.clip_mode, clipped, second_order, updates)
        return
    loss.backward(create_graph=second_order)
    if updates:
        if config.clip_grad:
            run.task.clip_gradients(config.clip_grad, config.clip_mode)
        run.optimizer.step()


def _after_update(run: Run, images: Tensor) -> None:
    config, progress = run.config, run.progress
    run.optimizer.zero_grad()
    update = math.ceil(progress.step / config.grad_accum_steps)
    total = run.updates
    run.task.update_ema(step=total)
    if config.synchronize_step and run.compute.device.type == "cuda":
        torch.cuda.synchronize()
    if run.scheduler is not None:
        run.scheduler.step_update(num_updates=total, metric=progress.loss_sum / progress.samples)
    if config.save_images and run.folder is not None and _log_due(run):
        from torchvision.utils import save_image

        save_image(images, run.folder / f"train-batch-{progress.step}.jpg", padding=0, normalize=True)
    if config.recovery_interval and update % config.recovery_interval == 0:
        run.save_recovery()


def _show(run: Run, images: int, updates: bool) -> None:
    progress = run.progress
    loss = progress.loss_sum / progress.samples
    due = updates and _log_due(run)
    run.report.step(progress.step, images * run.compute.world_size, loss, run.lr, due=due)
    if due:
        run.loggers.log({"running_loss": loss, "lr": run.lr}, update=run.updates)


def _log_due(run: Run) -> bool:
    """Whether the update that just ended is one of every ``--log-interval``, or the epoch's last."""
    update = math.ceil(run.progress.step / run.config.grad_accum_steps)
    return update % run.config.log_interval == 0 or run.progress.step == len(run.loader)


def _accumulated(run: Run, step: int) -> int:
    """Number of batches in the update of this step; the last update may have fewer."""
    steps, size = len(run.loader), run.config.grad_accum_steps
    return size if step < steps - steps % size else steps % size


def _to_device(run: Run, images: Tensor, target: Target) -> tuple[Tensor, Target]:
    images, target = images.to(device=run.compute.device, dtype=run.compute.dtype), target.to(device=run.compute.device)
    return (images.contiguous(memory_format=torch.channels_last) if run.config.channels_last else images), target


def agree(run: Run, stop: bool, bad: bool) -> tuple[bool, bool]:
    """Combine stop and error flags over ranks, so that all leave the loop together."""
    if not run.compute.distributed:
        return stop, bad
    flags = torch.tensor([stop, bad], dtype=torch.int32, device=run.compute.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags[0]), bool(flags[1])


def _save_batch(run: Run, images: Tensor, target: Target, output: Tensor, value: float) -> str:
    """Save the batch, its scores and the weights behind a non-finite loss; return the message."""
    where = f"epoch {run.progress.epoch + 1}, batch {run.progress.step + 1} of {len(run.loader)}"
    if math.isfinite(value):
        return f"the loss of {where} is not finite in another process"
    message = f"the loss of {where} is {value}"
    if run.folder is None:
        return message
    path = run.folder / f"nonfinite-batch-rank{run.compute.rank}.pth"
    content = {
        "images": images.cpu(),
        "target": target.to("cpu")._asdict() if isinstance(target, LabelMixture) else target.cpu(),
        "output": output.detach().cpu(),
        "loss": value,
        "loss_record": run.task.loss,
        "epoch": run.progress.epoch,
        "step": run.progress.step,
        "state_dict": utils.get_state_dict(run.model),
    }
    try:
        torch.save(content, path)
    except (OSError, RuntimeError) as error:
        return f"{message}; the batch could not be saved: {error}"
    return (
        f"{message}. The batch, the scores and the weights that made them are in {path} (torch.load). "
        "A lower --lr, --clip-grad, or --amp-dtype bfloat16 are the usual remedies"
    )
