"""Predictions: right, the same in every batching, without torch, within a class list."""

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from tests.export.colours import COLOURS, K, noise
from topk_export import ImageError, ModelFileError, Prediction, PredictionError, Predictor
from topk_export.runtime.ranking import rank_rows
from topk_export.verify import marginals

IMAGES = [noise(40 + 3 * i, 60, seed=i) for i in range(7)]
NAMES = list(COLOURS)


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert (value.shape, value.dtype) == (theirs[name].shape, theirs[name].dtype)
        assert np.allclose(value, theirs[name], rtol=1e-5, atol=1e-6), name


def test_images_of_one_colour_are_named(predictor, picture):
    predictions = predictor([picture(colour) for colour in COLOURS])
    assert [p.top[0].name for p in predictions] == NAMES
    for prediction in predictions:
        order = [entry.probability for entry in prediction.top]
        assert len(order) == K
        assert order == sorted(order, reverse=True)
        assert prediction.set is None


def test_a_prediction_has_the_numbers_of_the_outputs(predictor):
    (prediction,) = predictor([IMAGES[0]])
    outputs = predictor.run(predictor.preprocess([IMAGES[0]]))
    np.testing.assert_allclose(outputs["marginals"], marginals(outputs["logits"], K), rtol=1e-5)
    assert outputs["probabilities"].sum() == pytest.approx(1, rel=1e-6)
    for entry in prediction.top:
        assert entry.marginal == outputs["marginals"][0, entry.index]
        assert entry.probability == outputs["probabilities"][0, entry.index]
        assert entry.name == NAMES[entry.index]
    assert [entry.index for entry in prediction.top] == outputs["indices"][0].tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_batches_change_nothing(predictor, batch_size):
    for a, b in zip(predictor(IMAGES), predictor(iter(IMAGES), batch_size=batch_size), strict=True):
        assert [r.index for r in a.top] == [r.index for r in b.top]
        assert np.allclose([r.marginal for r in a.top], [r.marginal for r in b.top], rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_holds_one_batch_and_reads_the_next(model_file, workers):
    predictor = Predictor(model_file, device="cpu", workers=workers)
    taken = []
    stream = predictor.stream((taken.append(i) or image for i, image in enumerate(IMAGES)), batch_size=2)
    next(stream)
    assert taken == [0, 1, 2, 3]
    assert len(list(stream)) == len(IMAGES) - 1


BROKEN = [*IMAGES[:3], b"no image", *IMAGES[3:]]


def test_a_broken_image_loses_no_other(predictor):
    good, got = predictor(IMAGES), []
    with pytest.raises(ImageError, match="known format"):
        got.extend(predictor.stream(BROKEN, batch_size=32))
    assert got == good[:3]
    assert predictor(BROKEN, on_error="skip") == good
    marked = predictor(BROKEN, on_error="yield", batch_size=2)
    assert isinstance(marked[3], ImageError)
    for one, other in zip([p for p in marked if not isinstance(p, ImageError)], good, strict=True):
        for entry, expected in zip(one.top, other.top, strict=True):  # a sum may depend on the size of the batch
            assert (entry.index, entry.name) == (expected.index, expected.name)
            scores = entry.probability, entry.marginal
            assert scores == pytest.approx((expected.probability, expected.marginal), rel=1e-6)


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
    read = predictor.input_of

    def meet(image):
        together.wait()
        return read(image)

    predictor.input_of = meet
    assert len(predictor(IMAGES[:3], batch_size=3)) == 3


def test_a_predictor_pickles(model_file):
    predictor = Predictor(model_file, device="cpu", workers=3)
    copy = pickle.loads(pickle.dumps(predictor))
    assert (copy.metadata, copy.workers) == (predictor.metadata, 3)
    assert copy(IMAGES) == predictor(IMAGES)


def test_outputs_that_are_not_finite_are_an_error_of_that_image(predictor, edited):
    logits = np.zeros((4, len(COLOURS)), np.float32)
    logits[1, 4], logits[2, 0], logits[3, 0] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        outputs = {"logits": logits, "marginals": logits, "probabilities": logits * 0}
    outputs["probabilities"][3] = 0
    rows = list(rank_rows(outputs, predictor.metadata))
    assert [type(row) for row in rows] == [Prediction, PredictionError, PredictionError, Prediction]
    broken = Predictor(edited(nan=True), device="cpu")
    assert broken(IMAGES, on_error="skip") == []
    with pytest.raises(PredictionError, match="not finite"):
        broken(IMAGES)


def test_no_images_are_no_predictions(predictor):
    assert predictor([]) == []
    shapes = {name: value.shape for name, value in predictor.run(predictor.preprocess([])).items()}
    n = len(COLOURS)
    assert shapes == {"logits": (0, n), "marginals": (0, n), "probabilities": (0, n), "indices": (0, K)}


@pytest.mark.slow
def test_normalization_in_the_graph_is_the_same(predictor, in_graph_file):
    inside = Predictor(in_graph_file, device="cpu")
    pixels = inside.preprocess(IMAGES)
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == inside.input_shape == (32, 40, 3)
    close(inside.run(pixels), predictor.run(predictor.preprocess(IMAGES)))


@pytest.mark.slow
def test_a_file_can_be_quantized(predictor, model_file, picture, tmp_path):
    """By the command of docs/export.md."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(model_file, tmp_path / "int8.onnx")
    batch = predictor.preprocess([picture("red")])
    found, exact = Predictor(tmp_path / "int8.onnx", device="cpu").run(batch), predictor.run(batch)
    np.testing.assert_allclose(found["marginals"].sum(-1), exact["marginals"].sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found["logits"], exact["logits"], atol=0.1 * np.ptp(exact["logits"]))


@pytest.mark.nightly
def test_openvino_gives_the_same_marginals(predictor, model_file, picture):
    openvino = pytest.importorskip("openvino")
    batch = predictor.preprocess([picture("red")])
    found = openvino.Core().compile_model(str(model_file), "CPU")(batch)
    np.testing.assert_allclose(found["marginals"], predictor.run(batch)["marginals"], atol=1e-5)


def test_class_lists(predictor, picture):
    chosen = ["red", "pink", "blue"]
    images = [picture(colour) for colour in ("red", "orange", "green")]
    limited = predictor(images, allowed=chosen)
    for prediction in limited:
        assert {entry.name for entry in prediction.top} == set(chosen)
        assert [entry.marginal for entry in prediction.top] == [1.0] * 3  # at most k classes: all are in the set
        assert sum(entry.probability for entry in prediction.top) == pytest.approx(1, rel=1e-5)
    assert predictor(images, allowed=predictor.mask_of(chosen)) == limited
    x, mask = predictor.preprocess(images), predictor.mask_of(chosen)
    per_row = predictor.run(x, allowed=np.stack([mask, ~mask, mask]))
    close({k: v[:1] for k, v in per_row.items()}, predictor.run(x[:1], allowed=mask))
    assert (per_row["probabilities"][1, mask] == 0).all()
    np.testing.assert_array_equal(per_row["logits"], predictor.run(x)["logits"])


@pytest.mark.parametrize(
    ("names", "word"),
    [([], "empty"), (["redd"], "'redd'$"), (["red", "zzz"], "'zzz'"), (iter(()), "empty")],
    ids=["none", "misspelt", "unknown", "empty iterator"],
)
def test_bad_class_lists(predictor, names, word):
    with pytest.raises(ValueError, match=word):
        predictor.mask_of(names)


def test_bad_masks(predictor):
    x, n = predictor.preprocess(IMAGES[:2]), len(COLOURS)
    for mask in (np.ones(n), np.ones(n + 1, bool), np.ones((3, n), bool), np.zeros(n, bool)):
        with pytest.raises(ValueError, match=r"allowed must be bool|empty"):
            predictor.run(x, allowed=mask)
    with pytest.raises(TypeError, match="sequence of names"):
        predictor.mask_of("red")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_set": 0}, "max_set"),
        ({"on_error": "ignore"}, "on_error"),
        ({"alpha": 0.1}, "calibrate"),
    ],
    ids=str,
)
def test_bad_options(predictor, options, word):
    with pytest.raises(ValueError, match=word):
        predictor(IMAGES, **options)


def test_the_file_says_whether_images_are_turned(predictor, edited):
    image = Image.fromarray(noise(60, 90))
    image.getexif()[0x0112] = 6  # the camera was turned by a quarter
    turned = image.transpose(Image.Transpose.ROTATE_270)
    follows = Predictor(edited(props={"exif": True}), device="cpu")
    np.testing.assert_array_equal(follows.input_of(image), predictor.input_of(turned))
    assert not np.array_equal(predictor.input_of(image), predictor.input_of(turned))


def test_bad_arguments(predictor, model_file):
    for image in ("image.jpg", b"", IMAGES[0], IMAGES[0][..., 0], Image.fromarray(IMAGES[0])):
        with pytest.raises(TypeError, match="put it in a list"):
            predictor(image)
    for empty in (np.zeros((0, 4, 3), np.uint8), Image.new("RGB", (4, 0))):
        with pytest.raises(ImageError, match=r"\[0, 4, 3\]|no pixels"):
            predictor([empty])
    with pytest.raises(ValueError, match="device must be one of"):
        Predictor(model_file, device="gpu")
    with pytest.raises(ValueError, match="workers"):
        Predictor(model_file, workers=0)
    for wrong in (np.zeros((1, 3, 32, 32), np.float32), np.zeros((1, 3, 32, 40)), np.zeros((1, 32, 40, 3), np.uint8)):
        with pytest.raises(ValueError, match=r"takes float32 \[batch, 3, 32, 40\], got"):
            predictor.run(wrong)


def test_errors_of_images_name_them(predictor, model_file, tmp_path):
    with pytest.raises(ImageError, match=r"gone\.jpg does not exist"):
        predictor([IMAGES[0], tmp_path / "gone.jpg"])
    with pytest.raises(ImageError, match="10 x 10 pixels, the limit is 99"):
        Predictor(model_file, device="cpu", max_pixels=99)([Image.new("RGB", (10, 10))])


def test_files_that_are_not_exported_models(tmp_path, edited):
    corrupt = tmp_path / "corrupt.onnx"
    corrupt.write_bytes(b"\x08\x07 not a model")
    files = {
        "does not exist": tmp_path / "gone.onnx",
        "not a model": corrupt,
        "no topk_registry metadata": edited(props={"schema": None}),
        "has schema": edited(props={"schema": "topk_registry.classifier/99"}),
        "is broken": edited(props={"mean": [0.5]}),
        "gives images of the shape": edited(props={"input_size": [3, 9, 8]}),
        "12 classes, 1 names": edited(props={"class_names": ["a"]}),
    }
    for word, path in files.items():
        with pytest.raises(ModelFileError, match=word):
            Predictor(path, device="cpu")


def test_a_model_without_marginals_runs_and_does_not_predict(edited):
    bare = Predictor(edited(outputs=("logits",)), device="cpu")
    assert list(bare.run(bare.preprocess(IMAGES))) == ["logits"]
    with pytest.raises(ModelFileError, match="no marginals"):
        bare(IMAGES)


def test_prediction_imports_no_torch_and_none_of_the_core_but_its_lazy_names(model_file, picture):
    code = f"""
import sys
for name in ("torch", "timm", "onnx"):
    sys.modules[name] = None  # importing it fails
from topk_export import Predictor
predictor = Predictor({str(model_file)!r}, device="cpu")
print(predictor([{str(picture("red"))!r}], allowed=["red", "blue"])[0].top[0].name)
core = {{name for name in sys.modules if name.startswith("topk_registry")}}
assert core <= {{"topk_registry", "topk_registry.lazy"}}, core
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout.strip()) == (0, "red"), result.stderr
