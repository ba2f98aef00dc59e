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


@pytest.mark.parametrize(
    ("text", "attr", "told"),
    [
        ("try:\n    import fast as Mine\nexcept ImportError:\n    Mine = None\n", "Mine", ""),
        ("if True:\n    def Mine(): ...\n", "Mine.inner", ""),
        ("for Mine in range(3): pass\n", "Mine", ""),
        ("(Mine, other), *rest = f()\nMine.x = 3\n", "rest", ""),
        ("def f():\n    global Mine\n    Mine = 3\nf()\n", "Mine", ""),
        ("from elsewhere import *\n", "Mine", ""),
        ("globals()['Mine'] = 3\n", "Mine", ""),
        ("def __getattr__(name): ...\n", "Mine", ""),
        ("class Mien: ...\n", "Mine.inner", "module 'told' has no attribute 'Mine'; did you mean 'Mien'?"),
        ("\nclass :\n", "Mine", "SyntaxError: invalid syntax (told, line 2)"),
    ],
)
def test_what_is_certainly_wrong_is_told_without_an_import(site, text, attr, told):
    site.module("told", TRIPWIRE * (not told.startswith("Syntax")) + text)
    assert source.problem("told", attr) == told
    assert "told" not in sys.modules


def test_a_misspelt_module_is_told_at_any_depth(package):
    assert source.problem("wird", "Deep") == "module 'wird' is not installed; did you mean 'wired'?"
    assert source.problem("wired.depe", "Deep") == "module 'wired.depe' is not installed; did you mean 'deep'?"
    assert source.problem("wired", "deep") == ""  # a submodule
