"""The evaluation transform equals timm's, pixel by pixel, and errors about images name the file and the reason."""

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform

from tests.export.colours import encoded, noise, png_of
from topk_export import ImageError
from topk_export.errors import ImageTooLargeError
from topk_export.runtime.preprocess import FORMATS, Preprocess, read_image

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
INCEPTION = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
GREY = {"mean": (0.5,), "std": (0.25,), "color": "L"}
SETTINGS = [
    {"input_size": (3, 224, 224), **IMAGENET},
    {"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bilinear", **IMAGENET},
    {"input_size": (3, 96, 96), "crop_pct": 1.0, "interpolation": "lanczos", **INCEPTION},
    {"input_size": (3, 97, 97), "crop_pct": 0.9, "interpolation": "nearest", **PLAIN},
    {"input_size": (3, 64, 96), "crop_pct": 0.9, **IMAGENET},
    {"input_size": (3, 96, 64), "crop_pct": 0.8, "interpolation": "hamming", **IMAGENET},
    {"input_size": (3, 96, 96), "crop_pct": 0.9, "crop_mode": "border", **IMAGENET},
    {"input_size": (3, 65, 96), "crop_pct": 1.0, "crop_mode": "border", "interpolation": "bilinear", **INCEPTION},
    {"input_size": (3, 96, 96), "crop_pct": 0.9, "crop_mode": "squash", **IMAGENET},
    {"input_size": (3, 64, 97), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "box", **PLAIN},
    {"input_size": (1, 28, 28), "crop_pct": 1.0, **GREY},
    {"input_size": (1, 32, 32), "crop_mode": "border", **GREY},
]
SIZES = [(300, 200), (123, 251), (64, 64), (33, 21), (17, 240)]  # height, width


def timm_input(recipe: Preprocess, image: Image.Image) -> np.ndarray:
    """The input of timm's validation: the image converted as its ImageDataset does, then its evaluation transform."""
    transform = create_transform(
        input_size=recipe.input_size,
        interpolation=recipe.interpolation,
        mean=recipe.mean,
        std=recipe.std,
        crop_pct=recipe.crop_pct,
        crop_mode=recipe.crop_mode,
    )
    return transform(image.convert(recipe.color)).numpy()


def our_input(recipe: Preprocess, source: object, **options: object) -> np.ndarray:
    return recipe.normalize(recipe.pixels(read_image(source, **options))[None])[0]


def grey_levels_apart(recipe: Preprocess, ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape == tuple(recipe.input_size)
    return float((np.abs(ours - theirs) * np.array(recipe.std)[:, None, None]).max() * 255)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_inputs_are_those_of_timm(settings, size):
    recipe = Preprocess(**settings)
    image = Image.fromarray(noise(*size))
    # the same Pillow calls on the same pixels: apart by rounding of the normalization, far below the one level allowed
    assert grey_levels_apart(recipe, our_input(recipe, image), timm_input(recipe, image)) < 1e-3


def with_transparency() -> Image.Image:
    image = Image.fromarray(noise(90, 70)).quantize(16)
    image.info["transparency"] = bytes(range(16))
    return image


MODES = {
    "L": Image.fromarray(noise(90, 70, 1)[..., 0]),
    "LA": Image.fromarray(noise(90, 70, 1)[..., 0]).convert("LA"),
    "1": Image.fromarray(noise(90, 70, 1)[..., 0]).convert("1"),
    "P": Image.fromarray(noise(90, 70)).quantize(16),
    "P with transparency": with_transparency(),
    "RGBA": Image.fromarray(np.dstack((noise(90, 70), noise(90, 70, 1, seed=1)))),
    "CMYK": Image.fromarray(noise(90, 70)).convert("CMYK"),
    "YCbCr": Image.fromarray(noise(90, 70)).convert("YCbCr"),
    "I;16": Image.fromarray(noise(90, 70, 1)[..., 0].astype(np.uint16)),
}


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[-2]], ids=["RGB", "L"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")  # of timm's conversion
def test_images_of_every_mode_become_what_timm_makes_of_them(mode, settings, recwarn):
    recipe, image = Preprocess(**settings), MODES[mode]
    ours = our_input(recipe, image.copy())
    assert not recwarn.list
    assert grey_levels_apart(recipe, ours, timm_input(recipe, image.copy())) < 1e-3


@pytest.mark.parametrize("form", FORMATS)
def test_files_are_decoded_as_timm_does(form, tmp_path):
    """With an orientation tag, which Pillow follows in TIFF files and in no other format."""
    path, recipe, image = tmp_path / "image", Preprocess(**SETTINGS[0]), Image.fromarray(noise(500, 700))
    (exif := image.getexif())[0x0112] = 6
    image.save(path, form, exif=exif)
    with path.open("rb") as file, Image.open(file) as image:  # as timm's readers: Pillow reads paths in another way
        theirs = timm_input(recipe, image)
    for source in (path, str(path), path.read_bytes()):
        assert grey_levels_apart(recipe, our_input(recipe, source), theirs) < 1e-3


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("pixels", [noise(80, 120), noise(80, 120, 1)[..., 0].astype(np.uint16)], ids=["8 bits", "16"])
def test_the_exif_orientation_is_followed_on_request(pixels, form, tmp_path):
    path, image = tmp_path / "turned", Image.fromarray(pixels)
    (exif := image.getexif())[0x0112] = 6  # the camera was turned by a quarter
    (image.convert("L") if form == "JPEG" and image.mode != "RGB" else image).save(path, form, exif=exif)
    recipe, stored = Preprocess(**SETTINGS[4]), read_image(path)
    turned = stored if form == "TIFF" else stored.transpose(Image.Transpose.ROTATE_270)  # Pillow turns TIFF itself
    assert read_image(path, exif=True).size == turned.size == (80, 120)
    assert grey_levels_apart(recipe, our_input(recipe, path, exif=True), timm_input(recipe, turned)) < 1e-3


def test_arrays_are_images():
    recipe, array = Preprocess(**SETTINGS[0]), noise(50, 70)
    expected = our_input(recipe, Image.fromarray(array))
    assert np.array_equal(our_input(recipe, array), expected)
    grey = array[..., 0]
    assert np.array_equal(our_input(recipe, grey), our_input(recipe, grey[..., None]))


def picture(form: str) -> bytes:
    return encoded(Image.fromarray(noise(100, 100)), form)


def test_an_image_bomb_is_refused_before_it_is_decoded():
    with pytest.raises(ImageTooLargeError, match=r"9000 x 9000 pixels, the limit is 64000000"):
        read_image(png_of(9000, 9000))
    with pytest.raises(ImageTooLargeError, match="pixels"):
        read_image(png_of(60_000, 60_000))
    with pytest.raises(ImageTooLargeError, match="100 x 100 pixels, the limit is 9999"):
        read_image(picture("PNG"), max_pixels=9999)


def test_a_strip_that_would_become_too_large_is_an_error():
    source = png_of(1, 60_000, bytes(2 * 60_000))
    with pytest.raises(ImageTooLargeError, match=r"1 x 60000 pixels becomes 256 x 15360000 pixels"):
        Preprocess(**SETTINGS[0]).pixels(read_image(source))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_truncated_file_is_refused(form, tmp_path):
    path, whole = tmp_path / "broken", picture(form)
    for share in (0.2, 0.5, 0.9):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ImageError, match="broken"):
            read_image(path)


