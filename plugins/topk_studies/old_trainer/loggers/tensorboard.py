"""Log to event files in the run's folder, for ``tensorboard --logdir``."""

from collections.abc import Mapping
from typing import Any

from topk_studies.old_trainer.report.loggers import LoggedRun, require

require("tensorboard")


class TensorBoard:
    """Log to TensorBoard's event files, in the folder ``tensorboard`` of the run.

    Args:
        run: the run that is logged.
        options: of ``torch.utils.tensorboard.SummaryWriter``.
    """

    run_id = None  # a run goes on in its folder

    def __init__(self, *, run: LoggedRun, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # hides what an earlier part logged after the checkpoint that this part goes on from
        purged = run.update + 1 if run.update else None
        self._writer: Any = SummaryWriter(**{"log_dir": f"{run.folder}/tensorboard", "purge_step": purged, **options})
        if not run.update:
            self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items()))

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()
