"""Predictions: right, the same in every batching, without torch, and honest about the device."""

import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from tests.export.colours import COLOURS, ColourClassifier, K, noise
from tests.export.groups import GROUPS, expected_sets, grouped
from topk_export import DeviceError, ImageError, ModelFileError, Prediction, PredictionError, Predictor
from topk_export.runtime import session as runtime
from topk_export.runtime.ranking import rank_rows, softmax
from topk_registry.functional import topk_marginals

IMAGES = [noise(40 + 3 * i, 60, seed=i) for i in range(7)]
CUDA_WORKS = runtime.nvidia_gpus() > 0 and "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def test_images_of_one_colour_are_named(predictor, picture):
    predictions = predictor([picture(colour) for colour in COLOURS])
    assert [p.top[0].name for p in predictions] == list(COLOURS)
    for prediction in predictions:
        assert len(prediction.top) == K
        order = [ranked.softmax for ranked in prediction.top]
        assert order == sorted(order, reverse=True)


def test_outputs_are_those_of_torch(predictor):
    x = predictor.preprocess(IMAGES)
    outputs = predictor.run(x)
    with torch.no_grad():
        logits = ColourClassifier()(torch.from_numpy(x))
    assert np.allclose(outputs["logits"], logits, rtol=1e-5, atol=1e-5)
    marginals = topk_marginals(torch.from_numpy(outputs["logits"]).double(), K)
    assert np.allclose(outputs["marginals"], marginals, rtol=1e-5, atol=0)
    assert np.array_equal(np.sort(outputs["indices"]), np.sort(logits.topk(K).indices.numpy()))


def test_a_prediction_reads_the_outputs(predictor):
    (prediction,) = predictor([IMAGES[0]])
    outputs = predictor.run(predictor.preprocess([IMAGES[0]]))
    share = softmax(outputs["logits"][0])
    assert share.sum() == pytest.approx(1)
    for ranked in prediction.top:
        assert ranked.marginal == outputs["marginals"][0, ranked.index]
        assert ranked.softmax == share[ranked.index]
        assert ranked.name == list(COLOURS)[ranked.index]
    assert {ranked.index for ranked in prediction.top} == set(outputs["indices"][0].tolist())


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape
        assert value.dtype == theirs[name].dtype
        assert np.allclose(value, theirs[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_batches_change_nothing(predictor, batch_size):
    one = predictor(IMAGES)
    many = predictor(iter(IMAGES), batch_size=batch_size)
    for a, b in zip(one, many, strict=True):
        assert [r.index for r in a.top] == [r.index for r in b.top]
        assert np.allclose([r.marginal for r in a.top], [r.marginal for r in b.top], rtol=1e-5)


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (2, 4)])
def test_a_stream_holds_a_batch_and_reads_the_next(model_file, workers, ahead):
    predictor = Predictor(model_file, device="cpu", workers=workers)
    taken = []
    stream = predictor.stream((taken.append(i) or image for i, image in enumerate(IMAGES)), batch_size=2)
    next(stream)
    assert taken == list(range(ahead))
    assert len(list(stream)) == len(IMAGES) - 1


BROKEN = [*IMAGES[:3], b"no image", *IMAGES[3:]]


def test_a_broken_image_loses_no_other(predictor):
    good = predictor(IMAGES)
    got = []
    with pytest.raises(ImageError, match="known format"):
        got.extend(predictor.stream(BROKEN, batch_size=32))
    assert got == good[:3]
    assert predictor(BROKEN, on_error="skip") == good
    marked = predictor(BROKEN, on_error="yield", batch_size=2)
    assert isinstance(marked[3], ImageError)
    assert [p for p in marked if not isinstance(p, ImageError)] == good
    with pytest.raises(ValueError, match="on_error must be one of raise, skip, yield, got 'ignore'"):
        predictor(IMAGES, on_error="ignore")


def test_an_error_of_the_source_comes_after_the_images_before_it(predictor):
    def source():
        yield from IMAGES[:3]
        raise OSError("the disk is gone")

    stream = predictor.stream(source(), batch_size=2)
    assert [next(stream) for _ in range(3)] == predictor(IMAGES[:3])
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


def test_images_are_read_in_threads(model_file):
    predictor = Predictor(model_file, device="cpu", workers=3)
    together = threading.Barrier(3, timeout=60)  # broken unless three reads are in progress at once

    class Met:
        def read(self, image):
            together.wait()
            return Predictor._input_of(predictor, image)

    predictor._input_of = Met().read
    assert len(predictor(IMAGES[:3], batch_size=3)) == 3


def test_a_predictor_pickles(predictor):
    copy = pickle.loads(pickle.dumps(predictor))
    assert copy.metadata == predictor.metadata
    assert copy(IMAGES) == predictor(IMAGES)


