"""The table of what 100 million images cost follows from the measured seconds beside it."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs/guide/scale.md").read_text(encoding="utf-8")
IMAGES = 100_000_000


def test_the_hours_of_100_million_images_follow_from_the_measured_seconds():
    measured = re.findall(r"^\| (resnet\d+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|$", PAGE, re.MULTILINE)
    seconds = {name: float(total) for name, *_, total in measured}
    assert list(seconds) == ["resnet18", "resnet50"]
    for name, reading, running, _ in measured:
        assert seconds[name] == pytest.approx(float(reading) + float(running))
        assert re.search(rf"P x {IMAGES * seconds[name] / 3600:.0f}\b(?: core hours)? for {name}", PAGE)
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| (\d+) P \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for *hours, cores in rows:
        expected = [IMAGES * seconds[name] / 3600 / int(cores) for name in seconds]
        assert list(map(float, hours)) == pytest.approx(expected, abs=0.06)  # given to a tenth
    slowest = max(float(reading) for _, reading, *_ in measured)
    assert f"C / {slowest}" in PAGE
    assert f"16 cores need at least {IMAGES * slowest / 3600 / 16:.1f} hours" in PAGE
