"""Data of a run: timm's data sets by timm's names, registered ones by ``topk/NAME``, and their loaders."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import (
    AugMixDataset,
    FastCollateMixup,
    Mixup,
    MultiLabelTarget,
    create_dataset,
    create_loader,
    get_img_extensions,
)
from torch import Tensor
from torch.utils.data import default_collate

from topk_registry import registry
from topk_registry.data.labels import class_counts, class_names_of, is_indexed, kept_labels_of, labels_of
from topk_registry.folders.errors import FolderError
from topk_registry.folders.images import is_hidden, listed, read_folders, split_folder
from topk_registry.ops.targets.label_mixture import LabelMixture
from topk_registry.train.config import MULTILABEL, TrainConfig
from topk_registry.train.errors import DataError
from topk_registry.train.model import Compute

PREFIX = "topk/"
STREAMS = ("hfids/", "tfds/", "wds/")
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
Labels = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Data:
    """Training and evaluation data; ``counts`` are the training images per class."""

    train: Any
    validation: Any = None
    class_names: list[str] | None = None
    counts: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int | None:
        """Number of classes by name, else by label; None if neither is known."""
        return len(self.class_names or self.counts or ()) or None

    @property
    def num_samples(self) -> int | None:
        return len(self.train) if is_indexed(self.train) else None


class Subset:
    """Samples of a map-style data set by index; ``transform`` is that of the data set."""

    def __init__(self, dataset: Any, indices: Labels, labels: Labels | None = None) -> None:
        self.dataset, self.indices = dataset, indices
        if labels is not None:
            self.targets = labels[indices]
        if (names := class_names_of(dataset)) is not None:
            self.classes = names

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.indices[index])]


class ClassBalanced(Subset):
    """A data set in which each epoch draws every class equally often: rare images repeat, frequent ones alternate."""

    def __init__(self, dataset: Any, seed: int) -> None:
        labels = labels_of(dataset)
        super().__init__(dataset, np.arange(len(dataset)))
        self.members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        rng = np.random.default_rng([self.seed, epoch])
        sizes = np.diff(np.linspace(0, len(self.indices), len(self.members) + 1).astype(int))
        drawn = []
        for members, size in zip(self.members, sizes, strict=True):
            rounds = [rng.permutation(members) for _ in range(-(-size // len(members)))]
            drawn.append(np.concatenate(rounds)[:size] if rounds else members[:0])
        self.indices = np.concatenate(drawn)


def open_data(config: TrainConfig, *, channels: int = 3, needs_counts: bool = False) -> Data:
    """Open the training and evaluation data of a run.

    Args:
        config: the settings.
        channels: of the images.
        needs_counts: count the classes, even if each sample has to be read for it.

    Raises:
        DataError: a split does not exist or cannot be used.
    """
    fraction = held_out_fraction(config)
    notes = left_out_files(config)
    try:
        check_splits(config, fraction)
        train = open_split(config, config.train_split, training=True, channels=channels)
        data = Data(train, class_names=class_names_of(train), notes=notes)
        if is_indexed(train) and not len(train):
            raise DataError(f"the split {config.train_split!r} of {name_of(config)} is empty")
        if fraction:
            _hold_out(config, data, channels, fraction)
        elif config.val_split:
            classes = data.class_names if is_folder(config) else None
            data.validation = open_split(config, config.val_split, channels=channels, classes=classes)
            _check_classes(config, data)
        _count(config, data, needs_counts or bool(config.sampler))
    except (DataError, FolderError, ValueError) as error:
        raise DataError("; ".join([f"{error}", *notes])) from error
    if config.sampler:
        if not is_indexed(data.train):
            raise DataError(
                f"--sampler {config.sampler} needs images that can be picked, {name_of(config)} is a stream"
            )
        data.train = ClassBalanced(data.train, config.seed)
    return data


def open_split(
    config: TrainConfig, split: str, *, training: bool = False, channels: int = 3, classes: Sequence[str] | None = None
) -> Any:
    """Open one split; the loader sets its transform.

    Args:
        config: the settings.
        split: its name.
        training: whether a stream shuffles.
        channels: of the images.
        classes: of a folder of images, the names of the classes in the order of their numbers.

    Raises:
        DataError: it cannot be opened.
    """
    settings: dict[str, Any] = {"class_map": config.class_map}
    try:
        if config.dataset.startswith(PREFIX):
            return _open_registered(config, split)
        if config.task == MULTILABEL:
            if "/" not in config.dataset:
                raise ValueError("--task multilabel needs a data set with several labels per image, not a folder")
            settings["target_format"] = config.target_format
        if is_folder(config) and not config.class_map:
            root = split_folder(config.data_dir or "", split) or config.data_dir or ""
            names = read_folders(root, _suffixes(config)).names
            if classes is not None and (unknown := sorted({*names} - {*classes})):
                raise DataError(
                    f"{root} has classes that training lacks: {listed(unknown)}; training has {listed(list(classes))}"
                )
            settings["class_map"] = {name: i for i, name in enumerate(classes or names)}
        dataset: Any = create_dataset(
            config.dataset,
            root=config.data_dir,
            split=split,
            is_training=training,
            download=config.dataset_download,
            batch_size=config.batch_size,
            seed=config.seed,
            input_img_mode=config.input_img_mode or ("RGB" if channels == 3 else "L"),
            input_key=config.input_key,
            target_key=config.target_key,
            num_samples=config.train_num_samples if training else config.val_num_samples,
            **settings,
        )
    except (OSError, RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        raise DataError(f"cannot open split {split!r} of {name_of(config)}: {error}") from error
    reader = getattr(dataset, "reader", None)
    if is_folder(config) and hasattr(reader, "samples"):
        reader.samples = [each for each in reader.samples if not is_hidden(os.path.basename(each[0]))]
    if config.task == MULTILABEL:
        n = config.num_classes or len(class_names_of(dataset) or ())
        if not n:
            raise DataError("the data set does not name its classes: pass --num-classes")
        dataset.target_transform = MultiLabelTarget(n, dense=config.target_format == "multihot")
    return dataset


def _open_registered(config: TrainConfig, split: str) -> Any:
    return registry.datasets.create(config.dataset.removeprefix(PREFIX), split=split, **config.dataset_opt)


def name_of(config: TrainConfig) -> str:
    place = repr(config.data_dir) if config.data_dir else ""
    return " in ".join(filter(None, [config.dataset or "image folder", place]))


def is_folder(config: TrainConfig) -> bool:
    """Return whether the data is a directory in which timm looks for a folder per split."""
    return config.dataset in ("", "folder") and Path(config.data_dir or "").is_dir()


def held_out_fraction(config: TrainConfig) -> float | None:
    """Return the share of the training images that ``--val-split`` holds out; None if it is a name."""
    try:
        fraction = float(config.val_split)
    except ValueError:
        return None
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a fractional --val-split must be above 0 and below 1, got {config.val_split}")
    if config.dataset.lower().startswith(STREAMS):
        raise DataError(f"--val-split {config.val_split} needs images that can be picked, {config.dataset} is a stream")
    return fraction


def check_splits(config: TrainConfig, fraction: float | None) -> None:
    """Raise a DataError if a split does not exist: timm would read another part of the data instead."""
    if config.dataset.startswith(PREFIX):
        registry.datasets.builder(config.dataset.removeprefix(PREFIX))
    elif "/" not in config.dataset and not os.path.exists(config.data_dir or ""):
        raise DataError(f"the data directory {config.data_dir!r} does not exist")
    if not is_folder(config):
        return
    root = Path(config.data_dir or "")
    folders = listed(sorted(path.name for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)))
    train = split_folder(root, config.train_split)
    evaluation = split_folder(root, config.val_split) if config.val_split and not fraction else train
    if (train is None) != (evaluation is None):
        missing = config.train_split if train is None else config.val_split
        raise DataError(
            f"{root} has no split {missing!r}; it holds {folders or 'no folders'}. --val-split 0.1 holds out a part"
        )
    if train is None and config.val_split and not fraction:
        raise DataError(
            f"{root} has no folder per split, so evaluation would read the training images; it holds "
            f"{folders or 'no folders'}. --val-split 0.1 holds out a part, --val-split '' evaluates nothing"
        )


def left_out_files(config: TrainConfig) -> list[str]:
    """Return a note on files in class folders whose ending is not that of an image that is read."""
    if not is_folder(config):
        return []
    suffixes, kinds = _suffixes(config), Counter[str]()
    for _, folders, files in os.walk(config.data_dir or "", followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]
        endings = (os.path.splitext(name)[1].lower() or "no ending" for name in files if not is_hidden(name))
        kinds.update(ending for ending in endings if ending not in suffixes)
    images = {ending.lower() for ending in Image.registered_extensions()} & kinds.keys()
    if not images:
        return []
    told = ", ".join(f"{kinds[ending]} {ending}" for ending in sorted(images))
    every = ";".join([*suffixes, *sorted(images)])
    return [
        f"warning: {sum(kinds[e] for e in images)} image files are left out: {told}; --input-key '{every}' reads them"
    ]


def _suffixes(config: TrainConfig) -> list[str]:
    return config.input_key.split(";") if config.input_key else sorted(get_img_extensions())


def _hold_out(config: TrainConfig, data: Data, channels: int, fraction: float) -> None:
    """Split a share of each class off the training data; of several labels per image, a share of all images."""
    size = len(data.train)
    labels = np.zeros(size, np.int64) if config.task == MULTILABEL else labels_of(data.train)
    rng, held = np.random.default_rng(config.seed), np.zeros(size, bool)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        held[members[: min(len(members) - 1, max(1, round(fraction * len(members))))]] = True
    twin = open_split(config, config.train_split, channels=channels)  # evaluation has a transform of its own
    known = None if config.task == MULTILABEL else labels
    data.validation = Subset(twin, np.flatnonzero(held), known)
    data.train = Subset(data.train, np.flatnonzero(~held), known)
    data.notes.append(f"held out {int(held.sum())} of {size} training images for evaluation")


def _check_classes(config: TrainConfig, data: Data) -> None:
    names, own = data.class_names, class_names_of(data.validation)
    if names and own and names != own and config.task != MULTILABEL:
        gone, new = [name for name in names if name not in own], [name for name in own if name not in names]
        raise DataError(
            f"evaluation has other classes than training: missing {listed(gone) or 'none'}, new {listed(new) or 'none'}"
        )
    labels = kept_labels_of(data.validation) if names and config.task != MULTILABEL else None
    if names and labels is not None and (absent := sorted({*range(len(names))} - {*labels.tolist()})):
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


class LabelMixup(Mixup):
    """timm's mixup with a :class:`LabelMixture` as target: labels and shares in place of a distribution [B, n].

    timm mixes images and draws shares; it is given row numbers as labels, so that its small targets say how much of
    each row there is.
    """

    def __init__(self, *, smoothing: float, **options: Any) -> None:
        super().__init__(**options, label_smoothing=0.0)
        self.smoothing = smoothing

    def __call__(self, x: Tensor, target: Tensor) -> Any:
        self.num_classes = len(target)
        x, rows = super().__call__(x, torch.arange(len(target), device=target.device))
        return x, _mixture(rows, target, self.smoothing)


class LabelMixupCollate(FastCollateMixup):
    """timm's mixing collation with a :class:`LabelMixture` as target."""

    def __init__(self, *, smoothing: float, **options: Any) -> None:
        super().__init__(**options, label_smoothing=0.0)
        self.smoothing = smoothing

    def __call__(self, batch: list[Any], _: object = None) -> Any:
        self.num_classes = len(batch)
        x, rows = super().__call__([(image, row) for row, (image, *_) in enumerate(batch)])
        return x, _mixture(rows, default_collate([target for _, target, *_ in batch]), self.smoothing)


