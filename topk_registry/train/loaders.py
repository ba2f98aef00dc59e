"""Batches that depend on the seed, the epoch and the step alone.

timm's ``create_loader`` makes the transform, the collation and the normalisation; the order of samples and the random
numbers are ours. Each batch is drawn under a seed of its own, hashed from (seed, rank, epoch, step): augmentation and
mixup are the same with any number of workers, and a run that resumes in the middle of an epoch sees exactly the batches
that it would have seen.
"""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from timm.data import AugMixDataset, FastCollateMixup, Mixup, create_loader
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from topk_registry.data.labels import is_indexed
from topk_registry.train.compute import Compute
from topk_registry.train.criterion import uses_soft_targets
from topk_registry.train.errors import DataError

Key = tuple[int, int, list[int]]


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Random numbers of Python, NumPy and PyTorch (CPU) from a key of integers; the outer streams stay untouched."""
    seeds = np.random.SeedSequence(key).generate_state(3)
    outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(int(seeds[2]))
    try:
        yield
    finally:
        random.setstate(outer[0])
        np.random.set_state(outer[1])
        torch.set_rng_state(outer[2])


class BatchOrder(Sampler[Key]):
    """The batches of an epoch as (epoch, step, sample indices), from any step on.

    Over ``world`` processes the batches of one step are, together, the batch that a single process of ``world`` times
    the batch size would see.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1) -> None:
        self.size, self.batch_size, self.seed, self.rank, self.world = size, batch_size, seed, rank, world
        self.repeated: RepeatAugSampler | None = None
        self.epoch, self.first = 0, 0

    def start(self, epoch: int, step: int = 0) -> None:
        """What the next pass begins with."""
        self.epoch, self.first = epoch, step

    def samples(self) -> int:
        """How many samples an epoch has on this rank."""
        return self.size // self.world if self.repeated is None else len(self.repeated)

    def __len__(self) -> int:
        # as timm, an epoch drops its last, smaller batch; a data set below one batch is one batch
        return max(1, self.samples() // self.batch_size)

    def __iter__(self) -> Iterator[Key]:
        order = self._order()
        for step in range(self.first, len(self)):
            yield self.epoch, step, order[step * self.batch_size : (step + 1) * self.batch_size]

    def _order(self) -> list[int]:
        if self.repeated is not None:
            self.repeated.set_epoch(self.epoch)
            return list(self.repeated)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        return order[self.rank :: self.world][: self.samples()].tolist()


class Batches(Dataset[Any]):
    """A data set whose items are whole collated batches, each drawn under its own seed."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        rank: int = 0,
        mixup: Mixup | None = None,
        mixup_off_epoch: int = 0,
    ) -> None:
        self.dataset, self.collate, self.seed, self.rank = dataset, collate, seed, rank
        self.mixup, self.mixup_off_epoch = mixup, mixup_off_epoch

    def __getitem__(self, key: Key) -> Any:
        epoch, step, indices = key
        if self.mixup is not None:
            self.mixup.mixup_enabled = not self.mixup_off_epoch or epoch < self.mixup_off_epoch
        with seeded(self.seed, self.rank, epoch, step):
            batch = self.collate([self._sample(index) for index in indices])
            if self.mixup is not None and self.mixup is not self.collate:
                batch = self.mixup(*batch)
        return batch

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except (OSError, RuntimeError, SyntaxError, ValueError) as error:
            raise DataError(f"cannot read training sample {index}: {error}") from error


class SeededErasing:
    """timm's random erasing under a seed for each batch, counted from where the epoch starts."""

    def __init__(self, erase: Callable[[Tensor], Tensor], *, seed: int, rank: int) -> None:
        self.erase, self.key = erase, (seed, rank)
        self.epoch, self.step = 0, 0

    def start(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step

    def __call__(self, images: Tensor) -> Tensor:
        with seeded(*self.key, self.epoch, self.step, 1):
            images = self.erase(images)
        self.step += 1
        return images


class TrainLoader:
    """timm's training loader with an order that can be entered anywhere."""

    def __init__(self, loader: Any, order: BatchOrder | None) -> None:
        self.loader, self.order = loader, order

    def __len__(self) -> int:
        return len(self.loader)

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
        for i, batch in enumerate(self.loader):
            if i >= step:
                yield batch


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
    _keep_out_of_the_runs_stream(args, loader)
    return TrainLoader(loader, None)


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
    _keep_out_of_the_runs_stream(args, loader)
    return loader


def _keep_out_of_the_runs_stream(args: Namespace, loader: Any) -> None:
    """A torch loader draws a seed at the start of each pass, from PyTorch's random stream if it has no other."""
    getattr(loader, "loader", loader).generator = torch.Generator().manual_seed(args.seed)


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
    order = BatchOrder(len(dataset), args.batch_size, seed=args.seed, rank=args.rank, world=args.world_size)
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
        generator=torch.Generator().manual_seed(args.seed),
    )
    if inner is loader:
        return TrainLoader(ours, order)
    loader.loader = ours
    if loader.random_erasing is not None:
        loader.random_erasing = SeededErasing(loader.random_erasing, seed=args.seed, rank=args.rank)
    return TrainLoader(loader, order)
