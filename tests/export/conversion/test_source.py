"""Where a model comes from: names, checkpoints of timm's and torchvision's scripts, folders of runs, bad files."""

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

from topk_export import ExportError
from topk_export.commands.export import main
from topk_export.conversion.recipe import read_class_names
from topk_export.conversion.source import load_source
from topk_registry import normalize_classifier

RUN = {"model": "test_resnet", "num_classes": None, "loss": "smooth_topk_svm", "loss_opt": {"k": 3, "tau": 0.5}}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=7)


def save(trained, folder, *, ema=None, **args):
    """A checkpoint as timm's training script leaves it; ``model_best.pth.tar`` in the folder."""
    trained.pretrained_cfg["architecture"] = "test_resnet"
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    namespace = argparse.Namespace(**{**RUN, **args})
    saver = CheckpointSaver(
        trained, optimizer, args=namespace, checkpoint_dir=folder, recovery_dir=folder, model_ema=ema
    )
    saver.save_checkpoint(0, metric=1.0)


def same(a, b) -> bool:
    return all(torch.equal(a.state_dict()[key], value) for key, value in b.state_dict().items())


def test_a_run_knows_its_model_classes_loss_k_temperature_and_transform(model, tmp_path):
    save(model, tmp_path, crop_pct=0.8, interpolation="bilinear")
    source = load_source(tmp_path)
    assert same(source.model, model)
    assert (source.name, source.loss, source.k, source.temperature) == ("test_resnet", "smooth_topk_svm", 3, 1.5)
    assert (source.preprocess.crop_pct, source.preprocess.interpolation) == (0.8, "bilinear")
    assert re.fullmatch("[0-9a-f]{64}", source.sha256 or "")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"loss_opt": {"tau": 0.1}}, (5, 0.5)),  # the loss's own k
        ({"loss": "topk_hinge", "loss_opt": {"k": 4}}, (4, None)),
        ({"loss": "ce", "loss_opt": {}}, (None, None)),
        ({"marginal_temperature": 2.0}, (3, 2.0)),
        ({"loss_opt": {"k": 3}}, (3, 3.0)),  # a run of before, when the default of tau was 1
        ({"loss_opt": {"k": 3}, "loss_record": {"defaults": {"tau": 0.5}}}, (3, 1.5)),
        ({"loss": "topk_nll", "loss_opt": {"k": 3}}, (3, 3.0)),
        ({"loss": "noised_topk_imbalanced", "loss_opt": {"k": 2}}, (2, None)),
    ],
)
def test_k_and_temperature_come_from_the_loss(model, tmp_path, args, expected):
    save(model, tmp_path, **args)
    source = load_source(tmp_path)
    assert (source.k, source.temperature) == expected


def test_a_loss_that_is_not_installed_is_a_warning(model, tmp_path):
    save(model, tmp_path, loss="theirs")
    with pytest.warns(UserWarning, match="k and the temperature of loss 'theirs' are not known here"):
        source = load_source(tmp_path)
    assert (source.loss, source.k, source.temperature) == ("theirs", None, None)


def test_arguments_beside_weights_alone(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "last.pth.tar")
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(RUN))
    source = load_source(tmp_path)
    assert same(source.model, model)
    assert source.k == 3


def test_averaged_weights_come_first_unless_refused(model, tmp_path):
    average = timm.create_model("test_resnet", num_classes=7)
    save(model, tmp_path, ema=argparse.Namespace(module=average))
    torch.save(
        torch.load(tmp_path / "last.pth.tar", weights_only=False) | {"state_dict_ema": average.state_dict()},
        tmp_path / "model_best.pth.tar",
    )
    assert same(load_source(tmp_path).model, average)
    assert same(load_source(tmp_path, use_ema=False).model, model)


def test_a_normalised_classifier_is_put_back(model, tmp_path):
    normalize_classifier(model, scale=20.0, learn_scale=True)
    save(model, tmp_path, normalize_classifier=1.0, learn_scale=True)
    source = load_source(tmp_path)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(source.model.eval()(x), model.eval()(x))


def test_what_changes_a_models_arithmetic_is_put_back(tmp_path):
    model = timm.create_model("test_efficientnet", num_classes=7, in_chans=1, bn_eps=0.1)
    save(model, tmp_path, model="test_efficientnet", input_size=(1, 64, 64), mean=(0.5,), std=(0.2,), bn_eps=0.1)
    x = torch.randn(2, 1, 64, 64)
    source = load_source(tmp_path)
    torch.testing.assert_close(source.model.eval()(x), model.eval()(x))
    assert (source.preprocess.color, list(source.preprocess.input_size)) == ("L", [1, 64, 64])
    assert (source.preprocess.mean, source.preprocess.std) == ((0.5,), (0.2,))


def test_the_trainers_own_model():
    assert list(load_source("topk_convnet").preprocess.input_size) == [3, 32, 32]


@pytest.mark.parametrize("form", ["plain.pth", "wrapped.pth", "weights.safetensors"])
def test_bare_weights_need_a_name_alone(model, tmp_path, form):
    path, state = tmp_path / form, model.state_dict()
    if form == "wrapped.pth":
        torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, path)
    else:
        save_file(state, path) if form.endswith("safetensors") else torch.save(state, path)
    assert same(load_source(path, model="test_resnet").model, model)
    with pytest.raises(ExportError, match="does not say which model it holds: name it"):
        load_source(path)


