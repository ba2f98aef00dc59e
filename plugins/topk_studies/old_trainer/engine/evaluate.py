"""Evaluation of a model: top-k and macro top-k accuracy, by frequency of the classes, and the likelihood; of several
labels an image, mean average precision, F1 and top-k recall.

A class is ranked by its score, or by the loss's own ``probabilities(logits)`` where it has them (the spherical family).
With several crops an image's ranking for top-k is the mean over crops of the top-k marginals (Berrada et al. 2018), of
which the k = 1 case is softmax.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.task.evaluator import evaluation_sample_limit
from torch import Tensor, nn

from topk_registry.metrics import LabelSetMetrics, StreamingMetric, TopKAccuracy
from topk_registry.ops.ksubset import topk_marginals
from topk_registry.train.errors import DataError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.engine.measures import Observer
from topk_studies.old_trainer.setup.compute import Compute

LEAST_LIKELIHOOD = math.log(1e-30)  # log-likelihood of a label whose probability is 0


def readable(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches; raise a ``DataError`` where one cannot be read."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (OSError, RuntimeError, SyntaxError, ValueError) as error:
            raise DataError(f"cannot read the evaluation data: {error}") from error
        yield batch


class MeanNLL(StreamingMetric):
    """Mean negative log-likelihood of the label over samples, whatever loss is trained."""

    def __init__(self) -> None:
        super().__init__(nll=torch.zeros((), dtype=torch.float64), seen=torch.zeros((), dtype=torch.float64))

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.follow(scores)
        self.sums["nll"] += nn.functional.nll_loss(scores, target, reduction="sum")
        self.sums["seen"] += len(target)

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"nll": (totals["nll"] / totals["seen"]).item()}


class Crops:
    """An image as 5 or 10 crops (corners and centre, and their mirror images), each a uint8 array [3, h, w]."""

    def __init__(self, data_config: dict[str, Any], crops: int) -> None:
        from timm.data.transforms import str_to_interp_mode
        from torchvision.transforms import FiveCrop, Resize, TenCrop

        height, width = data_config["input_size"][1:]
        # a full-size centre crop has no corners to look at: leave the usual margin of 7/8
        margin = min(data_config["crop_pct"], 0.875)
        mode: Any = str_to_interp_mode(data_config["interpolation"])
        self.resize = Resize(round(max(height, width) / margin), mode)
        self.crop = (FiveCrop if crops == 5 else TenCrop)((height, width))

    def __call__(self, image: Image.Image) -> tuple[np.ndarray, ...]:
        return tuple(
            np.ascontiguousarray(np.asarray(crop).transpose(2, 0, 1)) for crop in self.crop(self.resize(image))
        )


class Evaluator:
    """Metrics of a model over a loader, accuracies in percent.

    Args:
        loader: evaluation batches.
        compute: device and precision.
        num_classes: n.
        sizes: the k of top-k.
        counts: training samples a class, for the many-, medium- and few-shot split.
        crops: how many consecutive groups of a batch are crops of the same images.
        tta: how many consecutive samples are one.
        temperature: of the marginals that crops are averaged by.
        stop: asked before each batch; True abandons the pass.
    """

    def __init__(
        self,
        loader: Any,
        compute: Compute,
        *,
        num_classes: int,
        sizes: Sequence[int] = (1, 5),
        counts: Sequence[int] | None = None,
        channels_last: bool = False,
        crops: int = 0,
        tta: int = 0,
        temperature: float = 1.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loader, self.num_classes, self.sizes, self.counts = loader, num_classes, list(sizes), counts
        self.compute, self.channels_last = compute, channels_last
        self.crops, self.tta, self.temperature, self.stop = crops, tta, temperature, stop
        self.stopped = False
        self.classes: Tensor | None = None  # the scores to keep, where the labels count only these
        self.observers: Sequence[Observer] = ()
        self.keep: Callable[[Tensor, Tensor], object] | None = None  # takes scores [B, n] and labels [B] of a batch

    @torch.inference_mode()
    def __call__(self, model: nn.Module, criterion: object = None) -> dict[str, float] | None:
        """Return the metrics, or None if stopped. ``criterion.probabilities`` predicts where there is one."""
        probabilities = getattr(criterion, "probabilities", None)
        nll = MeanNLL()
        accuracy = [self._accuracy([k]) for k in self.sizes] if self.crops else [self._accuracy(self.sizes)]
        model.eval()
        for logits, target in self._batches(model):
            likelihood, ranked = self._scores(logits, probabilities)
            if len(target):
                nll.update(likelihood[: len(target)].log().clamp(min=LEAST_LIKELIHOOD), target)
                for metric, scores in zip(accuracy, ranked, strict=True):
                    metric.update(scores[: len(target)], target)
                for observer in self.observers:
                    observer.update(likelihood[: len(target)], target)
                if self.keep is not None:
                    # their softmax is the likelihood
                    own = likelihood.log().clamp(min=LEAST_LIKELIHOOD) if probabilities or self.crops else ranked[0]
                    self.keep(own[: len(target)], target)
        return None if self.stopped else self._results(nll, accuracy)

    def _batches(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the scores of each batch, and the targets of its real samples; set ``stopped`` where asked to stop."""
        limit, self.stopped = evaluation_sample_limit(self.loader), False
        for images, target in readable(self.loader):
            if self.stop():
                self.stopped = True
                return
            logits = self._forward(model, images)
            target = target.to(logits.device)
            target = target[: len(target) // max(1, self.crops)][:: max(1, self.tta)]
            if limit is not None:  # beyond are the samples that make ranks even
                target = target[: max(0, limit)]
                limit -= len(target)
            yield logits, target

    def _accuracy(self, sizes: list[int]) -> TopKAccuracy:
        if self.counts is not None:
            return TopKAccuracy(sizes, class_counts=self.counts, device=self.compute.device)
        n = self.num_classes if self.classes is None else len(self.classes)
        return TopKAccuracy(sizes, num_classes=n, device=self.compute.device)

    def _forward(self, model: nn.Module, images: Tensor | dict[str, Tensor]) -> Tensor:
        if isinstance(images, dict):  # patches, and where they belong
            device = self.compute.device
            images = {n: part.to(device) if isinstance(part, Tensor) else part for n, part in images.items()}
        else:
            images = images.to(device=self.compute.device, dtype=self.compute.dtype)
            if self.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
        with self.compute.autocast():
            output = model(images)
        logits = output[0] if isinstance(output, (tuple, list)) else output
        return logits.float() if self.classes is None else logits.float()[:, self.classes.to(logits.device)]

    def _scores(self, logits: Tensor, probabilities: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Return the likelihood [B, n], and for each metric the scores that rank the classes."""
        if self.tta > 1:
            logits = logits.unflatten(0, (-1, self.tta)).mean(1)
        likelihood = probabilities(logits) if probabilities else logits.softmax(-1)
        if not self.crops:
            return likelihood, [likelihood if probabilities else logits]
        likelihood = self._mean_over_crops(likelihood)
        return likelihood, [likelihood if probabilities else self._marginals(logits, k) for k in self.sizes]

    def _marginals(self, logits: Tensor, k: int) -> Tensor:
        k = k if k < logits.shape[1] else 1  # with every class in the set, any ranking has the label in it
        return self._mean_over_crops(topk_marginals(logits, k, temperature=self.temperature))

    def _mean_over_crops(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.crops, -1)).mean(0)

    def _results(self, nll: MeanNLL, accuracy: list[TopKAccuracy]) -> dict[str, float]:
        results = nll.compute()
        for metric in accuracy:
            # a group that no class is in has no accuracy
            results |= {name: 100 * value for name, value in metric.compute().items() if not math.isnan(value)}
        return results


class LabelSetEvaluator(Evaluator):
    """Metrics of a model of several labels an image; their names are those of :class:`LabelSetMetrics`.

    Args:
        loader, compute, options: of :class:`Evaluator`.
        threshold: the probability from which a class is predicted.
    """

    def __init__(self, loader: Any, compute: Compute, *, threshold: float = 0.5, **options: Any) -> None:
        super().__init__(loader, compute, **options)
        self.threshold = threshold

    @torch.inference_mode()
    def __call__(self, model: nn.Module, criterion: object = None) -> dict[str, float] | None:
        """Return the metrics, or None if stopped."""
        device = self.compute.device
        metric = LabelSetMetrics(self.num_classes, k=self.sizes, threshold=self.threshold, device=device)
        model.eval()
        for logits, target in self._batches(model):
            logits = logits if self.tta < 2 else logits.unflatten(0, (-1, self.tta)).mean(1)
            if len(target):
                metric.update(logits[: len(target)], target)
                for observer in self.observers:
                    observer.update(logits[: len(target)].sigmoid(), target)
                if self.keep is not None:
                    self.keep(logits[: len(target)], target)
        if self.stopped:
            return None
        return {name: value if name == "bce" else 100 * value for name, value in metric.compute().items()}


def temperature_of(config: TrainConfig, criterion: object) -> float:
    """The marginals' temperature: the flag's, else the loss's own, else 1."""
    own = getattr(criterion, "temperature", None)
    if config.marginal_temperature is not None:
        return config.marginal_temperature
    return float(own) if isinstance(own, (int, float)) else 1.0
