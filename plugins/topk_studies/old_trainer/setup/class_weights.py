"""Weights of the training loss: timm's methods on the class counts of the training labels, or given numbers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from timm.loss import load_class_stats, resolve_class_weights
from torch import distributed as dist

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig, spelt
from topk_studies.old_trainer.config.sampling import sampler_of
from topk_studies.old_trainer.config.weights import FLAGS

SHOWN = 60  # characters of a value in a message: a list may have thousands


@dataclass(frozen=True)
class ClassWeights:
    """Weights of the classes, or of their positive terms, as they were asked for.

    Args:
        given: one of timm's methods, a file, or numbers with commas between them.
        power: exponent of ``inv_freq`` and ``neg_pos``.
        beta: of ``effective_num``.
        max_weight: the largest weight of a method; None for no limit.
        setting: the setting that asks for them, ``class_weight`` or ``loss_pos_weight``.
    """

    given: str
    power: float = 1.0
    beta: float = 0.999
    max_weight: float | None = None
    setting: str = "class_weight"

    @classmethod
    def of(cls, config: TrainConfig, setting: str = "class_weight") -> "ClassWeights | None":
        """The weights of a run, or None where it has none."""
        given = getattr(config, setting)
        settings = (config.loss_weight_power, config.loss_weight_beta, config.loss_weight_max)
        return cls(given, *settings, setting) if given else None

    @property
    def flag(self) -> str:
        """The flag as it was given; a long list is cut."""
        return f"{spelt(self.setting)} {self.given if len(self.given) <= SHOWN else self.given[:SHOWN] + '...'}"

    @property
    def kind(self) -> str:
        """timm's name of the option that a loss takes them by."""
        return self.setting.removeprefix("loss_")

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of timm's methods for these weights."""
        return FLAGS[self.setting]

    @property
    def needs_counts(self) -> bool:
        """Whether they are computed from class counts."""
        return self.given in self.methods

    def example(self, num_classes: int) -> tuple[float, ...]:
        """Made-up weights, for a trial of the loss before the data is read.

        Raises:
            TrainError: what is given can be no weights, whatever the data.
        """
        self._values([1 + c % 3 for c in range(num_classes)])
        return tuple(1.0 + c % 3 for c in range(num_classes))

    def values(
        self, class_counts: Sequence[float] | None, num_classes: int, samples: int | None = None
    ) -> tuple[float, ...]:
        """One weight a class.

        Args:
            class_counts: training samples of each class; None where they are not known.
            num_classes: the number of classes that the model predicts.
            samples: how many samples were counted; by default as many as the counts add up to.

        Raises:
            TrainError: counts are wanted and not known, or the number of weights is another.
        """
        if self.needs_counts and class_counts is None:
            raise TrainError(
                f"{self.flag} needs the class counts, which this data does not tell: give the weights "
                "themselves, in a file or as numbers with commas between them, or the counts by --class-stats"
            )
        weights = self._values(class_counts or (), samples)
        if len(weights) == 1 and self.kind == "pos_weight":  # timm takes one number for all classes
            weights *= num_classes
        if len(weights) != num_classes:
            raise TrainError(f"{self.flag}: expected {num_classes} weights, one for each class, got {len(weights)}")
        return weights

    def _values(self, class_counts: Sequence[float], samples: int | None = None) -> tuple[float, ...]:
        counted = int(sum(class_counts)) if samples is None else samples
        try:
            weights = resolve_class_weights(
                self.given,
                self.kind,
                class_stats=(torch.tensor(class_counts, dtype=torch.float64), counted),
                power=self.power,
                beta=self.beta,
                max_weight=self.max_weight,
            )
        except (OSError, ValueError, TypeError) as error:
            raise TrainError(f"{self.flag}: {self._reason(error)}") from error
        return tuple(torch.as_tensor(weights).reshape(-1).tolist())

    def _reason(self, error: Exception) -> str:
        """Say what is wrong with the value; for an unknown word, which values there are."""
        if isinstance(error, json.JSONDecodeError):
            return f"the file is not JSON, as its name says: {error}"
        if self.needs_counts or "could not convert" not in str(error):
            return f"{error}"
        if Path(self.given).is_file():
            return f"the file must hold numbers alone, one for each class; {error}"
        close = get_close_matches(self.given, self.methods, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"expected {', '.join(self.methods)}, a file, or numbers with commas between them{hint}"


def stats_of(file: str, num_classes: int | None = None) -> tuple[Sequence[float], int]:
    """Class counts and the number of samples of a file of ``--class-stats``.

    Raises:
        TrainError: it cannot be read, or has another number of classes.
    """
    try:
        stats = load_class_stats(file)
    except (OSError, ValueError, TypeError) as error:  # JSON's own error is a ValueError
        raise TrainError(f"--class-stats {file}: {error}") from error
    assert stats is not None
    counts, samples = stats[0].tolist(), stats[1]
    if num_classes is not None and len(counts) != num_classes:
        raise TrainError(f"--class-stats {file}: expected counts of {num_classes} classes, got {len(counts)}")
    return counts, samples


def told(weights: Sequence[float], asked: ClassWeights, class_names: Sequence[str] | None = None) -> str:
    """A sentence on class weights, for the plan of a run."""
    names = class_names or []

    def shown(c: int) -> str:
        return f"{weights[c]:.4g} ({names[c] if c < len(names) else f'class {c}'})"

    least, most = (pick(range(len(weights)), key=weights.__getitem__) for pick in (min, max))
    return f"{asked.flag}: from {shown(least)} to {shown(most)}"


def counted_twice(config: TrainConfig, loss: str) -> list[str]:
    """A sentence for the plan where rare classes count more by several ways at once.

    Args:
        config: the settings.
        loss: the name of the loss where it knows class frequencies; else empty.
    """
    asked = ClassWeights.of(config)
    ways = [f"loss {loss!r} by its class counts"] * bool(loss)
    ways += [f"{asked.flag} by weights"] if asked is not None else []
    sampler = sampler_of(config.sampler, config.retrain_head)
    ways += [f"--sampler {sampler} by drawing"] * (sampler != "instance")
    return [f"rare classes count more than once: {', '.join(ways)}"] if len(ways) > 1 else []


def same_in_all(weights: tuple[float, ...]) -> tuple[float, ...]:
    """The weights of the first process, which all processes train with."""
    shared = [weights]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    return shared[0]
