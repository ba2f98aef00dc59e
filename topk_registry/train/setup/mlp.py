"""A small perceptron for features stored as pixels (``topk/ambiguous``), registered with timm as ``topk_mlp``."""

from itertools import pairwise
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from topk_registry.train.setup.convnet import TopKConvNet, build, prepared

__all__ = ["TopKMLP", "topk_mlp"]

default_cfgs = generate_default_cfgs({"topk_mlp": prepared(3, 8)})  # timm reads it by this name


class TopKMLP(TopKConvNet):
    """Hidden layers over all pixels, and a linear classifier, with timm's model interface.

    Args:
        num_classes: number of scores; 0 leaves the features.
        in_chans: channels of the images.
        side: height and width of the images.
        width: units of each hidden layer.
        depth: number of hidden layers.
        drop_rate: dropout before the classifier.
    """

    def __init__(
        self,
        num_classes: int = 100,
        in_chans: int = 3,
        *,
        side: int = 8,
        width: int = 256,
        depth: int = 2,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(num_classes, in_chans)
        sizes = [in_chans * side * side] + depth * [width]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.features = nn.Sequential(nn.Flatten(), *layers)
        self.pool = nn.Sequential(nn.Dropout(drop_rate))
        self.num_features = self.head_hidden_size = width
        self.default_cfg["input_size"] = (in_chans, side, side)
        self.reset_classifier(num_classes)


@register_model
def topk_mlp(pretrained: bool = False, **kwargs: Any) -> TopKMLP:
    return build(TopKMLP, "topk_mlp", pretrained, kwargs)
