"""The container example: its command line, health check and requirements; and the service without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from topk_export.commands.serve import LOOPBACK, _parser

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "service"
WITHOUT_TORCH = """
import sys
for name in ("torch", "timm", "numba", "onnx", "pyarrow", "tqdm"):
    sys.modules[name] = None
import topk_export.commands.serve, topk_export.serve.server
from topk_export import Predictor
print(Predictor(sys.argv[1], device="cpu").device)
"""


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml"])
def test_the_command_has_allowed_hosts(file):
    text = (EXAMPLE / file).read_text()
    command = re.findall(r"^ *(?:CMD|command:) (\[.*\])$", text, re.MULTILINE)[-1]
    args = _parser().parse_args(json.loads(command))
    assert args.host not in LOOPBACK
    assert args.allowed_hosts == ["localhost"]


def test_a_busy_server_is_not_restarted():
    text = (EXAMPLE / "Dockerfile").read_text()
    assert "/healthz" in text
    assert "readyz" not in text


def test_floors_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    for line in (ROOT / "export" / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            assert re.search(rf'"{re.escape(line)}[";]', project), line


@pytest.mark.parametrize("name", ["pillow", "onnx", "h11", "python-multipart"])
def test_a_floor_that_excludes_a_known_hole_names_it(name):
    project = (ROOT / "pyproject.toml").read_text()
    assert len(set(re.findall(rf'"{name}>=([\d.]+)', project))) == 1  # the same in every extra
    assert re.search(rf'"{name}>=[\d.]+",  # .*CVE-\d+-\d+', project)


@pytest.mark.slow
def test_the_service_runs_without_torch(set_file):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(set_file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cpu"
