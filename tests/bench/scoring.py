"""Time ``topk-registry score`` against a plain loop of onnxruntime, and watch its memory.

    python -m tests.bench scoring model.onnx --images 1000 20000

For each number of images: the score command by numbers of workers, whose files must be equal; the most memory that
the command and its workers held together; and a loop over the same images, decoded before the clock starts, in batches
of the same size with as many threads as there are workers. At the end the processor seconds and bytes of an image, from
which docs/guide/scale.md reckons what many images cost.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from tests.executors.cluster import two_nodes
from topk_export import Predictor

BATCH, SHARD = 32, 512


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench scoring", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", help="an exported file, such as that of resnet18")
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 20000], metavar="N")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--ray", action="store_true", help="also on a Ray cluster of two nodes of this machine")
    args = parser.parse_args(argv)
    print("images  workers  seconds  images/s  MiB at most  plain loop, images/s  share of it")
    with tempfile.TemporaryDirectory() as folder, two_nodes() if args.ray else nullcontext() as cluster:
        for count in args.images:
            images = _pictures(Path(folder) / f"images-{count}", count, args.size)
            _measure(args.model, images, count, args.workers, cluster)
        reading, running = _processor_seconds(args.model, images)
        size, written = (_bytes(each) / count for each in (images, _output(images, args.workers[0])))
    print(f"processor seconds an image: {reading:.5f} to read and preprocess, {running:.5f} of the model")
    print(f"bytes an image: {size:.0f} read, {written:.0f} written")
    return 0


def _pictures(folder: Path, count: int, size: int) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(count):
        blocks = random.integers(0, 256, (size // 8, size // 8, 3), np.uint8)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(folder / f"{i:06d}.jpg")
    return folder


def _measure(model: str, images: Path, count: int, numbers: Sequence[int], cluster: str | None) -> None:
    written = []
    for workers in numbers:
        output = _output(images, workers)
        seconds, memory = _score(model, images, output, workers)
        loop = _loop(model, images, workers)
        row = (count, workers, f"{seconds:.1f}", f"{count / seconds:.1f}", f"{memory:.0f}", f"{loop:.1f}")
        print(*row, f"{count / seconds / loop:.3f}", sep="\t", flush=True)
        written.append({path.name: path.read_bytes() for path in output.iterdir()})
    if cluster is not None:
        output = _output(images, 0)
        seconds, _ = _score(model, images, output, 2, "--ray", cluster)
        print(count, "2 nodes", f"{seconds:.1f}", f"{count / seconds:.1f}", "-", "-", "-", sep="\t", flush=True)
        written.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert all(files == written[0] for files in written), "the files differ by the number of workers or nodes"
    print(f"{count} images: the same {len(written[0])} files {len(written)} times", flush=True)


def _output(images: Path, workers: int) -> Path:
    return images.with_name(f"{images.name}-{workers}")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _processor_seconds(model: str, images: Path) -> tuple[float, float]:
    """Processor seconds of an image, which other programs on the machine disturb less than the clock's."""
    predictor = Predictor(model, device="cpu", threads=1)
    paths = sorted(images.iterdir())[: 8 * BATCH]
    predictor.run(predictor.preprocess(paths[:BATCH]))
    began = time.process_time()
    batches = [predictor.preprocess(paths[start : start + BATCH]) for start in range(0, len(paths), BATCH)]
    read = time.process_time()
    for batch in batches:
        predictor.run(batch)
    return (read - began) / len(paths), (time.process_time() - read) / len(paths)


def _score(model: str, images: Path, output: Path, workers: int, *more: str) -> tuple[float, float]:
    """Seconds, start included, and the most MiB of the command and its workers."""
    words: list[Any] = [model, images, "-o", output, "--workers", workers, "--batch-size", BATCH, "--shard-size", SHARD]
    words += more
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "topk_registry", "score", *map(str, words), "--device", "cpu"])
    most, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(1):
            most = max(most, _held(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    status = process.wait()
    seconds = time.perf_counter() - began
    ended.set()
    thread.join()
    assert status == 0, status
    return seconds, most / 2**20


def _held(pid: int) -> float:
    try:
        command = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (command, *command.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0.0


def _loop(model: str, images: Path, threads: int) -> float:
    """Images a second of the session alone, over at most 1024 images that are decoded before."""
    predictor = Predictor(model, device="cpu", threads=threads)
    inputs = predictor.preprocess(sorted(images.iterdir())[:1024])
    session, name = predictor.session, predictor.input_name
    session.run(None, {name: inputs[:BATCH]})
    began = time.perf_counter()
    for start in range(0, len(inputs), BATCH):
        session.run(None, {name: inputs[start : start + BATCH]})
    return len(inputs) / (time.perf_counter() - began)
