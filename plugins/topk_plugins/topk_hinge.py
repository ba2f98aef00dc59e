"""Top-k hinge losses: the label's logit must exceed the k-th largest logit of the other classes by a margin.

A top-k error occurs if the k-th largest logit of the other classes exceeds the label's logit. Each loss of this module
is a hinge loss that compares the label's logit with the k-th largest logit or with a similar quantity. Only
``TopKHingeCalibrated`` is consistent with the top-k error (Yang, Koyejo 2020): a classifier with the lowest expected
loss has the lowest top-k error too.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_plugins._rows import at_labels, nan_if_invalid
from topk_registry import CommonOptions, TopKLoss


class TopKSVM(TopKLoss):
    """Top-k multiclass SVM: the label's logit must exceed the k-th largest logit of the other classes by k alpha.

        L(s, y) = max(0, alpha_y + (r - s_y) / k)

    Here s are the n logits of one sample, y is the label, alpha_y is the required margin, and r is the k-th largest
    logit of the other classes. This loss is the limit of ``smooth_topk_svm`` as tau goes to 0.

    - Use when: You want a baseline for ``smooth_topk_svm``, or you train a linear model.
    - Avoid when: You train a deep network from random weights. The gradient is nonzero for only two logits per sample,
      so accuracy stays at the level of random guesses. Use ``smooth_topk_svm``.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 72.7 and 58.6 (74.5 and 60.5), top-2 on Fashion-MNIST 94.8 and 92.9 (94.6 and
      91.6), top-3 on CIFAR-10N 92.1 and 90.0 (92.4 and 89.2).

    Args:
        k: number of classes that should include the label, 1 <= k < n.
        alpha: required margin, at least 0: one number, or one number per class [n]. The loss is 0 if the label's logit
            exceeds the k-th largest logit of the other classes by at least k alpha.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKSVM(k=1)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([0]))
        tensor(0.5000)

    Reference: Lapin, Hein, Schiele. Top-k Multiclass SVM. NIPS 2015. The factor 1/k is as in Berrada, Zisserman, Kumar.
    Smooth Loss Functions for Deep Top-k Classification. ICLR 2018, equation 3.
    """

    alpha: Tensor

    def __init__(
        self,
        k: int = 5,
        *,
        alpha: Annotated[float | Tensor | Sequence[float], "[0, inf)"] = 1.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self.set_option("alpha", alpha)

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        alpha = self.alpha.to(logits)
        lead = _lead_of_rival(logits, labels, self.k) / self.k
        return (lead + (alpha[labels] if alpha.ndim else alpha)).clamp(min=0)

    def per_class(self, logits: Tensor) -> Tensor:
        return (_leads_of_rivals(logits, self.k) / self.k + self.alpha.to(logits)).clamp(min=0)


class TopKHinge(TopKLoss):
    """Top-k hinge: the label's logit must exceed the k-th largest logit of the other classes by 1.

        L(s, y) = max(0, 1 + r - s_y)

    Here s are the n logits of one sample, y is the label, and r is the k-th largest logit of the other classes.

    - Use when: You want a baseline, or you start from trained weights.
    - Avoid when: You train a deep network from random weights. The gradient is nonzero for only two logits per sample,
      so training does not start. Use ``smooth_topk_svm``.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 71.9 and 57.3 (74.5 and 60.5), top-2 on Fashion-MNIST 94.8 and 92.1 (94.6 and
      91.6), top-3 on CIFAR-10N 91.8 and 89.2 (92.4 and 89.2).

    Args:
        k: number of classes that should include the label, 1 <= k < n.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHinge(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.5000)

    Reference: Lapin, Hein, Schiele. Top-k Multiclass SVM. NIPS 2015.
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (1 + _lead_of_rival(logits, labels, self.k)).clamp(min=0)

    def per_class(self, logits: Tensor) -> Tensor:
        return (1 + _leads_of_rivals(logits, self.k)).clamp(min=0)


