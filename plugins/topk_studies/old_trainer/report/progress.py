"""The place of a run, and its measurements so far."""

from dataclasses import dataclass, field

Row = dict[str, float]  # of the summary: metrics of one epoch by name


@dataclass
class Progress:
    """Place of a run: the epoch, the batches done in it, and the measurements so far."""

    epoch: int = 0
    step: int = 0
    steps_per_epoch: int = 0
    batch: int = 0  # images of a step in all processes; 0 where their order depends on the number of processes
    loss_sum: float = 0.0
    samples: float = 0
    history: list[Row] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0

    def same_images(self, other: "Progress") -> bool:
        """Whether an epoch of the other has the same images in the same order, in batches of any size."""
        if not (self.batch and other.batch) or self.batch == other.batch:
            return self.steps_per_epoch == other.steps_per_epoch
        ends = [each.steps_per_epoch * each.batch for each in (self, other)]
        return abs(ends[0] - ends[1]) < max(self.batch, other.batch)  # the last part of a batch is left out

    def next_epoch(self) -> None:
        self.epoch, self.step, self.loss_sum, self.samples = self.epoch + 1, 0, 0.0, 0

    def note(self, value: float, *, decreasing: bool) -> None:
        """Keep the best value of the evaluation metric, and count the evaluations since."""
        if self.best is None or (value < self.best if decreasing else value > self.best):
            self.best, self.best_epoch, self.stale = value, self.epoch, 0
        else:
            self.stale += 1