@pytest.mark.parametrize("recipe", [SETTINGS[0], SETTINGS[10]], ids=["RGB", "grey"])
@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "I;16", "F", "1", "LA", "PA"])
def test_other_modes_are_converted(mode, recipe):
    pixels = Preprocess(**recipe).pixels(Image.new(mode, (40, 30)))
    assert pixels.shape[2] == recipe["input_size"][0]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(np.uint16, (0, 60000)), (np.int32, (-1, 255)), (np.float32, (0, 255.5)), (np.float32, (0, np.nan))],
    ids=str,
)
def test_values_beyond_8_bits_are_an_error_that_names_the_file(dtype, values, tmp_path):
    path = tmp_path / "deep.tif"
    Image.fromarray(np.array([values] * 8, dtype)).save(path)
    with pytest.raises(ImageError, match=r"deep\.tif has values from .* convert it to 8 bits"):
        read_image(path)


def test_floats_from_0_to_1_are_fractions_of_white(tmp_path):
    path, levels = tmp_path / "float.tif", noise(90, 70, 1)[..., 0]
    Image.fromarray((levels / np.float32(255)).astype(np.float32)).save(path)
    assert np.array_equal(np.asarray(read_image(path)), levels)
    Image.fromarray(levels.astype(np.float32)).save(path)
    assert np.array_equal(np.asarray(read_image(path)), levels)


def test_a_mode_that_cannot_be_converted_is_an_image_error():
    image = Image.merge("LAB", [Image.new("L", (40, 30), 128)] * 3)
    assert Preprocess(**SETTINGS[0]).pixels(image).shape == (224, 224, 3)
    with pytest.raises(ImageError, match="mode LAB cannot be converted to L: conversion from LAB"):
        Preprocess(**SETTINGS[10]).pixels(image)


@pytest.mark.parametrize("content", [b"", b"hello", b"%PDF-1.4 ", b"\x89PNG\r\n\x1a\n", bytes(1000)], ids=repr)
def test_what_is_no_image_is_refused(content):
    with pytest.raises(ImageError, match=r"known format \(JPEG, PNG"):
        read_image(content)


def test_corrupt_content_is_refused():
    with pytest.raises(ImageError, match="cannot be decoded"):
        read_image(png_of(50, 50, b"too little"))


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ImageError, match=r"no\.jpg does not exist"):
        read_image(tmp_path / "no.jpg")
    with pytest.raises(ImageError, match="cannot be decoded"):
        read_image(tmp_path)


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8)])
def test_arrays_of_other_kinds_are_refused(array):
    with pytest.raises(ImageError, match="must be uint8"):
        read_image(array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolation": "cubic"}, "interpolation must be one of nearest, bilinear"),
        ({"crop_mode": "middle"}, "crop_mode must be one of center, border, squash"),
        ({"input_size": (224, 224)}, r"input_size must be \(channels, height, width\)"),
        ({"mean": (0.5,)}, "one value per channel"),
        ({"crop_pct": 0}, "crop_pct"),
        ({"std": (0.5, 0.5, 0.0)}, "std must be above 0"),
        ({"resize_size": (256,)}, "resize_size"),
        ({"color": "L"}, "3 channels"),
    ],
)
def test_settings_that_do_not_exist_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        Preprocess(**{**SETTINGS[0], **change})


def test_a_model_of_other_channels_takes_arrays_only():
    recipe = Preprocess((4, 8, 8), (0.0,) * 4, (1.0,) * 4, color="")
    with pytest.raises(ImageError, match="takes 4 channels"):
        recipe.pixels(Image.new("RGB", (8, 8)))
