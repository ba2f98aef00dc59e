"""Log to an MLflow server or store."""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from topk_registry.registry.errors import MissingPackageError
from topk_studies.old_trainer.report.loggers import INSTALL, LoggedRun, require

if TYPE_CHECKING:
    from mlflow import MlflowClient

require("mlflow")

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMETERS = 100  # of one request, by MLflow's limits
LONGEST = 6000  # characters of a parameter
ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # which MLflow 3 asks of those who keep runs in a folder of files


class MLflow:
    """Log to MLflow: a run with its settings as parameters.

    Args:
        run: the run that is logged.
        uri: of the server or store; by default what ``MLFLOW_TRACKING_URI`` says, else MLflow's own, which is a
            data base in the working folder (``sqlite:///mlflow.db``).
        experiment: its name; by default what ``MLFLOW_EXPERIMENT_NAME`` says, else ``Default``.
        tags: of the run.
    """

    def __init__(
        self,
        *,
        run: LoggedRun,
        uri: str | None = None,
        experiment: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Param

        self._client = _client(uri)
        if run.resumed_id is not None:
            self.run_id = run.resumed_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        existing = self._client.get_experiment_by_name(experiment)
        place = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
        self.run_id = self._client.create_run(place, run_name=run.name, tags=dict(tags or {})).info.run_id
        parameters = [Param(name, str(value)[:LONGEST]) for name, value in run.settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=parameters[first : first + MOST_PARAMETERS])

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.run_id, [Metric(name, value, now, update) for name, value in values.items()])

    def close(self, status: str) -> None:
        self._client.set_terminated(self.run_id, STATUS[status])


def _client(uri: str | None) -> "MlflowClient":
    """Open a server or store; one that cannot be opened is an error that says what to do."""
    from mlflow import MlflowClient, get_tracking_uri
    from mlflow.exceptions import MlflowException

    where = uri or get_tracking_uri()
    try:
        return MlflowClient(tracking_uri=uri)
    except ModuleNotFoundError as error:  # mlflow-skinny brings no package of a data base
        package = str(error.name).partition(".")[0]
        raise MissingPackageError(f"MLflow's store {where} needs {package}: {INSTALL}") from error
    except MlflowException as error:
        if ALLOWED not in str(error):
            raise
        raise ValueError(
            f"MLflow takes no runs into the folder of files {where}: choose a data base, --logger-opt "
            f"mlflow.uri=sqlite:///mlflow.db, or set {ALLOWED}=true"
        ) from error
