"""Functions that find and replace the classifier layers of a timm or torchvision model.

A classifier layer computes logits from features. A timm model returns this layer from ``get_classifier()``. For other
models, this module tries the attribute names that torchvision uses. Some models have several classifier layers: for
example, Inception networks have an auxiliary layer, and distilled models can have a layer that learns from a teacher.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = ("fc", "classifier", "head", "heads")
AUXILIARY_HEADS = ("aux_head", "aux1", "aux2", "AuxLogits")

ModelT = TypeVar("ModelT", bound=nn.Module)


class CosineClassifier(nn.Module):
    """A classifier that computes the cosine between the feature vector x and the weight vector w_c of each class c.

    .. math:: s_c = \\mathrm{scale} \\cdot \\langle x / |x|, w_c / |w_c| \\rangle

    s_c is the logit of class c. There is no bias. If the norm of x or w_c is below 1e-6, this vector is not
    divided by its norm. For inputs in half precision, norms are computed in float32 to avoid overflow.

    Args:
        in_features: length d of a feature vector.
        out_features: number of classes n.
        scale: factor of the cosine. Use 1 if the loss has its own option ``scale``, as ``ldam`` and
            ``noised_topk_imbalanced`` have. Use 16 to 64 for cross-entropy.
        learn_scale: If True, the scale is a parameter that training changes, and ``scale`` is the initial value.
        channels_first: If False, the input is [..., d], and the output is [..., n]. If True, the input is [B, d, ...],
            and the output is [B, n, ...], as for a 1 x 1 convolution.

    Example:
        >>> CosineClassifier(512, 100, scale=30.0)(torch.randn(8, 512)).shape
        torch.Size([8, 100])

    Reference: Gidaris, Komodakis 2018, *Dynamic Few-Shot Visual Learning without Forgetting*.
    """

    weight: nn.Parameter
    scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scale: float = 1.0,
        learn_scale: bool = False,
        channels_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale must be above 0, got {scale!r}")
        self.in_features = in_features
        self.out_features = out_features
        self.channels_first = channels_first
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        start = torch.full((), float(scale), device=device, dtype=dtype)
        # parameter and buffer have the same name, so a checkpoint with a learned scale can be loaded with a fixed scale
        if learn_scale:
            self.scale = nn.Parameter(start)
        else:
            self.register_buffer("scale", start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)  # uniform directions on the sphere

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_first:
            x = x.movedim(1, -1)
        cosine = F.linear(_unit(x), _unit(self.weight))
        return (self.scale * cosine).movedim(-1, 1) if self.channels_first else self.scale * cosine

    if TYPE_CHECKING:  # torch annotates the return type as Any

        def __call__(self, x: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        learned = isinstance(self.scale, nn.Parameter)
        return f"in_features={self.in_features}, out_features={self.out_features}, learn_scale={learned}"


def find_classifier(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the classifier layers of a timm or torchvision model as a list of pairs (dotted name, layer).

    The main classifier layer comes first. Each layer is an ``nn.Linear``, ``nn.Conv2d`` or :class:`CosineClassifier`.
    If the model has no classifier layer, the function raises ValueError.

    Example:
        >>> find_classifier(timm.create_model("deit_tiny_distilled_patch16_224"))
        [('head', Linear(...)), ('head_dist', Linear(...))]
    """
    names = {module: name for name, module in model.named_modules()}
    layers = [(names[layer], layer) for head in _heads(model) for layer in _outputs(head, model) if names[layer]]
    if not layers:
        looked = "get_classifier()" if hasattr(model, "get_classifier") else ", ".join(HEADS)
        raise ValueError(
            f"{type(model).__name__} has no classifier: expected a Linear, Conv2d or CosineClassifier in {looked}. "
            "Was the model built with num_classes=0?"
        )
    return list(dict(layers).items())


def num_classes_of(model: nn.Module) -> int:
    """Return the number of outputs of the main classifier layer of a timm or torchvision model."""
    return _out_features(find_classifier(model)[0][1])


def replace_classifier(model: ModelT, factory: Callable[[nn.Module], nn.Module]) -> ModelT:
    """Replace every classifier layer of a timm or torchvision model in place, and return the model.

    ``factory`` is a function that takes the old layer and returns the new layer.

    Example:
        >>> replace_classifier(torchvision.models.resnet18(), lambda old: nn.Linear(old.in_features, 10))
    """
    new = {old: factory(old) for _, old in find_classifier(model)}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new[module])
    return model


def normalize_classifier(model: ModelT, *, scale: float = 1.0, learn_scale: bool = False) -> ModelT:
    """Replace every classifier layer of a timm or torchvision model with a :class:`CosineClassifier`.

    The new layer has the weight of the old layer, but no bias. This function changes the model in place and returns the
    model. If the old layer is a 1 x 1 convolution (as in timm's dla and torchvision's squeezenet), the new layer
    computes one cosine per class at each position of the feature map. Any other convolution raises ValueError. The
    arguments ``scale`` and ``learn_scale`` are as in :class:`CosineClassifier`.

    Example:
        >>> model = normalize_classifier(timm.create_model("resnet18", num_classes=100), scale=30.0, learn_scale=True)
    """

    def cosine(old: nn.Module) -> CosineClassifier:
        weight = _weight_matrix(old)
        new = CosineClassifier(
            weight.shape[1],
            weight.shape[0],
            scale=scale,
            learn_scale=learn_scale,
            channels_first=isinstance(old, nn.Conv2d) or getattr(old, "channels_first", False),
            device=weight.device,
            dtype=weight.dtype,
        )
        new.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        return new.train(old.training)

    return replace_classifier(model, cosine)


def _heads(model: nn.Module) -> list[nn.Module]:
    get_classifier = getattr(model, "get_classifier", None)
    if get_classifier is not None:
        head = get_classifier()
    else:
        head = next((getattr(model, name) for name in HEADS if hasattr(model, name)), None)
        if head is None and isinstance(model, nn.Sequential):
            head = [model]
    heads = [*head] if isinstance(head, (tuple, list, nn.ModuleList)) else [head]
    heads += [getattr(model, name, None) for name in AUXILIARY_HEADS]
    return [each for each in heads if isinstance(each, nn.Module)]


def _outputs(head: nn.Module, model: nn.Module) -> list[nn.Module]:
    kinds = (nn.Linear, nn.Conv2d, CosineClassifier)
    layers: list[nn.Module] = [module for module in head.modules() if isinstance(module, kinds)]
    # The last layer of a head is a classifier. Distilled models, such as timm's repvit, have further classifiers in the
    # same head: the layers whose number of outputs is the number of classes.
    n = getattr(model, "num_classes", None)
    return [layer for layer in layers[:-1] if isinstance(n, int) and _out_features(layer) == n] + layers[-1:]


def _out_features(layer: nn.Module) -> int:
    return int(getattr(layer, "out_channels" if isinstance(layer, nn.Conv2d) else "out_features"))


def _weight_matrix(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    if not isinstance(layer, nn.Conv2d):
        return layer.weight
    if layer.kernel_size != (1, 1) or layer.groups != 1:
        raise ValueError(f"only a 1 x 1 convolution without groups can be normalized, got {layer}")
    return layer.weight.flatten(1)


def _unit(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        wide = x if x.dtype == torch.float64 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # a vector close to 0 is not divided by its norm, because its gradient would be multiplied by 1 / |x|
        return (wide / torch.where(norm < 1e-6, 1.0, norm)).to(x.dtype)
