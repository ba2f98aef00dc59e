"""Triton kernels compile for GPUs that are not there, in no more registers and stack than the table on file."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from benchmarks.registers import TARGETS, calls, compiled, launch_of, usage
from tests.ops.triton_runs import compiles

FILE = Path(__file__).parents[2] / "docs" / "results" / "registers.json"
CONTENT = json.loads(FILE.read_text())
RECORDED = CONTENT["targets"]
USUAL = (
    "smooth_topk, labels, 1000 classes",
    "smooth_topk, smoothed labels, 1000 classes",
    "perturbed_topk, 1000 classes",
)
GATE = ("sm_80", "sm_90")

CASES = [
    pytest.param(
        target,
        name,
        marks=pytest.mark.slow if target in GATE and name in USUAL else pytest.mark.nightly,
        id=f"{target}-{name}",
    )
    for target, table in RECORDED.items()
    for name in table
]


def limits(recorded: dict[str, int]) -> dict[str, float]:
    """Return the maxima: those on file, and somewhat more for another version of the compiler."""
    names = ("registers", "stack", "spilled registers")
    if triton.__version__ == CONTENT["triton"]:
        return {name: recorded[name] for name in names if name in recorded}
    return {name: 1.1 * recorded[name] + 16 for name in names if name in recorded}


@compiles
@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_kernel_takes_no_more_than_recorded(target, name):
    found = usage(launch_of(calls()[name]), TARGETS[target])
    recorded = RECORDED[target][name]
    assert (found["kernel"], found["warps"]) == (recorded["kernel"], recorded["warps"])
    assert {key: found[key] for key, limit in limits(recorded).items() if found[key] > limit} == {}


@compiles
@pytest.mark.slow
def test_a_gradient_with_nearly_2_31_entries_is_scaled_by_a_loop_in_64_bits():
    """In 32 bits, the position after the last block would be negative, and the loop would go on."""
    binary = compiled(launch_of(calls()["scale of a gradient"]), TARGETS["sm_90"])
    assert re.search(r"scf\.for .* : i64", binary.asm["ttir"])


def test_the_table_has_all_kernels_of_all_targets_and_kernels_of_1000_classes_spill_nothing():
    assert set(RECORDED) == set(TARGETS)
    for target, table in RECORDED.items():
        assert set(table) == set(calls())
        for name in table:
            if name.startswith("smooth_topk") and "1000" in name:
                assert table[name]["stack"] == 0, (target, name)
                assert target not in GATE or table[name]["registers"] < 200, (target, name)