def test_outputs_that_are_not_numbers_are_an_error_of_that_image(predictor, edited):
    logits = np.zeros((3, len(COLOURS)), np.float32)
    logits[1, 4] = np.nan
    marginals = np.full_like(logits, K / len(COLOURS))
    rows = list(rank_rows({"logits": logits, "marginals": marginals}, predictor.metadata))
    assert [type(row) for row in rows] == [Prediction, PredictionError, Prediction]
    with pytest.raises(PredictionError, match="not finite numbers"):
        predictor.rank({"logits": logits, "marginals": marginals})
    broken = Predictor(edited(nan=True), device="cpu")
    assert broken(IMAGES, on_error="skip") == []
    with pytest.raises(PredictionError):
        broken(IMAGES)


def test_a_set_is_cut_and_its_size_told(predictor):
    (whole,) = predictor(IMAGES[:1], softmax_mass=1.0)
    (cut,) = predictor(IMAGES[:1], softmax_mass=1.0, max_set=3)
    assert whole.softmax_set_size == len(whole.softmax_set) > 3
    assert cut.softmax_set == whole.softmax_set[:3]
    assert cut.softmax_set_size == whole.softmax_set_size
    with pytest.raises(ValueError, match="max_set must be at least 1, got 0"):
        predictor(IMAGES, max_set=0)


def test_a_fixed_batch_is_padded_and_the_padding_cut_off(predictor, edited):
    fixed = Predictor(edited(batch=4), device="cpu")
    assert fixed.batch_size == 4
    for count in (0, 1, 4, 7):
        x = predictor.preprocess(IMAGES[:count])
        close(fixed.run(x), predictor.run(x))


def test_bound_buffers_give_the_same_and_do_not_alias(predictor, model_file):
    bound = Predictor(model_file, device="cpu", bound_batch=3)
    x = predictor.preprocess(IMAGES)
    first = bound.run(x)
    copies = {name: value.copy() for name, value in first.items()}
    bound.run(-x)
    close(first, copies)
    close(first, predictor.run(x))


@pytest.mark.parametrize("options", [{}, {"bound_batch": 3}, {"bound_batch": 8}])
def test_groups_are_those_of_their_images_also_in_bound_buffers(model_file, tmp_path, options):
    file = grouped(model_file, tmp_path / "grouped.onnx")
    predictor = Predictor(file, device="cpu", **options)
    rng = np.random.default_rng(0)
    x = predictor.preprocess([noise(32, 40, seed=i) for i in range(7)])
    x *= rng.uniform(0.2, 3, (7, 1, 1, 1)).astype(np.float32)
    logits = predictor.run(x)["logits"]
    for _ in range(4):  # a run keeps nothing of the groups of the one before
        numbers = rng.integers(-1, len(GROUPS), 7)
        outputs = predictor.run(x, numbers)
        np.testing.assert_array_equal(outputs["set"], expected_sets(logits, numbers.tolist()))
        np.testing.assert_array_equal(outputs["set_size"], outputs["set"].sum(-1))
        assert predictor.run(x)["set"].all()  # not told: the largest threshold
    one = pickle.loads(pickle.dumps(Predictor(file, device="cpu", group=GROUPS[1], **options)))
    np.testing.assert_array_equal(one.run(x)["set"], expected_sets(logits, [1] * 7))
    np.testing.assert_array_equal(one.run(x, np.zeros(7, int))["set"], expected_sets(logits, [0] * 7))
    assert [one.group_number(name) for name in (None, "day", *GROUPS[2:])] == [1, 0, 2, 3]
    assert predictor.group_number(None) == -1
    with pytest.raises(ValueError, match="expected a group from 0 to 3, or -1, for each of 7 images"):
        predictor.run(x, np.full(7, 4))
    with pytest.raises(ModelFileError, match="calibration has seen no group 'dusk'"):
        predictor.group_number("dusk")
    plain = Predictor(model_file, device="cpu", **options)
    assert plain.group_number(None) is None
    with pytest.raises(ValueError, match="groups are of files with thresholds by group, and this file has none"):
        plain.run(x, np.zeros(7, int))


def test_no_images_are_no_predictions(predictor, model_file):
    assert predictor([]) == []
    for any_predictor in (predictor, Predictor(model_file, device="cpu", bound_batch=2)):
        outputs = any_predictor.run(any_predictor.preprocess([]))
        assert {name: value.shape for name, value in outputs.items()} == {
            "logits": (0, len(COLOURS)),
            "marginals": (0, len(COLOURS)),
            "indices": (0, K),
        }


