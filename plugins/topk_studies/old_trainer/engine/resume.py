"""Find the checkpoint to go on from, and the command that goes on."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import yaml
from timm.utils.checkpoint_saver import load_checkpoint_metadata

from topk_registry.train.errors import TrainError
from topk_studies.old_trainer.config.config import TrainConfig
from topk_studies.old_trainer.engine.state import LAST
from topk_studies.old_trainer.setup.datasets import file_digests

RECOVERY = "recovery-*.pth.tar"
RESULTS = ("*.pth.tar", "summary.csv", "curves.svg")  # what a run leaves in its folder and another would mix with
OUTPUT = Path("output", "train")

# Settings in which two parts of one run may differ: how long, where and how fast it runs, and what it shows.
FREE = {
    *("config", "resume", "no_resume_opt", "start_epoch", "epochs", "early_stop", "output", "experiment", "dry_run"),
    *("overwrite", "stop_epoch", "save_epochs", "no_persistent_workers"),
    *("device", "local_rank", "device_modules", "workers", "pin_mem", "channels_last", "torchcompile"),
    *("torchcompile_mode", "synchronize_step", "no_ddp_bb", "grad_checkpointing", "use_multi_epochs_loader"),
    *("class_parallel", "ignore_unknown_classes"),
    *("log_interval", "val_interval", "validation_batch_size", "recovery_interval", "checkpoint_hist", "save_images"),
    *("eval_metric", "multi_crop", "marginal_temperature", "tta", "dataset_download", "strict_data", "train_script"),
    *("logger", "logger_opt", "log_wandb", "wandb_project", "wandb_tags", "wandb_resume_id"),
}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, free: bool = True) -> list[str]:
    """Settings that differ, as ``name: saved -> now``; ``free`` leaves out those that parts of a run may differ in."""
    both = [name for name in now if name in saved and not (free and name in FREE)]
    return [f"{name}: {_plain(saved[name])} -> {_plain(now[name])}" for name in both
            if _plain(saved[name]) != _plain(now[name])]  # fmt: skip


def find_auto(config: TrainConfig) -> tuple[Path | None, str]:
    """The newest checkpoint of a run with these settings, and a sentence where there is none.

    Raises:
        TrainError: ``--experiment`` names a run with other settings.
    """
    root, now = Path(config.output or OUTPUT), config.to_dict() | file_digests(config)
    folders = [root / config.experiment] if config.experiment else [path for path in root.glob("*") if path.is_dir()]
    paths = [path for folder in folders if (path := newest(folder)) is not None]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    if not paths:
        return None, f"--resume auto: no checkpoint in {root / config.experiment}, starting anew"
    others = []
    for path in paths:
        settings = _settings(path.parent)
        differ = differences(settings, now)
        if not differ and (settings or config.experiment):
            return path, ""
        others.append(f"{path.parent} has other settings ({'; '.join(differ) or 'its args.yaml is missing'})")
    if config.experiment:
        raise TrainError(f"--resume auto: {others[0]}: name another --experiment, or go on with --resume {paths[0]}")
    return None, f"--resume auto: starting anew; the newest run, {others[0]}"


def recorded_loss(config: TrainConfig) -> dict[str, Any] | None:
    """The record of the loss in the run that is resumed; None without one, and where it is of another loss."""
    if not config.resume:
        return None
    path = find_auto(config)[0] if config.resume == "auto" else Path(config.resume)
    settings = {} if path is None else _settings(path.parent) or _settings_in(path)
    record = settings.get("loss_record") or {}
    return record if record.get("name", settings.get("loss")) == config.loss else None


def check_folder(config: TrainConfig) -> None:
    """Raise if the folder of a new run holds another run, whose files would be overwritten one by one and mixed."""
    if not config.experiment or config.overwrite or config.dry_run or config.resume == "auto":
        return
    folder = Path(config.output or OUTPUT) / config.experiment
    if config.resume and Path(config.resume).resolve().parent == folder.resolve():
        return
    if results(folder):
        on = f"go on with it by --resume {path}" if (path := newest(folder)) else "name another --output"
        raise TrainError(f"{folder} holds another run: {on}, name another --experiment, or begin anew by --overwrite")


def results(folder: Path) -> list[Path]:
    """The checkpoints and records that a run left in a folder."""
    return [path for pattern in RESULTS for path in sorted(folder.glob(pattern))]


def newest(folder: Path) -> Path | None:
    """The newest of a run's last and recovery checkpoints."""
    checkpoints = [path for path in (folder / LAST, *folder.glob(RECOVERY)) if path.is_file()]
    return max(checkpoints, key=lambda path: path.stat().st_mtime_ns, default=None)


def command(folder: Path) -> str:
    """The command line that goes on with a run, started as this process was."""
    words = [*launcher(), "train"] if not _is_train(sys.argv[0]) else launcher()
    return shlex.join([*words, "--config", f"{folder}/args.yaml", "--resume", f"{folder}/{LAST}"])


def launcher() -> list[str]:
    """How this program was started, torchrun and its arguments included, up to its own arguments."""
    program = Path(sys.argv[0])
    own = ["python", "-m", "topk_registry"] if program.name == "__main__.py" else [program.name]
    if program.stem not in ("__main__", "timm", "topk-registry", "topk-train"):
        own = ["timm"]  # called from Python
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return own
    given = sys.argv[1:]
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        words = []
    if given and words[-len(given) :] == given:
        return ["python" if words[0] == sys.executable else words[0], *words[1 : -len(given)]]
    return ["torchrun", f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}", "-m", "topk_registry"]


def _is_train(program: str) -> bool:
    return Path(program).stem == "topk-train"


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _settings_in(checkpoint: Path) -> dict[str, Any]:
    """The settings inside a checkpoint that was taken out of its folder; a broken one is told of when it is loaded."""
    try:
        args = load_checkpoint_metadata(str(checkpoint)).get("args")
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, UnpicklingError):
        return {}
    return vars(args) if isinstance(args, Namespace) else {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
