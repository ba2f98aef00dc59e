"""Test and measure on a GPU: kernels, correctness, times of losses, training, and an ONNX file.

    python -m benchmarks.gpu --output gpu.json
    python -m benchmarks.gpu --device cpu --output rehearsal.json     # the same steps in tiny sizes

The most important steps run first: the comparison of each Triton kernel with compiled PyTorch operations, and then the
tests. After each row of results, the results are written to the file. If a row fails, the error is written instead, and
the next row runs. After ``--seconds``, the command skips all other rows. If a row failed, the exit status is 1.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topk_registry import create_loss
from topk_registry.files import write_text

Step = Callable[[], Any]
Rows = Iterator[tuple[str, Step]]  # names of rows, and the functions that measure them

KERNELS = {"smooth_topk_svm at 0.1": ("smooth_topk_svm", {"tau": 0.1}), "at 1": ("smooth_topk_svm", {"tau": 1.0})}
PLAIN = {name: (name, {}) for name in ("focal", "topk_hinge", "sigmoid_mse", "encouraging")}
LARGE_K = {f"k = {k}": ("smooth_topk_svm", {"tau": 0.1, "k": k}) for k in (20, 50)}
SUBJECTS = KERNELS | {"noised_topk": ("noised_topk", {})} | PLAIN
TRAINED = ("ce", "smooth_topk_svm", "focal")
ROOT = Path(__file__).parents[1]
LIMIT = 120  # seconds for one row on a GPU, so that a slow compilation does not take the time of all other rows
AT_A_TIME = 0.05  # seconds of calls between two synchronizations, at most
QUEUED = 5  # calls that wait in the queue of the GPU; a GPU queues about 1000 kernels


class Bench:
    """The device and the sizes of a run. On the device "cpu", all sizes are tiny.

    Args:
        device: "cuda" or "cpu".
        seconds: time limit of the run.
    """

    def __init__(self, device: str, seconds: float = 600.0) -> None:
        self.device, self.is_gpu = device, device == "cuda"
        self.end = time.monotonic() + seconds
        self.shapes = ((8192, 1000), (1024, 21_841)) if self.is_gpu else ((8, 128), (4, 160))
        self.dtypes = (torch.float32, torch.bfloat16) if self.is_gpu else (torch.float32,)
        # the shapes and k of the comparison of kernels; Triton's interpreter is slow
        self.compared = (self.shapes, 5) if self.is_gpu else (((4, 16), (3, 20)), 2)
        self.rounds, self.calls = (15, 20) if self.is_gpu else (1, 1)
        self.steps, self.batch, self.size = (50, 256, 224) if self.is_gpu else (2, 2, 32)
        self.model = "resnet50" if self.is_gpu else "resnet18"
        self.copied = torch.empty(2, 1 << (28 if self.is_gpu else 16), device=device)

    def left(self) -> float:
        """Return the seconds until the end of the run."""
        return self.end - time.monotonic()

    def row(self, measure: Step) -> Any:
        """Return the results of ``measure``, or the error, or the reason why the row is skipped."""
        if self.left() <= 0:
            return {"skipped": "the time of the run is over"}
        try:
            with time_limit(min(self.left(), LIMIT) if self.is_gpu and measure != self._tests else self.left()):
                return measure()
        except Exception:
            return {"error": traceback.format_exc()}

    def environment(self) -> Rows:
        """Yield the device, the versions on which the results depend, and the backend of each operator."""
        import triton

        from topk_registry.ops.losses import usual_backend

        name = torch.cuda.get_device_name() if self.is_gpu else platform.processor() or platform.machine()
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
        yield "versions", lambda: {"device": name, "python": sys.version.split()[0], **versions}
        for operator in ("ksubset", "perturbed"):
            yield f"backend of {operator}", partial(usual_backend, operator, torch.device(self.device))

    def bandwidth(self) -> Rows:
        """Yield the bandwidth in GB/s with which the device copies a large tensor. Reads and writes both count."""
        size = 2 * self.copied[0].numel() * self.copied.element_size()
        yield "GB/s", lambda: size / self._times({"copy": self._copy})["copy"] / 1e3

    def kernels(self) -> Rows:
        """Yield the microseconds of each kernel on the device, and of its definition compiled by inductor."""
        from benchmarks.kernels import Forms, cases, difference

        def compare(make: Callable[[], Forms]) -> dict[str, dict[str, float]]:
            torch.compiler.reset()  # torch compiles a function only a few times, and then runs it without compilation
            found = {}
            for inputs, forms in make().items():
                error = difference(forms["kernel"](), forms["definition"]())
                figures = self.device_times(forms)
                ratio = figures["kernel"] / figures["definition"]
                found[inputs] = figures | {"kernel / definition": ratio, "largest difference": error}
            return found

        for name, make in cases(self.device, *self.compared, self.dtypes[-1], compiled).items():
            yield name, partial(compare, make)

    def tests(self) -> Rows:
        """Run the tests for a GPU in several processes, which compile at the same time. On a CPU, collect the tests."""
        yield "tests", self._tests

    def _tests(self) -> dict[str, str]:
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/ops/test_gpu.py"]
        if not self.is_gpu:
            command.append("--collect-only")
        elif find_spec("xdist"):
            command += ["-n", str(min(8, os.cpu_count() or 1))]
        return last_line(command, self.left() - 5)  # stops before the time limit of the row

    def losses(self) -> Rows:
        """Yield the microseconds of a forward and backward pass of each loss.

        Each pass runs from Python, and on a GPU also as a CUDA graph. The last two rows have compiled losses, and k
        for which there is no kernel.
        """
        for kind in ("indices", "distributions"):
            for rows, n in self.shapes:
                for dtype in self.dtypes:
                    yield f"{rows} x {n}, {kind}, {dtype}", partial(self._losses, rows, n, kind, dtype, SUBJECTS)
        rows, n = self.shapes[0]
        for label, subjects, transform in (("compiled", PLAIN, compiled), ("large k", LARGE_K, None)):
            measure = partial(self._losses, rows, n, "indices", self.dtypes[0], subjects, transform)
            yield f"{rows} x {n}, indices, {self.dtypes[0]}, {label}", measure

    def _losses(
        self,
        rows: int,
        n: int,
        kind: str,
        dtype: torch.dtype,
        subjects: dict[str, tuple[str, dict[str, Any]]],
        transform: Callable | None = None,
    ) -> dict[str, Any]:
        torch.compiler.reset()
        logits = torch.randn(rows, n, device=self.device).to(dtype).requires_grad_()
        target = torch.randint(n, (rows,), device=self.device)
        if kind == "distributions":
            target = 0.9 * F.one_hot(target, n).to(torch.float32) + 0.1 / n
        losses: dict[str, Callable] = {"cross-entropy": F.cross_entropy}
        for label, (name, options) in subjects.items():
            losses[label] = create_loss(name, **options).to(self.device)
        if transform:
            losses = {label: transform(loss) for label, loss in losses.items()}
        return self._figures({label: _step(loss, logits, target) for label, loss in losses.items()})

    def _figures(self, steps: dict[str, Step]) -> dict[str, dict[str, float | str]]:
        figures = {"from Python": self._times(steps), "host alone": self._times(steps, wait=False)}
        if self.is_gpu:
            graphs, failed = {}, {}
            for label, step in steps.items():
                try:
                    graphs[label] = _graph(step)
                except Exception as error:  # a loss that waits for the device cannot be captured in a CUDA graph
                    failed[label] = repr(error)[:200]
                    torch.cuda.synchronize()
            figures["CUDA graph"] = self._times(graphs) | failed
        return figures

    def _times(self, steps: dict[str, Step], wait: bool = True) -> dict[str, float]:
        """Return the median microseconds per call of each step. Without ``wait``, do not wait until the GPU is done."""
        times: dict[str, list[float]] = {label: [] for label in steps}
        calls = {label: self._calls(step) for label, step in steps.items()}
        for _ in range(self.rounds):
            for label, step in steps.items():
                self._synchronize()
                start = time.perf_counter()
                for _ in range(calls[label]):
                    step()
                if wait:
                    self._synchronize()
                times[label].append((time.perf_counter() - start) / calls[label] * 1e6)
        return {label: median(one) for label, one in times.items()}

    def _calls(self, step: Step) -> int:
        if self.calls == 1:
            return 1
        for _ in range(2):  # the first call compiles kernels
            step()
        self._synchronize()
        start = time.perf_counter()
        step()
        self._synchronize()
        return max(1, min(self.calls, int(AT_A_TIME / (time.perf_counter() - start))))

    def device_times(self, steps: dict[str, Step]) -> dict[str, float]:
        """Return the median microseconds per call that the GPU works on each step, without the time of Python.

        Before each measurement, the GPU gets other work. Meanwhile, Python queues the calls.
        """
        if not self.is_gpu:
            return self._times(steps)
        copy, host = self._times({"copy": self._copy})["copy"], self._times(steps, wait=False)
        times: dict[str, list[float]] = {label: [] for label in steps}
        for _ in range(self.rounds):
            for label, step in steps.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(1 + int(2 * QUEUED * host[label] / copy)):
                    self._copy()
                start.record()
                for _ in range(QUEUED):
                    step()
                end.record()
                self._synchronize()
                times[label].append(start.elapsed_time(end) / QUEUED * 1e3)
        return {label: median(one) for label, one in times.items()}

    def _copy(self) -> None:
        self.copied[0].copy_(self.copied[1])

    def _synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def training(self) -> Rows:
        """Train with each loss in TRAINED, and yield the images per second.

        In addition, yield the fraction of the time that the loss takes, and the first and the last value of the loss.
        """
        for name in TRAINED:
            yield name, partial(self._train, name, None)

    def compiled_training(self) -> Rows:
        """Yield the results of :meth:`training` for two losses, with a compiled forward and backward pass."""
        for name in TRAINED[:2]:
            yield name, partial(self._train, name, compiled)

    def _train(self, name: str, transform: Callable | None) -> dict[str, float]:
        import timm

        torch.manual_seed(0)
        model = timm.create_model(self.model, num_classes=1000).to(self.device, memory_format=torch.channels_last)
        loss = nn.CrossEntropyLoss() if name == "ce" else create_loss(name)
        loss = loss.to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        images = torch.randn(self.batch, 3, self.size, self.size, device=self.device)
        labels = torch.randint(1000, (self.batch,), device=self.device)

        def value() -> Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                return loss(model(images), labels)

        run = transform(value) if transform else value

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            result = run()
            result.backward()
            optimizer.step()
            return result.detach()

        first = float(step())
        for _ in range(self.steps // 10):
            step()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(self.steps):
            last = step()
        final = float(last)
        seconds = time.perf_counter() - start
        logits = torch.randn(self.batch, 1000, device=self.device, requires_grad=True)
        of_loss = self._times({"loss": _step(loss, logits, labels)})["loss"] * 1e-6
        return {
            "images per second": self.steps * self.batch / seconds,
            "share of the loss": of_loss * self.steps / seconds,
            "first loss": first,
            "last loss": final,
        }

    def onnx(self) -> Rows:
        """Run a ResNet-18 as an ONNX file. Yield milliseconds per run, and the nodes per execution provider."""
        yield "resnet18", self._onnx

    def _onnx(self) -> dict[str, Any]:
        import timm

        from topk_export.export import export_onnx
        from topk_export.runtime.session import open_session, placement

        with tempfile.TemporaryDirectory() as folder:
            model = timm.create_model("resnet18", num_classes=100).eval()
            path = export_onnx(model, Path(folder) / "model.onnx", k=5)
            session = open_session(path, device=self.device)
        (given,) = (one for one in session.get_inputs() if len(one.shape) == 4)
        shape = [size if isinstance(size, int) else 4 for size in given.shape]
        feed = {given.name: torch.randn(shape).numpy()}
        milliseconds = self._times({"run": lambda: session.run(None, feed)})["run"] / 1e3
        return {"milliseconds": milliseconds, "nodes per provider": placement(session)}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError if the block takes longer."""

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"a row took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def last_line(command: list[str], seconds: float) -> dict[str, str]:
    """Run pytest, and return the last line that it prints. If tests fail or take longer, return what it printed."""
    with tempfile.TemporaryFile("w+") as file:
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = None
        file.seek(0)
        lines = file.read().strip().splitlines()
    if code == 0:
        return {"last line": lines[-1]}
    if code is None:
        passed, failed = (sum(word in line for line in lines) for word in ("PASSED", "FAILED"))
        lines.append(f"not done after {seconds:.0f} s: {passed} passed, {failed} failed")
    return {"error": "\n".join(lines[-200:])}


