"""``--class-parallel``: the classifier's rows spread over the processes, and what cannot run so."""

import copy
from typing import Any, cast

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from torch import Tensor, nn

from topk_registry import registry
from topk_registry.nn.chunked_update.update import ChunkedUpdate
from topk_registry.nn.classifier import find_classifier, replace_classifier
from topk_registry.ops.ksubset.chunked.parallel import layout
from topk_registry.ops.update.rules import rule_of
from topk_registry.registry.options import unbound
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.setup.compute import Compute
from topk_studies.old_trainer.setup.parts import Parts
from topk_studies.old_trainer.setup.rehearsal import Rehearsal, check_value

METHOD = "of_linear"  # of a loss that takes features and the rows of a linear classifier


class ClassRows(nn.Module):
    """This process's rows of a linear classifier, in its place in the model.

    Features pass through: the loss makes scores from them, a chunk of classes at a time.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, sizes: list[int], rank: int) -> None:
        super().__init__()
        self.sizes, self.rank, self.first = sizes, rank, sum(sizes[:rank])
        self.weight = nn.Parameter(self.own(layer.weight), layer.weight.requires_grad)
        bias = layer.bias
        self.register_parameter("bias", None if bias is None else nn.Parameter(self.own(bias), bias.requires_grad))

    @property
    def num_classes(self) -> int:
        return sum(self.sizes)

    def own(self, whole: Tensor) -> Tensor:
        """A copy of this process's part of something that has a row a class [n, ...]."""
        return whole.detach()[self.first : self.first + self.sizes[self.rank]].clone()

    def forward(self, features: Tensor) -> Tensor:
        return features

    def extra_repr(self) -> str:
        return f"{self.sizes[self.rank]} of {self.num_classes} classes"


def class_rows(model: nn.Module) -> ClassRows:
    """The spread classifier of a model, in wrappers or not."""
    return next(module for module in model.modules() if isinstance(module, ClassRows))


def spread_classifier(model: nn.Module, compute: Compute) -> str:
    """Leave this process its rows of the model's classifier; a sentence for the plan of the run.

    Raises:
        TrainError: the model's classifier is not one linear layer.
    """
    classifiers = find_classifier(model)
    if len(classifiers) != 1 or not isinstance(classifiers[0][1], nn.Linear):
        layers = ", ".join(f"{name}: {type(layer).__name__}" for name, layer in classifiers)
        raise TrainError(f"--class-parallel needs a model whose classifier is one Linear, this one has {layers}")
    name, layer = classifiers[0][0], cast(nn.Linear, classifiers[0][1])
    sizes = layout(layer.out_features, compute.world_size)
    replace_classifier(model, lambda old: ClassRows(cast(nn.Linear, old), sizes, compute.rank))
    held = f"{sizes[0]} on each of {len(sizes)} processes" + (f", {sizes[-1]} on the last" * (sizes[-1] < sizes[0]))
    return f"classifier {name}: {layer.out_features} classes, {held}"


def check(config: TrainConfig, parts: Parts) -> None:
    """Refuse settings and parts that a spread classifier cannot serve.

    Raises:
        TrainError: a setting or part is such; the message says why.
    """
    for name, why in (
        ("multi_crop", "averages the probabilities of all classes"),
        ("tta", "averages the scores of all classes"),
        ("normalize_classifier", "makes a classifier of another kind"),
    ):
        if getattr(config, name):
            raise TrainError(
                f"--class-parallel never makes the scores of all classes, --{name.replace('_', '-')} {why}"
            )
    if parts.optimizer is not None:
        raise TrainError("--class-parallel makes new parameters of the classifier: leave the optimizer to the run")
    _check_optimizer(config)


