"""Work on a Ray cluster of two nodes: calls, scores and studies, with workers killed in the middle."""

import subprocess
import sys
from importlib.util import find_spec

import psutil
import pytest

from tests.executors.cluster import two_nodes
from tests.export.colours import colours_by, png
from tests.export.scoring.conftest import Held, parts

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


def python(*argv, **options):
    command = [sys.executable, "-W", "ignore", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def test_calls_on_two_nodes(cluster):
    done = python("-c", CALLS, cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the actor in /proc")
def test_two_nodes_score_as_one_process_does_and_an_actor_that_is_killed_costs_its_shard_alone(
    cluster, made_once, tmp_path
):
    """An actor waits at a named pipe in the place of an image, so that the middle is certain, and is killed there."""
    model_file = colours_by(made_once)
    images = tmp_path / "images"
    images.mkdir()
    for i, colour in enumerate(["red", "green", "blue", "pink", "grey", "orange", "brown"]):
        (images / f"{i}.png").write_bytes(png(colour))
    common = ("-m", "topk_registry", "score", model_file, images, "--shard-size", "2", "--device", "cpu")
    alone = python(*common, "-o", tmp_path / "alone", "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    held = Held(images / "4.png")
    command = [sys.executable, "-W", "ignore", *map(str, common), "-o", tmp_path / "both", "--ray", cluster]
    both = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        held.wait_for_a_reader(both)
        (actor,) = held.readers()
        assert "ray::" in " ".join(psutil.Process(actor).cmdline())
        held.release()
        psutil.Process(actor).kill()
        out, err = both.communicate(timeout=300)
    finally:
        held.close()
        both.kill()
        both.communicate()
    assert both.returncode == 0, err
    assert "2 workers on the Ray cluster" in err
    assert "7 images in 4 files" in out
    assert len(parts(tmp_path / "both")) == 4
    assert parts(tmp_path / "both") == parts(tmp_path / "alone")


STUDY = """
import os
TITLE, QUESTION, REFERENCE, RUNS, VERSION, ALONE = "Tiny", "Does it run?", "none", "tiny", 1, False

def configurations(options, known):
    return [{"x": x} for x in range(3)]

def run(configuration, work, progress):
    work.mkdir(parents=True, exist_ok=True)
    if configuration["x"] == 1 and not (work / "begun").exists():
        (work / "begun").touch()
        os.kill(os.getpid(), 9)
    return {"y": configuration["x"] ** 2}
"""
DRIVER = """
import sys
import tiny_study
from topk_registry.executors.ray import RayExecutor
from topk_studies.engine.runner import run_study
from topk_studies.engine.store import Store
from topk_studies.engine.study import Options
from pathlib import Path

executor = RayExecutor(2, address=sys.argv[1])
try:
    for _ in range(2):
        records = run_study(tiny_study, Options(), Store(Path("store")), jobs=2, executor=executor)
        print("told", [(record.configuration["x"], record.result.get("y"), record.error[:60]) for record in records])
finally:
    executor.kill()
"""


def test_a_study_on_two_nodes_goes_on_after_an_actor_died(cluster, tmp_path):
    (tmp_path / "tiny_study.py").write_text(STUDY)
    (tmp_path / "driver.py").write_text(DRIVER)
    done = python("driver.py", cluster, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = [line[5:] for line in done.stdout.splitlines() if line.startswith("told ")]
    assert "(0, 0, '')" in first
    assert "(2, 4, '')" in first
    assert "(1, None, 'WorkerDiedError" in first  # the run that took its actor with it
    assert second == "[(0, 0, ''), (1, 1, ''), (2, 4, '')]"  # done again, and the others not
