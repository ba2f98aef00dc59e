"""Loggers by entry point: the packages' own stores hold what the summary holds, over an interrupt too."""

import json
import re
import signal
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from topk_registry import registry
from topk_registry.cli.main import main
from topk_registry.train import TrainConfig
from topk_registry.train.report import loggers

from .conftest import stops_at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Memory:
    """A logger that keeps what it is told; it may fail at one call."""

    told: list = []  # noqa: RUF012
    fails_at = -1

    def __init__(self, *, run, mark="m"):
        Memory.told.append(("open", run.update, run.resumed_id))
        self.run_id = run.resumed_id or f"{mark}-{len(Memory.told)}"

    def log(self, values, *, update):
        if len(Memory.told) == Memory.fails_at:
            Memory.told.append(("failed", update))
            raise ConnectionError("the server has gone")
        Memory.told.append(("epoch" if "epoch" in values else "step", update, dict(values)))

    def close(self, status):
        Memory.told.append((status,))


@pytest.fixture
def memory():
    Memory.told, Memory.fails_at = [], -1
    registry.loggers.register("memory")(Memory)
    yield Memory
    registry.loggers.unregister("memory")


def test_a_logger_is_told_of_every_interval_and_epoch(train, memory):
    run = train("--logger", "memory", "--log-interval", "4")
    assert run.status == 0, run.err
    kinds = [(kind, *rest[:1]) for kind, *rest in memory.told]
    # 96 images in batches of 16: 6 updates an epoch, of which the 4th and the last are due
    one = [("step", 4), ("step", 6), ("epoch", 6)]
    assert kinds == [("open", 0), *one, *[(kind, update + 6) for kind, update in one], ("finished",)]
    assert [values for kind, *rest in memory.told if kind == "epoch" for values in rest[1:]] == run.summary
    assert memory.told[2][2] == {"running_loss": run.summary[0]["train_loss"], "lr": 0.01}


def test_a_run_goes_on_in_the_same_logged_run(train, memory, monkeypatch):
    with monkeypatch.context() as stopped:
        stops_at(stopped, 16)  # of 13 in an epoch: 6 batches, 6 of evaluation, and its end
        assert train("--logger", "memory", "--logger-opt", "memory.mark=x").status == 128 + signal.SIGTERM
    assert memory.told[-1] == ("stopped",)
    first = len(memory.told)
    whole = train("--logger", "memory", "--resume", "auto")
    assert whole.status == 0, whole.err
    assert memory.told[first][2] == "x-1"
    assert memory.told[first][1] == 9
    assert [values for kind, *rest in memory.told if kind == "epoch" for values in rest[1:]] == whole.summary
    # a run from the start in the same folder is another one
    before = len(memory.told)
    assert train("--logger", "memory", "--overwrite").status == 0
    assert memory.told[before] == ("open", 0, None)


def test_a_logger_that_fails_costs_no_training_and_is_filled_in(train, memory):
    memory.fails_at = 2  # the first epoch's row
    run = train("--logger", "memory", "--log-interval", "100")
    assert run.status == 0
    assert "logger 'memory' failed and is left out from here: ConnectionError: the server has gone" in run.out
    assert [kind for kind, *_ in memory.told] == ["open", "step", "failed"]
    more = train("--logger", "memory", "--resume", run.folder / "last.pth.tar", "--epochs", "3")
    rows = [rest for kind, *rest in memory.told[3:] if kind == "epoch"]
    assert [update for update, _ in rows] == [6, 12, 18]
    assert [values for _, values in rows] == more.summary


def test_epochs_after_an_older_checkpoint_are_logged_again(train, memory):
    run = train("--logger", "memory", "--epochs", "3")
    seen = len(memory.told)
    train("--logger", "memory", "--epochs", "3", "--resume", run.folder / "checkpoint-1.pth.tar")
    assert [rest[0] for kind, *rest in memory.told[seen:] if kind == "epoch"] == [12, 18]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--logger", "tensorbord"], "no logger is called 'tensorbord'; the closest are tensorboard"),
        (["--logger", "memory", "--logger-opt", "memory.colour=1"], "logger 'memory' takes no option 'colour'"),
        (["--logger-opt", "memory.mark=1"], "for a chosen logger (none), got 'memory.mark'"),
        (["--logger", "memory", "--logger-opt", "mark=1"], "LOGGER.OPTION=VALUE for a chosen logger (memory)"),
        (["--log-wandb", "--wandb-resume-id", "abc"], "needs --resume"),
        (["--logger", "fails"], "logger 'fails' of this process (test_loggers:fails) cannot start: OSError: no server"),
        (["--log-wandb"], "wandb is not installed: pip install 'topk-registry[log]'"),
        (["--logger", "tensorboard"], "tensorboard is not installed: pip install 'topk-registry[log]'"),
    ],
)
def test_wrong_loggers_are_one_line(train, memory, monkeypatch, flags, said):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    registry.loggers.refresh()
    for name in ("wandb", "tensorboard"):
        monkeypatch.delitem(sys.modules, f"topk_registry.train.loggers.{name}", raising=False)

    def fails(*, run):
        raise OSError("no server")

    fails.__module__, fails.__qualname__ = "test_loggers", "fails"
    registry.loggers.register("fails")(fails)
    try:
        run = train(*flags)
    finally:
        registry.loggers.unregister("fails")
        registry.loggers.refresh()
    assert run.status == 2
    assert said in run.err
    assert run.err.count("\n") == 1
    assert not memory.told


