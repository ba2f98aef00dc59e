"""The programs of docs/programs for packages that are installed apart (the extra ``programs``), and what they rely on.

A continuous integration job of its own installs these packages; where one is missing, its tests are skipped.
"""

import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer import Linear, Rows, trained
from topk_registry import create_loss

PROGRAMS = Path(__file__).parents[1] / "docs/programs"
WHY = "the package is not installed: python -m pip install 'topk-registry[programs]'"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the packages, about torch and each other


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 20 classes, 100 images of each."""
    folder = tmp_path_factory.mktemp("programs") / "images"
    runpy.run_path(str(PROGRAMS / "make_folder.py"))["main"](str(folder), "20", "100")
    return folder


@pytest.fixture
def program(tmp_path, monkeypatch):
    """``program(name)``: the names of a program, which imports as a module, so that its classes can be pickled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.syspath_prepend(str(PROGRAMS))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return __import__(name)

    return load


@pytest.fixture
def told(monkeypatch):
    """The epochs that losses are told of."""
    epochs = []
    monkeypatch.setattr("topk_registry.ClassificationLoss.set_epoch", lambda self, epoch: epochs.append(epoch))
    return epochs


def top5(text):
    return [float(found) for found in re.findall(r"top-5 (\d\.\d+)", text)]


CHANCE = 5 / 20


def test_the_program_for_transformers_learns(program, capfd, told):
    pytest.importorskip("transformers", reason=WHY)
    program("transformers_trainer").main("output")
    found = capfd.readouterr().out
    assert len(top5(found)) == 2
    assert top5(found)[-1] > 2 * CHANCE
    assert told == [0, 1]
    assert len(re.findall(r"^  field \d\d-\d [01]\.\d\d$", found, re.MULTILINE)) == 5  # of the model that was read


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("name", "options"), [("smooth_topk_svm", {"k": 2, "label_smoothing": 0.1}), ("focal", {})])
def test_steps_of_the_trainer_do_not_depend_on_how_batches_are_cut(program, name, options, dense):
    pytest.importorskip("transformers", reason=WHY)
    data = Rows(dense)
    make = program("transformers_trainer").TrainerLoss
    whole, _ = trained(make(name, **options), data, per_device_train_batch_size=12, per_device_eval_batch_size=24)
    cut, _ = trained(make(name, **options), data, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    torch.testing.assert_close(cut.weight, whole.weight, rtol=1e-5, atol=1e-6)
    assert not torch.equal(whole.weight, Linear().layer.weight)


def test_the_trainer_reports_the_mean_loss_in_evaluation(program):
    pytest.importorskip("transformers", reason=WHY)
    data = Rows(dense=False)
    make = program("transformers_trainer").TrainerLoss
    sizes = {"per_device_train_batch_size": 12, "per_device_eval_batch_size": 24}
    for precision in ({}, {"bf16": True}):
        layer, found = trained(make("smooth_topk_svm", k=2), data, **sizes, **precision)
        expected = float(create_loss("smooth_topk_svm", k=2)(layer(data.features), data.labels))
        # bfloat16 keeps 8 bits of each feature, weight and score
        assert found == pytest.approx(expected, rel=2e-2 if precision else 1e-5)


def test_the_trainer_on_two_processes_takes_the_step_of_one(program, tmp_path):
    pytest.importorskip("transformers", reason=WHY)
    make = program("transformers_trainer").TrainerLoss
    layer, _ = trained(make("topk_nll", k=2), Rows(False), per_device_train_batch_size=12)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import torch, transformers_trainer\n"
        "from tests.trainer import Rows, trained\n"
        "loss = transformers_trainer.TrainerLoss('topk_nll', k=2)\n"
        "layer, _ = trained(loss, Rows(False), per_device_train_batch_size=6)\n"
        "rank = torch.distributed.get_rank()\n"
        "torch.save(layer.weight, f'weight{rank}.pt')\n"
    )
    (tmp_path / "of_a_rank.py").write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "of_a_rank.py"]
    done = subprocess.run(
        [*launch, str(PROGRAMS), str(PROGRAMS.parents[1])], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        torch.testing.assert_close(torch.load(f"weight{rank}.pt"), layer.weight, rtol=1e-5, atol=1e-6)


def test_the_program_for_fastai_learns(program, images, capsys, told):
    pytest.importorskip("fastai", reason=WHY)
    program("fastai_learner").main(str(images), "output")
    found = capsys.readouterr().out
    assert len(top5(found)) == 2
    assert top5(found)[-1] > 1.3 * CHANCE
    assert told == [0, 1]
    assert len(re.findall(r"^  field-\d\d-\d [01]\.\d\d$", found, re.MULTILINE)) == 5  # of the learner that was read


def test_the_loss_for_fastai_is_the_loss(program):
    core = pytest.importorskip("fastai.torch_core", reason=WHY)
    loss = program("fastai_learner").RegisteredLoss("smooth_topk_svm", k=3, label_smoothing=0.1)
    plain = create_loss("smooth_topk_svm", k=3, label_smoothing=0.1)
    scores, label = torch.randn(7, 9), torch.randint(9, (7,))
    named = core.TensorImage(scores), core.TensorCategory(label)
    for one in (loss, pickle.loads(pickle.dumps(loss))):
        assert torch.equal(one(*named), plain(scores, label))
        one.reduction = "none"  # as mixup sets it
        assert one(*named).shape == (7,)
    torch.testing.assert_close(loss.activation(scores).sum(-1), torch.full((7,), 3.0))
    assert torch.equal(loss.decodes(loss.activation(scores)), scores.argmax(-1))


def test_the_program_for_ultralytics_learns(program, images, capsys, told):
    pytest.importorskip("ultralytics", reason=WHY)
    program("ultralytics_trainer").main(str(images), "output")
    found = capsys.readouterr().out
    assert top5(found)[-1] > 1.3 * CHANCE
    assert told == [0, 1]
    saved = torch.load("output/run/weights/best.pt", weights_only=False)  # written by this test
    assert getattr(saved["model"], "criterion", None) is None  # a file that needs nothing of the program
    assert re.search(r"field-00-0/00000.png: (field-\d\d-\d(, )?){5}$", found, re.MULTILINE)


def test_the_criterion_for_ultralytics_takes_scores_of_both_modes(program):
    pytest.importorskip("ultralytics", reason=WHY)
    criterion = program("ultralytics_trainer").Criterion("topk_nll", k=3, weight=[0.5] * 4 + [2.0] * 5).half()
    scores, label = torch.randn(7, 9), torch.randint(9, (7,))
    plain = create_loss("topk_nll", k=3, weight=[0.5] * 4 + [2.0] * 5)(scores, label)
    for given in (scores, (scores.softmax(-1), scores)):
        value, parts = criterion(given, {"cls": label})
        assert torch.equal(value, plain)
        assert torch.equal(parts["loss"], plain)
