"""timm's flags under timm's names and defaults, and what this trainer adds."""

import re
import subprocess
import sys

import pytest
import yaml

from topk_registry.train.config.arguments import create_parser, parse_args
from topk_registry.train.config.config import BUILTIN_DEFAULTS

TIMM_DEFAULTS = {
    "model": "resnet50", "train_split": "train", "val_split": "validation", "batch_size": 128, "device": "cuda",
    "opt": "sgd", "momentum": 0.9, "weight_decay": 2e-5, "clip_mode": "norm", "sched": "cosine",
    "lr_base": 0.1, "lr_base_size": 256, "lr_base_scale": "", "lr_noise_pct": 0.67, "lr_cycle_decay": 0.5,
    "warmup_lr": 1e-5, "min_lr": 0, "epochs": 300, "decay_milestones": [90, 180, 270], "decay_epochs": None,
    "warmup_epochs": 5, "cooldown_epochs": 0, "patience_epochs": 10, "decay_rate": 0.1, "scale": [0.08, 1.0],
    "ratio": [3 / 4, 4 / 3], "hflip": 0.5, "vflip": 0.0, "color_jitter": 0.4, "aug_repeats": 0, "aug_splits": 0,
    "reprob": 0.0, "remode": "pixel", "recount": 1, "mixup": 0.0, "cutmix": 0.0, "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5, "mixup_mode": "batch", "mixup_off_epoch": 0, "smoothing": 0.1,
    "train_interpolation": "random", "drop": 0.0, "dist_bn": "reduce", "model_ema_decay": 0.9998, "seed": 42,
    "worker_seeding": "all", "log_interval": 50, "recovery_interval": 0, "checkpoint_hist": 10, "workers": 4,
    "eval_metric": "top1", "tta": 0, "val_interval": 1, "grad_accum_steps": 1, "layer_decay_min_scale": 0,
}  # fmt: skip


def test_defaults_are_timms_where_data_is_named():
    args = vars(parse_args(["--data-dir", "somewhere"]))
    assert {name: args[name] for name in TIMM_DEFAULTS} == TIMM_DEFAULTS
    assert args["loss"] == "ce"


@pytest.mark.parametrize("named", [["somewhere"], ["--data-dir", "x"], ["--dataset", "torch/cifar100"]])
def test_the_built_in_jobs_defaults_are_for_no_data_alone(named):
    assert parse_args(named).model == "resnet50"
    args = vars(parse_args([]))
    assert {name: args[name] for name in BUILTIN_DEFAULTS} == BUILTIN_DEFAULTS
    assert parse_args(["--epochs", "3"]).epochs == 3


def test_a_config_file_is_between_defaults_and_flags(tmp_path):
    path = tmp_path / "args.yaml"
    record = {"name": "ce"}  # an args.yaml of a run has one
    path.write_text(yaml.safe_dump({"epochs": 7, "batch_size": 10, "kd_temperature": 4.0, "loss_record": record}))
    args = parse_args(["--config", str(path), "--epochs", "9"])
    assert (args.epochs, args.batch_size, args.model) == (9, 10, "topk_convnet")
    path.write_text(yaml.safe_dump({"data_dir": "somewhere"}))
    assert parse_args(["-c", str(path)]).model == "resnet50"


def test_loss_options_are_literals_and_repeats_merge(tmp_path):
    args = parse_args(["--loss", "x", "--loss-opt", "k=5", "tau=0.1", "--loss-opt", "kind=hard", "k=3", "w=[1, 2]"])
    assert args.loss_opt == {"k": 3, "tau": 0.1, "kind": "hard", "w": [1, 2]}
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump({"loss_opt": {"k": 7, "tau": 1.0}}))
    assert parse_args(["-c", str(path), "--loss-opt", "k=3"]).loss_opt == {"k": 3, "tau": 1.0}
    assert parse_args(["-c", str(path)]).loss_opt == {"k": 7, "tau": 1.0}


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"loss": "ldam", "loss_opt": {"drw_epoch": 0.8, "beta": 0.9}}, "'ldam'.*: beta=0.9 drw_epoch=0.8"),
        ({"loss": None, "bce_loss": True, "bce_sum": True}, "'bce'.*: bce_loss=True bce_sum=True"),
        ({"loss_opt": {"class_weight": [1, 2]}}, r"'ce'.*: class_weight=\[1, 2\]"),
    ],
)
def test_another_loss_than_the_files_does_not_get_its_options(tmp_path, capsys, monkeypatch, saved, said):
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump(saved))
    args = parse_args(["--config", str(path), "--loss", "focal", "--loss-opt", "gamma=1.0"])
    assert (args.loss, args.loss_opt) == ("focal", {"gamma": 1.0})
    assert re.search(f"--loss focal in the place of {said}", capsys.readouterr().err)
    monkeypatch.setenv("RANK", "1")  # of several processes the first one speaks
    assert parse_args(["--config", str(path), "--loss", "focal"]).loss_opt == {}
    assert capsys.readouterr().err == ""


