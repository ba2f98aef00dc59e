"""A small network for 32 x 32 images, registered with timm under a name of ours: the built-in job's default."""

from itertools import pairwise
from typing import Any

from timm.models import register_model
from torch import Tensor, nn

__all__ = ["TopKConvNet", "topk_convnet"]


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
        **ignored: Any,
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
        self.pretrained_cfg = self.default_cfg = {
            "input_size": (in_chans, 32, 32),
            "mean": (0.5,) * in_chans,
            "std": (0.165,) * in_chans,
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "num_classes": num_classes,
        }
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


@register_model
def topk_convnet(pretrained: bool = False, **kwargs: Any) -> TopKConvNet:
    if pretrained:
        raise ValueError("topk_convnet has no published weights")
    return TopKConvNet(**kwargs)
