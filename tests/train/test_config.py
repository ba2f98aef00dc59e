"""One frozen configuration, from flags, names and values, or a file, and back."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
import yaml

from topk_registry.train import TrainConfig
from topk_registry.train.config.arguments import parse_args
from topk_registry.train.errors import ConfigError


def test_flags_keywords_and_files_make_the_same_configuration():
    flags = [
        "--data-dir",
        "x",
        "--loss",
        "focal",
        "--loss-opt",
        "gamma=1",
        "-b",
        "32",
        "--lr",
        "1",
        "--scale",
        "0.5",
        "1",
    ]
    parsed = parse_args(flags)
    built = TrainConfig(data_dir="x", loss="focal", loss_opt={"gamma": 1}, batch_size=32, lr=1, scale=[0.5, 1])
    assert parsed == built
    assert TrainConfig.from_dict(yaml.safe_load(yaml.safe_dump(built.to_dict()))) == built
    assert pickle.loads(pickle.dumps(built)) == built
    assert isinstance(built.lr, float)


def test_it_is_frozen_and_replaced():
    config = TrainConfig(loss="focal")
    with pytest.raises(FrozenInstanceError):
        config.epochs = 3
    assert config.replace(epochs=3).epochs == 3
    assert config.epochs == 12


def test_the_built_in_jobs_defaults_give_way_to_what_is_given():
    assert TrainConfig(model="resnet18").model == "resnet18"
    assert TrainConfig(model="resnet50").model == "resnet50"  # timm's default, and given all the same
    assert TrainConfig().model == "topk_convnet"
    assert TrainConfig(data_dir="x").model == "resnet50"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"epochs": "7"}, "--epochs must be int, got '7'"),
        ({"epochs": True}, "--epochs must be int"),
        ({"epochs": None}, "--epochs must be int"),
        ({"scale": [0.5, "x"]}, "--scale must be float, got 'x'"),
        ({"scale": 0.5}, "--scale must be a list of float"),
        ({"amp": 1}, "--amp must be bool"),
        ({"loss_opt": [1]}, "--loss-opt must be dict"),
        ({"long_tail": "gauss"}, "--long-tail must be one of pareto, exp, got 'gauss'"),
        ({"mixup": 0.2, "batch_size": 7}, "even --batch-size"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message.replace("[", "\\[")):
        TrainConfig(**settings)


DEFAULTS = {"tau": 0.1, "alpha": 1.0, "k_weights": None, "combine": "mean"}  # of smooth_topk_svm, but for k


def test_the_loss_is_resolved_once():
    from topk_registry.train import LossSpec

    spec = LossSpec.resolve("smooth_topk_svm", {"k": 3})
    assert spec.record == {"name": "smooth_topk_svm", "options": {"k": 3}, "distribution": "topk-registry",
                           "version": spec.version, "defaults": DEFAULTS}  # fmt: skip
    assert spec.factory.__name__ == "SmoothTopKSVM"
    assert not spec.needs_class_counts
