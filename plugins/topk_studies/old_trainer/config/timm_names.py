"""timm's names of settings that this trainer reads in another way, or refuses."""

from collections.abc import Mapping
from typing import Any

from topk_registry.train.errors import ConfigError
from topk_studies.old_trainer.config.tasks import MULTILABEL

# Settings of modes that timm's own script has and this trainer has not, with timm's defaults: a command line or an
# args.yaml of timm's is taken, and any other value is refused.
ELSEWHERE: dict[str, Any] = {
    **dict.fromkeys(("naflex_loader", "naflex_patchify_channels_first", "torchscript", "model_ema_force_fp32"), False),
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

# options of timm's losses that timm has flags for, with timm's defaults; a name begins with that of its loss
OPTIONS: dict[str, float | str | None] = {
    "asl_gamma_pos": 1.0,
    "asl_gamma_neg": 4.0,
    "asl_clip": 0.05,
    "asl_reduction": "batchmean",
    "poly_epsilon": 2.0,
    "poly_gamma": 0.0,
    "poly_alpha": None,
    "twoway_tp": 4.0,
    "twoway_tn": 1.0,
    "db_neg_scale": 2.0,
    "db_init_bias": 0.05,
    "db_focal_gamma": 2.0,
}

# names in an args.yaml that are no settings
NOT_SETTINGS = {
    *("loss_record", "corrections", "config", "train_script"),
    *("class_weight_file", "loss_pos_weight_file", "class_stats_file", "label_files"),
}


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
    if settings.pop("persistent_workers", True) is False:
        settings["no_persistent_workers"] = True
    _name_loss(settings)
    return settings


def _name_loss(settings: dict[str, Any]) -> None:
    """Turn timm's older settings into ``loss`` and ``loss_opt``."""
    legacy = {name: settings.pop(name, None) for name in LEGACY}
    given = {name: value for name, value in legacy.items() if value not in (None, False)}
    usual = "bce" if "bce_loss" in given or settings.get("task") == MULTILABEL else "ce"
    loss = settings["loss"] = settings.get("loss") or ("jsd" if "jsd_loss" in given else usual)
    own = {name: value for name, usual in OPTIONS.items() if (value := settings.pop(name, None)) not in (None, usual)}
    for name in (*given, *own):
        owner = LEGACY.get(name) or name.partition("_")[0]
        if owner != loss:
            raise ConfigError(f"--{name.replace('_', '-')} is for --loss {owner}, and the loss is {loss}")
    options = own | {name: given[name] for name in ("bce_sum", "bce_target_thresh") if name in given}
    if "bce_pos_weight" in given:
        options["pos_weight"] = given["bce_pos_weight"]
    if loss == "jsd":
        options["jsd_splits"] = settings.get("aug_splits", 0)
    settings["loss_opt"] = {**options, **(settings.get("loss_opt") or {})}
