"""The data sets and data loaders of a run.

The name of a data set is a name of timm, such as ``torch/cifar10``, or ``topk/NAME`` for a registered data set.
"""

import atexit
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import AugMixDataset, FastCollateMixup, MultiLabelTarget, create_loader
from timm.data.readers.class_map import load_class_map
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import FiveCrop, Resize, TenCrop

from topk_registry.data.folders import listed, split_folder
from topk_registry.data.held_out import has_splits, images_to_use, record_of
from topk_registry.data.labels import class_counts, class_names_of, is_indexed, kept_labels_of, labels_of
from topk_registry.data.open import FOLDERS, PREFIX, open_dataset
from topk_registry.data.selection import Selection, class_balanced_epoch, renumber
from topk_registry.errors import DataError
from topk_registry.ops.masses import LabelMixture
from topk_registry.train.config import MULTILABEL, OWN_BATCHES, TrainConfig
from topk_registry.train.model import Compute
from topk_registry.train.posterize import allow_zero_bits
from topk_registry.train.run import SIGNALS


@dataclass
class Data:
    """Training and evaluation data of a run. ``counts``: number of training images per class, or None."""

    train: Any
    validation: Any = None
    class_names: list[str] | None = None
    counts: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int | None:
        """Number of classes, from the class names or else from the labels. None if both are unknown."""
        return len(self.class_names or self.counts or ()) or None

    @property
    def num_samples(self) -> int | None:
        return len(self.train) if is_indexed(self.train) else None


