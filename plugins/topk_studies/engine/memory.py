"""Batches of a small data set, made once: to read and normalise a sample takes longer than a step of a small network.

Without augmentation a sample is the same in every epoch. Where the samples fit in memory, the training samples are kept
as they leave timm's loader and picked by the run's own order of batches; the evaluation batches are kept whole. The
batches are the loader's, bit for bit.
"""

from collections.abc import Iterator
from copy import copy
from math import prod
from typing import Any

from torch import Tensor

from topk_studies.old_trainer import Run
from topk_studies.old_trainer.setup.batches import Batches, BatchOrder
from topk_studies.old_trainer.setup.loaders import TrainLoader
from topk_studies.old_trainer.setup.loss import uses_soft_targets

LARGEST = 1 << 26  # values of a set of samples: 256 MiB in single precision


class KeptSamples(TrainLoader):
    """Training batches of samples that are held in memory.

    Args:
        loader: timm's, which the samples were read by.
        order: of the batches.
        images, target: all samples, normalised, and their labels.
    """

    def __init__(self, loader: Any, order: BatchOrder, images: Tensor, target: Tensor) -> None:
        super().__init__(loader, order)
        self._order, self._images, self._target = order, images, target

    def pass_of(self, epoch: int, step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self._order.start(epoch, step)
        return ((self._images[indices], self._target[indices]) for _, _, indices in self._order)


class KeptBatches:
    """Evaluation batches, kept once all of them were read.

    Args:
        loader: timm's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = getattr(loader, "loader", loader)  # torch's own, whose workers end with the run
        self.dataset = loader.dataset
        self._made, self._kept = loader, None

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from self._kept
            return
        batches = []
        for batch in self._made:
            batches.append(batch)
            yield batch
        self._kept = batches


def keep_samples(run: Run, image: tuple[int, ...]) -> None:
    """Keep the training samples of a run in memory, where they fit and are the same in every epoch.

    Args:
        run: it has not begun.
        image: the shape of a sample.
    """
    config, order = run.config, run.loader.order
    batches = getattr(getattr(run.loader.loader, "loader", None), "dataset", None)
    fixed = config.no_aug and not uses_soft_targets(config)
    if not fixed or not isinstance(batches, Batches) or order is None or not _fits(batches.dataset, image):
        return
    whole = copy(run.loader.loader)  # normalises whatever batches it is given
    whole.loader = [batches[0, 0, list(range(len(batches.dataset)))]]
    images, target = next(iter(whole))
    run.loader = KeptSamples(run.loader.loader, order, images, target)


def kept_batches(run: Run, loader: Any, image: tuple[int, ...]) -> Any:
    """Return an evaluation loader that keeps its batches, or the given one where they do not fit in memory."""
    return loader if run.compute.distributed or not _fits(loader.dataset, image) else KeptBatches(loader)


def _fits(dataset: Any, image: tuple[int, ...]) -> bool:
    return hasattr(dataset, "__len__") and len(dataset) * prod(image) <= LARGEST