def test_the_files_own_loss_keeps_its_options(tmp_path, capsys):
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump({"loss": "ldam", "loss_opt": {"beta": 0.9}}))
    assert parse_args(["--config", str(path), "--loss", "ldam"]).loss_opt == {"beta": 0.9}
    assert capsys.readouterr().err == ""


def test_timms_older_flags_name_losses():
    args = parse_args(["--bce-loss", "--bce-sum", "--bce-target-thresh", "0.2", "--bce-pos-weight", "2"])
    assert (args.loss, args.loss_opt) == ("bce", {"bce_sum": True, "bce_target_thresh": 0.2, "pos_weight": 2.0})
    args = parse_args(["x", "--jsd-loss", "--aug-splits", "3"])
    assert (args.loss, args.loss_opt) == ("jsd", {"jsd_splits": 3})
    assert "jsd_loss" not in args.to_dict()  # said once, so that an args.yaml can be used with another loss


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss-opt", "k"], "takes key=value"),
        (["--mixup", "0.2", "-b", "7"], "even --batch-size"),
        (["x", "--aug-splits", "1"], "--aug-splits must be"),
        (["x", "--aug-splits", "2", "--cutmix", "1"], "cannot be combined"),
        (["--amp", "--model-dtype", "bfloat16"], "--amp needs a float32 model"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
        (["--kd-model-name", "resnet18"], "--train-script"),
        (["--kd-temperature", "2"], "--train-script"),
        (["--loss", "focal", "--bce-loss"], "--bce-loss is for --loss bce, and the loss is focal"),
        (["--bce-sum"], "--bce-sum is for --loss bce, and the loss is ce"),
        (["--loss", "bce", "--jsd-loss"], "--jsd-loss is for --loss jsd"),
    ],
)
def test_wrong_combinations_say_so(argv, message, capsys):
    with pytest.raises(SystemExit):
        parse_args(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [({"epoch": 3}, "did you mean 'epochs'"), ({"naflex_train_seq_lens": [1]}, "--train-script")],
    ids=["unknown", "of another mode"],
)
def test_a_config_file_with_what_would_be_ignored_is_refused(config, message, tmp_path, capsys):
    path = tmp_path / "args.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        parse_args(["--config", str(path)])
    assert message in capsys.readouterr().err


def test_every_flag_has_a_line_of_help():
    text = create_parser().format_help()
    assert "(default: topk_convnet)" not in text
    for flag in ("--loss", "--loss-opt", "--long-tail", "--multi-crop", "--resume", "--train-script", "--dry-run"):
        assert f" {flag} " in text


def test_help_and_a_misspelt_loss_need_no_torch():
    code = (
        "import sys\nfrom topk_registry.train.command import main\n"
        "from topk_registry.registry.errors import UnknownPluginError\n"
        "try:\n    main(['--loss', 'smooth_topk_smv'])\nexcept UnknownPluginError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules and 'timm' not in sys.modules, 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "smooth_topk_svm" in done.stdout


def test_an_empty_loss_is_refused(capsys):
    """As of a variable of a shell that is not set: it would train cross-entropy."""
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--loss", ""])
    assert "--loss is empty: expected the name of a loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--val-interval", "0"], "--val-interval must be at least 1, got 0"),
        (["--log-interval", "0"], "--log-interval must be at least 1, got 0"),
        (["--checkpoint-hist", "0"], "--checkpoint-hist must be at least 1, got 0"),
        (["-j", "-1"], "--workers must be at least 0, got -1"),
        (["--clip-grad=-1"], "--clip-grad must be above 0, got -1.0"),
        (["--mixup", "-1"], "--mixup must be at least 0, got -1.0"),
        (["--reprob", "2"], "--reprob must be from 0 to 1, got 2.0"),
        (["--early-stop", "-1"], "--early-stop must be at least 0, got -1"),
        (["--model-ema-decay", "2"], "--model-ema-decay must be from 0 to 1, got 2.0"),
        (["--lr", "nan"], "--lr must be at least 0, got nan"),
        (["--std", "1", "0", "1"], "--std must be above 0, got 0.0"),
        (["--scale", "0", "1"], "--scale must be above 0, got 0.0"),
        (["--mean", "inf"], "--mean must be finite, got inf"),
        (["--interpolation", "cubic"], "invalid choice: 'cubic'"),
        (["--clip-grad", "0"], "--clip-grad must be above 0, got 0.0"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        parse_args(flags)
    assert message in capsys.readouterr().err
