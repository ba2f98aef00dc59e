"""From a checkpoint, a name or a module to a source: weights, preprocessing, class names, k and temperature."""

import argparse
import io
import pickle
import re
import zipfile

import pytest
import timm
import torch
import torchvision
import yaml
from safetensors.torch import save_file
from timm.utils import CheckpointSaver
from torch import nn

from topk_export import ExportError, load_source
from topk_export.checkpoint import build, built_for
from topk_export.export import _prepare
from topk_export.source import DATA_KEYS, read_class_names
from topk_registry import create_loss, normalize_classifier

RUN = {"model": "test_resnet", "num_classes": None, "loss": "smooth_topk_svm", "loss_opt": {"k": 3, "tau": 0.5}}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=7)


def save(trained, folder, **args):
    """Write ``model_best.pth.tar`` as timm's training script does."""
    trained.pretrained_cfg["architecture"] = "test_resnet"
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    namespace = argparse.Namespace(**{**RUN, **args})
    CheckpointSaver(trained, optimizer, args=namespace, checkpoint_dir=folder, recovery_dir=folder).save_checkpoint(
        0, metric=1.0
    )


def same(a, b) -> bool:
    return all(torch.equal(a.state_dict()[key], value) for key, value in b.state_dict().items())


def test_a_run_records_its_model_loss_k_temperature_and_preprocessing(model, tmp_path):
    model.pretrained_cfg["crop_mode"] = "squash"  # which training's evaluation does not use
    save(model, tmp_path, crop_pct=0.8, interpolation="bilinear", input_size=(3, 48, 64), mean=(0.1, 0.2, 0.3))
    source = load_source(tmp_path)
    assert same(source.model, model)
    assert (source.name, source.loss, source.k, source.temperature) == ("test_resnet", "smooth_topk_svm", 3, 1.5)
    recipe = source.preprocess
    assert (recipe.crop_pct, recipe.interpolation, recipe.crop_mode) == (0.8, "bilinear", "center")
    assert (list(recipe.input_size), list(recipe.mean)) == ([3, 48, 64], [0.1, 0.2, 0.3])
    assert source.weights == "model"
    assert re.fullmatch("[0-9a-f]{64}", source.sha256 or "")
    assert load_source(tmp_path, data_config={"crop_pct": 1.0}).preprocess.crop_pct == 1.0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"loss_opt": {"tau": 0.1}}, (5, 0.5)),  # the loss's own k
        ({"loss": "topk_hinge", "loss_opt": {"k": 4}}, (4, None)),
        ({"loss": "ldr_kl", "loss_opt": {"temperature": 3.0}}, (None, None)),  # not a temperature of marginals
        ({"loss": "aldr_kl", "loss_opt": {"temperature": 3.0}}, (None, None)),
        ({"loss": "ce", "loss_opt": {}}, (None, None)),
        ({"marginal_temperature": 2.0}, (3, 2.0)),
        ({"loss": "topk_nll", "loss_opt": {"k": 3}}, (3, 3.0)),
        ({"loss": "noised_topk_imbalanced", "loss_opt": {"k": 2}}, (2, None)),
        ({"loss": "soft_topk", "loss_opt": {"k": 3}}, (3, None)),  # its k is a real number, its tau another temperature
        ({"loss": "soft_topk", "loss_opt": {"k": 2.5}}, (None, None)),
    ],
    ids=str,
)
def test_k_and_temperature_come_from_the_loss(model, tmp_path, args, expected):
    save(model, tmp_path, **args)
    source = load_source(tmp_path)
    assert (source.k, source.temperature) == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("log_spherical_softmax", {}),
        ("log_taylor_softmax", {}),
        ("spherical_bound", {}),
        ("ldam", {"class_counts": [1] * 7}),
        ("ldr_kl", {"temperature": 3.0}),
        ("aldr_kl", {"temperature": 3.0}),
    ],
)
def test_a_loss_that_does_not_predict_by_softmax_gives_its_scores(model, tmp_path, name, options):
    """The softmax of the exported scores are the probabilities with which training evaluates."""
    save(model, tmp_path, loss=name, loss_opt=options)
    x, wanted = 3 * torch.randn(2, 3, 64, 64), create_loss(name, **options)
    logits, scores = model.eval()(x), load_source(tmp_path).model.eval()(x)
    torch.testing.assert_close(scores.softmax(-1), wanted.predictive_logits(logits).softmax(-1))
    assert (name == "spherical_bound") == torch.equal(scores, logits)


