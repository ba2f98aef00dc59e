"""Workers and commands killed in the middle: what is done again, and that nothing differs in the end.

A named pipe stands where an image should be. Whoever reads it waits, so that the middle is certain and no test sleeps
for luck.
"""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.export.scoring.conftest import Held, parts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes"),
]
PIPE = "17-yellow.png"  # of the fourth of six shards


def command(model, folder, output, *flags):
    argv = [sys.executable, "-m", "topk_registry", "score", model, folder, "-o", output, "--device", "cpu"]
    return [*map(str, argv), "--shard-size", "5", "--batch-size", "2", *flags]


def start(*argv, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*argv), **pipes, **options)


@pytest.fixture(scope="module")
def expected(model_file, tmp_path_factory, contents):
    """The files of a run that nothing disturbed, by one worker, and the folder of the images."""
    folder = tmp_path_factory.mktemp("expected")
    images = folder / "images"
    images.mkdir()
    for name, content in contents.items():
        (images / name).write_bytes(content)
    done = subprocess.run(command(model_file, images, folder / "scores", "--workers", "1"), capture_output=True)
    assert done.returncode == 3, done.stderr
    return parts(folder / "scores"), images


@pytest.fixture
def held(expected):
    pipe = Held(expected[1] / PIPE)
    yield pipe
    pipe.close()


def workers_of(process):
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_any_number_of_workers_writes_the_same_bytes(expected, model_file, tmp_path):
    before, images = expected
    done = subprocess.run(command(model_file, images, tmp_path / "scores", "--workers", "3"), capture_output=True)
    assert done.returncode == 3, done.stderr
    assert parts(tmp_path / "scores") == before


def test_a_worker_that_is_killed_costs_its_shard_alone(expected, held, model_file, tmp_path):
    output = tmp_path / "scores"
    process = start(model_file, held.path.parent, output, "--workers", "1")
    held.wait_for_a_reader(process)
    held.release()
    (worker,) = workers_of(process)
    assert len(list(output.glob("*.parquet"))) == 3
    worker.kill()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 3, out + err
    assert "30 images in 6 files" in out
    assert parts(output) == expected[0]


def test_a_command_that_is_killed_goes_on_where_it_was(expected, held, model_file, tmp_path):
    output = tmp_path / "scores"
    process = start(model_file, held.path.parent, output, "--workers", "1")
    held.wait_for_a_reader(process)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    held.release()
    assert not psutil.wait_procs(workers, timeout=600)[1], "workers end with their command"
    assert len(list(output.glob("*.parquet"))) == 3
    done = subprocess.run(
        command(model_file, held.path.parent, output, "--workers", "1"), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 3, done.stderr
    assert "3 of them by an earlier call" in done.stdout
    assert parts(output) == expected[0]


def test_sigterm_stops_at_once_and_tells_how_to_go_on(held, model_file, tmp_path):
    output = tmp_path / "scores"
    process = start(model_file, held.path.parent, output, "--workers", "1")
    held.wait_for_a_reader(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"topk-registry score {model_file} {held.path.parent} -o {output}" in err
