"""Exported files and calibrated files, written once."""

from pathlib import Path

import pytest

from tests.deploy.files import as_image, labeled_colors, write_file
from topk_export import Predictor
from topk_export.calibrate import Images, calibrate_file
from topk_registry.conformal import Score


@pytest.fixture(scope="session")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("plain") / "colors.onnx")


@pytest.fixture(scope="session")
def calibrated(plain_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """``calibrated(score, rule)``: a file with sets, and the result of its calibration; each made once."""
    made = {}
    pixels, labels = labeled_colors(4000, seed=1)
    data = Images("colors", [as_image(color) for color in pixels], labels)
    scores = {"lac": Score("lac"), "aps": Score("aps"), "raps": Score("raps", penalty=0.05, k_reg=1)}

    def get(score: str = "lac", rule: str = "marginal"):
        if (score, rule) not in made:
            path = tmp_path_factory.mktemp("sets") / "colors-sets.onnx"
            done = calibrate_file(plain_file, path, data, score=scores[score], rule=rule, batch_size=500, device="cpu")
            made[score, rule] = path, done
        return made[score, rule]

    return get


@pytest.fixture(scope="session")
def set_file(calibrated) -> Path:
    return calibrated()[0]


@pytest.fixture(scope="session")
def predictor(set_file: Path) -> Predictor:
    return Predictor(set_file, device="cpu", threads=1)