def test_a_loss_that_is_not_installed_is_a_warning(model, tmp_path):
    save(model, tmp_path, loss="theirs", loss_record={"distribution": "their-losses"})
    with pytest.warns(UserWarning, match="'theirs' of their-losses cannot be built"):
        source = load_source(tmp_path)
    assert (source.loss, source.k, source.temperature) == ("theirs", None, None)


def test_a_loss_of_timm_needs_no_options_of_its_run(model, tmp_path, recwarn):
    save(model, tmp_path, loss="jsd", aug_splits=3)
    source = load_source(tmp_path)
    assert (source.loss, source.k, source.temperature, source.predictive_logits) == ("jsd", None, None, None)
    assert not [each for each in recwarn if "cannot be built" in str(each.message)]


def test_arguments_beside_bare_weights(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "last.pth.tar")
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(RUN))
    source = load_source(tmp_path)
    assert same(source.model, model)
    assert source.k == 3


def test_averaged_weights_are_the_default(model, tmp_path):
    average = timm.create_model("test_resnet", num_classes=7)
    save(model, tmp_path)
    path = tmp_path / "model_best.pth.tar"
    torch.save(torch.load(path, weights_only=False) | {"state_dict_ema": average.state_dict()}, path)
    averaged, own = load_source(tmp_path), load_source(tmp_path, ema=False)
    assert same(averaged.model, average)
    assert same(own.model, model)
    assert (averaged.weights, own.weights) == ("ema", "model")


def test_a_normalized_classifier_is_rebuilt(model, tmp_path):
    normalize_classifier(model, scale=20.0, learn_scale=True)
    save(model, tmp_path, normalize_classifier=1.0, learn_scale=True)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(load_source(tmp_path).model.eval()(x), model.eval()(x))


def test_options_of_the_model_are_rebuilt(tmp_path):
    model = timm.create_model("test_efficientnet", num_classes=7, in_chans=1, bn_eps=0.1)
    save(model, tmp_path, model="test_efficientnet", input_size=(1, 64, 64), mean=(0.5,), std=(0.2,), bn_eps=0.1)
    x, source = torch.randn(2, 1, 64, 64), load_source(tmp_path)
    torch.testing.assert_close(source.model.eval()(x), model.eval()(x))
    assert (source.preprocess.color, source.preprocess.mean, source.preprocess.std) == ("L", (0.5,), (0.2,))


def test_class_names_come_from_the_checkpoint_or_the_file_beside_it(model, tmp_path):
    names = tuple(f"class {i}" for i in range(7))
    save(model, tmp_path)
    assert load_source(tmp_path).class_names is None
    (tmp_path / "classes.txt").write_text("\n".join(names[:5]))  # a run may have more outputs than its data classes
    assert load_source(tmp_path).class_names == (*names[:5], "5", "6")
    (tmp_path / "classes.txt").write_text("\n".join((*names, "of other data")))
    assert load_source(tmp_path).class_names is None
    save(model, tmp_path, class_names=list(names))
    assert load_source(tmp_path).class_names == names


@pytest.mark.parametrize("form", ["plain.pth", "wrapped.pth", "weights.safetensors"])
def test_bare_weights_need_a_name(model, tmp_path, form):
    path, state = tmp_path / form, model.state_dict()
    if form == "wrapped.pth":
        torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, path)
    else:
        save_file(state, path) if form.endswith("safetensors") else torch.save(state, path)
    assert same(load_source(path, model="test_resnet").model, model)
    with pytest.raises(ExportError, match="--model"):
        load_source(path)


