"""Run a part of what only a GPU can say, step by step; results are written as they come.

    tests/gpu/run.sh kernels|speed|training|study --results DIR

A step that fails or takes too long ends alone, and the next one runs. The exit status is 1 if a step failed. Results
are the files that docs/results has, under DIR; each step's output is in DIR/logs. Copy DIR/*_gpu.json to docs/results
and run ``python tests/test_readme.py`` to renew the tables.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.plan import PARTS, Place, Step

ROOT = Path(__file__).parents[2]
PACK_EVERY = 15.0  # seconds between two archives of a step's results
PATIENCE = 10.0  # seconds that an interrupted step may take to save what it has
SHOWN = 15  # last lines of the output of a step that failed


@dataclass(frozen=True)
class Outcome:
    """One step: ``status`` is passed, failed, out of time, unfinished or skipped."""

    step: str
    status: str
    seconds: float
    told: str = ""

    @property
    def line(self) -> str:
        return f"{self.step:<16} {self.status:<12} {self.seconds:6.1f} s  {self.told}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    part = PARTS[args.part]
    place = Place(args.results.resolve(), rehearse=args.rehearse)
    steps = [step for step in part.steps(place) if not args.only or step.name in args.only]
    unknown = set(args.only or ()) - {step.name for step in steps}
    if unknown:
        names = ", ".join(step.name for step in part.steps(place))
        _parser().error(f"--only: no step {', '.join(sorted(unknown))}; part {args.part} has {names}")
    if args.list:
        print(*(f"{step.name:<16} {step.seconds:4.0f} s  {' '.join(step.command)}" for step in steps), sep="\n")
        return 0
    (place.results / "logs").mkdir(parents=True, exist_ok=True)
    if args.state:
        with tarfile.open(args.state) as archive:
            archive.extractall(place.results, filter="data")
    end = time.monotonic() + 60 * (part.minutes if args.minutes is None else args.minutes)
    outcomes: list[Outcome] = []
    try:
        for step in steps:
            outcomes.append(_done(step, place, end, args.archive))
            print(outcomes[-1].line, flush=True)
            _note(place, args.part, outcomes)
            _pack(place, args.archive)
    except KeyboardInterrupt:
        print("interrupted; the results so far are in", place.results, file=sys.stderr)
        return 130
    print("\n".join(["", f"part {args.part}:", *(outcome.line for outcome in outcomes)]))
    return int(any(outcome.status in ("failed", "out of time") for outcome in outcomes))


def _done(step: Step, place: Place, end: float, archive: Path | None) -> Outcome:
    """Run a step to its end, or to that of its time or of the part's."""
    reason = step.missing(place)
    left = end - time.monotonic()
    if reason or left < 1:
        return Outcome(step.name, "skipped", 0.0, reason or "no time was left")
    print(f"== {step.name}: {' '.join(step.command)}", flush=True)
    log = place.results / "logs" / f"{step.name}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.runnable(place),
            cwd=ROOT,
            env=_environment(place.environment, step.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = began + min(step.seconds, left)
        try:
            while process.poll() is None and time.monotonic() < late:
                try:
                    process.wait(min(PACK_EVERY, max(0.1, late - time.monotonic())))
                except subprocess.TimeoutExpired:
                    _pack(place, archive)
        finally:
            in_time = process.poll() is not None
            if not in_time:
                _end(process)
    seconds = time.monotonic() - began
    if not in_time:
        return Outcome(step.name, "unfinished" if step.resumes else "out of time", seconds, f"see {log.name}")
    if process.returncode == 0:
        return Outcome(step.name, "passed", seconds, _last_line(log))
    print("\n".join(_lines(log)[-SHOWN:]), flush=True)
    return Outcome(step.name, "failed", seconds, f"exit {process.returncode}, see {log.name}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a step, so that it can save what it has; after that end all its processes."""
    for number, patience in ((signal.SIGINT, PATIENCE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):  # its processes may be gone
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _environment(*own: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for variables in ({"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}, *own):
        found |= variables
    return found


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def _last_line(log: Path) -> str:
    return next((line.strip() for line in reversed(_lines(log)) if line.strip()), "")[:120]


def _note(place: Place, part: str, outcomes: Sequence[Outcome]) -> None:
    file = place.results / f"{part}.json"
    file.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def _pack(place: Place, archive: Path | None) -> None:
    """Write all results into one file, in place of the one before; checkpoints of unfinished runs stay out."""
    if archive is None:
        return

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith("study/work") else member

    half = archive.with_name(archive.name + ".tmp")
    try:
        with tarfile.open(half, "w:gz") as tar:
            tar.add(place.results, ".", filter=wanted)
    except FileNotFoundError:
        return  # a step has just replaced a file: the next archive has it
    half.replace(archive)


def _parser() -> argparse.ArgumentParser:
    parts = "; ".join(f"{name} ({part.minutes:g} min): {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("part", choices=PARTS, help=f"most telling first. {parts}")
    parser.add_argument("--results", type=Path, default=Path("output/gpu"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, metavar="M", help="the most minutes of the part (default: its own)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps alone")
    parser.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="also keep all results in this one file")
    parser.add_argument("--state", type=Path, metavar="FILE.tar.gz", help="go on from the archive of an earlier call")
    parser.add_argument("--list", action="store_true", help="list the steps and their times, and run none")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU, kernels by Triton's interpreter or plain torch"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
