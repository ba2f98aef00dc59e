"""Tar shards through timm's reader: each process and worker has its own, and a resumed run repeats the order."""

import gc
import io
import json
import signal
import tarfile
from itertools import chain

import pytest
from PIL import Image
from torch.utils.data import DataLoader

from topk_registry.train import TrainConfig
from topk_registry.train.setup import datasets

from .conftest import stops_at

# webdataset leaves the closing of a shard that is not read to its end to the garbage collector, which warns
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CLASSES = 4
SPLITS = {"train": (8, 6), "validation": (3, 5)}  # shards, samples of each


def sets_of(number):
    """The labels of a sample of several."""
    return [c for c in range(CLASSES) if (number + 1) >> c & 1]


def write_shards(root, splits, *, info=True):
    """Images of one colour that tells the sample, and the class beside each, as webdataset has them."""
    about = {}
    for split, (shards, samples) in splits.items():
        names = [f"{split}-{i:03d}.tar" for i in range(shards)]
        about[split] = {"name": split, "num_samples": shards * samples, "filenames": names}
        about[split]["shard_lengths"] = [samples] * shards
        for shard, name in enumerate(names):
            with tarfile.open(root / name, "w") as archive:
                for i in range(samples):
                    number = shard * samples + i
                    encoded = io.BytesIO()
                    Image.new("RGB", (24, 24), (number, 60 * (number % CLASSES), 90)).save(encoded, "png")
                    side = json.dumps({"labels": sets_of(number)}).encode()
                    files = {"png": encoded.getvalue(), "cls": b"%d" % (number % CLASSES), "json": side}
                    for ending, content in files.items():
                        member = tarfile.TarInfo(f"{number:04d}.{ending}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
    if info:
        (root / "_info.json").write_text(json.dumps({"splits": about}))
    return root


@pytest.fixture(autouse=True, scope="module")
def _collected():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), SPLITS)


def number_of(image):
    return image.getpixel((0, 0))[0]


def numbers(batch):
    return [(number_of(image), target) for image, target in batch]


def seen(shards, monkeypatch, *, rank, world, training, workers=2, epoch=0, batch=3, split=""):
    """The numbers and labels of the samples that one of several processes gets."""
    from timm.data.readers import reader_wds

    place = {"is_available": True, "is_initialized": True, "get_rank": rank, "get_world_size": world}
    for name, value in place.items():
        monkeypatch.setattr(reader_wds.dist, name, lambda value=value: value)
    config = TrainConfig(dataset="wds/shards", data_dir=str(shards), batch_size=batch)
    dataset = datasets.open_split(config, split or ("train" if training else "validation"), training=training)
    monkeypatch.undo()
    dataset.set_loader_cfg(num_workers=workers)
    dataset.set_epoch(epoch)
    loader = DataLoader(dataset, batch_size=batch, num_workers=workers, collate_fn=numbers)
    found = list(chain.from_iterable(loader))
    assert not training or len(found) == len(dataset)
    assert all(label == number % CLASSES for number, label in found)
    return [number for number, _ in found]


@pytest.mark.slow
def test_processes_and_workers_see_disjoint_shards_and_all_of_them(shards, monkeypatch):
    parts = [seen(shards, monkeypatch, rank=rank, world=2, training=True) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert sorted(chain(*parts)) == list(range(48))
    # a shard is read by one process alone
    assert not {n // 6 for n in parts[0]} & {n // 6 for n in parts[1]}


def test_the_order_is_the_epochs(shards, monkeypatch):
    orders = [
        seen(shards, monkeypatch, rank=0, world=1, training=True, workers=0, epoch=epoch) for epoch in (0, 1, 0, 2)
    ]
    assert all(sorted(order) == list(range(48)) for order in orders)
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("world", [2, 3, 5])  # as many shards as processes, fewer, and not a multiple
def test_evaluation_reads_every_sample_once(shards, monkeypatch, world):
    parts = [seen(shards, monkeypatch, rank=rank, world=world, training=False, workers=0) for rank in range(world)]
    assert sorted(chain(*parts)) == list(range(15))
    assert all(parts)


def flags_for(root):
    return (
        *("--dataset", "wds/shards", "--data-dir", str(root), "--num-classes", str(CLASSES)),
        *("--model", "topk_convnet", "--model-kwargs", "width=4", "-b", "6", "--device", "cpu", "--opt", "adamw"),
        *("--img-size", "16", "--lr", "0.01", "--warmup-epochs", "0", "--epochs", "2", "--reprob", "0.5"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_shards_is_resumed_bit_for_bit(shards, train, monkeypatch, workers):
    flags = flags_for(shards)
    whole = train("-j", workers, name="whole", tiny=flags)
    assert whole.status == 0, whole.err
    assert "48 to train, 15 to evaluate" in whole.out
    with monkeypatch.context() as stopped:
        stops_at(stopped, 14)  # of 12 in the first epoch: 8 batches, 3 of evaluation, and its end
        assert train("-j", workers, name="stopped", tiny=flags).status == 128 + signal.SIGTERM
    resumed = train("-j", workers, "--resume", "auto", name="stopped", tiny=flags)
    assert "at epoch 2, batch 3" in resumed.out
    assert resumed.summary == whole.summary


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-j", "16"], "has 8 shards for 1 processes of 16 loaders each"),
        (["--train-split", "trian"], "split trian not found in info (dict_keys(['train', 'validation']))"),
        (["--val-split", "0.1"], "is a stream"),
        (["--train-split", "elsewhere-{000..003}.tar"], "num_samples not specified"),
    ],
)
def test_what_cannot_be_read_is_one_line(shards, train, flags, said):
    run = train("-j", "0", *flags, tiny=flags_for(shards))
    assert run.status == 2
    assert said in run.err
    assert run.err.count("\n") == 1


def test_a_missing_package_is_one_line(shards, train, monkeypatch):
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    run = train("-j", "0", tiny=flags_for(shards))
    assert run.status == 2
    assert "pip install 'topk-registry[shards]'" in run.err


def test_patterns_need_no_file_of_information(tmp_path, train):
    (tmp_path / "data").mkdir()
    root = write_shards(tmp_path / "data", {"train": (2, 6)}, info=False)

    run = train("-j", "0", "--epochs", "1", "--val-split", "", "--train-split", "train-{000..001}.tar|12",
                tiny=flags_for(root))  # fmt: skip
    assert run.status == 0, run.err
    assert "12 to train, none to evaluate" in run.out


def test_several_labels_come_from_the_json_beside_an_image(train, shards):
    flags = ("--task", "multilabel", "--dataset", "wds/x", "--data-dir", shards, "--target-key", "labels")
    run = train(*flags, "--num-classes", CLASSES, "--dataset-opt", "--img-size", 24, "--epochs", 1)
    assert run.status == 0, run.err
    assert 0 <= run.summary[-1]["eval_map"] <= 100
    config = TrainConfig(dataset="wds/x", data_dir=str(shards), task="multilabel", target_key="labels", num_classes=4)
    found = list(datasets.open_split(config, "validation", training=False))
    assert [target.nonzero().flatten().tolist() for _, target in found] == [sets_of(i) for i in range(15)]
    unknown = train(*flags, "--dataset-opt", name="unknown")
    assert unknown.status == 2
    assert "the number of classes is not known" in unknown.err
