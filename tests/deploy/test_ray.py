"""docs/programs/ray_score.py with the real Ray and two workers."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.deploy.files import COLORS, as_image

PROGRAM = Path(__file__).parents[2] / "docs" / "programs" / "ray_score.py"


@pytest.mark.nightly
def test_two_workers_write_one_row_per_image(set_file, tmp_path):
    pytest.importorskip("ray.data")
    folder, out = tmp_path / "images", tmp_path / "out"
    folder.mkdir()
    names = list(COLORS)
    for i in range(60):
        as_image(COLORS[names[i % 7]]).save(folder / f"{i:02d}.png")
    (folder / "17.png").write_bytes(b"broken")
    command = [sys.executable, str(PROGRAM), str(set_file), str(folder), str(out), "--workers", "2", "--alpha", "0.2"]
    # tests import the packages from this process's path, and so must the workers
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_DISABLE_IMPORT_WARNING": "1"}
    done = subprocess.run([*command, "--batch-size", "5"], capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = sorted(pq.read_table(out).to_pylist(), key=lambda row: row["file"])
    assert [row["file"] for row in rows] == [str(folder / f"{i:02d}.png") for i in range(60)]
    for i, row in enumerate(rows):
        assert bool(row["error"]) == (i == 17)
        if i != 17:
            assert row["classes"] == [names[i % 7]]
            assert row["set"][0] == names[i % 7]