class ClassBalanced(Selection):
    """A data set that draws the samples of each epoch at random such that all classes are equally frequent."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.seed, self.whole = seed, Selection(dataset, targets=labels_of(dataset))
        super().__init__(self.whole)

    def set_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng([self.seed, epoch])
        super().__init__(self.whole, class_balanced_epoch(labels_of(self.whole), rng))


def open_data(config: TrainConfig, *, channels: int = 3, needs_counts: bool = False) -> Data:
    """Open the training and evaluation data of a run, or raise a DataError.

    With ``needs_counts``, count the training images per class, even if every sample must be read for this.
    """
    check_splits(config)
    train = open_split(config, config.train_split, training=True, channels=channels, held_out=config.held_out)
    notes: list[str] = list(getattr(train, "notes", ()))
    data = Data(train, class_names=class_names_of(train), notes=notes)
    try:
        if config.val_split:
            data.validation = open_evaluation(config, channels=channels)
        if config.held_out:
            notes.append(f"held out {len(data.validation)} training images for evaluation")
        elif config.val_split:
            notes += getattr(data.validation, "notes", ())
            _align(config, data)
        _count(config, data, needs_counts or bool(config.sampler))
    except (DataError, ValueError) as error:
        raise DataError("; ".join([*notes, f"{error}"])) from error
    if config.sampler:
        if not is_indexed(data.train):
            raise DataError(f"--sampler {config.sampler} needs random access, and {config.data_name} is a stream")
        data.train = ClassBalanced(data.train, config.seed)
    return data


def open_split(
    config: TrainConfig, split: str, *, training: bool = False, channels: int = 3, held_out: float = 0.0
) -> Any:
    """Open one split of the data set of a run, or raise a DataError. The data loader sets the image transform later.

    If ``held_out`` is 0, return all images of the split. Otherwise, ``held_out`` is the fraction of each class that is
    held out for evaluation. With ``training``, return the images that are not held out. Without ``training``, return
    the held-out images. Options such as label noise apply only with ``training``.
    """
    mode = config.input_img_mode or ("RGB" if channels == 3 else "L")
    options: dict[str, Any] = {"training": training, "held_out": held_out, "mode": mode}
    options["multilabel"] = config.task == MULTILABEL
    if config.dataset in FOLDERS:
        options |= {"suffixes": tuple(config.input_key.split(";"))} if config.input_key else {}
    elif not config.dataset.startswith(PREFIX):
        options["timm_options"] = {
            "is_training": training,
            "class_map": config.class_map,
            "download": config.dataset_download,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "input_key": config.input_key,
            "target_key": config.target_key,
            "num_samples": config.train_num_samples if training else config.val_num_samples,
        }
        if config.task == MULTILABEL:
            if not config.num_classes:
                raise DataError(f"{config.dataset} with --task multilabel needs --num-classes")
            encode = MultiLabelTarget(config.num_classes, dense=config.target_format == "multihot")
            options["timm_options"] |= {"target_format": config.target_format, "target_transform": encode}
    try:
        dataset = open_dataset(config.dataset, split, config.data_dir, **{**options, **config.dataset_opt})
        dataset = _mapped(config, dataset) if config.class_map and config.dataset in FOLDERS else dataset
        if is_indexed(dataset) and not len(dataset):
            raise ValueError("no images are left; see --val-split and --class-map")
        bands = getattr(dataset[0][0], "getbands", tuple)() if is_indexed(dataset) else ()
        if bands and len(bands) != channels:
            seen = f"its images have {len(bands)} channels ({''.join(bands)}), and the model takes {channels}"
            raise ValueError(f"{seen}; see --in-chans and --input-img-mode")
        return dataset
    except (OSError, RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        raise DataError(f"cannot open split {split!r} of {config.data_name}: {error}") from error


def open_evaluation(config: TrainConfig, *, channels: int = 3) -> Any:
    """Open the images on which a run evaluates: a held-out part of the training split, or the split ``val_split``."""
    split = config.train_split if config.held_out else config.val_split
    return open_split(config, split, channels=channels, held_out=config.held_out)


def open_images(
    config: TrainConfig, records: Mapping[str, Any], *, channels: int = 3, all_images: bool = False
) -> tuple[Any, list[str]]:
    """Open the images of ``config`` on which models are evaluated. Also return text that says which images these are.

    If the data is a folder without splits, the images are those that training held out, or all images if training used
    none of them. If a model may have been trained on some of the images that another run held out, raise a DataError.
    With ``all_images``, neither holds. A split that the user names is taken as it is.

    ``records`` has the record of the training run of each model by name, see
    :func:`topk_registry.data.held_out.record_of`.
    """
    if config.dataset == OWN_BATCHES:
        if not config.data_dir:
            raise DataError("the model was trained on your own loaders: specify the data by a directory or --dataset")
        config = config.replace(dataset="")
    root, notes = Path(config.data_dir or ""), []
    whole = config.dataset in FOLDERS and bool(config.data_dir) and root.is_dir() and not has_splits(root)
    try:
        if whole:
            fraction, seed, note = images_to_use(root, records, all_images=all_images)
            options = {**config.dataset_opt, "change_seed": seed}
            config = config.replace(val_split=f"{fraction}" if fraction else "validation", dataset_opt=options)
            notes.append(note)
        elif config.held_out and not all_images:
            own = record_of(config.to_dict()) or {}
            records = {name: each for name, each in records.items() if not each or _may_share(each, own)}
            note = images_to_use(config.data_name, {"these images": own, **records})[2]
            notes += [note] if records else []
    except ValueError as error:
        raise DataError(f"{error}") from error
    dataset = open_evaluation(config, channels=channels)
    return dataset, [*notes, *getattr(dataset, "notes", ())]


def _may_share(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two runs may have trained on the same images, according to their records."""
    kinds = {"" if each["dataset"] in FOLDERS else each["dataset"] for each in (one, other)}
    folders = {each["folder"] for each in (one, other)} - {""} if kinds == {""} else ()
    return len(kinds) == 1 and len(folders) < 2 and one["train_split"] == other["train_split"]


def _mapped(config: TrainConfig, dataset: Any) -> Any:
    numbers = load_class_map(config.class_map, config.data_dir or "")
    order = {int(number): str(name) for name, number in numbers.items()}
    classes = [order.get(i, str(i)) for i in range(max(order) + 1)]
    own = class_names_of(dataset) or []
    return renumber(dataset, {i: numbers[name] for i, name in enumerate(own) if name in numbers}, classes)


