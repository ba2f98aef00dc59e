"""Summaries come from source files; no code of a package runs to find them."""

import sys

import pytest

from topk_registry.registry import source

TRIPWIRE = "raise RuntimeError('this package was imported')\n"


@pytest.fixture
def package(site):
    site.module("wired.__init__", TRIPWIRE + "from .deep import Deep as Renamed\nfrom . import deep\n")
    site.module("wired.deep", '"""The module."""\n' + TRIPWIRE + 'class Deep:\n    """The class.\n\n    More."""\n')
    site.module("wired.bare", '"""Only the module speaks.\n\nAt length."""\nclass Bare:\n    x = 1\n')
    site.module("wired.nested", "class Outer:\n    def make():\n        'A method.'\n")
    site.module("wired.loop_a", "from wired.loop_b import Loop\n")
    site.module("wired.loop_b", "from wired.loop_a import Loop\n")
    site.module("wired.wrong", "def (\n")
    site.module("spaces.inner.leaf", "def f():\n    '''  In a namespace package.  '''\n")
    yield
    assert not [name for name in sys.modules if name.split(".")[0] in ("wired", "spaces")]


@pytest.mark.parametrize(
    ("module", "attr", "line"),
    [
        ("wired.deep", "Deep", "The class."),
        ("wired.bare", "Bare", "Only the module speaks."),
        ("wired.deep", "missing", "The module."),
        ("wired", "Renamed", "The class."),
        ("wired.nested", "Outer.make", "A method."),
        ("spaces.inner.leaf", "f", "In a namespace package."),
        ("wired.loop_a", "Loop", ""),
        ("wired.wrong", "f", ""),
        ("wired.nowhere", "f", ""),
        ("nowhere", "f", ""),
        ("itertools", "count", ""),
    ],
)
def test_summaries(package, module, attr, line):
    assert source.summary(module, attr) == line


def test_a_module_is_found_at_any_depth(package):
    assert source.find_spec("spaces.inner.leaf").origin.endswith("leaf.py")
    assert source.find_spec("spaces.inner.nowhere") is None
    assert source.find_spec("wired.deep.below") is None


def test_a_finder_that_fails_is_no_reason_to_fail(package, monkeypatch):
    class Angry:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "meta_path", [Angry, *sys.meta_path])
    assert source.summary("wired.deep", "Deep") == ""
