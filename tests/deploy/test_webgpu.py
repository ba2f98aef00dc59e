"""The commands on onnxruntime's WebGPU provider, which gives the answers of the CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.deploy.files import COLORS, NAMES, as_image, png
from tests.deploy.service import Process, predict, request
from topk_export import Predictor
from topk_export.commands import calibrate
from topk_export.commands.predict import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("software_gpu")]


def test_predict(set_file, tmp_path, capsys):
    for name, color in zip("abc", COLORS.values(), strict=False):
        as_image(color).save(tmp_path / f"{name}.png")
    answers = []
    for device in ("webgpu", "cpu"):
        flags = ["--device", device, "--alpha", "0.2", "--allow", "black", "--allow", "white", "--json", "-"]
        assert main([str(set_file), str(tmp_path), *flags]) == 0
        answers.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert len(answers[0]) == 3
    for found, expected in zip(*answers, strict=True):
        for one, other in zip(found["top"] + found["set"], expected["top"] + expected["set"], strict=True):
            assert one["index"] == other["index"]
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-6)


def test_calibrate(plain_file, tmp_path):
    for name, color in zip(NAMES[:4], COLORS.values(), strict=False):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(30):
            as_image(tuple(min(255, max(0, value + 2 * i - 30)) for value in color)).save(
                tmp_path / "data" / name / f"{i}.png"
            )
    reports = []
    for device in ("webgpu", "cpu"):
        flags = ["-o", str(tmp_path / f"{device}.onnx"), "--json", str(tmp_path / "report.json"), "--device", device]
        assert calibrate.main([str(plain_file), "--data-dir", str(tmp_path / "data"), *flags, "--force"]) == 0
        reports.append(json.loads((tmp_path / "report.json").read_text()))
    assert reports[0]["coverage"] == pytest.approx(reports[1]["coverage"])
    assert Predictor(tmp_path / "webgpu.onnx", device="webgpu").device == "webgpu"


def test_serve(set_file):
    with Process(set_file, "--device", "webgpu") as server:
        assert request(server.port, "GET", "/model")[1]["device"] == "webgpu"
        status, answer = predict(server.port, png(COLORS["red"]), "?alpha=0.2")
    (expected,) = Predictor(set_file, device="cpu").predict([png(COLORS["red"])], alpha=0.2)
    assert status == 200
    found = answer["predictions"][0]
    assert [entry["index"] for entry in found["set"]] == [entry.index for entry in expected.set]
    assert found["top"][0]["probability"] == pytest.approx(expected.top[0].probability, abs=1e-6)


def test_a_machine_without_a_device_gets_one_line(set_file, tmp_path):
    as_image(COLORS["red"]).save(tmp_path / "a.png")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORT_WEBGPU")}
    command = [sys.executable, "-m", "topk_registry", "predict", str(set_file), str(tmp_path), "--device", "webgpu"]
    environment["VK_ICD_FILENAMES"] = str(tmp_path / "nothing.json")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert "error: requested webgpu, but onnxruntime runs the model on the CPU" in done.stderr
    assert "CPUExecutionProvider" in done.stderr
    assert "Traceback" not in done.stderr
