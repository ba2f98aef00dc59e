"""The data sets and data loaders of a run.

The name of a data set is a name of timm, such as ``torch/cifar10``, or ``topk/NAME`` for a registered data set.
"""

import atexit
import multiprocessing
import signal
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
from torch import Tensor
from torch.utils.data import default_collate

from topk_registry.data.folders import listed, split_folder
from topk_registry.data.held_out import has_splits, images_to_use
from topk_registry.data.labels import class_counts, class_names_of, is_indexed, kept_labels_of, labels_of
from topk_registry.data.open import FOLDERS, PREFIX, open_dataset
from topk_registry.data.selection import class_balanced_epoch, renumber
from topk_registry.errors import DataError
from topk_registry.ops.masses import LabelMixture
from topk_registry.train.config import MULTILABEL, TrainConfig, quiet_about_workers
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


class ClassBalanced:
    """A data set that draws the samples of each epoch at random such that all classes are equally frequent."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.labels = dataset, seed, labels_of(dataset)
        self.indices = np.arange(len(dataset))
        self.classes = class_names_of(dataset)

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def set_epoch(self, epoch: int) -> None:
        self.indices = class_balanced_epoch(self.labels, np.random.default_rng([self.seed, epoch]))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]


def open_data(config: TrainConfig, *, channels: int = 3, needs_counts: bool = False) -> Data:
    """Open the training and evaluation data of a run, or raise a DataError.

    With ``needs_counts``, count the training images per class, even if every sample must be read for this.
    """
    fraction = held_out_fraction(config)
    check_splits(config, fraction)
    train = open_split(config, config.train_split, training=True, channels=channels, held_out=fraction)
    notes: list[str] = list(getattr(train, "notes", ())) or list(getattr(getattr(train, "dataset", None), "notes", ()))
    data = Data(train, class_names=class_names_of(train), notes=notes)
    try:
        if config.val_split:
            data.validation = open_evaluation(config, channels=channels)
        if fraction:
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
    options: dict[str, Any] = {"multilabel": config.task == MULTILABEL}
    options["mode"] = config.input_img_mode or ("RGB" if channels == 3 else "L")
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
            dense = config.target_format == "multihot"
            encode = MultiLabelTarget(config.num_classes, dense=dense)
            options["timm_options"] |= {"target_format": config.target_format, "target_transform": encode}
    about: dict[str, Any] = {"training": training, "held_out": held_out, **options, **config.dataset_opt}
    try:
        dataset = open_dataset(config.dataset, split, config.data_dir, **about)
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
    fraction = held_out_fraction(config)
    split = config.train_split if fraction else config.val_split
    return open_split(config, split, channels=channels, held_out=fraction)


def without_training_images(
    config: TrainConfig, records: Mapping[str, Any], all_images: bool = False
) -> tuple[TrainConfig, list[str]]:
    """Return settings for the evaluation on a folder, and text that says which images are used, or raise a DataError.

    If the folder has no splits, the images are those that training held out. ``records`` has the record of the training
    run of each model by name, see :func:`topk_registry.data.held_out.record_of`.
    """
    root = config.data_dir
    if config.dataset not in FOLDERS or not root or not Path(root).is_dir() or has_splits(root):
        return config, []
    try:
        fraction, seed, note = images_to_use(root, records, all_images=all_images)
    except ValueError as error:
        raise DataError(f"{error}") from error
    options = {**config.dataset_opt, "change_seed": seed}
    return config.replace(val_split=f"{fraction}" if fraction else "validation", dataset_opt=options), [note]


def _mapped(config: TrainConfig, dataset: Any) -> Any:
    numbers = load_class_map(config.class_map, config.data_dir or "")
    order = {int(number): str(name) for name, number in numbers.items()}
    classes = [order.get(i, str(i)) for i in range(max(order) + 1)]
    own = class_names_of(dataset) or []
    return renumber(dataset, {i: numbers[name] for i, name in enumerate(own) if name in numbers}, classes)


def held_out_fraction(config: TrainConfig) -> float:
    """Return the fraction of training images that ``--val-split`` holds out, or 0 if the flag names a split."""
    try:
        fraction = float(config.val_split)
    except ValueError:
        return 0.0
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a fractional --val-split must be above 0 and below 1, got {config.val_split}")
    return fraction


def check_splits(config: TrainConfig, fraction: float) -> None:
    """Raise a DataError if an image folder lacks the training or evaluation split and no ``fraction`` is held out."""
    root = Path(config.data_dir or "")
    if config.dataset not in FOLDERS or config.task == MULTILABEL or not root.is_dir() or fraction:
        return
    train, evaluation = (split_folder(root, split) for split in (config.train_split, config.val_split))
    if config.val_split and (train is None or evaluation is None):
        folders = listed(sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."))
        missing = config.train_split if train is None else config.val_split
        raise DataError(
            f"{root} has no split {missing!r}; it holds {folders or 'no folders'}. --val-split 0.1 holds out 10 % of "
            "the training images, --val-split '' skips evaluation"
        )


def align(dataset: Any, classes: Sequence[str], where: str) -> Any:
    """Return a data set whose class indices are the positions of its class names in ``classes``, or raise a DataError.

    If ``dataset`` has no class names, return ``dataset`` unchanged. ``where`` names the data set in error messages.
    """
    names = class_names_of(dataset)
    if names is None or names == list(classes):
        return dataset
    unknown = [name for name in names if name not in classes]
    if unknown or not is_indexed(dataset):
        raise DataError(f"{where} has classes that training lacks: {listed(unknown)}; it has {listed(list(classes))}")
    numbers = {i: list(classes).index(name) for i, name in enumerate(names)}
    return renumber(dataset, numbers, list(classes))


def _align(config: TrainConfig, data: Data) -> None:
    names = data.class_names
    if not names:
        return
    data.validation = align(data.validation, names, f"split {config.val_split!r}")
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
        return x, _mixture(rows, default_collate([target for _, target, *_ in batch]), self.smoothing)


def _mixture(rows: Tensor, target: Tensor, smoothing: float) -> LabelMixture:
    # rows [B, B] are timm's mixed one-hot vectors of the image indices 0, ..., B - 1. timm mixes image i with image
    # B - 1 - i, so rows[i, i] is the weight of image i, and the weight of image B - 1 - i is 1 - rows[i, i].
    label, count = target.long(), len(rows)  # in timm's mode "half", count is half of the batch size
    return LabelMixture.mixed(label[:count], label.flip(0)[:count], rows.diagonal()).smooth(smoothing)


class TrainLoader:
    """Iterator over the training batches, which moves each batch to the device.

    ``mixup_off_epoch`` is the first epoch without mixup; 0 means that mixup never ends.
    """

    def __init__(self, loader: Any, device: torch.device, mixup_off_epoch: int = 0) -> None:
        self.loader, self.device, self.mixup_off_epoch = loader, device, mixup_off_epoch
        try:
            self.size = len(loader)
        except TypeError as error:
            raise DataError("the training loader has no length: pass --train-num-samples") from error
        if not self.size:
            raise DataError("the training data has less than one batch: lower --batch-size")

    def __len__(self) -> int:
        return self.size

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
            yield images.to(device=self.device, dtype=torch.float32), target.to(device=self.device)


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


def create_train_loader(
    config: TrainConfig, dataset: Any, preprocessing: dict[str, Any], compute: Compute, *, mixtures: bool = False
) -> TrainLoader:
    """Return the loader of the training batches, with the transforms and the collate function of timm.

    With ``mixtures``, the targets of mixup and CutMix are :class:`LabelMixture` instead of distributions [B, n].
    """
    batch = config.batch_size * compute.world_size
    if is_indexed(dataset) and len(dataset) < batch:
        raise DataError(f"{len(dataset)} training images are less than one batch of {batch}: lower --batch-size")
    collate = None
    if config.mixes:
        options: dict[str, Any] = {"mixup_alpha": config.mixup, "cutmix_alpha": config.cutmix}
        options |= {"prob": config.mixup_prob, "switch_prob": config.mixup_switch_prob, "mode": config.mixup_mode}
        if mixtures:
            collate = LabelMixupCollate(smoothing=config.smoothing, **options)
        else:
            options |= {"num_classes": config.num_classes, "multi_label": config.task == MULTILABEL}
            collate = FastCollateMixup(label_smoothing=config.smoothing, **options)
    if config.aug_splits > 1:
        dataset = AugMixDataset(dataset, num_splits=config.aug_splits)
    same = config.no_aug or not config.train_interpolation
    augmentation = ("no_aug", "scale", "ratio", "hflip", "vflip", "color_jitter")
    allow_zero_bits()
    try:
        loader = _create_loader(
            dataset,
            batch_size=config.batch_size,
            is_training=True,
            **{name: getattr(config, name) for name in augmentation},
            re_prob=config.reprob,
            re_mode=config.remode,
            auto_augment=config.aa,
            num_aug_repeats=config.aug_repeats,
            num_aug_splits=config.aug_splits,
            interpolation=preprocessing["interpolation"] if same else config.train_interpolation,
            collate_fn=collate,
            **_common(config, preprocessing, compute),
        )
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        raise DataError(
            "timm cannot create the training transforms; see --aa, --color-jitter, --scale, --ratio "
            f"and --aug-repeats: {error or type(error).__name__}"
        ) from error
    return TrainLoader(_without_signals(loader), compute.device, config.mixup_off_epoch)


def create_eval_loader(config: TrainConfig, dataset: Any, preprocessing: dict[str, Any], compute: Compute) -> Any:
    loader = _create_loader(
        dataset,
        batch_size=config.validation_batch_size or config.batch_size,
        is_training=False,
        interpolation=preprocessing["interpolation"],
        crop_pct=preprocessing["crop_pct"],
        **_common(config, preprocessing, compute),
    )
    if config.multi_crop:
        dataset.transform = Crops(preprocessing, config.multi_crop)
    return _without_signals(loader)


def _create_loader(dataset: Any, **options: Any) -> Any:
    with quiet_about_workers():
        return create_loader(dataset, **options)


def _common(config: TrainConfig, preprocessing: dict[str, Any], compute: Compute) -> dict[str, Any]:
    return {
        "input_size": tuple(preprocessing["input_size"]),
        "mean": tuple(preprocessing["mean"]),
        "std": tuple(preprocessing["std"]),
        "num_workers": config.workers,
        "distributed": compute.distributed,
        "pin_memory": config.pin_mem and compute.device.type == "cuda",
        "device": compute.device,
        "persistent_workers": False,  # workers that survive an epoch would have state that a checkpoint does not save
    }


def _without_signals(loader: Any) -> Any:
    inner = getattr(loader, "loader", loader)
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

    def __init__(self, preprocessing: dict[str, Any], crops: int) -> None:
        from timm.data.transforms import str_to_interp_mode
        from torchvision.transforms import FiveCrop, Resize, TenCrop

        height, width = preprocessing["input_size"][1:]
        # The image must be larger than the crops, or all crops would be equal. 0.875 is timm's default crop_pct.
        margin = min(preprocessing["crop_pct"], 0.875)
        mode: Any = str_to_interp_mode(preprocessing["interpolation"])
        self.resize = Resize(round(max(height, width) / margin), mode)
        self.crop = (FiveCrop if crops == 5 else TenCrop)((height, width))

    def __call__(self, image: Image.Image) -> tuple[np.ndarray[Any, Any], ...]:
        crops = self.crop(self.resize(image))
        return tuple(np.atleast_3d(crop).transpose(2, 0, 1).copy() for crop in crops)
