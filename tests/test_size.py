"""A ceiling on the lines of Python per package, so that code that is removed stays removed."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CEILINGS = {
    "benchmarks": 710,
    "docs": 700,
    "export/topk_export": 5289,
    "plugins/template": 150,
    "plugins/topk_plugins": 3000,
    "plugins/topk_studies": 1838,
    "tests": 16960,
    "topk_registry/*.py": 200,
    "topk_registry/cli": 450,
    "topk_registry/conformal": 518,
    "topk_registry/data": 1000,
    "topk_registry/distributions": 335,
    "topk_registry/losses": 900,
    "topk_registry/metrics": 380,
    "topk_registry/ops": 6557,
    "topk_registry/nn": 1495,
    "topk_registry/registry": 700,
    "topk_registry/testing": 1192,
    "topk_registry/train": 3899,
}


def lines(place: Path) -> int:
    files = [place] if place.is_file() else place.rglob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def packages() -> dict[str, int]:
    """Lines by package: everything below the folder, or the files at the top of it if packages are below."""
    core = ROOT / "topk_registry"
    counts = {f"topk_registry/{each.name}": lines(each) for each in core.iterdir() if (each / "__init__.py").is_file()}
    counts["topk_registry/*.py"] = sum(lines(file) for file in core.glob("*.py"))
    for place in ("plugins/topk_plugins", "plugins/topk_studies", "plugins/template", "export/topk_export"):
        counts[place] = lines(ROOT / place)
    counts["docs"] = lines(ROOT / "docs")
    counts["benchmarks"] = lines(ROOT / "benchmarks")
    counts["tests"] = lines(ROOT / "tests")
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_stays_below_its_ceiling(package):
    assert package in CEILINGS, f"add {package} to the table"
    assert packages()[package] <= CEILINGS[package]


def test_the_table_has_no_packages_that_are_gone():
    assert set(CEILINGS) == set(packages())
