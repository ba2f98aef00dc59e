"""The loaders of a run: timm's transforms, collation and normalisation, with our order and our seeds."""

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
from topk_registry.ops.targets.label_mixture import Target
from topk_registry.train.errors import DataError, TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.config.tasks import MULTILABEL
from topk_studies.old_trainer.data.sampling import Draw
from topk_studies.old_trainer.setup.batches import Batches, BatchOrder, SeededErasing
from topk_studies.old_trainer.setup.compute import Compute
from topk_studies.old_trainer.setup.loss import uses_soft_targets
from topk_studies.old_trainer.setup.mixing import LabelMixup, LabelMixupCollate
from topk_studies.old_trainer.setup.sampler import create_draw
from topk_studies.old_trainer.setup.shards import Shards
from topk_studies.old_trainer.setup.workers import end_of_process, leave_to_the_run


class TrainLoader:
    """timm's training loader with an order that can be entered anywhere."""

    def __init__(self, loader: Any, order: BatchOrder | None, batches: int | None = None) -> None:
        self.loader, self.order, self.batches = loader, order, batches

    def __len__(self) -> int:
        try:
            return self.batches or len(self.loader)
        except TypeError as error:
            raise DataError("the training loader has no length: pass --train-batches-per-epoch") from error

    @property
    def draw(self) -> Draw | None:
        """The draw of an epoch's images, where there is one."""
        return None if self.order is None else self.order.draw

    def images_of_step(self, world: int) -> int:
        """Images of a step in all processes; 0 where the order of images depends on the number of processes."""
        return self.order.batch_size * world if self.order is not None and self.order.repeated is None else 0

    def pass_of(self, epoch: int, step: int = 0) -> Iterator[tuple[Tensor, Target]]:
        """The batches of an epoch from a step on."""
        erasing = getattr(self.loader, "random_erasing", None)
        if isinstance(erasing, SeededErasing):
            erasing.start(epoch, step if self.order is not None else 0)
        if self.order is None:
            return self._stream(epoch, step)
        self.order.start(epoch, step)
        return iter(self.loader)

    def _stream(self, epoch: int, step: int) -> Iterator[tuple[Tensor, Target]]:
        for part in ("dataset", "sampler"):
            if hasattr(getattr(self.loader, part, None), "set_epoch"):
                getattr(self.loader, part).set_epoch(epoch)
        passes = chain.from_iterable(repeat(self.loader)) if self.batches else self.loader
        yield from islice(passes, step, self.batches)


def create_train_loader(
    config: TrainConfig, dataset: Any, data_config: dict[str, Any], compute: Compute, *, mixtures: bool = False
) -> TrainLoader:
    """The training batches: timm's augmentation, mixup and collation, in our order.

    Args:
        mixtures: whether mixed targets are a LabelMixture; else they are distributions over all classes.
    """
    if isinstance(dataset, Shards):
        dataset.check_workers(config.workers)
    draw = create_draw(config, dataset)
    if config.aug_splits > 1:
        dataset = AugMixDataset(dataset, num_splits=config.aug_splits)
    mixup = _mixup(config, mixtures)
    indexed = is_indexed(dataset)
    interpolation = config.train_interpolation
    loader = _created(
        dataset,
        input_size=data_config["input_size"],
        batch_size=config.batch_size,
        is_training=True,
        no_aug=config.no_aug,
        re_prob=config.reprob,
        re_mode=config.remode,
        re_count=config.recount,
        re_split=config.resplit,
        train_crop_mode=config.train_crop_mode,
        scale=(config.scale[0], config.scale[1]),
        ratio=(config.ratio[0], config.ratio[1]),
        hflip=config.hflip,
        vflip=config.vflip,
        color_jitter=config.color_jitter,
        color_jitter_prob=config.color_jitter_prob,
        grayscale_prob=config.grayscale_prob or 0.0,
        gaussian_blur_prob=config.gaussian_blur_prob or 0.0,
        auto_augment=config.aa,
        num_aug_splits=config.aug_splits,
        interpolation=data_config["interpolation"] if config.no_aug or not interpolation else interpolation,
        mean=data_config["mean"],
        std=data_config["std"],
        num_workers=config.workers,
        distributed=compute.distributed and not indexed,
        collate_fn=mixup if isinstance(mixup, FastCollateMixup) else None,
        pin_memory=config.pin_mem and compute.device.type != "cpu",
        img_dtype=compute.dtype,
        device=compute.device,
        use_prefetcher=not config.no_prefetcher,
        persistent_workers=not config.no_persistent_workers,
    )
    if indexed:
        return _reordered(config, loader, dataset, mixup, compute, draw)
    _set_workers(config, loader)
    _seed_erasing(config, loader, compute)
    return TrainLoader(loader, None, config.train_batches_per_epoch)


def _created(dataset: Any, **options: Any) -> Any:
    """timm's loader of training batches; what its transforms cannot be made from is told as the flags' fault."""
    try:
        return create_loader(dataset, **options)
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        flags = "--aa, --train-crop-mode, --color-jitter, --scale, --ratio and the other flags of augmentation"
        raise TrainError(
            f"timm cannot make the transforms of training images from {flags}: {error or type(error).__name__}"
        ) from error