@pytest.mark.slow
def test_normalising_in_the_graph_is_the_same(predictor, in_graph_file):
    inside = Predictor(in_graph_file, device="cpu")
    pixels = inside.preprocess(IMAGES)
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == inside.input_shape == (32, 40, 3)
    close(inside.run(pixels), predictor.run(predictor.preprocess(IMAGES)))


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_set_is_the_fewest_classes_that_cover(predictor, coverage):
    for prediction in predictor(IMAGES, softmax_mass=coverage):
        assert prediction.softmax_set is not None
        shares = [ranked.softmax for ranked in prediction.softmax_set]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) >= coverage - 1e-12
        assert sum(shares[:-1]) < coverage
        shorter = min(K, len(shares))
        assert prediction.softmax_set[:shorter] == prediction.top[:shorter]


def test_arguments_that_make_no_sense_are_errors(predictor, model_file, edited):
    for coverage in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="softmax_mass must be above 0 and at most 1"):
            predictor(IMAGES, softmax_mass=coverage)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        predictor(IMAGES, batch_size=0)
    with pytest.raises(TypeError, match="put it in a list"):
        predictor("image.jpg")
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda, tensorrt, got 'gpu'"):
        Predictor(model_file, device="gpu")
    with pytest.raises(ValueError, match="cuda_graph needs bound_batch"):
        Predictor(model_file, cuda_graph=True)
    with pytest.raises(ValueError, match="fixed batch size of 4, bound_batch is 2"):
        Predictor(edited(batch=4), device="cpu", bound_batch=2)
    with pytest.warns(RuntimeWarning, match="cuda_graph has no effect on the CPU"):
        Predictor(model_file, device="cpu", bound_batch=2, cuda_graph=True)


def test_inputs_of_another_shape_or_type_are_errors(predictor):
    for wrong in (np.zeros((1, 3, 32, 32), np.float32), np.zeros((1, 3, 32, 40)), np.zeros((1, 32, 40, 3), np.uint8)):
        with pytest.raises(ValueError, match=r"takes float32 \[batch, 3, 32, 40\], got"):
            predictor.run(wrong)


def test_broken_images_are_errors_with_their_names(predictor, tmp_path):
    with pytest.raises(ImageError, match=r"gone\.jpg does not exist"):
        predictor([IMAGES[0], tmp_path / "gone.jpg"])


def test_images_beyond_the_limit_are_errors(model_file):
    small = Predictor(model_file, device="cpu", max_pixels=99)
    with pytest.raises(ImageError, match="10 x 10 pixels, and more than 99"):
        small([Image.new("RGB", (10, 10))])


def test_files_that_are_no_exported_models_are_errors(tmp_path, edited):
    with pytest.raises(ModelFileError, match=r"gone\.onnx does not exist"):
        Predictor(tmp_path / "gone.onnx")
    corrupt = tmp_path / "corrupt.onnx"
    corrupt.write_bytes(b"\x08\x07 not a model")
    with pytest.raises(ModelFileError, match=r"corrupt\.onnx is not a model that onnxruntime can load"):
        Predictor(corrupt, device="cpu")
    with pytest.raises(ModelFileError, match="carries no topk_registry metadata"):
        Predictor(edited(props={"schema": None}), device="cpu")
    with pytest.raises(ModelFileError, match="newer than this version reads"):
        Predictor(edited(props={"schema": "topk_registry.classifier/99"}), device="cpu")
    with pytest.raises(ModelFileError, match=r"metadata of .* is broken"):
        Predictor(edited(props={"mean": [0.5]}), device="cpu")


def test_a_model_without_marginals_still_runs(edited):
    bare = Predictor(edited(outputs=("logits",)), device="cpu")
    assert list(bare.run(bare.preprocess(IMAGES))) == ["logits"]
    with pytest.raises(ModelFileError, match=r"exported without marginals: use Predictor\.run"):
        bare(IMAGES)


def test_it_needs_no_torch_and_imports_none(model_file, picture, predictor):
    code = """
import sys
import threading

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision", "timm", "onnx", "topk_registry", "topk_plugins"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
from topk_export import Predictor

(prediction,) = Predictor(sys.argv[1], device="cpu")([sys.argv[2]])
print(prediction.top[0].name, repr(prediction.top[0].marginal))
"""
    path = picture("turquoise")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, model_file, path], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert importlib.util.find_spec("torch")  # what was blocked is installed
    (expected,) = predictor([path])
    name, marginal = result.stdout.split()
    assert name == "turquoise"
    assert float(marginal) == pytest.approx(expected.top[0].marginal, rel=1e-6)