def test_a_checkpoint_of_torchvisions_script(tmp_path):
    model = torchvision.models.squeezenet1_1(num_classes=7)
    args = argparse.Namespace(model="squeezenet1_1", val_crop_size=64, val_resize_size=70, interpolation="bicubic")
    average = {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in model.state_dict().items()}}
    torch.save({"model": model.state_dict(), "model_ema": average, "args": args}, tmp_path / "model_3.pth")
    source = load_source(tmp_path / "model_3.pth")
    assert same(source.model, model)
    assert source.name == "torchvision:squeezenet1_1"
    assert list(source.preprocess.input_size) == [3, 64, 64]
    assert source.preprocess.scale_size == (70, 70)
    assert source.preprocess.interpolation == "bicubic"


def test_names_of_timm_and_of_torchvision():
    ours, theirs = load_source("resnet18", num_classes=4), load_source("torchvision:resnet18", num_classes=4)
    assert ours.model.pretrained_cfg["architecture"] == "resnet18"
    assert not hasattr(theirs.model, "pretrained_cfg")
    assert theirs.preprocess.scale_size == (256, 256)
    with pytest.raises(ExportError, match=r"'test_resnet_' is no file or folder, .* timm has test_"):
        load_source("test_resnet_")


def test_the_checkpoint_of_another_model(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "a.pth")
    with pytest.raises(ExportError, match=r"a\.pth is not a checkpoint of test_vit: missing: cls_token.* and \d+ more"):
        load_source(tmp_path / "a.pth", model="test_vit")
    with pytest.raises(ExportError, match=r"of another shape: fc\.weight is \[7, \d+\], expected \[9, \d+\]"):
        load_source(tmp_path / "a.pth", model="test_resnet", num_classes=9)


def zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "")
    return content.getvalue()


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_files_that_are_no_checkpoints(model, tmp_path, capsys):
    whole = tmp_path / "whole.pth"
    torch.save(model.state_dict(), whole)
    kind = "is no checkpoint: expected a file that torch.save or safetensors wrote$"
    broken = {
        "half.pth": (whole.read_bytes()[:2000], "is corrupt or no checkpoint: "),
        "bad.safetensors": (b"\x10\x00\x00\x00\x00\x00\x00\x00{]", "is corrupt or no checkpoint: "),
        "text.pth": (b"no checkpoint at all", kind),
        "empty.pth": (b"", kind),
        "archive.zip": (zipped("a.txt"), kind),
        "script.pt": (zipped("script/constants.pkl"), "is a TorchScript archive"),
        "old.pkl": (pickle.dumps({"a": 1}, protocol=4), "holds no weights"),
    }
    for name, (content, reason) in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ExportError, match=f"{name} {reason}") as caught:
            load_source(tmp_path / name, model="test_resnet")
        assert "\n" not in str(caught.value)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ExportError, match="holds a list, expected a dictionary of weights"):
        load_source(tmp_path / "list.pth", model="test_resnet")
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ExportError, match="holds a print, which runs code when it is read"):
        load_source(tmp_path / "evil.pth", model="test_resnet")
    assert "executed" not in capsys.readouterr().out


def test_a_photo_is_refused_in_one_line(tmp_path, picture, capsys):
    assert main([str(picture("red", "photo.jpg")), str(tmp_path / "model.onnx")]) == 1
    (*_, last) = capsys.readouterr().err.splitlines()
    assert last.endswith("photo.jpg is no checkpoint: expected a file that torch.save or safetensors wrote")
    assert last.startswith("error: ")


def test_places_without_a_checkpoint(tmp_path):
    with pytest.raises(ExportError, match=r"holds no checkpoint \(expected model_best\.pth\.tar or last\.pth\.tar\)"):
        load_source(tmp_path)
    with pytest.raises(ExportError, match=r"none\.pth does not exist"):
        load_source(tmp_path / "none.pth")


def test_class_names_from_files(tmp_path):
    text, listed, mapped = tmp_path / "a.txt", tmp_path / "b.json", tmp_path / "c.json"
    text.write_text("cat\n\ndög\n", encoding="utf-8")
    listed.write_text('["cat", "dog"]')
    mapped.write_text('{"10": "dog", "9": "cat"}')
    assert read_class_names(text) == ("cat", "dög")
    assert read_class_names(listed) == read_class_names(mapped) == ("cat", "dog")
    with pytest.raises(ExportError, match="class names cannot be read"):
        read_class_names(tmp_path / "none.txt")


def test_a_run_tells_the_names_of_its_classes(model, tmp_path):
    save(model, tmp_path)
    assert load_source(tmp_path).class_names is None
    names = tuple(f"class {i}" for i in range(7))
    (tmp_path / "classes.txt").write_text("\n".join(names))
    assert load_source(tmp_path).class_names == names
    (tmp_path / "classes.txt").write_text("\n".join(names[:5]))  # a run may have more outputs than its data classes
    assert load_source(tmp_path).class_names == (*names[:5], "5", "6")
    (tmp_path / "classes.txt").write_text("\n".join((*names, "of other data")))
    assert load_source(tmp_path).class_names is None
