"""The parts of a GPU's turn and their steps: what runs, for how long at most, and what it needs.

Every step exists twice: as it runs on a GPU, and as a rehearsal on the CPU, tiny, with Triton's interpreter or with
kernels replaced by plain torch.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

GRAPHS = "tests/gpu/test_graphs.py"
TESTS = (  # all that have tests marked gpu
    "tests/ops",
    "tests/plugins/test_contract.py",
    "tests/export/runtime/test_predictor.py",
    "tests/gpu/test_steps.py",
    GRAPHS,
)
BENCHED = ("F.cross_entropy*", "topk_registry", "topk_registry: t[!r]*")  # ours as it is chosen, and in plain torch
REHEARSED = ("tests/ops/perturbed/test_cuda.py", "tests/gpu/test_steps.py")
PLAIN = {"TOPK_REGISTRY_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
INTERPRETED = {"TRITON_INTERPRET": "1", "TOPK_GPU_REHEARSAL": "1"}
PARALLEL = ("-n", "logical", "--dist", "worksteal")
SANITIZED = "every_entry or in_tiles or in_segments or strided"  # rows of every form, written and read at their ends


@dataclass(frozen=True)
class Place:
    """Where results go, and whether this is a rehearsal."""

    results: Path
    rehearse: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every step: on a GPU nothing is compiled for the CPU, which would take minutes."""
        return PLAIN if self.rehearse else {"TOPK_REGISTRY_BACKEND": "triton"}

    @property
    def junit(self) -> Path:
        return self.results / "gpu_tests.xml"

    def file(self, name: str) -> str:
        return str(self.results / name)


def _gpu() -> str:
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def onnx_gpu() -> str:
    """Why onnxruntime does not run on the GPU, "" if it does."""
    import onnxruntime

    there = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return "" if there else "this onnxruntime has no CUDA provider (onnxruntime-gpu has)"


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        name: in lists, and of its log.
        seconds: that it may take at most.
        command: without the tool.
        tool: a program that runs the command, with its options; without it the step is skipped.
        resumes: whether it goes on where it was cut off, so that running out of time is no failure.
        environment: further variables.
        needs: say what is missing; not asked in a rehearsal.
    """

    name: str
    seconds: float
    command: Sequence[str]
    tool: Sequence[str] = ()
    resumes: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[Callable[[], str]] = (_gpu,)

    def missing(self, place: Place) -> str:
        """Why the step cannot run, "" if it can."""
        if place.rehearse:
            return ""
        if self.tool and shutil.which(self.tool[0]) is None:
            return f"{self.tool[0]} is not installed"
        return next(filter(None, (need() for need in self.needs)), "")

    def runnable(self, place: Place) -> list[str]:
        """The whole command; in a rehearsal without a tool that is not there."""
        there = not place.rehearse or (self.tool and shutil.which(self.tool[0]))
        return [*(self.tool if there else ()), *self.command]


@dataclass(frozen=True)
class Part:
    """Steps of one call, the most telling first."""

    about: str
    minutes: float
    steps: Callable[[Place], list[Step]]


def python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def pytest(*words: str) -> list[str]:
    # other versions of other packages may deprecate what they like
    quiet = ("-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")
    return python("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu", *quiet, *words)


def kernels(place: Place) -> list[Step]:
    """The kernels' tests, their speed in a few cases, and a sanitizer's opinion of them."""
    # a module that does not import is a failure, and no reason to run none of the others
    others = [one for one in TESTS if one != GRAPHS]
    spread = (*PARALLEL, "--continue-on-collection-errors", *others)
    few = ("-k", "kth_largest or smooth_topk_svm", *REHEARSED)
    tests = pytest("--junit-xml", str(place.junit), *(few if place.rehearse else spread))
    some = ("-k", "focal") if place.rehearse else PARALLEL
    graphs = pytest("--junit-xml", place.file("gpu_graphs.xml"), *some, GRAPHS)
    awkward = pytest("-x", "-k", "every_entry" if place.rehearse else SANITIZED, "tests/ops")
    interpreted = INTERPRETED if place.rehearse else {}
    sanitizer = {**interpreted, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or it sees one allocation in place of many

    def sanitized(tool: str) -> Step:
        words = ("compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
        return Step(tool, 100, awkward, tool=words, environment=sanitizer)

    return [
        Step("tests", 240, tests, environment=interpreted),
        bench("ksubset", place, 150, only=BENCHED),
        targets(place),
        Step("graphs", 60, graphs, environment=interpreted),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Step("doctor", 60, python("topk_registry", "doctor"), needs=()),
    ]


def speed(place: Place) -> list[Step]:
    """All losses, the noised operator and linear classifiers beside cross-entropy, and profiles."""
    at = ("--device", place.device, *(("--quick",) if place.rehearse else ()))
    sizes = ("--classes", "1000000", "--features", "512", "--batch", "4096", "--dtype", "bfloat16", "--repeats", "7")
    tiny = ("--classes", "300", "--features", "8", "--batch", "4", "--rows", "2", "--repeats", "1")
    linear = ("linear", *(tiny if place.rehearse else sizes), "--device", place.device, "--limit", "8")
    counters = ("ncu", "--clock-control", "none", "--set", "basic", "--kernel-name-base", "function", "-c", "40")
    shown = python("tests.gpu.profile", *at, "--output", place.file("profile_gpu.txt"))
    once = python("tests.gpu.profile", *at, "--once")
    return [
        Step("warm", 120, python("tests.gpu.warm", *at)),
        bench("linear", place, 90, words=linear),
        bench("losses", place, 200, only=("F.cross_entropy*", "focal", "ldr_kl") if place.rehearse else ()),
        bench("perturbed", place, 60, only=BENCHED),
        targets(place),
        Step("profile", 40, shown),
        Step("counters", 60, once, tool=counters),
    ]


def training(place: Place) -> list[Step]:
    """The loss's share of training steps, a training run from end to end, and the exported file."""
    quick = ("--quick",) if place.rehearse else ()
    models = ("test_vit",) if place.rehearse else ("resnet50", "vit_base_patch16_224")
    tiny = ("--batch", "2", "--size", "160", "--classes", "30", "--repeats", "1")
    some = (*tiny, "--losses", "focal", "smooth_topk_svm") if place.rehearse else ()
    steps = ("steps", "--models", *models, "--device", place.device, *some)
    data = ("--dataset", "topk/hierarchy", "--dataset-opt")
    small = (*data, "size=40", "eval_size=20", "-b", "10", "-vb", "10") if place.rehearse else (*data, "size=50000")
    epochs = ("--model", "topk_convnet", "--opt", "adamw", "--lr", "2e-3", "--epochs", "1" if place.rehearse else "4")
    best = place.file("train/train/model_best.pth.tar")

    def train(name: str, *words: str) -> Step:
        where = ("--device", place.device, "--output", place.file("train"), "--experiment", name)
        given = ("train", "--loss", "smooth_topk_svm", *small, *epochs, *words, *where)
        return Step(name, 60, python("topk_registry", *given))

    validate = ("validate", "--checkpoint", best, "--device", place.device)
    validated = ("--results-file", place.file("validated_gpu.json"), "--results-format", "json")
    mixed = ("--mixup", "0.8", "--cutmix", "1.0", "--smoothing", "0.1", "--amp", "--model-ema")
    return [
        Step("warm", 90, python("tests.gpu.warm", "--steps", "--device", place.device, *quick)),
        bench("steps", place, 200, words=steps),
        targets(place),
        train("train", "--smoothing", "0", "--label-noise", "0.4", "--eval-metric", "top5"),
        train("train_mixed", *mixed),  # in float16, whose loss is scaled
        Step("validate", 40, python("topk_registry", *validate, *validated)),
        Step("onnx", 100, python("pytest", "-q", "tests/export/test_session.py"), needs=(_gpu, onnx_gpu)),
    ]


