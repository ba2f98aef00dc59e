"""Checkpoints as timm's scripts, torchvision's scripts and ours write them, read with ``weights_only``."""

import argparse
import hashlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topk_export.conversion.convert import plain
from topk_export.errors import ExportError

PICKLE = b"\x80"  # the first byte of every pickle since protocol 2
TORN = b"PK"  # the first bytes of a zip file, here of one that lost its end


@dataclass(frozen=True)
class Checkpoint:
    """Weights, and what is recorded of the run they come from."""

    path: Path
    state: dict[str, Any]
    arch: str | None
    args: dict[str, Any]
    sha256: str


def read(path: Path, *, use_ema: bool) -> Checkpoint:
    """Read a checkpoint; the arguments of its run come from inside it, or else from ``args.yaml`` beside it."""
    content = _load(path)
    arch = content.get("arch")
    args = _embedded_args(content) or _read_args(path.parent)
    return Checkpoint(path, _state_dict(content, use_ema), arch if isinstance(arch, str) else None, args, _sha256(path))


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        _check_kind(path)
        # timm's train.py keeps its arguments as a namespace
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols here, and raises what matters
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ExportError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        why = f"a {found[1]}, which runs code when it is read; save state_dict() instead" if found else "no weights"
        raise ExportError(f"{path} holds {why} (checkpoints are read with weights_only)") from error
    except Exception as error:  # zip, pickle and safetensors errors share no base class
        raise ExportError(f"{path} is corrupt or no checkpoint: {plain(error)}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} holds a {type(content).__name__}, expected a dictionary of weights")
    return content


def _check_kind(path: Path) -> None:
    """Refuse files of other kinds before torch looks at them: its errors speak of trust, at length."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
        if "constants.pkl" in names:
            raise ExportError(f"{path} is a TorchScript archive; export the checkpoint that it was made from")
        if "data.pkl" in names:
            return
    else:
        with path.open("rb") as file:
            if file.read(2).startswith((PICKLE, TORN)):
                return
    raise ExportError(f"{path} is no checkpoint: expected a file that torch.save or safetensors wrote")


def _embedded_args(content: Mapping[str, Any]) -> dict[str, Any]:
    args = content.get("args")
    if isinstance(args, argparse.Namespace):
        return vars(args)
    return dict(args) if isinstance(args, Mapping) else {}


def _read_args(folder: Path) -> dict[str, Any]:
    import yaml

    path = folder / "args.yaml"
    if not path.is_file():
        return {}
    try:
        args = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from error
    if not isinstance(args, dict):
        raise ExportError(f"{path} does not hold a training run's arguments")
    return args


def _state_dict(content: dict[str, Any], use_ema: bool) -> dict[str, Any]:
    from timm.models import clean_state_dict

    keys = ("state_dict_ema", "model_ema") if use_ema else ()
    nested = (content.get(key) for key in (*keys, "state_dict", "model"))
    weights = next((state for state in nested if isinstance(state, dict)), content)
    # evaluation needs neither the counter of torchvision's averaging nor the batch norms of augmented views
    return {k: v for k, v in clean_state_dict(weights).items() if k != "n_averaged" and ".aux_bn." not in k}


def fill(model: nn.Module, checkpoint: Checkpoint, name: str) -> None:
    """Load the weights into the model; if they do not fit, raise one line that names the differences."""
    state = checkpoint.state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        own = model.state_dict()
        missing, extra = [key for key in own if key not in state], [key for key in state if key not in own]
        shapes = [
            f"{key} is {list(state[key].shape)}, expected {list(own[key].shape)}"
            for key in own
            if key in state and getattr(state[key], "shape", None) is not None and state[key].shape != own[key].shape
        ]
        details = "; ".join(
            f"{what}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
            for what, keys in (("missing", missing), ("unknown", extra), ("of another shape", shapes))
            if keys
        )
        raise ExportError(f"{checkpoint.path} is not a checkpoint of {name}: {details or error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