def test_timms_flags_choose_and_set_wandb():
    config = TrainConfig(log_wandb=True, wandb_project="p", wandb_tags=["a", "b"], logger_opt={"wandb.mode": "offline"})
    assert loggers.chosen(config) == {"wandb": {"project": "p", "tags": ["a", "b"], "mode": "offline"}}


def test_loggers_are_listed_without_an_import(capsys):
    assert main(["loggers"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["NAME", "mlflow", "tensorboard", "wandb"]
    assert main(["loggers", "--why", "wandb"]) == 0
    assert "imports" in capsys.readouterr().out


def test_doctor_notes_a_logger_whose_package_is_missing(monkeypatch):
    from topk_registry.cli import doctor

    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "topk_registry.train.loggers.mlflow", raising=False)
    registry.loggers.refresh()
    try:
        report = doctor.Report()
        doctor._plugins(report)
    finally:
        registry.loggers.refresh()
    assert "logger 'mlflow': mlflow is not installed: pip install 'topk-registry[log]'" in report.notes
    assert not [note for note in report.notes if "logger" in note and "broken" in note]
    assert not [problem for problem in report.problems if "mlflow" in problem]


def wandb_records(path):
    """The records of a file of Weights & Biases: LevelDB's log format, each record whole in a block of 32 KiB here."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place = path.read_bytes(), 7
    while place + 7 <= len(content):
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        assert kind == 1, "a record over two blocks"
        record = Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        yield record
        place += 7 + length


def wandb_rows(folder):
    """By run ID, the epochs' rows of every part of a run."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("history"):
                items = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                         for item in record.history.item}  # fmt: skip
                if "epoch" in items:
                    rows.append((path.stem.removeprefix("run-"), items))
    return rows


def brought(extra):
    """The names of the packages that an extra of ours brings."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return {re.match(r"[\w-]+", requirement)[0] for requirement in project["optional-dependencies"][extra]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("module", ["alembic.migration", "sqlalchemy"])
def test_mlflows_data_base_asks_for_what_the_extra_brings(train, monkeypatch, module):
    def skinny(**settings):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("mlflow.MlflowClient", skinny)
    run = train("--logger", "mlflow", "--logger-opt", "mlflow.uri=sqlite:///mlflow.db")
    assert run.status == 2
    package = module.partition(".")[0]
    assert run.err.endswith(f"sqlite:///mlflow.db needs {package}: pip install 'topk-registry[log]'\n")
    assert run.err.count("\n") == 1
    assert package in brought("log")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_a_folder_that_mlflow_takes_no_runs_into_is_one_line(train, tmp_path, monkeypatch):
    from mlflow.store.tracking.file_store import FileStore

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    try:
        FileStore(str(tmp_path / "mlruns"))
    except Exception:
        pass
    else:
        pytest.skip("an MLflow that takes runs into a folder of files")
    run = train("--logger", "mlflow", "--logger-opt", f"mlflow.uri={tmp_path}/mlruns")
    assert run.status == 2
    assert "--logger-opt mlflow.uri=sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true" in run.err
    assert run.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_packages_stores_hold_the_summary(train, tmp_path, monkeypatch):
    """TensorBoard's event files, MLflow's data base, Weights & Biases without a network: one run, stopped between.

    An environment from before the extra brought alembic has MLflow's folder of files to test.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = f"sqlite:///{tmp_path}/mlflow.db" if find_spec("alembic") else (tmp_path / "mlruns").as_uri()
    flags = ["--logger", "tensorboard", "mlflow", "--log-wandb", "--wandb-tags", "a", "b", "--log-interval", "2"]
    flags += ["--logger-opt", f"mlflow.uri={store}", "mlflow.experiment=tiny", "--epochs", "3"]
    with monkeypatch.context() as stopped:
        stops_at(stopped, 16)  # of 13 in an epoch: 6 batches, 6 of evaluation, and its end
        assert train(*flags).status == 128 + signal.SIGTERM
    state = yaml.safe_load((tmp_path / "run" / "loggers.yaml").read_text())
    assert {name: known["epochs"] for name, known in state.items()} == {"tensorboard": 1, "mlflow": 1, "wandb": 1}
    torch.manual_seed(3)
    run = train(*flags, "--resume", "auto")
    assert run.status == 0, run.err
    accuracy = [(6 * (i + 1), row["eval_top1"]) for i, row in enumerate(run.summary)]

    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    single = pytest.approx([value for _, value in accuracy], rel=1e-6)  # event files hold single precision
    assert [event.value for event in events.Scalars("eval_top1")] == single
    assert [event.step for event in events.Scalars("eval_top1")] == [6, 12, 18]
    assert [event.step for event in events.Scalars("running_loss")] == list(range(2, 19, 2))

    client = MlflowClient(store)
    (logged,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert (logged.info.run_id, logged.info.status) == (state["mlflow"]["id"], "FINISHED")
    history = client.get_metric_history(logged.info.run_id, "eval_top1")
    assert [(metric.step, metric.value) for metric in history] == accuracy
    assert logged.data.params["model"] == "topk_convnet"

    rows = wandb_rows(run.folder)
    assert {name for name, _ in rows} == {state["wandb"]["id"]}
    assert [(items["_step"], items["eval_top1"]) for _, items in rows] == accuracy