def study(place: Place) -> list[Step]:
    """The label-noise study: as many of its runs as there is time for; the next call goes on with the others."""
    data = ("size=40", "eval_size=20") if place.rehearse else ("size=50000", "eval_size=10000")
    flags = ("epochs=1", "batch_size=10") if place.rehearse else ("epochs=100", "batch_size=512")
    some = ("--losses", "ce", "--seeds", "0") if place.rehearse else ("--seeds", "0", "1", "2", "3", "4")
    where = ("--jobs", "1" if place.rehearse else "12", "--device", place.device, "--output", place.file("study"))
    words = ("study", "noise", "--dataset", "topk/hierarchy", "--dataset-opt", *data, "--flags", *flags, *some, *where)
    return [Step("noise", 3000, python("topk_registry", *words), resumes=True)]


def bench(name: str, place: Place, seconds: float, *, words: Sequence[str] = (), only: Sequence[str] = ()) -> Step:
    """A command of ``tests.bench``; its report is NAME_gpu.json."""
    found = list(words) or [name, "--gpu-cases", "--device", place.device, "--limit", "2", "--repeats", "15"]
    if place.rehearse and not words:
        found += ["--shapes", "8,50,3", "--repeats", "1", "--dtype", "float32"]
    if only:
        found += ["--only", *only]
    found += ["--junit", str(place.junit), "--json", place.file(f"{name}_gpu.json")]
    return Step(name, seconds, python("tests.bench", *found))


def targets(place: Place) -> Step:
    return Step("targets", 30, python("tests.bench", "targets", str(place.results)), needs=())


PARTS = {
    "kernels": Part("tests of all kernels, speed of the smooth top-k SVM, sanitizer", 8, kernels),
    "speed": Part("all losses, linear classifiers, the noised operator, profiles", 7, speed),
    "training": Part("the loss's share of a step, training from end to end, ONNX", 5, training),
    "study": Part("the label-noise study, which goes on from call to call", 5, study),
}
