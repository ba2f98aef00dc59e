"""Inputs and outputs of onnxruntime sessions as arrays: checks, conversions, and random inputs for tests of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from topk_export.errors import ModelFileError
from topk_export.runtime.metadata import Metadata
from topk_export.runtime.preprocess import UNKNOWN, Preprocess
from topk_export.runtime.session import TYPES

SAMPLES = 5  # rows of a random batch
FREE_AXIS = 64  # length that an axis of any length gets in random inputs


def check_feed(session: Any, feed: Mapping[str, Any], *, batched: bool = True) -> dict[str, np.ndarray]:
    """Return the arrays for the inputs of a model, in the types of the model.

    If ``batched`` is False, the inputs of the model have no batch axis, but the arrays have one.

    Raises:
        ValueError: an input is missing or unknown, an array has another type or shape than the input, or the arrays
            have different numbers of rows.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    if set(feed) != set(inputs):
        raise ValueError(f"the model takes the inputs {', '.join(inputs)}, got {', '.join(feed) or 'none'}")
    arrays = {}
    for name, value in inputs.items():
        array = np.asarray(feed[name])
        shape = ["batch", *value.shape[batched:]]
        fits = array.ndim == len(shape) and all(
            not isinstance(length, int) or length in (size, 0, -1)
            for length, size in zip(shape, array.shape, strict=True)
        )
        cast = _as_type(array, TYPES.get(value.type, array.dtype))
        if not fits or cast is None:
            raise ValueError(f"the input {name} takes {value.type} {shape}, got {array.dtype} {list(array.shape)}")
        arrays[name] = cast
    if len({len(array) for array in arrays.values()}) > 1:
        counts = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise ValueError(f"the inputs must have the same number of rows, got {counts}")
    return arrays


def _as_type(array: np.ndarray, wanted: Any) -> np.ndarray | None:
    """Return an array of the wanted type with the same numbers, up to the rounding of floats, or None."""
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "biuf":
        return None
    cast = array.astype(wanted)
    return cast if np.issubdtype(wanted, np.floating) or (cast == array).all() else None


def as_arrays(session: Any, outputs: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return the outputs of a session by name, and as arrays.

    A sequence of maps, as models of scikit-learn return, becomes an array [B, n] in the order of the classes.
    """
    arrays = {}
    for value, output in zip(session.get_outputs(), outputs, strict=True):
        if value.type.startswith("tensor("):
            arrays[value.name] = np.asarray(output)
        elif value.type.startswith("seq(map("):
            arrays[value.name] = np.asarray([list(row.values()) for row in output])
    return arrays


def image_batch(recipe: Preprocess, *, in_graph: bool = False, batch: int = SAMPLES) -> np.ndarray:
    """Return a batch of random images in the input format of the model: a grid of 4 x 4 random colors, plus noise.

    The images are the same in each call. If mean and standard deviation of the preprocessing are unknown, the values
    are between -1 and 1.
    """
    c, h, w = recipe.input_size
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (batch, 4, 4, c)).repeat(-(-h // 4), 1).repeat(-(-w // 4), 2)[:, :h, :w]
    pixels = np.clip(coarse + rng.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)
    if recipe.color == UNKNOWN:
        return (pixels.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32)
    return pixels if in_graph else recipe.normalize(pixels)


def random_inputs(session: Any, largest: int = 1) -> dict[str, np.ndarray]:
    """Return random values for all inputs of a model, by name. The values are the same in each call.

    Floating-point inputs are normally distributed. Integers are from 0 to ``largest``; many models look integers up in
    a table, whose length is unknown. Axes of any length get the length 5 for the first axis (the batch), and
    ``FREE_AXIS`` for the other axes.
    """
    rng = np.random.default_rng(0)
    feed = {}
    for value in session.get_inputs():
        free = [FREE_AXIS if i else SAMPLES for i in range(len(value.shape))]
        shape = [d if isinstance(d, int) and d > 0 else f for d, f in zip(value.shape, free, strict=True)]
        dtype = TYPES.get(value.type)
        if value.type == "tensor(string)":
            feed[value.name] = np.full(shape, "a", dtype=object)
        elif dtype is None:
            raise ModelFileError(f"the input {value.name} has the type {value.type}, which is not supported")
        elif np.issubdtype(dtype, np.floating):
            feed[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            feed[value.name] = rng.integers(0, 2 if dtype is np.bool_ else largest + 1, shape).astype(dtype)
    return feed


def inputs_for(session: Any, metadata: Metadata) -> dict[str, np.ndarray]:
    """Return random inputs of a model, by name."""
    if metadata.preprocess is None:
        return random_inputs(session)
    return {session.get_inputs()[0].name: image_batch(metadata.preprocess, in_graph=metadata.in_graph)}


def takes_images(shape: Sequence[Any], recipe: Preprocess, *, in_graph: bool) -> bool:
    """Return whether an input of this shape, without the batch axis, fits the images that a preprocessing gives."""
    wanted = image_shape(recipe, in_graph=in_graph)
    return len(shape) == 3 and all(not isinstance(d, int) or d == w for d, w in zip(shape, wanted, strict=True))


def image_shape(recipe: Preprocess, *, in_graph: bool) -> tuple[int, int, int]:
    """Return [height, width, channels] if the graph normalizes images, else [channels, height, width]."""
    c, h, w = recipe.input_size
    return (h, w, c) if in_graph else (c, h, w)
