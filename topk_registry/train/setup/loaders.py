"""The loaders of a run: timm's transforms, collation and normalisation, with our order and our seeds."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from timm.data import AugMixDataset, FastCollateMixup, Mixup, create_loader
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils.data import DataLoader

from topk_registry.data.labels import is_indexed
from topk_registry.train.engine.signals import leave_to_the_run
from topk_registry.train.errors import DataError
from topk_registry.train.setup.batches import Batches, BatchOrder, SeededErasing
from topk_registry.train.setup.compute import Compute
from topk_registry.train.setup.criterion import uses_soft_targets


class TrainLoader:
    """timm's training loader with an order that can be entered anywhere."""

    def __init__(self, loader: Any, order: BatchOrder | None, batches: int | None = None) -> None:
        self.loader, self.order, self.batches = loader, order, batches

    def __len__(self) -> int:
        return self.batches or len(self.loader)

    def pass_of(self, epoch: int, step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from a step on."""
        if self.order is None:
            return self._stream(epoch, step)
        self.order.start(epoch, step)
        erasing = getattr(self.loader, "random_erasing", None)
        if isinstance(erasing, SeededErasing):
            erasing.start(epoch, step)
        return iter(self.loader)

    def _stream(self, epoch: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)
        passes = chain.from_iterable(repeat(self.loader)) if self.batches else self.loader
        yield from islice(passes, step, self.batches)


def create_train_loader(args: Namespace, dataset: Any, config: dict[str, Any], compute: Compute) -> TrainLoader:
    """The training batches: timm's augmentation, mixup and collation, in our order."""
    if args.aug_splits > 1:
        dataset = AugMixDataset(dataset, num_splits=args.aug_splits)
    mixup = _mixup(args)
    indexed = is_indexed(dataset)
    interpolation = args.train_interpolation
    loader = create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=args.batch_size,
        is_training=True,
        no_aug=args.no_aug,
        re_prob=args.reprob,
        re_mode=args.remode,
        re_count=args.recount,
        re_split=args.resplit,
        train_crop_mode=args.train_crop_mode,
        scale=args.scale,
        ratio=args.ratio,
        hflip=args.hflip,
        vflip=args.vflip,
        color_jitter=args.color_jitter,
        color_jitter_prob=args.color_jitter_prob,
        grayscale_prob=args.grayscale_prob or 0.0,
        gaussian_blur_prob=args.gaussian_blur_prob or 0.0,
        auto_augment=args.aa,
        num_aug_splits=args.aug_splits,
        interpolation=config["interpolation"] if args.no_aug or not interpolation else interpolation,
        mean=config["mean"],
        std=config["std"],
        num_workers=args.workers,
        distributed=args.distributed and not indexed,
        collate_fn=mixup if isinstance(mixup, FastCollateMixup) else None,
        pin_memory=args.pin_mem and compute.device.type != "cpu",
        img_dtype=compute.dtype,
        device=compute.device,
        use_prefetcher=not args.no_prefetcher,
    )
    if indexed:
        return _reordered(args, loader, dataset, mixup, compute)
    _set_workers(args, loader)
    return TrainLoader(loader, None, args.train_batches_per_epoch)


def create_eval_loader(
    args: Namespace,
    dataset: Any,
    config: dict[str, Any],
    compute: Compute,
    *,
    transform: Callable[[Any], Any] | None = None,
) -> Any:
    """The evaluation batches; ``transform`` replaces timm's, and yields uint8 arrays for the prefetcher."""
    loader: Any = create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=args.validation_batch_size or args.batch_size,
        is_training=False,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        num_workers=args.workers,
        distributed=args.distributed,
        crop_pct=config["crop_pct"],
        pin_memory=args.pin_mem and compute.device.type != "cpu",
        img_dtype=compute.dtype,
        device=compute.device,
        use_prefetcher=transform is not None or not args.no_prefetcher,
    )
    if transform is not None:
        dataset.transform = transform
    _set_workers(args, loader)
    return loader


def _set_workers(args: Namespace, loader: Any) -> None:
    """Leave signals to the run, and draw the workers' seeds from another stream than the run's."""
    inner = getattr(loader, "loader", loader)
    inner.generator = torch.Generator().manual_seed(args.seed)
    inner.worker_init_fn = partial(leave_to_the_run, then=inner.worker_init_fn)


def _mixup(args: Namespace) -> Mixup | None:
    if not uses_soft_targets(args):
        return None
    build = Mixup if args.no_prefetcher else FastCollateMixup
    return build(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        cutmix_minmax=args.cutmix_minmax,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
        mode=args.mixup_mode,
        label_smoothing=args.smoothing,
        num_classes=args.num_classes,
    )


def _reordered(args: Namespace, loader: Any, dataset: Any, mixup: Mixup | None, compute: Compute) -> TrainLoader:
    """Put our batches in the place of the torch loader that timm made."""
    inner = getattr(loader, "loader", loader)
    order = BatchOrder(
        len(dataset),
        args.batch_size,
        seed=args.seed,
        rank=args.rank,
        world=args.world_size,
        batches=args.train_batches_per_epoch,
    )
    if args.aug_repeats:
        if not args.distributed:
            raise DataError("--aug-repeats needs more than one process")
        order.repeated = RepeatAugSampler(dataset, num_repeats=args.aug_repeats)
    batches = Batches(
        dataset,
        inner.collate_fn,
        seed=args.seed,
        rank=args.rank,
        mixup=mixup,
        mixup_off_epoch=args.mixup_off_epoch,
    )
    ours = DataLoader(
        batches,
        batch_size=None,
        sampler=order,
        num_workers=args.workers,
        pin_memory=args.pin_mem and compute.device.type != "cpu",
        persistent_workers=args.workers > 0,
    )
    _set_workers(args, ours)
    if inner is loader:
        return TrainLoader(ours, order)
    loader.loader = ours
    if loader.random_erasing is not None:
        loader.random_erasing = SeededErasing(loader.random_erasing, seed=args.seed, rank=args.rank)
    return TrainLoader(loader, order)
