"""Train the classifier of a model anew on frozen features (Kang et al. 2020, classifier re-training)."""

import os
from pickle import UnpicklingError

from timm.models import load_state_dict
from torch import nn

from topk_registry.nn.classifier import find_classifier
from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.folders.images import listed


def check_head(config: TrainConfig) -> None:
    """Raise a TrainError where the checkpoint of ``--retrain-head`` is not there, and the run does not go on anyway."""
    if _reads(config) and not os.path.isfile(config.retrain_head):
        raise TrainError(f"--retrain-head {config.retrain_head}: there is no such checkpoint")


def freeze_features(config: TrainConfig, model: nn.Module, *, own: bool) -> str:
    """Load all but the classifier, and freeze it; return a sentence for the plan.

    The classifier starts as the model was built. A caller's own model may be trained already: its classifier is
    initialised again.

    Args:
        config: the settings; with a checkpoint to resume from, that one brings the weights.
        model: changed in place.
        own: whether it is a caller's own.

    Raises:
        TrainError: the checkpoint is not of this model, or the model's classifier is not found.
    """
    try:
        head = find_classifier(model)
    except ValueError as error:
        raise TrainError(f"--retrain-head: {error}") from error
    if _reads(config):
        _load(config.retrain_head, model, tuple(f"{name}." for name, _ in head))
    model.requires_grad_(False)
    for _, layer in head:
        if own:
            _reset(layer)
        layer.requires_grad_(True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    names = " and ".join(name for name, _ in head)
    return (
        f"--retrain-head {config.retrain_head}: {names} is trained, {trained} of {whole} parameters; all else is "
        "frozen and runs as in evaluation"
    )


def _reads(config: TrainConfig) -> bool:
    return bool(config.retrain_head) and config.resume in ("", "auto")


def _load(path: str, model: nn.Module, head: tuple[str, ...]) -> None:
    """Load a checkpoint's weights, the moving average where there is one, without those of the classifier."""
    try:
        saved = {name: value for name, value in load_state_dict(path).items() if not name.startswith(head)}
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise TrainError(f"--retrain-head {path}: {error}") from error
    missing = [name for name in missing if not name.startswith(head)]
    if missing or unexpected:
        raise TrainError(
            f"--retrain-head {path} is of another model: missing {listed(missing) or 'none'}, unexpected "
            f"{listed(unexpected) or 'none'}; give the --model that it was trained with"
        )


def _reset(layer: nn.Module) -> None:
    reset = getattr(layer, "reset_parameters", None)
    if reset is None:
        raise TrainError(f"--retrain-head: {type(layer).__name__} has no reset_parameters() to begin anew with")
    reset()
