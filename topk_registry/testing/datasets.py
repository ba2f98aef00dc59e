"""The checks of a data set: what ``timm train --dataset topk/NAME`` and its evaluation ask of one.

The contract is written in :mod:`topk_registry.data.contract`. In one line,

    check_dataset(MyData, options={"size": 100})

or by name, from the command line: ``topk-registry check-dataset NAME``.
"""

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from topk_registry import registry
from topk_registry.data import contract
from topk_registry.data.labels import class_names_of, is_indexed, kept_k_hot_of, kept_labels_of, superclasses_of
from topk_registry.testing.expect import CheckFailedError, NotApplicableError, expect
from topk_registry.testing.result import CheckResult, ChecksFailedError, left_out, result_of

NO_SPLIT = "no-such-split"
SIZE = 32  # of the images of a batch


@dataclass(frozen=True)
class DatasetSubject:
    """A factory of data sets with its options.

    Args:
        factory: takes the split and options.
        name: what reports call it.
        options: keyword options of every build.
        splits: of training and of evaluation.
        samples: how many samples of a split are read at most.
    """

    factory: Callable[..., Any]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: tuple[str, str] = ("train", "validation")
    samples: int = 64

    @cached_property
    def sets(self) -> dict[str, Any]:
        """Both splits, opened once."""
        return {split: self.factory(split=split, **self.options) for split in self.splits}

    @cached_property
    def read(self) -> dict[str, dict[int, Any]]:
        """Samples spread over each split, by their index."""
        return {split: {i: data[i] for i in self._spread(data)} for split, data in self.sets.items()}

    @cached_property
    def several(self) -> bool:
        """Whether its samples have several labels, by the target of the first."""
        first = next(iter(self.read.values()))
        return contract.has_k_hot_targets(next(iter(first.values())))

    def each(self) -> Iterator[tuple[str, int, Any]]:
        """Yield split, index and sample of all that are read."""
        return ((split, i, sample) for split, samples in self.read.items() for i, sample in samples.items())

    def _spread(self, data: Any) -> list[int]:
        return sorted({int(i) for i in np.linspace(0, len(data) - 1, min(self.samples, len(data)))})


Check = Callable[[DatasetSubject], None]


def opens_both_splits(data: DatasetSubject) -> None:
    """A run opens a split to train on and one to evaluate on, each with the same options."""
    assert data.sets


def refuses_an_unknown_split(data: DatasetSubject) -> None:
    """A misspelt --train-split or --val-split must not train on something else."""
    try:
        data.factory(split=NO_SPLIT, **data.options)
    except (ValueError, LookupError, OSError):
        return
    raise CheckFailedError(f"expected a ValueError for split {NO_SPLIT!r} that names the splits, got a data set")


def has_samples(data: DatasetSubject) -> None:
    """Batches are made of dataset[i], for i below len(dataset)."""
    for split, dataset in data.sets.items():
        expect(is_indexed(dataset), f"{split}: {contract.no_data_set(dataset)}")
        expect(len(dataset) > 0, f"expected samples in split {split!r}, got none")


def gives_images_and_labels(data: DatasetSubject) -> None:
    """A sample without a transform is a pair: a PIL image, which timm's transforms take, and a number or a vector."""
    for split, i, sample in data.each():
        problem = contract.problem_of_sample(sample, None, several=data.several)
        expect(not problem, f"{split}[{i}]: {problem}")


def names_its_classes(data: DatasetSubject) -> None:
    """The names tell how many scores a model needs; they are stored with it, and evaluation compares them."""
    first, *others = (class_names_of(dataset) for dataset in data.sets.values())
    expect(first is not None, "expected an attribute classes with the names of the classes, got none")
    names = first or []
    expect(len(names) > 1, f"expected two classes at least, got {names}")
    twice = next((name for name in names if names.count(name) > 1), None)
    expect(twice is None, f"expected a name for each class, got {twice!r} twice")
    for other in others:
        apart = _first_apart(names, other or [])
        expect(not apart, f"expected the same classes in both splits, got {apart}")


