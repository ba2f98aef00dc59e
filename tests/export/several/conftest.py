"""A file of several labels, and the same calibrated."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.several.channels import exported, pictures
from topk_export.calibration.label_run import CalibratedLabels, calibrate_label_file
from topk_export.samples import Samples


@pytest.fixture(scope="session")
def several_file(made_once: Callable[..., Path]) -> Path:
    return made_once("several", lambda folder: exported(folder / "several.onnx")) / "several.onnx"


@pytest.fixture(scope="session")
def held_out() -> Samples:
    return pictures(400)


@pytest.fixture(scope="session")
def calibrated_labels(
    several_file: Path, held_out: Samples, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, CalibratedLabels]:
    """A file with thresholds and sets, made once, and what was found."""
    output = tmp_path_factory.mktemp("several") / "sets.onnx"
    return output, calibrate_label_file(several_file, output, held_out, alpha=0.1, seed=3, device="cpu")