def compiled(function: Callable) -> Callable:
    """Compile a function as a whole. Without a GPU, only trace the forward and the backward pass."""
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def _step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Step:
    return lambda: torch.autograd.grad(loss(logits, target), logits)


def _graph(step: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    return lambda: (graph.replay(), kept)[0]


STEPS = ("environment", "bandwidth", "kernels", "tests", "losses", "onnx", "training", "compiled_training")


def main(arguments: list[str] | None = None) -> int:
    """Run the steps, write the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--rows", nargs="+", default=[""], help="run only the rows with one of these texts in the name")
    parser.add_argument("--seconds", type=float, default=570, help="time limit of the run (default: 570)")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before the import of triton
    bench, failed = Bench(options.device, options.seconds), False
    results: dict[str, dict[str, Any]] = {"seconds": {}}
    for step in options.steps:
        start, results[step] = time.perf_counter(), {}
        for name, measure in getattr(bench, step)():
            if not any(text in name for text in options.rows):
                continue
            value = bench.row(measure)
            wrong = isinstance(value, dict) and "error" in value
            failed |= wrong
            results[step][name] = value
            results["seconds"][step] = round(time.perf_counter() - start, 1)
            write_text(options.output, json.dumps(results, indent=1) + "\n")
            print(f"{results['seconds'][step]:6.1f} s  {step}, {name}: {'FAILED' if wrong else value}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
