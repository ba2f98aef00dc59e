"""Log to an MLflow server or store."""

import os
import time
from collections.abc import Mapping

from topk_registry.train.report.loggers import LoggedRun, require

require("mlflow")

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMETERS = 100  # of one request, by MLflow's limits
LONGEST = 6000  # characters of a parameter


class MLflow:
    """Log to MLflow: a run with its settings as parameters.

    Args:
        run: the run that is logged.
        uri: of the server or store; by default what ``MLFLOW_TRACKING_URI`` says.
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
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=uri)
        if run.resumed_id is not None:
            self.run_id = run.resumed_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
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
