"""The head of a model of several labels."""

import torch
from torch import Tensor, nn

LARGEST = 60.0  # the sigmoid is 1 in single precision from 17 on, and exp is finite up to 88


class SigmoidHead(nn.Module):
    """Logits [B, n] and the probability of each class: the sigmoid of logits / temperature.

    It is w / (1 + w) with w the exponential, since onnxruntime's own Sigmoid loses small probabilities on CPUs: 17
    percent at -15, and everything from -18 on.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        x = logits if self.temperature == 1.0 else logits / self.temperature
        odds = torch.exp(x.clamp(max=LARGEST))
        return logits, odds * (1 / (1 + odds))
