"""Studies small enough for a test: a stub without training, and training runs of a second."""

import textwrap
from dataclasses import dataclass

import pytest

from topk_studies.engine.store import Store
from topk_studies.engine.study import Options, Record

STUB = """
import os, signal, time
from topk_studies.engine.study import ConfigurationError

TITLE, QUESTION, REFERENCE = "Stub", "Does it run?", "none"
RUNS, VERSION, ALONE = "stub", 1, False
COUNT = 4

def configurations(options, known):
    wanted = [{"x": x, "plan": options.flags.get(str(x), "square")} for x in range(COUNT)]
    first = [record for record in known if record.configuration["x"] < COUNT and not record.error]
    if len(first) == COUNT:  # a second stage, chosen by the first
        best = max(first, key=lambda record: record.result["y"])
        wanted.append({"x": 10 * best.configuration["x"], "plan": "square"})
    return wanted

def run(configuration, work, progress):
    work.mkdir(parents=True, exist_ok=True)
    resumed = (work / "trace").exists()
    (work / "trace").write_text("here")
    with open(os.environ["STUB_LOG"], "a") as log:
        print(os.getpid(), configuration["x"], configuration["plan"], file=log)
    plan, x = configuration["plan"], configuration["x"]
    if plan == "refuse":
        raise ConfigurationError("x is not to the study's liking")
    if plan == "break":
        raise ZeroDivisionError("by x")
    if plan == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == "talk":
        print("this is no answer", flush=True)
    if plan == "sleep" or (plan == "sleep-once" and not resumed):
        time.sleep(600)
    while plan == "held" and not os.path.exists(os.environ["STUB_LOG"] + ".go"):
        time.sleep(0.01)
    while plan == "meet" and len({line.split()[0] for line in open(os.environ["STUB_LOG"])}) < 3:
        time.sleep(0.01)  # two processes are one command's, the third another's
    progress(0.5, "half-way")
    return {"y": x * x, "threads": os.environ["OMP_NUM_THREADS"]}

def report(records):
    raise AssertionError("runs are done without a look at the report")
"""

QUIET = {"say": lambda text: None}
CONFIGURATION = {"flags": {"loss": "ce", "lr": 0.1}, "device": "cpu"}
RECORD = Record(
    "train", 1, CONFIGURATION, {"history": [{"top5": 50.0}]}, 2.5, "2026-01-01T00:00:00+00:00", {"torch": "2"}
)
TINY_FLAGS = (
    *("--dataset", "topk/hierarchy", "--dataset-opt", "size=96", "superclasses=4", "fine=3", "pixel_noise=1.0"),
    *("--flags", "model_kwargs={'width': 4}", "batch_size=16", "epochs=1", "warmup_epochs=0"),
    *("--device", "cpu", "--seeds", "0"),
)
TINY = {
    "dataset": "topk/hierarchy",
    "dataset_opt": {"size": 96, "superclasses": 4, "fine": 3, "pixel_noise": 1.0},
    "model_kwargs": {"width": 4},
    "batch_size": 16,
    "epochs": 2,
    "warmup_epochs": 0,
}


@dataclass
class Stub:
    """The stub study and what its runs have logged."""

    study: object
    log: object

    def runs(self) -> list[tuple[int, str]]:
        """(x, plan) of every run that was begun, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(x), plan) for _, x, plan in map(str.split, lines)]

    def go(self) -> None:
        """Let the runs that are held go on."""
        self.log.with_name("log.go").touch()

    def processes(self) -> set[str]:
        return {line.split()[0] for line in self.log.read_text().splitlines()}


@pytest.fixture
def stub(site, tmp_path, monkeypatch):
    """A study whose runs square a number, or fail as ``Options.flags`` say."""
    site.module("stub_study", textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    import stub_study

    return Stub(stub_study, tmp_path / "log")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "studies")


@pytest.fixture
def tiny():
    """Options of a study whose training runs take a second."""
    return Options(flags=TINY, device="cpu", seeds=(0,))


def trained(configuration, history, **result):
    """A record of a training run with this history: one row of metrics an epoch."""
    rows = [{"epoch": float(epoch), **row} for epoch, row in enumerate(history, 1)]
    return Record("train", 1, configuration, {"history": rows, **result}, 1.0, "2026-01-01T00:00:00+00:00", {})