def check_splits(config: TrainConfig) -> None:
    """Raise a DataError if an image folder lacks the training or evaluation split and no fraction is held out."""
    root = Path(config.data_dir or "")
    if config.dataset not in FOLDERS or config.task == MULTILABEL or not root.is_dir() or config.held_out:
        return
    missing = [split for split in (config.train_split, config.val_split) if split_folder(root, split) is None]
    if config.val_split and missing:
        folders = listed(sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."))
        raise DataError(
            f"{root} has no split {missing[0]!r}; it holds {folders or 'no folders'}. --val-split 0.1 holds out 10 % "
            "of the training images, --val-split '' skips evaluation"
        )


def align(dataset: Any, classes: Sequence[str] | None, where: str) -> Any:
    """Return a data set whose class indices are the positions of its class names in ``classes``, or raise a DataError.

    If ``dataset`` or the model has no class names, return ``dataset`` unchanged. ``where`` names the data set in error
    messages.
    """
    names = class_names_of(dataset)
    if names is None or classes is None or names == list(classes):
        return dataset
    unknown = [name for name in names if name not in classes]
    if unknown or not is_indexed(dataset):
        raise DataError(f"{where} has classes that training lacks: {listed(unknown)}; it has {listed(list(classes))}")
    numbers = {i: list(classes).index(name) for i, name in enumerate(names)}
    return renumber(dataset, numbers, list(classes))


def _align(config: TrainConfig, data: Data) -> None:
    names = data.class_names or []
    data.validation = align(data.validation, names or None, f"split {config.val_split!r}")
    labels = kept_labels_of(data.validation) if config.task != MULTILABEL and is_indexed(data.validation) else None
    if labels is not None and (absent := sorted({*range(len(names))} - {*labels.tolist()})):
        data.notes.append(f"no evaluation images of {listed([names[c] for c in absent])}")


def _count(config: TrainConfig, data: Data, read: bool) -> None:
    if not is_indexed(data.train):
        return
    if config.task == MULTILABEL:
        targets = getattr(data.train, "targets", None)
        data.counts = None if targets is None else (np.asarray(targets) >= 0.5).sum(0).tolist()
        return
    labels = labels_of(data.train) if read else kept_labels_of(data.train)
    if labels is not None:
        n = config.num_classes or data.num_classes or int(labels.max()) + 1
        data.counts = class_counts(labels, n)


class LabelMixupCollate(FastCollateMixup):
    """timm's ``FastCollateMixup``, but with a :class:`LabelMixture` as target instead of a distribution."""

    def __init__(self, *, smoothing: float, **options: Any) -> None:
        super().__init__(**options, label_smoothing=0.0)
        self.smoothing = smoothing

    def __call__(self, batch: list[Any], _: object = None) -> Any:
        self.num_classes = len(batch)
        x, rows = super().__call__([(image, row) for row, (image, *_) in enumerate(batch)])
        # rows [B, B] are timm's mixed one-hot vectors of the image indices 0, ..., B - 1. timm mixes image i with image
        # B - 1 - i, so rows[i, i] is the weight of image i, and the weight of image B - 1 - i is 1 - rows[i, i].
        label = default_collate([target for _, target, *_ in batch]).long()
        count = len(rows)  # in timm's mode "half", count is half of the batch size
        return x, LabelMixture.mixed(label[:count], label.flip(0)[:count], rows.diagonal()).smooth(self.smoothing)


class TrainLoader:
    """Iterator over the training batches, which moves each batch to the device.

    ``mixup_off_epoch`` is the first epoch without mixup; 0 means that mixup never ends.
    """

    def __init__(
        self, loader: Any, device: torch.device, mixup_off_epoch: int = 0, *, channels_last: bool = False
    ) -> None:
        self.loader, self.device, self.mixup_off_epoch = loader, device, mixup_off_epoch
        self.memory_format = torch.channels_last if channels_last else torch.preserve_format
        try:
            batches = len(loader)
        except TypeError as error:
            raise DataError("the training loader has no length: pass --train-num-samples") from error
        if not batches:
            raise DataError("the training data has less than one batch: lower --batch-size")

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0: shuffle the samples. From ``mixup_off_epoch`` on, switch mixup off."""
        for part in (getattr(self.loader, name, None) for name in ("dataset", "sampler")):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        if self.mixup_off_epoch and epoch >= self.mixup_off_epoch:
            self.loader.mixup_enabled = False

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for batch in self.loader:
            images, target = images_and_targets(batch)
            images = images.to(device=self.device, dtype=torch.float32, memory_format=self.memory_format)
            yield images, target.to(device=self.device)


def images_and_targets(batch: Any) -> tuple[Tensor, Any]:
    """Return the images and the targets of a batch, or raise a DataError that describes the batch."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[0], Tensor) and hasattr(batch[1], "to"):
        return batch[0], batch[1]
    found = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        found += f" with the keys {', '.join(map(repr, batch))}"
    elif isinstance(batch, (tuple, list)):
        found += f" of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    raise DataError(f"expected batches (images, targets) of tensors from the loader, got {found}")


def create_train_loader(config: TrainConfig, dataset: Any, compute: Compute, *, mixtures: bool = False) -> TrainLoader:
    """Return the loader of the training batches, with the transforms and the collate function of timm.

    With ``mixtures``, the targets of mixup and CutMix are :class:`LabelMixture` instead of distributions [B, n].
    """
    mixing: dict[str, Any] = {
        "mixup_alpha": config.mixup,
        "cutmix_alpha": config.cutmix,
        "prob": config.mixup_prob,
        "switch_prob": config.mixup_switch_prob,
        "mode": config.mixup_mode,
    }
    collate = None
    if config.mixes and mixtures:
        collate = LabelMixupCollate(smoothing=config.smoothing, **mixing)
    elif config.mixes:
        targets: dict[str, Any] = {"num_classes": config.num_classes, "multi_label": config.task == MULTILABEL}
        collate = FastCollateMixup(label_smoothing=config.smoothing, **targets, **mixing)
    if config.aug_splits > 1:
        dataset = AugMixDataset(dataset, num_splits=config.aug_splits)
    same = config.no_aug or not config.train_interpolation
    augmentation = ("no_aug", "scale", "ratio", "hflip", "vflip", "color_jitter")
    allow_zero_bits()
    try:
        loader = _create_loader(
            config,
            dataset,
            compute,
            batch_size=config.batch_size,
            is_training=True,
            **{name: getattr(config, name) for name in augmentation},
            re_prob=config.reprob,
            re_mode=config.remode,
            auto_augment=config.aa,
            num_aug_repeats=config.aug_repeats,
            num_aug_splits=config.aug_splits,
            interpolation=config.interpolation if same else config.train_interpolation,
            collate_fn=collate,
        )
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        raise DataError(
            "timm cannot create the training transforms; see --aa, --color-jitter, --scale, --ratio "
            f"and --aug-repeats: {error or type(error).__name__}"
        ) from error
    return TrainLoader(loader, compute.device, config.mixup_off_epoch, channels_last=config.channels_last)


def create_eval_loader(config: TrainConfig, dataset: Any, compute: Compute) -> Any:
    loader = _create_loader(
        config,
        dataset,
        compute,
        batch_size=config.validation_batch_size or config.batch_size,
        is_training=False,
        interpolation=config.interpolation,
        crop_pct=config.crop_pct,
    )
    if config.multi_crop:
        dataset.transform = Crops(config)
    return loader


def _create_loader(config: TrainConfig, dataset: Any, compute: Compute, **options: Any) -> Any:
    """Create a loader of timm for a run whose preprocessing is known. Its processes leave signals to the main process.

    PyTorch warns about more workers than CPUs. This warning is ignored, because only an explicit --workers gives it.
    """
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    input_size: Any = tuple(config.input_size or ())
    loader = create_loader(
        dataset,
        input_size=input_size,
        mean=tuple(config.mean or ()),
        std=tuple(config.std or ()),
        num_workers=config.workers,
        distributed=compute.distributed,
        pin_memory=config.pin_mem and compute.device.type == "cuda",
        device=compute.device,
        persistent_workers=False,  # workers that survive an epoch would have state that a checkpoint does not save
        **options,
    )
    return _without_signals(loader)


def _without_signals(loader: Any) -> Any:
    inner: Any = getattr(loader, "loader", loader)
    inner.worker_init_fn = partial(_ignore_signals, then=inner.worker_init_fn)
    atexit.unregister(_end_workers)
    atexit.register(_end_workers)
    return loader


def _end_workers() -> None:
    # at exit, multiprocessing sends SIGTERM to its processes and waits for them, but workers ignore this signal
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report each worker as killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _ignore_signals(worker: int, then: Callable[[int], object] | None) -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if then is not None:
        then(worker)


class Crops:
    """Transform of an image into 5 crops (corners and center), or 10 with mirror images. Each is uint8 [c, h, w]."""

    def __init__(self, config: TrainConfig) -> None:
        _, height, width = config.input_size or [3, 0, 0]
        # The image must be larger than the crops, or all crops would be equal. 0.875 is timm's default crop_pct.
        margin = min(config.crop_pct or 1.0, 0.875)
        mode: Any = str_to_interp_mode(config.interpolation)
        self.resize = Resize(round(max(height, width) / margin), mode)
        self.crop = (FiveCrop if config.multi_crop == 5 else TenCrop)((height, width))

    def __call__(self, image: Image.Image) -> tuple[np.ndarray[Any, Any], ...]:
        crops = self.crop(self.resize(image))
        return tuple(np.atleast_3d(crop).transpose(2, 0, 1).copy() for crop in crops)
