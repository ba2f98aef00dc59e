"""The order of batches, the seeds they are drawn under, and the data sets behind them."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset

from topk_registry.data.labels import class_counts, class_names_of, is_indexed, labels_of
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.setup.batches import BatchOrder, seeded
from topk_registry.train.setup.datasets import open_data
from topk_registry.train.setup.unreadable import report_unreadable

from .conftest import TINY, unclosed_files


def batches(order, epoch, step=0):
    order.start(epoch, step)
    return [indices for _, _, indices in order]


def test_an_epoch_is_a_permutation_less_the_last_small_batch():
    order = BatchOrder(107, 10, seed=1)
    assert len(order) == 10
    seen = [i for batch in batches(order, 0) for i in batch]
    assert len(seen) == len(set(seen)) == 100
    assert batches(order, 0) == batches(BatchOrder(107, 10, seed=1), 0)
    assert batches(order, 0) != batches(order, 1)
    assert batches(order, 0) != batches(BatchOrder(107, 10, seed=2), 0)


def test_an_epoch_can_be_entered_anywhere():
    order = BatchOrder(107, 10, seed=1)
    assert batches(order, 3, 4) == batches(order, 3)[4:]
    assert batches(order, 3, 10) == []


@pytest.mark.parametrize("world", [2, 3])
def test_processes_together_see_the_batch_of_one(world):
    alone = batches(BatchOrder(100, 12, seed=5), 2)
    ranks = [batches(BatchOrder(100, 12 // world, seed=5, rank=r, world=world), 2) for r in range(world)]
    assert len({len(rank) for rank in ranks}) == 1  # or one process waits for the others for ever
    for together, *parts in zip(alone, *ranks, strict=False):
        assert sorted(together) == sorted(i for part in parts for i in part)


def test_a_data_set_below_one_batch_is_one_batch():
    assert [sorted(batch) for batch in batches(BatchOrder(5, 16, seed=0), 0)] == [[0, 1, 2, 3, 4]]


def test_seeded_streams_depend_on_the_key_and_leave_the_outer_ones_alone():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    outer = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    drawn = []
    for key in ((1, 2, 3), (1, 2, 4), (1, 2, 3)):
        with seeded(*key):
            drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))
    assert outer == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    with pytest.raises(KeyError), seeded(1):
        raise KeyError
    assert torch.get_rng_state().tolist() == outer[2]


def opened(*flags):
    return open_data(parse_args([*TINY, *flags]))


def test_noise_and_tails_touch_training_alone():
    plain, harder = opened(), opened("--label-noise", "1", "--long-tail", "exp", "--imbalance-factor", "4")
    assert labels_of(harder.validation).tolist() == labels_of(plain.validation).tolist()
    assert (harder.counts[0], harder.counts[-1]) != (harder.counts[-1], harder.counts[0])
    assert len(harder.train) < len(plain.train)
    assert len(harder.notes) == 2


def test_what_is_held_out_has_clean_labels_and_is_not_trained_on():
    data = opened("--val-split", "0.25", "--label-noise", "1")
    assert len(data.train) + len(data.validation) == 96
    assert not set(data.train.indices.tolist()) & set(data.validation.indices.tolist())
    clean = [index % 12 for index in data.validation.indices.tolist()]
    assert [label for _, label in data.validation] == clean
    again = opened("--val-split", "0.25", "--label-noise", "1")
    assert again.validation.indices.tolist() == data.validation.indices.tolist()


def test_a_subset_is_balanced():
    assert opened("--subset", "0.5").counts == [4] * 12


def test_timms_image_folder_tells_its_labels(image_folder):
    dataset = create_dataset("", root=str(image_folder), split="train")
    assert class_counts(labels_of(dataset), 4) == [12] * 4
    assert class_names_of(dataset) == [f"class{c}" for c in range(4)]
    assert is_indexed(dataset)


@unclosed_files
def test_unreadable_images_are_replaced_within_their_part(tmp_path):
    for i in range(16):  # an image's colour tells which it is
        path = tmp_path / "train" / f"class{i // 8}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path)
    broken = {1, 2, 3, 4, 7, 9, 12, 13, 14, 15}
    for i in broken:
        (tmp_path / "train" / f"class{i // 8}" / f"{i:02}.png").write_bytes(b"this is no image")
    data = open_data(parse_args(["--data-dir", str(tmp_path), "--val-split", "0.5"]))
    for part in (data.train, data.validation):
        members = part.indices.tolist()
        whole = [i for i in members if i not in broken]
        for place, i in enumerate(members):
            image, label = part[place]
            shown = image.getpixel((0, 0))[0]
            assert shown == next((j for j in whole if j >= i), whole[0])
            assert label == shown // 8
    assert "could not be read" in report_unreadable(data.train, "training")


HELD = """
import os, signal, torch
from topk_registry.train.setup.workers import end_of_process, leave_to_the_run
from functools import partial

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        list(range(6)), num_workers=2, worker_init_fn=partial(leave_to_the_run, over=end_of_process())
    )
    held = iter(loader)
    print(next(held).item(), next(held).item())  # each of the two workers has been initialised
    for signum in (signal.SIGTERM, signal.SIGINT):
        for worker in held._workers:
            os.kill(worker.pid, signum)
    print(*(next(held).item() for _ in range(4)), flush=True)
"""


def test_a_worker_ignores_signals_and_ends_with_the_process_that_still_holds_its_loader():
    run = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0 1\n2 3 4 5\n", "")