class TopKHingeConvex(TopKLoss):
    """Convex top-k hinge: a hinge on the mean of the k largest logits, after 1 is added to all but the label's logit.

        L(s, y) = max(0, mean_k(s + 1 - onehot_y) - s_y)

    Here s are the n logits of one sample, y is the label, and onehot_y is the one-hot vector of the label. So 1 is
    added to the logits of all classes except the label. Then mean_k is the mean of the k largest entries.

    - Use when: You want a convex top-k loss for a linear model, or a baseline.
    - Avoid when: You train a deep network from random weights, because the gradient is nonzero for only a few logits
      per sample. Use ``smooth_topk_svm``.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 75.0 and 57.5 (74.5 and 60.5), top-2 on Fashion-MNIST 94.9 and 91.1 (94.6 and
      91.6), top-3 on CIFAR-10N 92.4 and 88.7 (92.4 and 89.2).

    Args:
        k: number of classes that should include the label, 1 <= k < n.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeConvex(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([2]))
        tensor(2.7500)

    Reference: Lapin, Hein, Schiele. Top-k Multiclass SVM. NIPS 2015. The paper calls this loss alpha.
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        scores = _rivals_and_label(logits, labels, self.k)
        return nan_if_invalid(self._hinge(scores[:, :-2].sum(1), scores[:, -2], scores[:, -1]), logits)

    def per_class(self, logits: Tensor) -> Tensor:
        top, index = logits.topk(self.k + 1, dim=1)
        # the rivals of one of the k highest classes are the other k - 1 of them, and the (k+1)-th highest class
        best = self._hinge(top[:, : self.k].sum(1, True) - top[:, : self.k], top[:, self.k :], top[:, : self.k])
        table = self._hinge(top[:, : self.k - 1].sum(1, True), top[:, self.k - 1 : self.k], logits)
        return nan_if_invalid(table.scatter(1, index[:, : self.k], best), logits)

    def _hinge(self, better: Tensor, last: Tensor, score: Tensor) -> Tensor:
        # better is the sum of the k - 1 highest logits of the other classes, last is the next logit
        lead = (better + self.k - 1) / self.k - score
        return lead.add(torch.maximum(last + 1, score), alpha=1 / self.k).clamp(min=0)


class TopKHingeCalibrated(TopKLoss):
    """Calibrated top-k hinge: the label's logit must exceed the (k+1)-th largest of all logits by 1.

        L(s, y) = max(0, 1 + r - s_y)

    Here s are the n logits of one sample, y is the label, and r is the (k+1)-th largest logit of all classes, label
    included. The loss is calibrated: the logits with the lowest expected loss rank the k most probable classes first.

    - Use when: You want a calibrated hinge for a linear model, or you start from trained weights.
    - Avoid when: You train a deep network from random weights, because the gradient is nonzero for only two logits per
      sample. Use ``noised_topk``, a smoothed version of this loss.
    - Evidence: In this project's study on pictures, accuracy in % with clean and with noisy labels, and in parentheses
      with cross-entropy: top-5 on icons 71.7 and 57.1 (74.5 and 60.5), top-2 on Fashion-MNIST 94.5 and 92.5 (94.6 and
      91.6), top-3 on CIFAR-10N 91.5 and 89.2 (92.4 and 89.2).

    Args:
        k: number of classes that should include the label, 1 <= k < n.
        common: the options weight, reduction, label_smoothing and ignore_index of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> TopKHingeCalibrated(k=2)(torch.tensor([[2.0, 1.5, 0.0]]), torch.tensor([1]))
        tensor(0.)

    Reference: Yang, Koyejo. On the Consistency of Top-k Surrogate Losses. ICML 2020.
    """

    def per_label(self, logits: Tensor, labels: Tensor) -> Tensor:
        threshold = logits.topk(self.k + 1, dim=1).values[:, -1]
        return nan_if_invalid((1 + threshold - at_labels(logits, labels)).clamp(min=0), logits)

    def per_class(self, logits: Tensor) -> Tensor:
        threshold = logits.topk(self.k + 1, dim=1).values[:, -1:]
        return nan_if_invalid((1 + threshold - logits).clamp(min=0), logits)


def _leads_of_rivals(s: Tensor, k: int) -> Tensor:
    # The k-th largest logit of the other classes minus the logit of the class, for each class [B, n]. For the k highest
    # classes, this rival has the (k+1)-th largest logit. torch.topk breaks ties: the gradient reaches only one class.
    top, index = s.topk(k + 1, dim=1)
    leads = (top[:, k - 1 : k] - s).scatter(1, index[:, :k], top[:, k:] - top[:, :k])
    return nan_if_invalid(leads, s)


def _lead_of_rival(s: Tensor, labels: Tensor, k: int) -> Tensor:
    # the k-th largest logit of the other classes minus the label's logit [B]
    scores = _rivals_and_label(s, labels, k)
    return nan_if_invalid(scores[:, k - 1] - scores[:, k], s)


def _rivals_and_label(s: Tensor, labels: Tensor, k: int) -> Tensor:
    # The k largest logits of the other classes, and then the label's logit [B, k + 1]. One gather reads all of them, so
    # that autograd allocates only one gradient of the size of s.
    index = s.detach().topk(k + 1, dim=1).indices
    after_label = (index[:, :k] == labels[:, None]).cumsum(1) > 0
    rivals = torch.where(after_label, index[:, 1:], index[:, :k])
    return s.gather(1, torch.cat([rivals, labels[:, None]], 1))
