"""The measurements on a GPU, rehearsed on the CPU in tiny sizes."""

import json
import math

import pytest

from benchmarks.gpu import STEPS, main


@pytest.mark.slow
def test_every_step_runs(tmp_path):
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--output", str(file)]) == 0, file.read_text()
    results = json.loads(file.read_text())
    assert set(STEPS) <= set(results)
    (figures,) = {key: value for key, value in results["losses"].items() if "indices" in key}.values()
    assert set(figures["from Python"]) == set(figures["host alone"]) > {"cross-entropy", "smooth_topk_svm at 0.1"}
    assert all(microseconds > 0 for microseconds in figures["from Python"].values())
    assert math.isfinite(results["training"]["smooth_topk_svm"]["last loss"])
    assert "CPUExecutionProvider" in results["onnx"]["operators per provider"]
