"""Studies of a loss's own option: one setting of everything else, one run a value and seed, nothing tuned."""

from collections.abc import Mapping, Sequence
from typing import Any

from topk_studies.engine.settings import Trial, trials
from topk_studies.engine.study import Configuration, Options, Record
from topk_studies.engine.tuning import Choice, choices, merge, run_of

SMALL_RATE = 1e-3


def variant_runs(
    options: Options,
    loss: str,
    loss_options: Mapping[str, Any],
    seeds: Sequence[int],
    flags: Mapping[str, Any] | None = None,
) -> list[Configuration]:
    """A loss with these options on every seed; the rest is the budget's: the paper's trial, or the middle rate."""
    trial: Trial = trials(options, loss)[0] if options.budget == "paper" else {"lr": SMALL_RATE}
    setting = merge(flags or {}, {**trial, "loss_opt": {**trial.get("loss_opt", {}), **loss_options}})
    return [run_of(options, loss=loss, seed=seed, **setting) for seed in seeds]


def variants(records: Sequence[Record]) -> list[Choice]:
    """Every setting as a choice of its own."""
    return choices(records, tuned=())


def option_of(choice: Choice, name: str, default: Any) -> Any:
    """An option of the loss, as it was set."""
    return choice.flags.get("loss_opt", {}).get(name, default)
