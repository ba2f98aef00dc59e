"""Batches that depend on the seed, the epoch and the step alone.

The order of samples and the random numbers are ours, not the loader's. Each batch is drawn under a seed of its own,
hashed from (seed, rank, epoch, step): augmentation and mixup are the same with any number of workers, and a run that
resumes in the middle of an epoch sees exactly the batches that it would have seen.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from topk_registry.train.errors import DataError
from topk_studies.old_trainer.data.sampling import Draw

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
    the batch size would see. With a ``draw`` the samples of an epoch are drawn by it, in all processes alike.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        batches: int | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.size, self.batch_size, self.seed, self.rank, self.world = size, batch_size, seed, rank, world
        self.batches, self.draw = batches, draw
        self.repeated: RepeatAugSampler | None = None
        self.epoch, self.first = 0, 0

    def start(self, epoch: int, step: int = 0) -> None:
        """Set where the next pass begins."""
        self.epoch, self.first = epoch, step

    def samples(self) -> int:
        """Number of samples that one pass over the data has on this rank."""
        return self.size // self.world if self.repeated is None else len(self.repeated)

    def __len__(self) -> int:
        # as timm, an epoch drops its last, smaller batch; a data set below one batch is one batch
        return self.batches or max(1, self.samples() // self.batch_size)

    def __iter__(self) -> Iterator[Key]:
        order = self._pass(0)
        for more in count(1):  # an epoch may be longer than the data
            if not self.batches or len(order) >= self.batches * self.batch_size:
                break
            order += self._pass(more)
        for step in range(self.first, len(self)):
            yield self.epoch, step, order[step * self.batch_size : (step + 1) * self.batch_size]

    def _pass(self, more: int) -> list[int]:
        """One pass over the data in random order; ``more`` counts those of the epoch."""
        if self.repeated is not None:
            self.repeated.set_epoch(self.epoch + (more << 20))
            return list(self.repeated)
        rng = np.random.default_rng([self.seed, self.epoch, *[more] * (more > 0)])
        order = rng.permutation(self.size) if self.draw is None else self.draw(rng)
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
