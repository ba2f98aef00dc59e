"""Log to Weights & Biases."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.old_trainer.report.loggers import LoggedRun, require

require("wandb")


class WandB:
    """Log to Weights & Biases, as timm's ``--log-wandb`` does.

    Args:
        run: the run that is logged.
        project: timm's ``--wandb-project``.
        tags: timm's ``--wandb-tags``.
        resume_id: timm's ``--wandb-resume-id``: go on with this run, which must exist.
        options: of ``wandb.init``, such as ``mode="offline"`` or ``entity``.
    """

    def __init__(
        self,
        *,
        run: LoggedRun,
        project: str | None = None,
        tags: Sequence[str] = (),
        resume_id: str = "",
        **options: Any,
    ) -> None:
        import wandb

        known = resume_id or run.resumed_id
        self._run: Any = wandb.init(
            **{
                "project": project,
                "name": run.name,
                "config": dict(run.settings),
                "tags": list(tags),
                "dir": str(run.folder),
                "id": known,
                "resume": "must" if resume_id else "allow" if known else None,
                **options,
            }
        )
        self.run_id: str = self._run.id

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        self._run.log(dict(values), step=update)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
