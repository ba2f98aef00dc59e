"""A small exported file that is written without torch, and images whose labels follow its probabilities."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tests.export.colours import COLOURS, encoded
from topk_export.graph import optional_input
from topk_export.runtime.metadata import ALLOWED, LOGITS, Metadata
from topk_export.runtime.preprocess import Preprocess

COLORS = {name: COLOURS[name] for name in ("black", "white", "red", "green", "blue", "yellow", "pink")}
COLORS["<b>grey\u202e"] = COLOURS["grey"]  # a name that a page and a terminal must escape
NAMES = tuple(COLORS)
SIZE, SCALE = 8, 20.0


def write_file(path: Path, *, lists: bool = True, side: int = SIZE, k: int = 1) -> Path:
    """Write a classifier of colors: logits are minus the squared distance of the mean color, times ``SCALE``.

    For k = 1, the marginals are the softmax over the allowed classes. For larger k, they are only
    a bound: k times that, at most 1.
    """
    c = np.asarray(list(COLORS.values()), np.float32) / 255
    n = len(c)
    constants = {
        "weight": (2 * SCALE * c).T,
        "bias": -SCALE * (c**2).sum(-1),
        "axes": np.array([2, 3], np.int64),
        "excluded": np.float32(-np.inf),
        "k": np.float32(k),
        "one": np.float32(1),
    }
    inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, side, side])]
    shape = ["batch", n]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in (LOGITS, "marginals", "probabilities")
    ]
    masked = ("Where", [ALLOWED, LOGITS, "excluded"]) if lists else ("Identity", [LOGITS])
    nodes = [
        helper.make_node("ReduceMean", ["input", "axes"], ["mean"], keepdims=0),
        helper.make_node("Gemm", ["mean", "weight", "bias"], [LOGITS]),
        helper.make_node(*masked, ["masked"]),
        helper.make_node("Softmax", ["masked"], ["probabilities"], axis=-1),
        helper.make_node("Mul", ["probabilities", "k"], ["scaled"]),
        helper.make_node("Min", ["scaled", "one"], ["marginals"]),
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "colors", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if lists:
        optional_input(model, ALLOWED, np.ones((1, n), bool), ["lists", n])
    recipe = Preprocess((3, side, side), (0.0,) * 3, (1.0,) * 3, interpolation="bilinear", crop_pct=1.0)
    metadata = Metadata(k=k, temperature=1.0, num_classes=n, class_names=NAMES, preprocess=recipe, backbone="colors")
    for key, value in metadata.to_props().items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, str(path))
    return path


def softmax_logits(pixels: np.ndarray) -> np.ndarray:
    """Logits [N, n] of the file for images of one color, uint8 [N, 3]."""
    x, c = pixels / 255, np.asarray(list(COLORS.values())) / 255
    return SCALE * (2 * x @ c.T - (c**2).sum(-1))


def labeled_colors(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Colors uint8 [N, 3], and labels drawn from the probabilities of the file."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 3)).astype(np.uint8)
    logits = softmax_logits(pixels)
    return pixels, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


def as_image(color: Any, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    return Image.new("RGB", size, tuple(int(v) for v in color))


def png(color: Any, size: tuple[int, int] = (SIZE, SIZE)) -> bytes:
    return encoded(as_image(color, size))


def class_folders(root: Path, count: int, seed: int = 0, names: tuple[str, ...] = NAMES) -> Path:
    """Write labeled images into one folder per class."""
    for i, (color, label) in enumerate(zip(*labeled_colors(count, seed), strict=True)):
        folder = root / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        as_image(color).save(folder / f"{i:05d}.png")
    return root
