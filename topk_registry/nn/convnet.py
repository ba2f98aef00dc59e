"""Two small networks for the built-in data sets, registered in timm as ``topk_convnet`` and ``topk_mlp``."""

from itertools import pairwise
from typing import Any, TypeVar

from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

__all__ = ["TopKConvNet", "TopKMLP", "topk_convnet", "topk_mlp"]

WEIGHT_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # timm passes these options to every network
Network = TypeVar("Network", bound="TopKConvNet")


def _preprocessing(channels: int, side: int) -> dict[str, Any]:
    return {
        "input_size": (channels, side, side),
        "mean": (0.5,) * channels,
        "std": (0.165,) * channels,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }


# timm reads the variable ``default_cfgs`` of each module that registers a model
default_cfgs = generate_default_cfgs({"topk_convnet": _preprocessing(3, 32), "topk_mlp": _preprocessing(3, 8)})


class TopKConvNet(nn.Module):
    """Convolutional network for 32 x 32 images. The class has the methods that timm expects of a model.

    The network has three 3 x 3 convolutions of stride 2, average pooling to 4 x 4, and a linear classifier. ReLU
    follows each convolution.

    Args:
        num_classes: number of classes. If 0, the network has no classifier and returns features.
        in_chans: number of channels of the images.
        width: number of output channels of the first convolution. The second convolution has 2 * width output
            channels, and the third convolution has 4 * width.
        norm: whether batch normalization follows each convolution.
        drop_rate: dropout probability before the classifier.
    """

    def __init__(
        self, num_classes: int = 100, in_chans: int = 3, *, width: int = 32, norm: bool = False, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        channels = [in_chans, width, 2 * width, 4 * width]
        self.features = nn.Sequential()
        for a, b in pairwise(channels):
            self.features.append(nn.Conv2d(a, b, 3, 2, 1, bias=not norm))
            if norm:
                self.features.append(nn.BatchNorm2d(b))
            self.features.append(nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(drop_rate))
        self.num_features = self.head_hidden_size = 16 * channels[-1]
        self.pretrained_cfg = self.default_cfg = {**_preprocessing(in_chans, 32), "num_classes": num_classes}
        self.reset_classifier(num_classes)

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


class TopKMLP(TopKConvNet):
    """Multilayer perceptron with all pixels of an image as input.

    This network is for data sets such as ``topk/ambiguous``, which stores each feature vector as a small image.

    Args:
        num_classes, in_chans, drop_rate: as in :class:`TopKConvNet`.
        side: height and width of the images.
        width: number of units of each hidden layer.
        depth: number of hidden layers.
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


def _build(network: type[Network], name: str, pretrained: bool, options: dict[str, Any]) -> Network:
    if pretrained:
        raise ValueError(f"{name} has no pretrained weights")
    return network(**{key: value for key, value in options.items() if key not in WEIGHT_OPTIONS})


@register_model
def topk_convnet(pretrained: bool = False, **kwargs: Any) -> TopKConvNet:
    return _build(TopKConvNet, "topk_convnet", pretrained, kwargs)


@register_model
def topk_mlp(pretrained: bool = False, **kwargs: Any) -> TopKMLP:
    return _build(TopKMLP, "topk_mlp", pretrained, kwargs)