@pytest.mark.skipif(CUDA_WORKS, reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_a_gpu_that_is_not_there_is_a_warning_or_an_error(model_file, device):
    with pytest.warns(RuntimeWarning, match=f"wanted {device}, but onnxruntime runs on the CPU"):
        fallen = Predictor(model_file, device=device)
    assert fallen.device == "cpu"
    assert len(fallen(IMAGES)) == len(IMAGES)
    with pytest.raises(DeviceError, match=f"wanted {device}, but onnxruntime runs on the CPU"):
        Predictor(model_file, device=device, require_gpu=True)


def test_requiring_a_gpu_of_the_cpu_is_an_error(model_file):
    with pytest.raises(DeviceError, match="wanted a GPU, but onnxruntime runs on the CPU"):
        Predictor(model_file, device="cpu", require_gpu=True)


@pytest.mark.skipif(runtime.nvidia_gpus() > 0, reason="there is a GPU")
def test_auto_is_the_cpu_without_a_word_where_there_is_no_gpu(model_file, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Predictor(model_file).device == "cpu"
    assert capfd.readouterr() == ("", "")
    with pytest.raises(DeviceError, match="NVIDIA GPUs here: 0"):
        Predictor(model_file, require_gpu=True)


class FakeRuntime:
    """An onnxruntime that claims CUDA, and whose sessions say the CPU, as one with broken CUDA libraries does."""

    def __init__(self, honoured: bool, raises: bool = False) -> None:
        self.honoured, self.raises, self.asked = honoured, raises, None
        self.SessionOptions = onnxruntime.SessionOptions

    def preload_dlls(self) -> None:
        print("libcudart.so not found")

    def get_available_providers(self) -> list[str]:
        return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, source, options, providers):  # noqa: N802
        self.asked = providers
        if self.raises and len(providers) > 1:
            raise RuntimeError("CUDA driver version is insufficient")
        names = [name for name, _ in providers] if self.honoured else ["CPUExecutionProvider"]
        return SimpleNamespace(get_providers=lambda: names)


@pytest.fixture
def machine(monkeypatch):
    def make(*, gpus: int, honoured: bool, raises: bool = False) -> FakeRuntime:
        fake = FakeRuntime(honoured, raises)
        monkeypatch.setattr(runtime, "nvidia_gpus", lambda: gpus)
        monkeypatch.setattr(runtime, "import_onnxruntime", lambda: fake)
        return fake

    return make


def test_a_gpu_that_fails_is_told_even_where_nobody_asked(machine, capsys):
    machine(gpus=1, honoured=False)
    with pytest.warns(RuntimeWarning, match="NVIDIA GPUs here: 1"):
        runtime.open_session(b"", device="auto")
    with pytest.raises(DeviceError):
        runtime.open_session(b"", device="auto", require_gpu=True)
    assert capsys.readouterr().out == ""  # what libraries print goes beside the answer, not into it


def test_a_gpu_whose_libraries_raise_is_told_with_the_cause(machine):
    machine(gpus=1, honoured=False, raises=True)
    with pytest.warns(RuntimeWarning, match="runs on the CPU .* It said: CUDA driver version is insufficient"):
        assert runtime.device_of(runtime.open_session(b"", device="cuda")) == "cpu"
    with pytest.raises(DeviceError, match="It said: CUDA driver version is insufficient"):
        runtime.open_session(b"", device="auto", require_gpu=True)


def test_a_gpu_that_works_is_taken(machine):
    fake = machine(gpus=1, honoured=True)
    session = runtime.open_session(b"", device="auto", require_gpu=True)
    assert runtime.device_of(session) == "cuda"
    assert [name for name, _ in fake.asked] == ["CUDAExecutionProvider", "CPUExecutionProvider"]


def test_provider_options(machine):
    fake = machine(gpus=1, honoured=True)
    runtime.open_session(b"", device="cuda", cuda_graph=True, tf32=False)
    assert fake.asked[0] == ("CUDAExecutionProvider", {"enable_cuda_graph": "1", "use_tf32": "0"})
    assert runtime.device_of(runtime.open_session(b"", device="tensorrt", cuda_graph=True)) == "tensorrt"
    assert fake.asked[0] == ("TensorrtExecutionProvider", {"trt_cuda_graph_enable": "1"})
    assert [name for name, _ in fake.asked[1:]] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    runtime.open_session(b"", device="cpu")
    assert fake.asked == [("CPUExecutionProvider", {})]


def test_onnxruntime_reports_nothing_unless_asked(tmp_path):
    """Its import would write a device's id below HOME, and start a thread that sends."""
    names = ("XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")
    environment = {key: value for key, value in os.environ.items() if key not in names} | {"HOME": str(tmp_path)}
    program = "from topk_export.runtime.session import import_onnxruntime; import_onnxruntime()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA_WORKS, reason="needs a GPU and its onnxruntime")
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_cuda_gives_what_the_cpu_gives(model_file, predictor, cuda_graph):
    gpu = Predictor(model_file, device="cuda", require_gpu=True, bound_batch=4, cuda_graph=cuda_graph)
    assert gpu.device == "cuda"
    x = predictor.preprocess(IMAGES)
    for _ in range(3):
        ours, theirs = gpu.run(x), predictor.run(x)
        assert np.allclose(ours["marginals"], theirs["marginals"], atol=1e-2)  # TF32 in the backbone
