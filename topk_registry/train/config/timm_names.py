"""timm's names of settings that this trainer reads in another way, or refuses."""

from collections.abc import Mapping
from typing import Any

from topk_registry.train.errors import ConfigError

# Settings of modes that timm's own script has and this trainer has not, with timm's defaults: a command line or an
# args.yaml of timm's is taken, and any other value is refused.
ELSEWHERE: dict[str, Any] = {
    **dict.fromkeys(("naflex_loader", "naflex_patchify_channels_first", "torchscript"), False),
    **{name: [] for name in ("naflex_patch_sizes", "naflex_patch_size_probs")},
    **{name: [] for name in ("train_img_sizes", "train_batch_sizes", "train_size_probs")},
    **dict.fromkeys(("distill_loss_weight", "task_loss_weight"), None),
    **dict.fromkeys(("kd_model_name", "kd_student_feature_dim", "kd_teacher_feature_dim"), None),
    "fuser": "",
    "naflex_train_seq_lens": [128, 256, 576, 784, 1024],
    "naflex_max_seq_len": 576,
    "naflex_loss_scale": "linear",
    "train_size_schedule": "constant",
    "train_size_schedule_spread": 0.65,
    "train_size_random_mix": 0.1,
    "variable_batch_loss_scale": "none",
    "kd_distill_type": "logit",
    "kd_loss_type": "kl",
    "kd_temperature": 4.0,
    "kd_token_distill_type": "soft",
}

# timm's ways to name a loss from before --loss, and the loss that each belongs to
LEGACY = {"jsd_loss": "jsd", "bce_loss": "bce", "bce_sum": "bce", "bce_target_thresh": "bce", "bce_pos_weight": "bce"}

# names in an args.yaml that are no settings
NOT_SETTINGS = {"loss_record", "corrections", "class_weight_file", "config", "train_script"}


def from_timm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under this trainer's names alone.

    Raises:
        ConfigError: one is for timm's own script, or for another loss than the one that is named.
    """
    settings = {name: value for name, value in settings.items() if name not in NOT_SETTINGS}
    for name, default in ELSEWHERE.items():
        if (settings.pop(name, None) or default or None) != (default or None):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for timm's own training script: run that, with any registered loss, by "
                "--train-script PATH"
            )
    data = settings.pop("data", None)
    if data and not settings.get("data_dir"):
        settings["data_dir"] = data
    weight = settings.pop("loss_class_weight", None)
    if weight and not settings.get("class_weight"):
        settings["class_weight"] = weight
    _name_loss(settings)
    return settings


def _name_loss(settings: dict[str, Any]) -> None:
    """Turn timm's older settings into ``loss`` and ``loss_opt``."""
    legacy = {name: settings.pop(name, None) for name in LEGACY}
    given = {name: value for name, value in legacy.items() if value not in (None, False)}
    named = "jsd" if "jsd_loss" in given else "bce" if "bce_loss" in given else "ce"
    loss = settings["loss"] = settings.get("loss") or named
    for name in given:
        if LEGACY[name] != loss:
            raise ConfigError(f"--{name.replace('_', '-')} is for --loss {LEGACY[name]}, and the loss is {loss}")
    options = {name: given[name] for name in ("bce_sum", "bce_target_thresh") if name in given}
    if "bce_pos_weight" in given:
        options["pos_weight"] = given["bce_pos_weight"]
    if loss == "jsd":
        options["jsd_splits"] = settings.get("aug_splits", 0)
    settings["loss_opt"] = {**options, **(settings.get("loss_opt") or {})}