def check_loss(rehearsal: Rehearsal, sample: float | None = None) -> None:
    """Refuse a loss that does not train on the scores of a part of the classes, or on a sample of them.

    Raises:
        TrainError: the message names the losses that do.
    """
    loss, context, criterion = rehearsal.spec, rehearsal.context, rehearsal.trial()
    if not hasattr(criterion, METHOD) or hasattr(criterion, "probabilities"):
        raise TrainError(
            f"{loss} needs the scores of all classes, which --class-parallel never makes; it serves "
            f"{', '.join(_losses())} (cross-entropy is topk_nll with k=1) and any loss with a method {METHOD}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features, weight = torch.randn(2, 1, requires_grad=True), torch.randn(context.num_classes, 1)
        labels = torch.arange(2) % context.num_classes
        soft = torch.full((2, context.num_classes), 1 / context.num_classes)
        try:
            check_value(criterion.of_linear(features, weight, None, soft if context.soft_targets else labels))
            if sample is not None:
                check_value(criterion.of_linear(features, weight, None, labels, sample=sample))
        except Exception as error:
            raise TrainError(f"{loss} does not train with --class-parallel: {error}") from error


def settle_precision(dtype: str, model: nn.Module) -> None:
    """Give the classifier's weight the precision of this name."""
    rows = class_rows(model)
    rows.weight.data = rows.weight.data.to(getattr(torch, dtype))


def chunked_update(
    config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, scaler: Any
) -> tuple[ChunkedUpdate, str]:
    """The update of the spread classifier a chunk at a time; and a sentence for the plan of the run.

    The classifier changes in the backward pass, or where something is done to whole gradients, in the step.

    Raises:
        TrainError: the loss does not hand over the classifier's gradient a chunk at a time.
    """
    assert config.chunked_update is not None
    rows = class_rows(model)
    causes = ["--clip-grad"] * (config.clip_grad is not None and config.clip_mode == "norm")
    causes += ["--grad-accum-steps"] * (config.grad_accum_steps > 1) + ["float16"] * (scaler is not None)
    causes += ["a loss that uses the classifier several times"] * (_uses(criterion, rows.num_classes) > 1)
    update = ChunkedUpdate(
        optimizer,
        rows,
        state=config.chunked_update,
        when="step" if causes else "backward",
        scaler=getattr(scaler, "_scaler", None),
        seed=config.seed,
    )
    where = f"in the step, for the sake of {', '.join(causes)}" if causes else "in the backward pass"
    weight = f", its weight in {config.classifier_dtype}" if config.classifier_dtype else ""
    return update, f"classifier updated {where}, its optimizer's states in {config.chunked_update}{weight}"


def _uses(criterion: Any, n: int) -> int:
    """How often a loss runs backward through a classifier in one pass."""
    layer = nn.Linear(1, n, bias=False)
    trial = ChunkedUpdate(torch.optim.SGD(layer.parameters(), lr=0.1), layer, when="step")
    with torch.random.fork_rng(devices=[]):
        criterion = copy.deepcopy(criterion).cpu()
        criterion.of_linear(torch.ones(2, 1), layer.weight, None, torch.arange(2) % n).sum().backward()
    if layer.weight.grad is not None or not trial.passes:
        raise TrainError(
            f"--chunked-update needs a loss whose {METHOD} calls linear_smooth_topk with the classifier's weight as it "
            f"is, {type(criterion).__name__} makes a gradient of all weights"
        )
    return trial.passes


def _losses() -> list[str]:
    """Registered losses with the method; those that cannot be loaded are left out."""
    names = []
    for name in registry.list_losses():
        try:
            builder = unbound(registry.get_loss_builder(name))
        except Exception:  # a broken plug-in of somebody else
            continue
        if hasattr(builder, METHOD):
            names.append(name)
    return names


def _check_optimizer(config: TrainConfig) -> None:
    """Refuse an optimizer whose step on rows of a matrix is not those rows of its step on the matrix."""
    if config.clip_grad is not None and config.clip_grad <= 0:
        raise TrainError(f"--clip-grad must be above 0, got {config.clip_grad}")
    settings: dict[str, Any] = optimizer_kwargs(cfg=config.replace(lr=0.1, layer_decay=None))

    n, d = 64, 40  # above the least size of a matrix that optimizers factor
    sizes = torch.logspace(-3, 1, n)[:, None]  # rows of one size would hide what is scaled by a norm

    def trained(rows: list[int]) -> Tensor:
        stream = torch.Generator().manual_seed(0)
        parts = [nn.Parameter(part.clone()) for part in (sizes * torch.randn(n, d, generator=stream)).split(rows)]
        optimizer: Any = create_optimizer_v2(nn.ParameterList(parts), **settings, **config.opt_kwargs)
        if config.chunked_update:
            rule_of(optimizer)
        for _ in range(3):
            for part, gradient in zip(parts, (sizes * torch.randn(n, d, generator=stream)).split(rows), strict=True):
                part.grad = gradient.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    with torch.random.fork_rng(devices=[]):
        try:
            same = torch.allclose(trained([n]), trained([n // 3, n - n // 3]), rtol=1e-5, atol=1e-6)
        except Exception as error:
            flag = "--chunked-update" if config.chunked_update else "--class-parallel"
            raise TrainError(f"{flag} cannot use optimizer {config.opt!r}: {error}") from error
    if not same:
        raise TrainError(
            f"optimizer {config.opt!r} looks at a whole matrix, whose rows --class-parallel spreads over processes: "
            "use one that treats each number by itself, such as sgd, adamw, lion or nadamw"
        )
