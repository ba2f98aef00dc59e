"""Noised top-k losses: the calibrated top-k hinge, smoothed by Gaussian noise on its threshold.

A score that beats the (k+1)-th largest is in the top k, so (1 + s_[k+1] - s_y)_+ is a hinge whose minimiser ranks the k
likeliest classes first. Its gradient touches two scores only, too few for a deep net. Perturbing the scores spreads it
over all the classes that could be the (k+1)-th.

The noise comes from torch's global generator, as dropout's does: seed it with ``torch.manual_seed``.

Reference:
    Garcin, Servajean, Joly, Salmon. Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced
    classification. ICML 2022.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from topk_plugins._margins import relative_gaps
from topk_registry import CommonOptions, TopKLoss
from topk_registry.functional import perturbed_hinge, perturbed_topk
from topk_registry.losses.targets import Masses
from topk_registry.options import integer, number


class NoisedTopK(TopKLoss):
    """The balanced noised top-k loss.

        L(s, y) = (1 + E_Z[(s + eps Z)_[k+1]] - s_y)_+

    Use when:
        K answers are shown, and one loss should be tuned by a scale in units of scores, ``epsilon``.

    Avoid when:
        A step must be cheap or repeat without a seed: it draws noise for every row. A very small ``epsilon`` does not
        train, as the gradient reaches few scores.

    Args:
        k: size of the set, 1 <= k <= n - 1.
        epsilon: standard deviation of the noise, in the unit of the scores; 0 is the calibrated hinge.
        num_samples: how many draws estimate the expectation and its gradient.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> import torch
        >>> NoisedTopK(k=1, epsilon=0.0)(torch.tensor([[2.0, 1.5, -3.0]]), torch.tensor([0]))
        tensor(0.5000)
    """

    option_ranges: ClassVar = {"epsilon": "[0, inf)", "num_samples": "[1, inf)"}
    tuning_grid: ClassVar = {"epsilon": (0.1, 0.3, 1.0, 3.0)}

    scale: float = 1.0

    def __init__(
        self,
        k: int = 5,
        *,
        epsilon: float = 1.0,
        num_samples: int = 5,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, **common)
        self.epsilon = number(epsilon, "epsilon", at_least=0)
        self.num_samples = integer(num_samples, "num_samples", at_least=1)

    def fused(self, logits: Tensor, masses: Masses) -> Tensor:
        """Return the rows' losses [B], or their sum [], by the perturbed operator."""
        return perturbed_hinge(
            logits, masses, k=self.k + 1, epsilon=self.epsilon, num_samples=self.num_samples, alpha=self.margin(logits),
            scale=self.scale, sums=self.reduction != "none" and logits.shape[0] > 0,
        )  # fmt: skip

    def per_class(self, logits: Tensor) -> Tensor:
        threshold = perturbed_topk(logits, self.k + 1, epsilon=self.epsilon, num_samples=self.num_samples)
        gap = torch.as_tensor(self.margin(logits)).to(logits)
        return self.scale * (gap + threshold[:, None] - logits).clamp(min=0)

    def margin(self, logits: Tensor) -> float | Tensor:
        """Return how far the score of a class, as the label, must be above the threshold: one for all, or each [n]."""
        return 1.0

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon:g}, num_samples={self.num_samples}, {super().extra_repr()}"


class NoisedTopKImbalanced(NoisedTopK):
    """The imbalanced noised top-k loss: rare classes get larger required gaps.

        L(s, y) = scale * (m_y + E_Z[(s + eps Z)_[k+1]] - s_y)_+,   m_c = max_margin * (min_j n_j / n_c)^(1/4)

    It is meant for scores in [-1, 1], cosines of normalised features and weights; ``scale`` brings their gradients to
    the usual size. The noise and the gaps m_c, the paper's margins, are in the unit of the cosines. The paper takes an
    epsilon of 0.01. A short training then leaves some frequent classes among the k best of every image: with so little
    noise no gradient reaches them there.

    Use when:
        K answers are shown, a tail is long and mean accuracy over classes counts; with a cosine classifier
        (``--normalize-classifier``).

    Avoid when:
        Classes are balanced (``noised_topk``), or the classifier is a plain linear one, whose scores have no fixed
        scale for its gaps.

    Args:
        k: size of the set, 1 <= k <= n - 1.
        class_counts: how many training samples each class has [n]; the trainer passes it. A class without any gets the
            gap of the rarest class that has some.
        epsilon: standard deviation of the noise, in the unit of the scores.
        num_samples: how many draws estimate the expectation and its gradient.
        max_margin: the required gap of the rarest class.
        scale: factor of the loss.
        common: weight, reduction, label_smoothing, ignore_index, as in ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> import torch
        >>> loss = NoisedTopKImbalanced(k=1, class_counts=[16, 1, 1], epsilon=0.0, max_margin=0.5, scale=10)
        >>> loss(torch.tensor([[0.5, 0.75, -0.5]]), torch.tensor([0]))
        tensor(2.5000)
    """

    option_ranges: ClassVar = {"max_margin": "[0, inf)", "scale": "(0, inf)"}
    fixed_options: ClassVar = ("class_counts",)
    tuning_grid: ClassVar = {"epsilon": (0.01, 0.05), "max_margin": (0.2, 0.4)}

    relative_gaps: Tensor

    def __init__(
        self,
        k: int = 5,
        *,
        class_counts: Tensor | Sequence[float],
        epsilon: float = 0.05,
        num_samples: int = 5,
        max_margin: float = 0.3,
        scale: float = 50.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(k, epsilon=epsilon, num_samples=num_samples, **common)
        self.scale, self.max_margin = number(scale, "scale", above=0), number(max_margin, "max_margin", at_least=0)
        # an option, not a state: a checkpoint must load whatever the counts are
        self.register_buffer("relative_gaps", relative_gaps(class_counts), persistent=False)

    def margin(self, logits: Tensor) -> Tensor:
        gaps = self.relative_gaps
        if gaps.numel() != logits.shape[1]:
            raise ValueError(f"class_counts has {gaps.numel()} entries, logits have {logits.shape[1]} classes")
        return self.max_margin * gaps

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, max_margin={self.max_margin:g}, {super().extra_repr()}"