def _mixture(rows: Tensor, target: Tensor, smoothing: float) -> LabelMixture:
    label, count = target.long(), len(rows)  # timm's mode "half" halves the batch
    return LabelMixture.mixed(label[:count], label.flip(0)[:count], rows.diagonal(), smoothing)


class TrainLoader:
    """The training batches on the device.

    Args:
        loader: yields images and targets.
        device, dtype: of the images; None leaves the precision.
        mixup: mixes batches on the device.
        mixup_off_epoch: epoch at which mixing ends; 0 for never.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        dtype: torch.dtype | None = None,
        mixup: Mixup | None = None,
        mixup_off_epoch: int = 0,
    ) -> None:
        self.loader, self.device, self.dtype = loader, device, dtype
        self.mixup, self.mixup_off_epoch = mixup, mixup_off_epoch
        try:
            self.size = len(loader)
        except TypeError as error:
            raise DataError("the training loader has no length: pass --train-num-samples") from error
        if not self.size:
            raise DataError("the training data has less than one batch: lower --batch-size")

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, counted from 0: samplers shuffle anew, and mixing ends when it should."""
        for part in (getattr(self.loader, name, None) for name in ("dataset", "sampler")):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        if self.mixup_off_epoch and epoch >= self.mixup_off_epoch:
            if self.mixup is not None:
                self.mixup.mixup_enabled = False
            elif hasattr(self.loader, "mixup_enabled"):
                self.loader.mixup_enabled = False

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for images, target, *_ in self.loader:
            images, target = images.to(device=self.device, dtype=self.dtype), target.to(device=self.device)
            yield self.mixup(images, target) if self.mixup is not None else (images, target)


