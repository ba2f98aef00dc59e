"""The papers' settings on data of CIFAR-100's and ImageNet's format, and what they would take."""

# values of tables and attributes of studies are told apart by what they hold, not by type
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import json
import pickle
import re
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from hashlib import md5

import numpy as np
import pytest
from PIL import Image

from tests.train.conftest import unclosed_files
from topk_registry.cli.main import main
from topk_registry.data.cifar100 import CLASSES
from topk_studies import command
from topk_studies.engine.catalogue import load_study
from topk_studies.engine.plan import all_runs
from topk_studies.engine.study import Options
from topk_studies.engine.tuning import run_of

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = ("--flags", "model=topk_convnet", "model_kwargs={'width': 2}", "epochs=1", "batch_size=50", "workers=0")
ONE = ("--budget", "paper", "--losses", "ce", "--seeds", "0", "--device", "cpu", *FAST)


class Inline(Executor):
    """Does calls at once, in this process: torchvision is told here what its files hold."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def here(monkeypatch):
    @contextmanager
    def executor(args, store):
        yield Inline()

    monkeypatch.setattr(command, "_executor", executor)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """CIFAR-100's files in ``data``, of three training images and one test image a class."""
    from torchvision.datasets import CIFAR100

    folder, draw = tmp_path / "data" / CIFAR100.base_folder, np.random.default_rng(0)
    folder.mkdir(parents=True)
    contents = {"meta": {"fine_label_names": CLASSES}}
    for split, each in (("train", 3), ("test", 1)):
        images = draw.integers(0, 256, (100 * each, 3072), np.uint8)
        contents[split] = {"data": images, "fine_labels": [i % 100 for i in range(100 * each)]}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
    digests = {name: md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest() for name in contents}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", digests["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", digests["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": digests["meta"]})
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def imagenet(tmp_path):
    """Folders of JPEG files: ``train`` and ``validation``, a folder a class."""
    draw = np.random.default_rng(1)
    for split, each in (("train", 12), ("validation", 2)):
        for name in ("n01440764", "n01443537", "n02091831"):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(each):
                pixels = draw.integers(0, 256, (40, 48, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}_{i}.JPEG")
    return tmp_path / "imagenet"


def flags_of(folder):
    """The flags of each study's runs."""
    runs = json.loads((folder / "runs.json").read_text())
    assert not any(run["error"] for run in runs)
    return {
        name: [run["configuration"]["flags"] for run in runs if name in run["studies"]]
        for name in sorted({name for run in runs for name in run["studies"]})
    }


@pytest.mark.slow
@unclosed_files
def test_one_command_runs_the_papers_settings_on_both(cifar, imagenet, here, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["study", "noise", "small-data", *ONE, "--imagenet", str(imagenet), "--output", str(out)]
    assert main(argv) == 0
    found = flags_of(out)
    assert [flags.get("label_noise", 0.0) for flags in found["noise"]] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert {(flags["dataset"], flags["data_dir"]) for flags in found["noise"]} == {("torch/cifar100", "data")}
    assert [flags.get("subset", 1.0) for flags in found["small-data"]] == [0.05, 0.1, 0.25, 0.5, 1.0]
    assert {flags["data_dir"] for flags in found["small-data"]} == {str(imagenet)}
    assert not any("dataset" in flags for flags in found["small-data"])
    # the papers' recipe, but for what the flags of this test say
    both = [*found["noise"], *found["small-data"]]
    assert {(flags["opt"], flags["sched"], flags["lr"]) for flags in both} == {("sgd", "multistep", 0.1)}
    text = capsys.readouterr().out
    assert "Accuracy by noise: top-5" in text
    assert "67.7" in text  # the paper's cross-entropy at noise 1 stands beside


@pytest.mark.slow
@unclosed_files
def test_the_plan_counts_the_runs_and_says_the_hours(cifar, imagenet, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["study", "noise", "small-data", "theory", *ONE, "--imagenet", str(imagenet), "--output", str(out)]
    assert main([*argv, "--plan", "--jobs", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    seconds = r"\d+ s"  # of this machine
    whole = (
        f"noise: 6 runs on torch/cifar100, topk_convnet, by top-5; expected {seconds}, {seconds} with 2 side by side"
    )
    assert re.match(whole, told[0])
    assert told[1].startswith("  ce: 6 runs of 1 epoch, ")
    assert told[2].startswith(f"small-data: 5 runs on {imagenet}, topk_convnet, by top-5; expected ")
    shares = [line.partition(":")[0].strip() for line in told[3:8]]
    assert shares == ["ce subset=0.05", "ce subset=0.1", "ce subset=0.25", "ce subset=0.5", "ce"]
    assert told[8] == "theory: no training that is not planned yet"
    assert re.match(f"in all 11 runs, {seconds}; with 2 side by side {seconds}", told[9])
    assert len(told) == 10
    assert not out.exists()


def test_a_run_of_two_studies_is_planned_once(tmp_path, capsys):
    tiny = ("--dataset", "topk/ambiguous", "--dataset-opt", "size=200", "side=4", "families=3", "fine=4")
    flags = ("--flags", "model_kwargs={'side': 4}", "epochs=1")
    argv = ["study", "noise", "noise", *tiny, *flags, "--losses", "ce", "--seeds", "0", "--device", "cpu", "--plan"]
    assert main(argv) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("noise: 16 runs on topk/ambiguous, topk_mlp, by top-5; ")
    assert told[2] == "noise: no training that is not planned yet"
    assert told[3].startswith("in all 16 runs, ")


def test_a_plan_without_its_data_says_so(tmp_path, capsys):
    argv = ["study", "small-data", "--budget", "paper", "--imagenet", str(tmp_path / "no"), "--plan"]
    assert main(argv) == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["noise", "noise-parameter", "multi-crop", "compare"])
def test_the_runs_of_later_stages_are_counted(name):
    study = load_study(name)
    runs = all_runs(study, Options(losses=("ce", "topk_nll") if name != "noise-parameter" else None))
    seeds = {flags["seed"] for flags in (run["flags"] for run in runs)}
    assert set(study.SEEDS) <= seeds
    trials = {"noise": 4 * 2 * (4 + 4), "noise-parameter": 7 * 5, "multi-crop": 2 * 5, "compare": 2 * (8 + 4 + 2 + 5)}
    assert len(runs) == trials[name]


def test_another_network_is_built_without_the_options_of_the_budgets():
    for budget in ("small", "standard", "paper"):
        flags = run_of(Options(budget=budget, flags={"model": "resnet18"}), loss="ce", seed=0)["flags"]
        assert "model_kwargs" not in flags
        assert run_of(Options(budget=budget), loss="ce", seed=0)["flags"]["model_kwargs"]
        given = Options(budget=budget, flags={"model": "resnet18", "model_kwargs": {"drop_rate": 0.5}})
        assert run_of(given, loss="ce", seed=0)["flags"]["model_kwargs"] == {"drop_rate": 0.5}
