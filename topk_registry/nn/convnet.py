"""A small network for 32 x 32 images, registered with timm under a name of ours: the built-in job's default."""

from itertools import pairwise
from typing import Any, TypeVar

from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

__all__ = ["TopKConvNet", "topk_convnet"]

OF_WEIGHTS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # what timm hands to every network
Network = TypeVar("Network", bound="TopKConvNet")


def prepared(channels: int, side: int = 32) -> dict[str, Any]:
    """How images are prepared for a network, under timm's names."""
    return {
        "input_size": (channels, side, side),
        "mean": (0.5,) * channels,
        "std": (0.165,) * channels,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }


default_cfgs = generate_default_cfgs({"topk_convnet": prepared(3)})  # timm reads it by this name


class TopKConvNet(nn.Module):
    """Three 3 x 3 convolutions of stride 2, a 4 x 4 map, and a linear classifier, with timm's model interface.

    Larger depths put further convolutions, of stride 1, behind each of the three.

    Args:
        num_classes: number of scores; 0 leaves the features.
        in_chans: channels of the images.
        width: channels of the first convolution; the next have twice and four times as many.
        depth: convolutions of each resolution.
        norm: whether batch norm follows each convolution.
        drop_rate: dropout before the classifier.
    """

    def __init__(
        self,
        num_classes: int = 100,
        in_chans: int = 3,
        *,
        width: int = 32,
        depth: int = 1,
        norm: bool = False,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        channels = [in_chans, width, 2 * width, 4 * width]
        self.features = nn.Sequential()
        for i, (a, b) in enumerate(pairwise(channels)):
            self._add(f"{i}", nn.Conv2d(a, b, 3, 2, 1, bias=not norm), norm)
            for j in range(1, depth):
                self._add(f"{i}_{j}", nn.Conv2d(b, b, 3, 1, 1, bias=not norm), norm)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(drop_rate))
        self.num_features = self.head_hidden_size = 16 * channels[-1]
        self.pretrained_cfg = self.default_cfg = {**prepared(in_chans), "num_classes": num_classes}
        self.reset_classifier(num_classes)

    def _add(self, name: str, convolution: nn.Conv2d, norm: bool) -> None:
        self.features.add_module(f"conv{name}", convolution)
        if norm:
            self.features.add_module(f"norm{name}", nn.BatchNorm2d(convolution.out_channels))
        self.features.add_module(f"act{name}", nn.ReLU())

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def build(network: type[Network], name: str, pretrained: bool, options: dict[str, Any]) -> Network:
    """Make a network from the options that timm hands on, less those of weights, of which there are none."""
    if pretrained:
        raise ValueError(f"{name} has no published weights")
    return network(**{key: value for key, value in options.items() if key not in OF_WEIGHTS})


@register_model
def topk_convnet(pretrained: bool = False, **kwargs: Any) -> TopKConvNet:
    return build(TopKConvNet, "topk_convnet", pretrained, kwargs)