def create_train_loader(
    config: TrainConfig, dataset: Any, preprocessing: dict[str, Any], compute: Compute, *, mixtures: bool = False
) -> TrainLoader:
    """Return the training batches, by timm's transforms and collation.

    Args:
        config: the settings.
        dataset: the training data.
        preprocessing: size, mean, standard deviation and interpolation.
        compute: device and precision.
        mixtures: mixed targets are a LabelMixture, not a distribution [B, n].
    """
    if is_indexed(dataset) and len(dataset) < config.batch_size * compute.world_size:
        raise DataError(
            f"{len(dataset)} training images are less than one batch of {config.batch_size * compute.world_size}: "
            "lower --batch-size"
        )
    collate = mixup = None
    if config.mixes:
        options: dict[str, Any] = {"mixup_alpha": config.mixup, "cutmix_alpha": config.cutmix}
        options |= {"prob": config.mixup_prob, "switch_prob": config.mixup_switch_prob, "mode": config.mixup_mode}
        if mixtures:
            mixer: Any = (LabelMixup if config.no_prefetcher else LabelMixupCollate)(
                smoothing=config.smoothing, **options
            )
        else:
            options |= {"num_classes": config.num_classes, "multi_label": config.task == MULTILABEL}
            mixer = (Mixup if config.no_prefetcher else FastCollateMixup)(label_smoothing=config.smoothing, **options)
        collate, mixup = (None, mixer) if config.no_prefetcher else (mixer, None)
    if config.aug_splits > 1:
        dataset = AugMixDataset(dataset, num_splits=config.aug_splits)
    same = config.no_aug or not config.train_interpolation
    augmentation = ("no_aug", "train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter")
    try:
        loader = create_loader(
            dataset,
            batch_size=config.batch_size,
            is_training=True,
            **{name: getattr(config, name) for name in augmentation},
            re_prob=config.reprob,
            re_mode=config.remode,
            auto_augment=config.aa,
            num_aug_repeats=config.aug_repeats,  # pyright: ignore[reportArgumentType]
            num_aug_splits=config.aug_splits,
            interpolation=preprocessing["interpolation"] if same else config.train_interpolation,
            collate_fn=collate,
            **_common(config, preprocessing, compute),
        )
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        raise DataError(
            "timm cannot create the training transforms; see --aa, --train-crop-mode, --color-jitter, --scale, --ratio "
            f"and --aug-repeats: {error or type(error).__name__}"
        ) from error
    dtype = compute.dtype if config.no_prefetcher else None
    return TrainLoader(_without_signals(loader), compute.device, dtype, mixup, config.mixup_off_epoch)


