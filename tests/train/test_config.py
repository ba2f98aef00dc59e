"""Flags, args.yaml and the checks that are made from one table."""

import copy
import shlex
from argparse import SUPPRESS
from dataclasses import fields

import pytest
import yaml

from topk_registry.errors import ConfigError
from topk_registry.registry.ranges import Interval
from topk_registry.train.config import (
    COMMON,
    EQUIVALENTS,
    TIMM_ONLY,
    TrainConfig,
    clean_settings,
    create_parser,
    flag_of,
    parse_args,
)


def failing(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_at_most_110_flags_with_25_in_help():
    names = [setting.name for setting in fields(TrainConfig)]
    flags = [action for action in create_parser()._actions if action.option_strings]
    assert len(flags) <= 110
    assert len([action for action in flags if action.help != SUPPRESS]) <= 25
    assert not {*names} & {*TIMM_ONLY}
    text = create_parser().format_help()
    assert all(flag_of(name) in text for name in COMMON if name != "data_dir")
    assert "--mixup-switch-prob" not in text
    assert "--mixup-switch-prob" in create_parser(full=True).format_help()
    assert len(text.splitlines()) < 90


def ranged():
    for setting in fields(TrainConfig):
        said = setting.metadata
        if said["within"] != "(-inf, inf)":
            for value in Interval.parse(said["within"]).examples(1)[1]:
                yield pytest.param(setting.name, value, said["nargs"], id=f"{setting.name}={value}")


@pytest.mark.parametrize(("name", "value", "nargs"), list(ranged()))
def test_numbers_out_of_range_are_refused(name, value, nargs):
    hint = TrainConfig.__annotations__[name]
    given = [value] * (nargs or 1) if "list" in str(hint) else value
    with pytest.raises(ConfigError, match=flag_of(name)):
        TrainConfig(**{name: given})


@pytest.mark.parametrize("setting", [s for s in fields(TrainConfig) if s.metadata["choices"]], ids=lambda s: s.name)
def test_other_choices_are_refused(setting):
    with pytest.raises(ConfigError, match=flag_of(setting.name)):
        TrainConfig(**{setting.name: ["other"] if setting.name == "log" else "other"})


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"overwrite": True, "resume": "auto"}, "overwrite"),
        ({"sched": "plateau"}, "--early-stop"),
        ({"mixup": 0.2, "batch_size": 7}, "even"),
        ({"aug_splits": 1}, "aug-splits"),
        ({"learn_scale": True}, "normalize-classifier"),
        ({"eval_metric": "top0"}, "eval-metric"),
        ({"task": "multilabel", "sampler": "class_balanced"}, "sampler"),
        ({"epochs": "three"}, "epochs"),
        ({"val_split": "1.5"}, "--val-split must name a split or be in"),
        ({"val_split": 0.0}, "--val-split must name a split or be in"),
        ({"loss": ""}, "--loss is empty"),
        ({"scale": [0.5]}, "--scale takes 2 numbers"),
        ({"ratio": [1.0]}, "--ratio takes 2 numbers"),
        ({"seed": 2**32}, "--seed must be in"),
    ],
)
def test_settings_that_exclude_each_other(settings, word):
    with pytest.raises(ConfigError, match=word):
        TrainConfig(**settings)


def test_builtin_defaults_only_without_data():
    assert TrainConfig().epochs == 8
    assert TrainConfig(epochs=300).epochs == 300
    assert (TrainConfig(data_dir=".").epochs, TrainConfig(data_dir=".").model) == (300, "resnet50")
    assert TrainConfig(task="multilabel").loss == "bce"


def test_a_flag_of_timms_alone_names_the_command_that_works(capsys):
    message = failing(capsys, "--naflex-loader", "--loss", "focal")
    assert "timm run PATH/train.py" in message
    assert message.count("\n") == 1


def test_config_values_are_parsed_as_flags(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("lr: 1e-3\nloss: focal\nloss_opt: gamma=2\nmean: 0.5 0.5 0.5\nepochs: '7'\n")
    config = parse_args(["--config", str(file), "--epochs", "9"])
    assert (config.lr, config.loss_opt, config.mean, config.epochs) == (1e-3, {"gamma": 2}, [0.5] * 3, 9)
    assert parse_args(["--config", str(file), "--loss", "ce"]).loss_opt == {}
    file.write_text("loss_opt: gamma=2\n")
    assert parse_args(["--config", str(file), "--loss", "focal"]).loss_opt == {"gamma": 2}


@pytest.mark.parametrize(
    ("text", "word"), [("", "empty"), ("- a", "list"), ("epoch: 3", "epochs"), ("fuser: te", "timm run"), ("[", "args")]
)
def test_config_that_cannot_be_read(tmp_path, capsys, text, word):
    file = tmp_path / "args.yaml"
    file.write_text(text)
    assert word in failing(capsys, "--config", str(file))


def test_settings_return_from_their_dictionary():
    config = TrainConfig(loss="focal", loss_opt={"gamma": 3.0}, mixup=0.2)
    assert TrainConfig(**clean_settings(yaml.safe_load(yaml.safe_dump(config.to_dict())))) == config
    assert TrainConfig(**clean_settings({**config.to_dict(), **TIMM_ONLY})) == config


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_a_flag_of_timms_names_its_equivalent_here(capsys, tmp_path, name):
    equivalent = EQUIVALENTS[name]
    assert f"{flag_of(name)} belongs to timm's own script; the equivalent here is {equivalent}; see" in failing(
        capsys, flag_of(name), "1"
    )
    config = parse_args(["--dataset", "topk/hierarchy", *shlex.split(equivalent)])
    assert config != parse_args(["--dataset", "topk/hierarchy"])
    file = tmp_path / "args.yaml"
    file.write_text(f"{name}: 0.5\n")
    assert equivalent in failing(capsys, "--config", str(file))


def test_numbers_and_lists_of_a_file_are_read_as_words_of_the_command_line(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("val_split: 0.2\nloss: focal\nloss_opt: [gamma=2]\nmean: 0.5\nexperiment: 7\n")
    words = ["--val-split", "0.2", "--loss", "focal", "--loss-opt", "gamma=2", "--mean", "0.5", "--experiment", "7"]
    assert parse_args(["--config", str(file)]) == parse_args(words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("val_split: no", "--val-split must be str, got False"),
        ("epochs: 2.5", "--epochs must be int, got 2.5"),
        ("amp: 'false'", "--amp must be bool, got 'false'"),
        ("loss_opt: [gamma]", "--loss-opt takes key=value, got 'gamma'"),
        ("loss_opt: 3", "--loss-opt must be dict, got 3"),
    ],
)
def test_other_types_in_a_file_are_refused(tmp_path, capsys, text, message):
    file = tmp_path / "args.yaml"
    file.write_text(text)
    assert message in failing(capsys, "--config", str(file))


def test_an_unknown_setting_names_the_closest():
    with pytest.raises(ConfigError, match=r"there is no setting 'losss'; did you mean 'loss'?"):
        TrainConfig(losss="focal")
    with pytest.raises(ConfigError, match="the equivalent here is --loss bce"):
        TrainConfig(bce_loss=True)
    assert copy.copy(TrainConfig(loss="focal")).loss == "focal"