def test_a_checkpoint_of_torchvisions_script(tmp_path):
    model = torchvision.models.squeezenet1_1(num_classes=7)
    args = argparse.Namespace(model="squeezenet1_1", val_crop_size=64, val_resize_size=70, interpolation="bicubic")
    average = {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in model.state_dict().items()}}
    torch.save({"model": model.state_dict(), "model_ema": average, "args": args}, tmp_path / "model_3.pth")
    source = load_source(tmp_path / "model_3.pth")
    assert same(source.model, model)
    assert (source.name, source.weights) == ("torchvision:squeezenet1_1", "ema")
    recipe = source.preprocess
    assert (list(recipe.input_size), recipe.scale_size, recipe.interpolation) == ([3, 64, 64], (70, 70), "bicubic")


def test_the_checkpoint_of_another_model(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "a.pth")
    with pytest.raises(ExportError, match=r"a\.pth is not a checkpoint of test_vit: .*Missing key.*cls_token"):
        load_source(tmp_path / "a.pth", model="test_vit")
    with pytest.raises(ExportError, match=r"size mismatch for fc\.weight: .*\[7, \d+\].*\[9, \d+\]"):
        load_source(tmp_path / "a.pth", model="test_resnet", num_classes=9)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_files_that_are_not_checkpoints(model, tmp_path, capsys):
    whole = tmp_path / "whole.pth"
    torch.save(model.state_dict(), whole)
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), script := io.BytesIO())
    with zipfile.ZipFile(zip_file := io.BytesIO(), "w") as archive:
        archive.writestr("a.txt", "")
    broken = {
        "half.pth": (whole.read_bytes()[:2000], "is corrupt or not a checkpoint"),
        "bad.safetensors": (b"\x10\x00\x00\x00\x00\x00\x00\x00{]", "is corrupt or not a checkpoint"),
        "text.pth": (b"no checkpoint at all", "contains no weights"),
        "empty.pth": (b"", "is corrupt or not a checkpoint: EOFError"),
        "archive.zip": (zip_file.getvalue(), "is corrupt or not a checkpoint"),
        "script.pt": (script.getvalue(), "is corrupt or not a checkpoint: .* TorchScript"),
        "old.pkl": (pickle.dumps({"a": 1}, protocol=4), "contains no weights"),
    }
    for name, (content, reason) in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ExportError, match=f"{name} {reason}") as caught:
            load_source(tmp_path / name, model="test_resnet")
        assert "\n" not in str(caught.value)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ExportError, match="a list, expected a dictionary"):
        load_source(tmp_path / "list.pth", model="test_resnet")
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ExportError, match="a print, which runs code"):
        load_source(tmp_path / "evil.pth", model="test_resnet")
    assert "executed" not in capsys.readouterr().out


def test_places_without_a_checkpoint(tmp_path):
    with pytest.raises(ExportError, match=r"has no checkpoint \(expected model_best\.pth\.tar or last\.pth\.tar\)"):
        load_source(tmp_path)
    with pytest.raises(ExportError, match=r"none\.pth does not exist"):
        load_source(tmp_path / "none.pth")


def test_class_names_from_files(tmp_path):
    text, listed, mapped = tmp_path / "a.txt", tmp_path / "b.json", tmp_path / "c.json"
    text.write_text("\ufeffcat\n\ndög\n", encoding="utf-8")  # with a byte order mark, as of Windows
    listed.write_text('["cat", "dog"]')
    mapped.write_text('{"10": "dog", "9": "cat"}')
    assert read_class_names(text) == ("cat", "dög")
    assert read_class_names(listed) == read_class_names(mapped) == ("cat", "dog")
    for content in ("{", "5", '"ab"', '{"cat": 0}', '{"0": ["n01", "cat"]}'):
        listed.write_text(content)
        for path in (tmp_path / "none.txt", listed):
            with pytest.raises(ExportError, match="class names cannot be read"):
                read_class_names(path)


# --- models by name, and modules


def load(name: str, **options):
    return load_source(name, random_weights=True, **options)