def create_eval_loader(config: TrainConfig, dataset: Any, preprocessing: dict[str, Any], compute: Compute) -> Any:
    """Return the evaluation batches."""
    loader = create_loader(
        dataset,
        batch_size=config.validation_batch_size or config.batch_size,
        is_training=False,
        interpolation=preprocessing["interpolation"],
        crop_pct=preprocessing["crop_pct"],
        **_common(config, preprocessing, compute, prefetcher=bool(config.multi_crop)),
    )
    if config.multi_crop:
        dataset.transform = Crops(preprocessing, config.multi_crop)
    return _without_signals(loader)


def _common(
    config: TrainConfig, preprocessing: dict[str, Any], compute: Compute, prefetcher: bool = False
) -> dict[str, Any]:
    return {
        "input_size": tuple(preprocessing["input_size"]),
        "mean": tuple(preprocessing["mean"]),
        "std": tuple(preprocessing["std"]),
        "num_workers": config.workers,
        "distributed": compute.distributed,
        "pin_memory": config.pin_mem and compute.device.type == "cuda",
        "img_dtype": compute.dtype,
        "device": compute.device,
        "use_prefetcher": prefetcher or not config.no_prefetcher,
        "persistent_workers": False,  # workers that start anew each epoch have no state that a checkpoint would lack
    }


def _without_signals(loader: Any) -> Any:
    """Let workers ignore the signals that stop a run: they end with the run."""
    inner = getattr(loader, "loader", loader)
    inner.worker_init_fn = partial(_ignore_signals, then=inner.worker_init_fn)
    return loader


def _ignore_signals(worker: int, then: Callable[[int], object] | None) -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if then is not None:
        then(worker)


class Crops:
    """An image as 5 or 10 crops (corners and center, and their mirror images), each a uint8 array [3, h, w]."""

    def __init__(self, preprocessing: dict[str, Any], crops: int) -> None:
        from timm.data.transforms import str_to_interp_mode
        from torchvision.transforms import FiveCrop, Resize, TenCrop

        height, width = preprocessing["input_size"][1:]
        margin = min(preprocessing["crop_pct"], 0.875)  # a full-size center crop has no corners: leave timm's margin
        mode: Any = str_to_interp_mode(preprocessing["interpolation"])
        self.resize = Resize(round(max(height, width) / margin), mode)
        self.crop = (FiveCrop if crops == 5 else TenCrop)((height, width))

    def __call__(self, image: Image.Image) -> tuple[np.ndarray[Any, Any], ...]:
        crops = self.crop(self.resize(image))
        return tuple(np.ascontiguousarray(np.asarray(crop).transpose(2, 0, 1)) for crop in crops)
