"""Models in files: a checkpoint of ``timm train`` here, other kinds by entry points.

A distribution brings a kind of file by an entry point of the group ``topk_registry.model_files``: its name is the
ending of such files, its object takes a path and a :class:`Running`, and returns a :class:`ModelFile`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from topk_registry import registry
from topk_registry.evaluation.images import DATA, Images
from topk_registry.train.config.tasks import MULTILABEL
from topk_registry.train.config.validate_flags import create_parser
from topk_registry.train.errors import TrainError

Keep = Callable[[np.ndarray, np.ndarray], object]
CHECKPOINTS = (".pth", ".pt", ".tar", ".bin", ".safetensors", ".ckpt")
CLASSES = "classes.txt"  # of a training run, beside its checkpoints


class Running(NamedTuple):
    """How a model is run.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        batch_size: images a run.
        workers: processes or threads that read images; None for the model's own choice.
        use_ema: take a checkpoint's moving average of the weights, where there is one.
    """

    device: str = "auto"
    batch_size: int = 64
    workers: int | None = None
    use_ema: bool = False


class OpenedModel(Protocol):
    """A model that is ready to run.

    Its images have its class numbers when they come. ``run`` gives ``keep`` the scores [b, n], whose softmax is the
    model's probabilities, and the labels [b] of each batch in order, from image number ``start``.
    """

    @property
    def class_names(self) -> Sequence[str]: ...

    def run(self, images: Any, keep: Keep, *, start: int = 0) -> None: ...


class ModelFile(Protocol):
    """A model in a file, told apart by ``fingerprint``: a SHA-256 of its weights and of all that changes its scores."""

    @property
    def fingerprint(self) -> str: ...

    def open(self, images: Any) -> OpenedModel: ...


def model_file(path: str | Path, running: Running = Running()) -> ModelFile:  # noqa: B008  an immutable default
    """Return the model in a file, without opening it.

    Args:
        path: a checkpoint, the folder of a training run, or a file of a registered kind.
        running: how it is run.

    Raises:
        TrainError: there is no such file.
        UnknownPluginError: no installed distribution reads files of this ending.
    """
    path = find_file(path)
    refuse_several_labels(path)
    if path.name.endswith(CHECKPOINTS):
        return Checkpoint(path, running)
    return registry.model_files.builder(path.suffix.lstrip("."))(path, running)


def refuse_several_labels(path: Path) -> None:
    """Raise a TrainError for a checkpoint of ``--task multilabel``, whose images have no single label to look at."""
    from topk_registry.train.validate import recorded_in

    if path.name.endswith(CHECKPOINTS) and recorded_in(str(path)).get("task") == MULTILABEL:
        raise TrainError(
            f"{path} is of --task multilabel: comparisons, reports and searches for wrong labels are of one label an "
            "image. `timm validate` measures it"
        )


def find_file(path: str | Path) -> Path:
    """The file that a path names: itself, or the best checkpoint in the folder of a training run."""
    path = Path(path)
    if path.is_dir():
        checkpoints = [path / name for name in ("model_best.pth.tar", "last.pth.tar") if (path / name).is_file()]
        if not checkpoints:
            raise TrainError(f"{path} holds no checkpoint (expected model_best.pth.tar or last.pth.tar)")
        return checkpoints[0]
    if not path.is_file():
        raise TrainError(f"there is no model file {path}")
    return path


def data_settings(path: str | Path) -> dict[str, Any]:
    """The settings of the data that a checkpoint was evaluated on; none of another file."""
    from topk_registry.train.validate import recorded_in

    path = find_file(path)
    refuse_several_labels(path)
    recorded = recorded_in(str(path)) if path.name.endswith(CHECKPOINTS) else {}
    return {name: value for name, value in recorded.items() if name in DATA}


class Checkpoint:
    """A checkpoint of ``timm train``, evaluated as ``timm validate`` evaluates it.

    Args:
        path: the file.
        running: how it is run.
        settings: further flags of ``timm validate``, by name.
    """

    def __init__(self, path: Path, running: Running, **settings: Any) -> None:
        self.path, self.running, self.settings = path, running, settings

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the file, of its classes' names and of what its evaluation depends on besides."""
        import timm

        digest = file_digest(self.path)
        classes = self.path.parent / CLASSES
        digest.update(classes.read_bytes() if classes.is_file() else b"")
        digest.update(json.dumps([timm.__version__, self.running.use_ema, self.settings], default=str).encode())
        return digest.hexdigest()

    def open(self, images: Images) -> "_OpenedCheckpoint":
        """Build the model and load its weights."""
        from topk_registry.train.validate import prepare

        args = create_parser().parse_args(["--checkpoint", str(self.path), "-b", str(self.running.batch_size)])
        given: dict[str, Any] = {**images.settings, "use_ema": self.running.use_ema, **self.settings}
        if self.running.device != "auto":
            given["device"] = self.running.device
        workers = self.running.workers
        given["workers"] = min(4, os.cpu_count() or 1) if workers is None else workers
        for name, value in given.items():
            setattr(args, name, value)
        return _OpenedCheckpoint(args, prepare(args, images.data))


class _OpenedCheckpoint:
    def __init__(self, args: Any, ready: Any) -> None:
        self.args, self.ready = args, ready

    @property
    def class_names(self) -> Sequence[str]:
        return self.ready.names

    def run(self, images: Any, keep: Keep, *, start: int = 0) -> None:
        """Run the evaluator of ``timm validate`` over the images from number ``start`` on."""
        from dataclasses import replace

        from topk_registry.train.setup.loaders import end_workers

        data = replace(images.data, validation=_Rest(images.dataset, start) if start else images.dataset)
        evaluator = self.ready.evaluator(self.args, data)
        evaluator.keep = lambda scores, labels: keep(scores.float().cpu().numpy(), labels.cpu().numpy())
        try:
            evaluator(self.ready.model, self.ready.criterion)
        finally:
            end_workers(evaluator.loader)


class _Rest:
    """The images of a data set from one number on."""

    def __init__(self, dataset: Any, start: int) -> None:
        self.dataset, self.start = dataset, start

    @property
    def transform(self) -> Any:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform

    def __len__(self) -> int:
        return len(self.dataset) - self.start

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index + self.start]


def file_digest(path: Path) -> Any:
    """The SHA-256 of a file's bytes, as hashlib's object."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest


def given_settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """The data's settings among the flags of a command, as far as they were given."""
    return {name: value for name, value in args.items() if name in DATA and value is not None}
