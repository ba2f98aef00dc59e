"""Every example in a docstring runs, and gives the result that it shows."""

import doctest
import functools
import importlib
import re
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision

import topk_registry

ROOT = Path(__file__).parents[1]
SOURCES = ((ROOT, "topk_registry"), (ROOT / "plugins", "topk_plugins"))
SOURCES += ((ROOT / "export", "topk_export"),)


def modules_with_examples() -> list[str]:
    """Modules whose source has an example; the others need not be imported."""
    found = []
    for root, package in SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            if "\n        >>> " in path.read_text(encoding="utf-8"):
                found.append(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
    return found


@functools.cache
def examples(module: str) -> dict[str, doctest.DocTest]:
    found = doctest.DocTestFinder(recurse=True).find(importlib.import_module(module))
    return {test.name.removeprefix(f"{module}."): test for test in found if test.examples}


NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


class Checker(doctest.OutputChecker):
    """An example without a result need only run; numbers are compared to the digits that torch prints."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if not want or super().check_output(want, got, optionflags):
            return True
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (want, got)]
        words = [NUMBER.sub("#", "".join(text.split())) for text in (want, got)]
        return words[0] == words[1] and numbers[1] == pytest.approx(numbers[0], rel=2e-4)


def names() -> dict[str, object]:
    """The libraries and some data, as a reader has them."""
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(64, 10, generator=generator), torch.arange(64) % 10
    return {
        "torch": torch,
        "nn": torch.nn,
        "timm": timm,
        "torchvision": torchvision,
        "topk_registry": topk_registry,
        **{name: getattr(topk_registry, name) for name in dir(topk_registry)},
        **{name: getattr(topk_registry.functional, name) for name in topk_registry.functional.__all__},
        "logits": logits,
        "val_logits": logits,
        "held_out_logits": logits,
        "target": target,
        "labels": target,
        "val_labels": target,
        "images": torch.zeros(2, 3, 32, 32),
        "stream": [0.1, 0.9],
        "calibration_scores": torch.rand(200),
    }


@pytest.mark.slow
@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_run_and_show_what_they_give(module):
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in examples(module).values():
        test.globs = {**names(), **test.globs}
        with warnings.catch_warnings():
            runner.run(test, out=report.append)
    topk_registry.refresh_plugins()
    assert not report, "".join(report)
