"""Tar shards as webdataset writes them, by timm's reader, in an order that a resumed run repeats.

timm's reader deals shards out to processes and their workers. Its shuffle buffer and the augmentation draw from streams
that run on from epoch to epoch; here they begin anew in each, from a key of (seed, process, epoch, worker).
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from timm.data import IterableImageDataset
from torch.utils.data import get_worker_info

from topk_registry.train.errors import DataError
from topk_studies.old_trainer.setup.batches import seeded


class Shards(IterableImageDataset):
    """One process's part of a split.

    In training each worker reads shards of its own; as timm's reader has it, all processes get the same number of
    batches, so with shards of different lengths some samples come twice in an epoch and others not. In evaluation
    every sample is read once, over all processes.

    Args:
        reader: timm's, over webdataset.
        seed: of the run.
        training: whether to shuffle, and to give all processes the same number of batches.
    """

    def __init__(self, reader: Any, *, seed: int, training: bool) -> None:
        super().__init__("", reader=reader)
        self.seed, self.rank, self.world = seed, reader.dist_rank, reader.dist_num_replicas
        self.training, self.shards = training, len(reader.split_info.filenames)
        self.stride = 1
        if not training and self.world > 1:
            # the reader would repeat and drop samples to make processes even, which evaluation does not need
            reader.dist_rank, reader.dist_num_replicas = 0, 1
            if self.shards < self.world:
                self.stride = self.world
            else:
                reader.split_info.filenames = reader.split_info.filenames[self.rank :: self.world]

    @property
    def num_samples(self) -> int:
        """Samples of the split, over all processes; 0 where nobody told."""
        reader: Any = self.reader
        return reader.num_samples

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        worker = get_worker_info()
        reader: Any = self.reader
        key = self.seed, self.rank, reader.epoch_count.value, 0 if worker is None else worker.id
        if worker is not None:
            # what the reader finds out by itself at its first pass, where it takes the seed of torch's worker too
            reader.worker_info, reader.worker_id, reader.num_workers = worker, worker.id, worker.num_workers
            reader.global_num_workers = reader.dist_num_replicas * worker.num_workers
            reader.global_worker_id = reader.dist_rank * worker.num_workers + worker.id
        reader.worker_seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        reader.ds = None  # the reader builds its pipeline anew, from this seed
        first = self.rank if self.stride > 1 else 0
        for number, (image, target) in enumerate(islice(reader, first, None, self.stride)):
            with seeded(*key, number):
                sample = image if self.transform is None else self.transform(image)
            yield sample, target if self.target_transform is None else self.target_transform(target)

    def check_workers(self, workers: int) -> None:
        """Refuse more readers than shards: one without a shard would leave all others waiting.

        Raises:
            DataError: there are too few.
        """
        wanted = self.world * max(1, workers)
        if self.training and self.shards < wanted:
            raise DataError(
                f"the training split has {self.shards} shards for {self.world} processes of {max(1, workers)} loaders "
                f"each, and every loader needs one of its own: write at least {wanted} shards, or give fewer --workers"
            )
