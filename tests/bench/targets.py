"""Say of the reports of a GPU, in one folder, which targets they meet.

    python -m tests.bench targets DIR

Times are medians of whole steps. Beside cross-entropy those under CUDA graphs count, which hold no launch; where a
kernel takes less than its launch, those without. The verdicts are kept in DIR/targets_gpu.json.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.linear import ON_LOGITS, TORCH
from tests.bench.linear import OURS as LINEAR
from tests.bench.report import aligned
from topk_studies.timing.contest import CROSS_ENTROPY, OURS

COMPILED = f"{CROSS_ENTROPY}, compiled"
LARGE = ((8192, 1000, 5), (1024, 21_841, 5))  # where moving the logits is what takes the time
SHARE = 0.01  # of a training step
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A figure beside its target; ``at_least`` says that the target is a lower bound."""

    what: str
    case: str
    target: float
    found: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.found >= self.target if self.at_least else self.found <= self.target


def of_ksubset(rows: Sequence[Row]) -> Iterator[Verdict]:
    """The smooth top-k SVM beside cross-entropy, and the share of the copy bandwidth."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["both"]:
            key = (*(row[name] for name in ("B", "n", "k", "dtype", "tau", "mixup", "graph")),)
            cases.setdefault(key, {})[row["contestant"]] = row
    for (*shape, dtype, tau, mixup, graph), found in cases.items():
        if OURS not in found:
            continue
        where = f"{tuple(shape)} {dtype}, tau {tau:g}, {'distributions' if mixup else 'indices'}"
        large = tuple(shape) in LARGE
        if graph:
            for peer, limit in ((CROSS_ENTROPY, 1.5 if mixup else 1.0), (COMPILED, 1.5 if mixup else 1.3)):
                if large and peer in found:
                    yield Verdict(f"time over {peer}", f"{where}, graph", limit, _ratio(found, peer))
            if large:
                share = found[OURS]["floor"] / found[OURS]["both"]["median"]
                yield Verdict("share of the copy bandwidth", f"{where}, graph", 0.5, share, at_least=True)
        elif not large and CROSS_ENTROPY in found:
            limit = 1.5 if mixup else 1.3
            yield Verdict(f"time over {CROSS_ENTROPY}, launched", where, limit, _ratio(found, CROSS_ENTROPY))


def _ratio(found: Mapping[str, Row], peer: str) -> float:
    return found[OURS]["both"]["median"] / found[peer]["both"]["median"]


def of_linear(rows: Sequence[Row]) -> Iterator[Verdict]:
    """The classifier without logits beside PyTorch's; beside cross-entropy on logits where this version has none."""
    found = {row["contestant"]: row for row in rows if not row["problem"]}
    peer = next((name for name in (TORCH, ON_LOGITS) if name in found), None)
    if LINEAR in found and peer:
        ours, theirs = found[LINEAR], found[peer]
        where = f"n = {ours['n']}, d = {ours['d']}, B = {ours['B']}, {ours['dtype']}"
        yield Verdict(f"time over {peer}", where, 1.3, ours["both"] / theirs["both"])
        yield Verdict(f"memory over {peer}", where, 1.1, ours["bytes"] / theirs["bytes"])


def of_steps(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Each loss's share of a training step."""
    for row in rows:
        if not row["problem"]:
            yield Verdict("share of a training step", f"{row['model']}, {row['loss']}", SHARE, row["share"])


REPORTS: dict[str, Callable[[Sequence[Row]], Iterator[Verdict]]] = {
    "ksubset_gpu.json": of_ksubset,
    "linear_gpu.json": of_linear,
    "steps_gpu.json": of_steps,
}


def verdicts(folder: Path) -> list[Verdict]:
    """The verdicts on all reports that are there."""
    found: list[Verdict] = []
    for name, judge in REPORTS.items():
        if (folder / name).is_file():
            found += judge(json.loads((folder / name).read_text())["results"])
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench targets", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    found = verdicts(args.folder)
    rows = [("what", "case", "target", "found", "")]
    for one in found:
        sign = ">=" if one.at_least else "<="
        rows.append((one.what, one.case, f"{sign} {one.target:g}", f"{one.found:.3g}", "met" if one.met else "MISSED"))
    print("\n".join(aligned(rows)))
    missed = sum(not one.met for one in found)
    kept = [{**asdict(one), "met": one.met} for one in found]
    (args.folder / "targets_gpu.json").write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    print(f"{len(found) - missed} of {len(found)} targets met")
    return 0
