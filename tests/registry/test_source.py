"""Summaries come from source files; no code of a package runs to find them."""

import sys

import pytest

from topk_registry.registry import source

TRIPWIRE = "raise RuntimeError('this package was imported')\n"


@pytest.fixture
def package(site):
    site.module("wired.__init__", TRIPWIRE + "from .deep import Deep as Renamed\n")
    site.module("wired.deep", '"""The module."""\n' + TRIPWIRE + 'class Deep:\n    """The class.\n\n    More."""\n')
    site.module("wired.bare", '"""Only the module has a docstring.\n\nAt length."""\nclass Bare:\n    x = 1\n')
    site.module("wired.wrong", "def (\n")
    site.module("spaces.inner.leaf", "def f():\n    '''  In a namespace package.  '''\n")
    yield
    assert not [name for name in sys.modules if name.split(".")[0] in ("wired", "spaces")]


@pytest.mark.parametrize(
    ("module", "attr", "line"),
    [
        ("wired.deep", "Deep", "The class."),
        ("spaces.inner.leaf", "f", "In a namespace package."),
        ("wired", "Renamed", ""),
        ("wired.deep", "missing", ""),
        ("wired.bare", "Bare", ""),
        ("wired.wrong", "f", ""),
        ("wired.nowhere", "f", ""),
        ("nowhere", "f", ""),
        ("itertools", "count", ""),
    ],
)
def test_summaries(package, module, attr, line):
    assert source.summary(module, attr) == line


def test_a_finder_that_fails_is_no_reason_to_fail(package, monkeypatch):
    class Angry:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise RuntimeError("no")

    monkeypatch.setattr(sys, "meta_path", [Angry, *sys.meta_path])
    assert source.summary("wired.deep", "Deep") == ""
