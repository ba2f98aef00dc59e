"""Evaluation of a model on the batches of a loader.

Classes are ranked by their logits: the outputs of the model, or ``predictive_logits(outputs)`` of the loss. If an image
has several crops, the top-k marginals are averaged over the crops (Berrada et al. 2018). The top-k marginal of a class
is the probability that a random set of k classes contains the class, where a set has a probability proportional to
exp(sum of its logits / temperature).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.task.evaluator import evaluation_sample_limit
from torch import Tensor, nn

from topk_registry.data.selection import LEFT_OUT
from topk_registry.errors import DataError
from topk_registry.functional import topk_marginals
from topk_registry.metrics import ExpectedCalibrationError, LabelSetMetrics, StreamingMetric, TopKAccuracy
from topk_registry.metrics.streaming import ratio
from topk_registry.train.config import MULTILABEL, TrainConfig
from topk_registry.train.data import images_and_targets
from topk_registry.train.model import Compute

LEAST_LIKELIHOOD = math.log(1e-30)  # used instead of log(0) for a label with probability 0
TEMPERATURES = [2 ** (step / 3) for step in range(-24, 31)]  # from 1/256 to 1024
Keep = Callable[[Tensor, Tensor], object]


class Likelihood(StreamingMetric):
    """Negative log-likelihood (NLL) of the labels, as it is (``nll``) and after temperature scaling (``nll_fitted``).

    ``left_out`` is the number of samples without a label, such as unreadable images, if there are any.

    A loss such as a hinge trains no softmax, so the scale of its logits is arbitrary, and so is the NLL at temperature
    1. Therefore the temperature for one half of the images is fitted on the other half. The halves are the images with
    even and with odd positions.
    """

    def __init__(self) -> None:
        losses = torch.zeros(2, len(TEMPERATURES), dtype=torch.float64)
        super().__init__(losses=losses, images=losses[:, 0], left_out=losses[0, 0])
        self.position = 0

    def update(self, scores: Tensor, target: Tensor) -> None:
        self.follow(scores)
        half = torch.arange(self.position, self.position + len(target), device=scores.device) % 2
        self.position += len(target)
        columns = [nn.functional.cross_entropy(scores / t, target, reduction="none") for t in TEMPERATURES]
        losses = torch.stack(columns, 1).clamp(max=-LEAST_LIKELIHOOD).to(self.sums["losses"].dtype)
        self.sums["losses"].index_add_(0, half, losses)
        self.sums["images"].index_add_(0, half, (target != LEFT_OUT).to(losses.dtype))
        self.sums["left_out"] += (target == LEFT_OUT).sum()

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        losses, images = totals["losses"], totals["images"]
        results = {"nll": ratio(losses[:, TEMPERATURES.index(1.0)].sum(), images.sum())}
        if images.all():
            first, second = losses.argmin(1).tolist()
            results["nll_fitted"] = ratio(losses[0, second] + losses[1, first], images.sum())
        return results | left_out(totals)


def left_out(totals: dict[str, Tensor]) -> dict[str, float]:
    return {"left_out": totals["left_out"].item()} if totals["left_out"] else {}


class SingleLabel:
    """Metrics of images with one label: NLL, and top-k accuracies in percent, over images and over classes (macro).

    The arguments are those of :func:`evaluate`.
    """

    def __init__(
        self,
        num_classes: int,
        k: Sequence[int] = (1, 5),
        *,
        device: torch.device | str,
        class_counts: Sequence[int] | None = None,
        crops: int = 0,
        temperature: float = 1.0,
        calibration: bool = False,
    ) -> None:
        self.k, self.crops, self.temperature = list(k), crops, temperature
        self.accuracy = [
            TopKAccuracy(sizes, num_classes=num_classes, class_counts=class_counts, device=device)
            for sizes in ([[size] for size in k] if crops else [self.k])
        ]
        self.likelihood, self.ece = Likelihood(), [ExpectedCalibrationError(device=device)] * calibration

    def update(self, logits: Tensor, target: Tensor) -> Tensor:
        """Update the metrics with a batch. Return the logits [B, n] of the B images with labels ``target`` [B].

        A batch can have more than B images: the other images are copies that give all processes equal batches, and do
        not count. If ``crops`` is set, return instead the logarithms of the class probabilities, averaged over the
        crops of an image.
        """
        b = len(target)
        scores, ranked = logits, [logits]
        if self.crops:
            scores = self._mean(logits.softmax(-1)).log().clamp(min=LEAST_LIKELIHOOD)
            n = logits.shape[1]
            sizes = [k if k < n else 1 for k in self.k]  # for k >= n, the top-k accuracy is 100 % for any ranking
            ranked = [self._mean(topk_marginals(logits, k, temperature=self.temperature)) for k in sizes]
        self.likelihood.update(scores[:b], target)
        for metric, each in zip(self.accuracy, ranked, strict=True):
            metric.update(each[:b], target)
        for metric in self.ece:
            metric.update(scores[:b], target)
        return scores[:b]

    def compute(self) -> dict[str, float]:
        results = self.likelihood.compute()
        for metric in [*self.accuracy, *self.ece]:  # the accuracy of a group of classes without images is NaN
            results |= {name: 100 * value for name, value in metric.compute().items() if not math.isnan(value)}
        return results

    def _mean(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (self.crops, -1)).mean(0)


class MultiLabel(LabelSetMetrics):
    """Metrics of images with several labels: binary cross-entropy, and mAP, F1 and top-k recall in percent."""

    def __init__(self, num_classes: int, k: Sequence[int], *, device: torch.device) -> None:
        super().__init__(num_classes, k=list(k), device=device)
        self.sums["left_out"] = torch.zeros_like(self.sums["seen"])

    def update(self, logits: Tensor, target: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = logits[: len(target)]
        labeled = (target if target.ndim == 1 else target[:, 0]) != LEFT_OUT
        super().update(logits[labeled], target[labeled])
        self.sums["left_out"] += (~labeled).sum()
        return logits

    def ratios(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return super().ratios(totals) | left_out(totals)

    def compute(self) -> dict[str, float]:
        results = super().compute()
        return {name: value if name in ("bce", "left_out") else 100 * value for name, value in results.items()}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Any,
    *,
    num_classes: int,
    k: Sequence[int] = (1, 5),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    predictive_logits: Callable[[Tensor], Tensor] | None = None,
    class_counts: Sequence[int] | None = None,
    crops: int = 0,
    temperature: float = 1.0,
    calibration: bool = False,
    multilabel: bool = False,
    channels_last: bool = False,
    keep: Keep | None = None,
    progress: Callable[[int], bool] = lambda batch: False,
) -> dict[str, float] | None:
    """Return the metrics of a model on the batches of a loader. Accuracies are in percent.

    Args:
        model: model that returns logits [B, n]. This function calls ``model.eval()`` and does not restore the mode.
        loader: yields images [B, ...] and labels [B]. With ``multilabel``, yields k-hot targets [B, n] instead of
            labels.
        num_classes: number of classes n.
        k: values of k for top-k accuracy.
        device: device on which the model runs. Default: device of the parameters of the model.
        dtype: dtype of the images. Default: dtype of the images in the loader.
        autocast: function that returns a context manager for the forward pass.
        predictive_logits: function from outputs of the model to logits whose softmax gives the class probabilities, as
            the method of :class:`topk_registry.ClassificationLoss`. Default: the outputs are these logits. Without
            effect with ``multilabel``.
        class_counts: number of training images per class. If given, the metrics include the accuracies of classes with
            many (above 100), medium (20 to 100) and few (below 20) training images.
        crops: number of crops per image. A batch has the first crops of all images, then the second crops of all images
            in the same order, and so on. 0: a batch has one view of each image.
        temperature: temperature of :func:`topk_registry.topk_marginals`. With ``crops``, classes are ranked by the mean
            of their marginals over the crops.
        calibration: whether to measure the expected calibration error (``ece``), in percent.
        multilabel: whether images have several labels.
        channels_last: whether images are converted to the channels-last memory layout.
        keep: function that is called with logits [B, n] and the targets of each batch. The logits are log-probabilities
            if ``crops`` is given, else logits.
        progress: function that is called with the index of each batch. If the function returns True, evaluation stops.

    Returns:
        Dictionary of metrics, such as ``nll``, ``nll_fitted`` (NLL after temperature scaling, with the temperature for
        each half of the images from the other half), ``top1`` and ``macro_top1``, or ``map`` and ``micro_f1`` with
        ``multilabel``. Samples with the label -100, such as unreadable images of :func:`open_dataset`, do not count. If
        there are any, ``left_out`` is their number. If ``progress`` stopped the evaluation, the result is None.

    Example:
        >>> metrics = evaluate(model, loader, num_classes=100)  # doctest: +SKIP
        >>> metrics["top5"], metrics["macro_top5"]  # doctest: +SKIP
    """
    device = torch.device(device) if device is not None else next(model.parameters()).device
    if multilabel:
        metrics: Any = MultiLabel(num_classes, k, device=device)
    else:
        about: dict[str, Any] = {"class_counts": class_counts, "temperature": temperature, "calibration": calibration}
        metrics = SingleLabel(num_classes, k, device=device, crops=crops, **about)
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    model.eval()
    limit = evaluation_sample_limit(loader)
    for batch, (images, target) in enumerate(readable(loader)):
        if progress(batch):
            return None
        with autocast():
            output = model(images.to(device=device, dtype=dtype or images.dtype, memory_format=memory_format))
        logits = (output[0] if isinstance(output, (tuple, list)) else output).float()
        if predictive_logits is not None and not multilabel:
            logits = predictive_logits(logits)
        target = target.to(device)[: len(target) // max(1, crops)]
        if limit is not None:  # images after the limit repeat other images, so that all processes have equal batches
            target = target[: max(0, limit)]
            limit -= len(target)
        scores = metrics.update(logits, target)
        if keep is not None:
            keep(scores, target)
    return metrics.compute()


def evaluation_options(config: TrainConfig, compute: Compute, criterion: object, counts: Any) -> dict[str, Any]:
    """Return arguments for :func:`evaluate`. ``counts``: number of training images per class, or None."""
    metric = config.metric
    size = "".join(letter for letter in metric.partition("top")[2] if letter.isdecimal())
    temperature = config.marginal_temperature or getattr(criterion, "marginal_temperature", None) or 1.0
    shots = counts is not None and len({(c > 100) + (c >= 20) for c in counts}) > 1
    return {
        "num_classes": config.num_classes or 0,
        "k": sorted({1, 5, *([int(size)] if size else [])}),
        "device": compute.device,
        "dtype": torch.float32,
        "autocast": compute.autocast,
        "predictive_logits": getattr(criterion, "predictive_logits", None),
        "class_counts": counts if shots or metric.startswith(("many", "medium", "few")) else None,
        "crops": config.multi_crop,
        "temperature": temperature,
        "multilabel": config.task == MULTILABEL,
        "channels_last": config.channels_last,
    }


def readable(loader: Any) -> Iterator[tuple[Tensor, Any]]:
    """Yield the images and targets of a loader. Raise a DataError if a batch cannot be read."""
    try:
        for batch in loader:
            yield images_and_targets(batch)
    except (OSError, RuntimeError, SyntaxError, ValueError) as error:
        last = "".join(f"{error}".splitlines()[-1:])  # a message from a worker process begins with a traceback
        raise DataError(f"cannot read the data: {last}") from error
