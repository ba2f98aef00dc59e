"""A service's log against the calibration: does it still see the images that its sets were calibrated on?"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topk_export.errors import ModelFileError
from topk_export.runtime.session import open_session
from topk_registry.oldsets import ExchangeabilityTest
from topk_registry.pages import lines, page, paragraph, table

WATCHED = {"probability": "probability of the best class", "size": "size of the prediction set"}
POINTS = 400


@dataclass(frozen=True)
class Monitored:
    """The tests of a log, one a watched value, each at an equal share of the level."""

    tests: dict[str, ExchangeabilityTest]
    level: float
    entries: list[dict[str, Any]]
    reference: int

    @property
    def rejected(self) -> bool:
        return any(test.rejected for test in self.tests.values())


def reference_of(model: str | Path) -> dict[str, list[float]]:
    """The values that calibration left in a file for monitoring."""
    props = open_session(model, device="cpu").get_modelmeta().custom_metadata_map
    if "sets_reference" not in props:
        raise ModelFileError(
            f"{model} was not calibrated, so it has nothing to compare with: topk-registry calibrate it"
        )
    return json.loads(props["sets_reference"])


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a log; a last line that is still being written does not count."""
    entries = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n") or not line.strip():
            continue
        try:
            entry = json.loads(line)
            float(entry["probability"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no line of `topk-registry serve --log`: expected a JSON object with time, "
                f"size and probability, got {line.strip()[:80]!r}"
            ) from error
        entries.append(entry)
    return entries


def watch(
    entries: Sequence[Mapping[str, Any]],
    reference: Mapping[str, Sequence[float]],
    *,
    level: float = 0.01,
    seed: int = 0,
) -> Monitored:
    """Test whether the entries are exchangeable with the reference, and among each other.

    Args:
        entries: of a log, in the order of time.
        reference: values of held-out samples, by name; none: the test within the log.
        level: the probability of ever rejecting where nothing has changed.
        seed: of the random ranks among equal values.
    """
    if not entries:
        raise ValueError("the log is empty: there is nothing to test")
    names = [name for name in WATCHED if all(entry.get(name) is not None for entry in entries)]
    names = [name for name in names if not reference or name in reference]
    if not 0 < level < 1:
        raise ValueError(f"level, the probability of a false alarm, must be above 0 and below 1, got {level!r}")
    tests = {name: ExchangeabilityTest(reference.get(name, ()), level=level / len(names), seed=seed) for name in names}
    for entry in entries:
        for name, test in tests.items():
            test.update(float(entry[name]))
    return Monitored(tests, level, [dict(entry) for entry in entries], len(reference.get("probability", ())))


def verdict(found: Monitored) -> str:
    """Sum up the tests in a sentence."""
    bound = f"at level {found.level:g}, over all looks together"
    if not found.rejected:
        return f"no change found in {len(found.entries)} predictions, {bound}"
    name, test = min(
        ((name, test) for name, test in found.tests.items() if test.rejected_at is not None),
        key=lambda pair: pair[1].rejected_at or 0,
    )
    at = test.rejected_at or 0
    when = f", {found.entries[at]['time']}" if "time" in found.entries[at] else ""
    return (
        f"the images have changed: the {WATCHED[name]} rejects exchangeability at prediction {at + 1} of "
        f"{len(found.entries)}{when}, {bound}. The promise of the sets no longer holds: calibrate anew"
    )


def monitor_page(found: Monitored) -> str:
    """The capital of the tests over time, as a page."""
    step = max(1, math.ceil(len(found.entries) / POINTS))
    named = {
        name: [(i + 1.0, test.log_capital[i] / math.log(10)) for i in range(0, len(test.log_capital), step)]
        for name, test in found.tests.items()
    }
    level = math.log10(len(found.tests) / found.level)
    plot = lines(named, label="Capital of the tests", of="predictions", level=level)
    text = (
        "The common logarithm of a gambler's capital that bets against exchangeability. Where nothing has changed it "
        f"reaches the dashed line with probability at most {found.level:g}, however long the log."
    )
    rows = [
        (
            WATCHED[name],
            max(test.log_capital) / math.log(10),
            "no" if test.rejected_at is None else test.rejected_at + 1,
        )
        for name, test in found.tests.items()
    ]
    facts = [("predictions", len(found.entries)), ("reference values", found.reference), ("level", found.level)]
    sections = [
        ("Capital", paragraph(text) + plot),
        ("Tests", table(("value", "largest log10 capital", "rejected at prediction"), rows)),
        ("Facts", table(("fact", "value"), facts)),
    ]
    return page("Prediction sets: monitoring", verdict(found).capitalize() + ".", sections)