def create_eval_loader(
    config: TrainConfig,
    dataset: Any,
    data_config: dict[str, Any],
    compute: Compute,
    *,
    transform: Callable[[Any], Any] | None = None,
    model: Any = None,
) -> Any:
    """The evaluation batches.

    Args:
        transform: replaces timm's, and yields uint8 arrays for the prefetcher.
        model: the model to validate; timm's validation follows its crop mode, and its patches where they are asked for.
    """
    if "naflex_max_seq_len" in data_config:
        return _patches_loader(config, dataset, data_config, compute, model)
    loader: Any = create_loader(
        dataset,
        input_size=data_config["input_size"],
        batch_size=config.validation_batch_size or config.batch_size,
        is_training=False,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        num_workers=config.workers,
        distributed=compute.distributed,
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config.get("crop_mode") if model is not None else None,  # as timm: in validation alone
        crop_border_pixels=data_config.get("crop_border_pixels"),
        tf_preprocessing=data_config.get("tf_preprocessing", False),
        pin_memory=config.pin_mem and compute.device.type != "cpu",
        img_dtype=compute.dtype,
        device=compute.device,
        use_prefetcher=transform is not None or not config.no_prefetcher,
    )
    if transform is not None:
        dataset.transform = transform
    _set_workers(config, loader)
    return loader


def _patches_loader(
    config: TrainConfig, dataset: Any, data_config: dict[str, Any], compute: Compute, model: Any
) -> Any:
    """Batches of patches for a NaFlex model."""
    from timm.data import create_naflex_loader

    loader = create_naflex_loader(
        dataset,
        patch_size=getattr(getattr(model, "embeds", None), "patch_size", None) or (16, 16),
        max_seq_len=data_config["naflex_max_seq_len"],
        batch_size=config.validation_batch_size or config.batch_size,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
        crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"],
        crop_border_pixels=data_config.get("crop_border_pixels"),
        num_workers=config.workers,
        pin_memory=config.pin_mem and compute.device.type != "cpu",
        img_dtype=compute.dtype,
        device=compute.device,
    )
    _set_workers(config, loader)
    return loader


def _set_workers(config: TrainConfig, loader: Any) -> None:
    """Leave signals to the run, and draw the workers' seeds from another stream than the run's."""
    inner = getattr(loader, "loader", loader)
    inner.generator = torch.Generator().manual_seed(config.seed)
    inner.worker_init_fn = partial(leave_to_the_run, over=end_of_process(), then=inner.worker_init_fn)


def end_workers(loader: Any) -> None:
    """End the workers of a loader that keeps them between epochs; the next pass starts others."""
    inner = getattr(loader, "loader", loader)
    if getattr(inner, "_iterator", None) is not None:
        inner._iterator = None  # they end with what holds them


def _mixup(config: TrainConfig, mixtures: bool) -> Mixup | None:
    if not uses_soft_targets(config):
        return None
    options: dict[str, Any] = {
        "mixup_alpha": config.mixup,
        "cutmix_alpha": config.cutmix,
        "cutmix_minmax": config.cutmix_minmax,
        "prob": config.mixup_prob,
        "switch_prob": config.mixup_switch_prob,
        "mode": config.mixup_mode,
    }
    if mixtures:
        return (LabelMixup if config.no_prefetcher else LabelMixupCollate)(smoothing=config.smoothing, **options)
    build = Mixup if config.no_prefetcher else FastCollateMixup
    several = config.task == MULTILABEL
    n = config.num_classes or 0
    return build(**options, label_smoothing=config.smoothing, num_classes=n, multi_label=several)


def _reordered(
    config: TrainConfig, loader: Any, dataset: Any, mixup: Mixup | None, compute: Compute, draw: Draw | None
) -> TrainLoader:
    """Replace the torch loader inside timm's by one over our batches."""
    inner = getattr(loader, "loader", loader)
    order = BatchOrder(
        len(dataset) if draw is None else len(draw),
        config.batch_size,
        seed=config.seed,
        rank=compute.rank,
        world=compute.world_size,
        batches=config.train_batches_per_epoch,
        draw=draw,
    )
    if config.aug_repeats:
        if not compute.distributed:
            raise DataError("--aug-repeats needs more than one process")
        order.repeated = RepeatAugSampler(dataset, num_repeats=int(config.aug_repeats))
    batches = Batches(
        dataset,
        inner.collate_fn,
        seed=config.seed,
        rank=compute.rank,
        mixup=mixup,
        mixup_off_epoch=config.mixup_off_epoch,
    )
    ours = DataLoader(
        batches,
        batch_size=None,
        sampler=order,
        num_workers=config.workers,
        pin_memory=config.pin_mem and compute.device.type != "cpu",
        persistent_workers=config.workers > 0 and not config.no_persistent_workers,
    )
    _set_workers(config, ours)
    if inner is loader:
        return TrainLoader(ours, order)
    loader.loader = ours
    _seed_erasing(config, loader, compute)
    return TrainLoader(loader, order)


def _seed_erasing(config: TrainConfig, loader: Any, compute: Compute) -> None:
    if getattr(loader, "random_erasing", None) is not None:
        loader.random_erasing = SeededErasing(loader.random_erasing, seed=config.seed, rank=compute.rank)
