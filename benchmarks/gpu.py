"""Test and measure on a GPU: correctness, times of losses, training, compilation, and an ONNX file.

    python -m benchmarks.gpu --output gpu.json
    python -m benchmarks.gpu --device cpu --output rehearsal.json     # the same steps in tiny sizes

A run takes about ten minutes. After each step, the results are written to the file. If a step fails, the error
is written instead, and the next step runs. The exit status is 1 if a step failed. The times of losses are medians over
several rounds. Each round measures all losses in turn.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from topk_registry import create_loss

Step = Callable[[], Any]
KERNELS = {"smooth_topk_svm at 0.1": ("smooth_topk_svm", {"tau": 0.1}), "at 1": ("smooth_topk_svm", {"tau": 1.0})}
PLAIN = {name: (name, {}) for name in ("focal", "topk_hinge", "sigmoid_mse", "encouraging")}
LARGE_K = {f"k = {k}": ("smooth_topk_svm", {"tau": 0.1, "k": k}) for k in (20, 50)}
SUBJECTS = KERNELS | {"noised_topk": ("noised_topk", {})} | PLAIN | LARGE_K
TRAINED = ("ce", "smooth_topk_svm", "focal")


class Bench:
    """The device and the sizes of a run. On the device "cpu", all sizes are tiny."""

    def __init__(self, device: str) -> None:
        self.device, self.is_gpu = device, device == "cuda"
        self.shapes = ((8192, 1000), (1024, 21_841)) if self.is_gpu else ((8, 128),)
        self.rounds, self.calls = (15, 20) if self.is_gpu else (2, 1)
        self.steps, self.batch, self.size = (200, 256, 224) if self.is_gpu else (2, 2, 32)
        self.model = "resnet50" if self.is_gpu else "resnet18"

    def environment(self) -> dict[str, Any]:
        """Return the device and the versions on which the results depend."""
        name = torch.cuda.get_device_name() if self.is_gpu else platform.processor() or platform.machine()
        return {
            "device": name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
        }

    def tests(self) -> dict[str, Any]:
        """Run the tests for a GPU. On a CPU, only collect these tests."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/ops/test_gpu.py"]
        root = Path(__file__).parents[1]
        run = subprocess.run([*command, *([] if self.is_gpu else ["--collect-only"])], capture_output=True, cwd=root)
        last = run.stdout.decode().strip().splitlines()[-1:]
        if run.returncode:
            raise RuntimeError(run.stdout.decode()[-2000:] + run.stderr.decode()[-2000:])
        return {"last line": last}

    def bandwidth(self) -> float:
        """Return the bandwidth in GB/s with which the device copies a large tensor. Reads and writes both count."""
        x = torch.empty(1 << (28 if self.is_gpu else 16), device=self.device)
        y = torch.empty_like(x)
        return 2 * x.numel() * x.element_size() / self._times({"copy": lambda: y.copy_(x)})["copy"] / 1e3

    def losses(self) -> dict[str, Any]:
        """Return the microseconds of a forward and backward pass of each loss.

        Each pass runs from Python, and on a GPU also as a CUDA graph. The losses in PLAIN are also compiled.
        """
        table: dict[str, Any] = {}
        for rows, n in self.shapes:
            for kind in ("indices", "distributions"):
                for dtype in (torch.float32, torch.bfloat16) if self.is_gpu else (torch.float32,):
                    table[f"{rows} x {n}, {kind}, {dtype}"] = self._figures(self._subjects(rows, n, kind, dtype))
        return table

    def _subjects(self, rows: int, n: int, kind: str, dtype: torch.dtype) -> dict[str, Step]:
        logits = torch.randn(rows, n, device=self.device).to(dtype).requires_grad_()
        target = torch.randint(n, (rows,), device=self.device)
        if kind == "distributions":
            target = 0.9 * F.one_hot(target, n).to(torch.float32) + 0.1 / n
        losses: dict[str, Callable] = {
            "cross-entropy": F.cross_entropy,
            "cross-entropy, compiled": _compiled(F.cross_entropy),
        }
        for label, (name, options) in SUBJECTS.items():
            losses[label] = create_loss(name, **options).to(self.device)
            if label in PLAIN:
                losses[f"{label}, compiled"] = _compiled(losses[label])
        return {label: _step(loss, logits, target) for label, loss in losses.items()}

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
        for step in steps.values():
            for _ in range(3):
                step()
        for _ in range(self.rounds):
            for label, step in steps.items():
                self._synchronize()
                start = time.perf_counter()
                for _ in range(self.calls):
                    step()
                if wait:
                    self._synchronize()
                times[label].append((time.perf_counter() - start) / self.calls * 1e6)
        return {label: median(one) for label, one in times.items()}

    def _synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def training(self) -> dict[str, Any]:
        """Train with each loss in TRAINED, and return the images per second.

        In addition, return the fraction of the time that the loss takes, and the first and the last value of the loss.
        """
        return {name: self._train(name, compiled=False) for name in TRAINED}

    def compiled_training(self) -> dict[str, Any]:
        """Return the results of :meth:`training` with a compiled forward and backward pass."""
        return {name: self._train(name, compiled=True) for name in TRAINED[: None if self.is_gpu else 2]}

    def _train(self, name: str, compiled: bool) -> dict[str, float]:
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

        run = _compiled(value) if compiled else value

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

    def onnx(self) -> dict[str, Any]:
        """Run a ResNet-18 as an ONNX file. Return milliseconds per run, and operators per execution provider."""
        import onnxruntime as ort
        import timm

        from topk_export.export import export_onnx

        provider = "CUDAExecutionProvider" if self.is_gpu else "CPUExecutionProvider"
        if self.is_gpu:
            ort.preload_dlls()
        with tempfile.TemporaryDirectory() as folder:
            model = timm.create_model("resnet18", num_classes=100).eval()
            path = export_onnx(model, Path(folder) / "model.onnx", k=5)
            options = ort.SessionOptions()
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
            providers = [provider, "CPUExecutionProvider"] if self.is_gpu else [provider]
            session = ort.InferenceSession(str(path), options, providers=providers)
            if session.get_providers()[0] != provider:
                raise RuntimeError(f"onnxruntime has no {provider}: {session.get_providers()}")
            given = session.get_inputs()[0]
            shape = [size if isinstance(size, int) else 4 for size in given.shape]
            feed = {given.name: torch.randn(shape).numpy()}
            milliseconds = self._times({"run": lambda: session.run(None, feed)})["run"] / 1e3
            events = json.loads(Path(session.end_profiling()).read_text())
        where: dict[str, set[str]] = {}
        for event in events:
            args = event.get("args", {})
            if "provider" in args:
                where.setdefault(args["provider"], set()).add(args.get("op_name", "?"))
        return {
            "milliseconds": milliseconds,
            "operators per provider": {name: sorted(ops) for name, ops in where.items()},
        }


def _step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Step:
    return lambda: torch.autograd.grad(loss(logits, target), logits)


def _compiled(function: Callable) -> Callable:
    # without a GPU, the backend "eager" only traces the function
    return torch.compile(function, dynamic=False, backend="inductor" if torch.cuda.is_available() else "eager")


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


STEPS = ("environment", "tests", "bandwidth", "losses", "training", "compiled_training", "onnx")


def main(arguments: list[str] | None = None) -> int:
    """Run the steps, write the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    options = parser.parse_args(arguments)
    bench, results, failed = Bench(options.device), {}, False
    for step in options.steps:
        start = time.perf_counter()
        try:
            results[step] = getattr(bench, step)()
        except Exception:
            results[step], failed = {"error": traceback.format_exc()}, True
        results.setdefault("seconds", {})[step] = round(time.perf_counter() - start, 1)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(
            f"{step}: {results['seconds'][step]} s{' FAILED' if 'error' in str(results[step])[:10] else ''}", flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