def keeps_labels_in_range(data: DatasetSubject) -> None:
    """A label is the place of its class in ``classes``; a larger one ends training, on a GPU without a message."""
    problem_of = contract.problem_of_target if data.several else contract.problem_of_label
    for split, i, (_, label) in data.each():
        problem = problem_of(label, len(class_names_of(data.sets[split]) or []) or None)
        expect(not problem, f"{split}[{i}]: {problem}")


def lists_its_labels(data: DatasetSubject) -> None:
    """Losses and recipes that need class counts read ``targets``, and else every image."""
    for split, dataset in data.sets.items():
        labels = kept_k_hot_of(dataset) if data.several else kept_labels_of(dataset)
        if labels is None:
            raise NotApplicableError(f"no attribute targets: counting the classes of {split!r} reads every image")
        expect(len(labels) == len(dataset), f"expected {len(dataset)} targets in {split!r}, got {len(labels)}")
        for i, (_, label) in data.read[split].items():
            same = np.array_equal(np.asarray(labels[i]), np.asarray(label))
            expect(same, f"{split}: targets[{i}] is {labels[i]}, and the sample has {label}")


def knows_its_families(data: DatasetSubject) -> None:
    """Label noise stays within families, and ``superclasses`` has the family of each class."""
    for split, dataset in data.sets.items():
        if getattr(dataset, "superclasses", None) is None:
            raise NotApplicableError("no attribute superclasses")
        families, names = superclasses_of(dataset), class_names_of(dataset) or []
        expect(len(families) == len(names), f"expected {len(names)} superclasses in {split!r}, got {len(families)}")


def applies_the_transform(data: DatasetSubject) -> None:
    """The trainer sets ``transform``: it augments, and makes the tensors that batches are made of."""
    for split, dataset in data.sets.items():
        problem = contract.problem_of_transform(dataset)
        expect(not problem, f"{split}: {problem}")


def repeats_under_a_seed(data: DatasetSubject) -> None:
    """A run that resumes sees the same batches, so chance must come from the generators that the trainer seeds."""
    for split, dataset in data.sets.items():
        for i in list(data.read[split])[:8]:
            first, second = (_seeded(lambda at=i, of=dataset: of[at]) for _ in range(2))
            expect(_same(first, second), f"expected {split}[{i}] to be the same under the same seed, got another")


def keeps_splits_apart(data: DatasetSubject) -> None:
    """Images that training has seen tell nothing about others."""
    train, other = ({_bytes(image) for image, _ in samples.values()} for samples in data.read.values())
    shared = len(train & other)
    expect(2 * shared <= len(other), f"{shared} of {len(other)} images of {data.splits[1]!r} are in {data.splits[0]!r}")


def reaches_other_processes(data: DatasetSubject) -> None:
    """Workers that are started afresh, as on macOS and Windows, get the data set pickled."""
    for split, dataset in data.sets.items():
        try:
            copy = pickle.loads(pickle.dumps(dataset))
        except Exception as error:
            raise CheckFailedError(f"expected {split!r} to be pickled, got {type(error).__name__}: {error}") from error
        i = next(iter(data.read[split]))
        again = _same(_seeded(lambda at=i, of=copy: of[at]), _seeded(lambda at=i, of=dataset: of[at]))
        expect(again, f"expected the same sample {i} from a pickled copy of {split!r}, got another")


