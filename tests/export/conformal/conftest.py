"""A classifier of twelve colours, and images of colours that are hard to tell."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.export.colours import COLOURS, colours_by


@pytest.fixture(scope="session")
def colours_file(made_once):
    return colours_by(made_once)


@pytest.fixture(scope="session")
def held_out(tmp_path_factory):
    """A folder of 360 images: each the mean of a colour, and of another one to some degree."""
    root = tmp_path_factory.mktemp("held-out")
    rng = np.random.default_rng(0)
    colours = {name: np.array(rgb, float) for name, rgb in COLOURS.items()}
    for name, rgb in colours.items():
        (root / name).mkdir()
        for i in range(30):
            other = colours[rng.choice(list(COLOURS))]
            share = 0.65 * rng.random()
            pixels = (1 - share) * rgb + share * other + 12 * rng.standard_normal((8, 10, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(Path(root, name, f"{i:02}.png"))
    return root
