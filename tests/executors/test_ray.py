"""Work on a Ray cluster of two nodes: calls, scores and studies, with workers killed in the middle."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.executors.cluster import two_nodes
from tests.export.colours import exported, png
from tests.export.scoring.conftest import parts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'topk-registry[ray]'"),
    pytest.mark.skipif(sys.platform == "win32", reason="Ray has no clusters of several nodes on Windows"),
]

CALLS = """
import os, sys, time
from topk_registry.executors.errors import WorkerDiedError
from topk_registry.executors.ray import RayExecutor

def raised(future):
    try:
        future.result(timeout=300)
    except BaseException as error:
        return type(error)

executor = RayExecutor(address=sys.argv[1])
assert len(executor.workers) == 2
begun = [executor.submit(os.getpid), executor.submit(os._exit, 3), executor.submit(abs, -2)]
assert begun[0].result() != os.getpid()
assert raised(begun[1]) is WorkerDiedError
assert begun[2].result() == 2
assert raised(executor.submit(divmod, 1, 0)) is ZeroDivisionError
slow = executor.submit(time.sleep, 600)
while not any(worker._busy for worker in executor.workers):
    time.sleep(0.05)
executor.interrupt()
assert raised(slow) is KeyboardInterrupt
executor.shutdown()
print("done")
"""


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as address:
        yield address


def python(*argv):
    command = [sys.executable, "-W", "ignore", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_calls_on_two_nodes(cluster):
    done = python("-c", CALLS, cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_two_nodes_score_as_one_process_does(cluster, tmp_path):
    model_file = exported(tmp_path / "colours.onnx")
    images = tmp_path / "images"
    images.mkdir()
    for i, colour in enumerate(["red", "green", "blue", "pink", "grey", "orange", "brown"]):
        (images / f"{i}.png").write_bytes(png(colour))
    common = ("-m", "topk_registry", "score", model_file, images, "--shard-size", "2", "--device", "cpu")
    alone = python(*common, "-o", tmp_path / "alone", "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    both = python(*common, "-o", tmp_path / "both", "--ray", cluster)
    assert both.returncode == 0, both.stderr
    assert "2 workers on the Ray cluster" in both.stderr
    assert len(parts(tmp_path / "both")) == 4
    assert parts(tmp_path / "both") == parts(tmp_path / "alone")