def makes_a_batch(data: DatasetSubject) -> None:
    """timm's loader crops, turns and stacks the images, for training and for evaluation."""
    from timm.data import create_loader

    for split, training in zip(data.splits, (True, False), strict=True):
        dataset, count = data.sets[split], min(4, len(data.sets[split]))
        before = getattr(dataset, "transform", None)
        images_of: Any = torch.utils.data.Subset(dataset, list(data.read[split])[:count]) if training else dataset
        try:
            loader: Any = create_loader(
                images_of,
                input_size=(3, SIZE, SIZE),
                batch_size=count,
                is_training=training,
                num_workers=0,
                device=torch.device("cpu"),
                use_prefetcher=True,
                pin_memory=False,
            )
            if training:  # timm sets the transform of what it is given
                dataset.transform = loader.dataset.transform
            images, labels = next(iter(loader))
        finally:
            dataset.transform = before
        shape, wanted = list(images.shape), [count, 3, SIZE, SIZE]
        expect(shape == wanted, f"expected images {wanted} of {split!r}, got {shape}")
        expect(bool(images.isfinite().all()), f"expected finite numbers in the images of {split!r}")
        if data.several:
            told = f"{labels.dtype} {list(labels.shape)}"
            right = labels.is_floating_point() and labels.ndim == 2
            expect(right, f"expected floating-point targets [{count}, n] in {split!r}, got {told}")
        else:
            expect(labels.dtype == torch.int64, f"expected int64 labels in {split!r}, got {labels.dtype}")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        opens_both_splits,
        has_samples,
        gives_images_and_labels,
        names_its_classes,
        applies_the_transform,
        refuses_an_unknown_split,
        keeps_labels_in_range,
        lists_its_labels,
        knows_its_families,
        repeats_under_a_seed,
        keeps_splits_apart,
        reaches_other_processes,
        makes_a_batch,
    )
}
NEEDED = tuple(CHECKS)[:3]  # where one of them fails, the others would say nothing new


def check_dataset(
    dataset: str | Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    splits: tuple[str, str] = ("train", "validation"),
    samples: int = 64,
) -> None:
    """Run every check on a data set and raise one :class:`ChecksFailedError` that lists all failures.

    Args:
        dataset: a factory, or a registered name.
        options: keyword options to build it with.
        splits: of training and of evaluation.
        samples: how many samples of each split are read at most.

    Example:
        >>> check_dataset("hierarchy", options={"size": 100})
    """
    subject = dataset_subject(dataset, options=options, splits=splits, samples=samples)
    results = list(run_dataset_checks(subject))
    if any(result.status == "failed" for result in results):
        raise ChecksFailedError(subject.name, results)


def dataset_subject(
    dataset: str | Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    splits: tuple[str, str] = ("train", "validation"),
    samples: int = 64,
) -> DatasetSubject:
    """Return what :func:`run_dataset_checks` takes; arguments as for :func:`check_dataset`."""
    factory = registry.datasets.builder(dataset) if isinstance(dataset, str) else dataset
    name = dataset if isinstance(dataset, str) else getattr(dataset, "__name__", type(dataset).__name__)
    return DatasetSubject(factory, name, options or {}, splits, samples)


def run_dataset_checks(
    subject: DatasetSubject, *, started: Callable[[str], object] | None = None
) -> Iterator[CheckResult]:
    """Yield the result of each check as it is found.

    Args:
        subject: from :func:`dataset_subject`.
        started: is called with the name of each check before it runs, to show progress.
    """
    missing = ""
    for name, check in CHECKS.items():
        if started is not None:
            started(name)
        result = left_out(check, f"needs {missing}") if missing else result_of(check, subject)
        if result.status == "failed" and name in NEEDED:
            missing = missing or name
        yield result


def _seeded(call: Callable[[], Any]) -> Any:
    outer = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    try:
        return call()
    finally:
        random.setstate(outer[0])
        np.random.set_state(outer[1])
        torch.set_rng_state(outer[2])


def _same(first: Any, second: Any) -> bool:
    return _bytes(first[0]) == _bytes(second[0]) and np.array_equal(np.asarray(first[1]), np.asarray(second[1]))


def _bytes(image: Any) -> tuple[Any, ...]:
    return image.mode, image.size, image.tobytes()


def _first_apart(names: Sequence[str], others: Sequence[str]) -> str:
    if len(names) != len(others):
        return f"{len(names)} and {len(others)}"
    pairs = enumerate(zip(names, others, strict=True))
    return next((f"{one!r} and {other!r} as class {i}" for i, (one, other) in pairs if one != other), "")