def test_names_of_timm_of_torchvision_and_of_the_trainer():
    ours, theirs = load("resnet18", num_classes=4), load("torchvision:resnet18", num_classes=4)
    assert ours.model.pretrained_cfg["architecture"] == "resnet18"
    assert not hasattr(theirs.model, "pretrained_cfg")
    assert theirs.preprocess.scale_size == (256, 256)
    preset = torchvision.models.MobileNet_V3_Large_Weights.DEFAULT.transforms()
    recipe = load("torchvision:mobilenet_v3_large").preprocess
    assert recipe.resize_size == (preset.resize_size[0],) * 2
    assert recipe.interpolation == preset.interpolation.value
    assert list(load("topk_convnet").preprocess.input_size) == [3, 32, 32]
    with pytest.raises(ExportError, match=r"'test_resnet_' .* timm has test_"):
        load("test_resnet_")
    with pytest.raises(ExportError, match="--random-weights"):
        load_source("resnet18")


def test_torchvision_is_asked_for_published_weights(monkeypatch):
    asked = []
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, **options: asked.append(options) or nn.Identity())
    for pretrained in (True, False):
        build("torchvision:resnet18", pretrained=pretrained)
    assert [options["weights"] for options in asked] == ["DEFAULT", None]


@pytest.mark.parametrize(
    "name",
    ["test_vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("swin_s3_tiny_224", "torchvision:vit_b_16"))],
)
def test_a_model_of_one_size_is_built_for_the_wanted_size(name):
    source = load(name, num_classes=5, data_config={"input_size": (3, 64, 64)})
    assert built_for(source.model) == (64, 64)
    assert source.preprocess.input_size == (3, 64, 64)
    _prepare(source)


def test_modules_say_their_size_and_others_take_any():
    source = load_source(timm.create_model("test_vit", img_size=64, num_classes=5))
    assert source.preprocess.input_size == (3, 64, 64)
    assert built_for(load("test_resnet", num_classes=5).model) is None
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=1)
    with pytest.raises(ExportError, match=r"does not run on an input of size .*--input-size C H W"):
        _prepare(load_source(model, data_config={"input_size": (3, 96, 64)}))


def test_arguments_of_the_factory_are_passed_on():
    source = load("test_vit", model_kwargs={"num_classes": 7, "global_pool": "avg"})
    assert (source.model.global_pool, source.model.num_classes) == ("avg", 7)


def test_an_unknown_module_must_say_its_images():
    model, size = torchvision.models.MobileNetV2(width_mult=0.3), {"input_size": (3, 64, 64)}
    with pytest.raises(ExportError, match=r"input of MobileNetV2 is unknown: .*--input-size"):
        load_source(model)
    with pytest.raises(ExportError, match="mean and std belong together"):
        load_source(model, data_config={**size, "mean": (0.5,)})
    with pytest.warns(UserWarning, match="takes arrays only"):
        unknown = load_source(model, data_config=size).preprocess
    assert (unknown.mean, unknown.std, unknown.color) == ((), (), "unknown")
    known = load_source(model, data_config={**size, "mean": (0.5,), "std": (0.2, 0.3, 0.4)}).preprocess
    assert (known.mean, known.std, known.color) == ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4), "RGB")
    assert (known.scale_size, known.interpolation) == ((73, 73), "bilinear")
    with pytest.raises(ExportError, match=r"as channels; got input_size \(1, 64, 64\)"):
        load("test_resnet", data_config={"input_size": (1, 64, 64), "mean": (0.5, 0.5), "std": (0.2,)})


@pytest.mark.parametrize("name", ["test_resnet", "torchvision:squeezenet1_1"])
def test_every_key_of_data_config_is_read(name):
    config = {
        "input_size": (3, 64, 48),
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "interpolation": "hamming",
        "crop_pct": 0.5,
        "crop_mode": "squash",
        "resize_size": (70, 80),
        "exif": True,
    }
    assert config.keys() == set(DATA_KEYS)
    made = load(name, num_classes=5, data_config=config).preprocess
    assert {key: getattr(made, key) for key in DATA_KEYS} == config
    with pytest.raises(ValueError, match=r"no key 'input_sise'; did you mean 'input_size'\? \(it takes"):
        load(name, data_config={"input_sise": (3, 64, 64)})
