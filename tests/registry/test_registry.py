"""Rules 3, 4, 6 and 7: creating losses, registering them here, and what is said when something is wrong."""

import functools
import re
import threading

import pytest
import torch

import topk_registry as tr
from topk_registry.errors import BrokenPluginError, NameTakenError, UnknownPluginError

GOOD = '"""Losses of acme."""\n\ndef Mine(*, k=5, scale=1.0):\n    return lambda logits, target: scale * logits.sum()\n'


@pytest.fixture
def acme(site):
    site.module("acme_losses", GOOD)
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    return site


def broken(site, source, value="broken_losses:Mine"):
    site.module("broken_losses", source)
    site.distribution("broken-losses", {"broken": value})


def test_options_reach_the_factory(acme, registry):
    loss = registry.create("acme", scale=3.0)
    assert loss(torch.ones(2, 3), None) == 18


@pytest.mark.parametrize(("option", "meant"), [("scal", "scale"), ("tua", "tau")])  # two of three letters fit
def test_an_option_it_does_not_take_names_those_it_does(registry, option, meant):
    registry.register("acme")(lambda k=5, scale=1.0, tau=1.0: None)
    expected = rf"loss 'acme' takes no option '{option}'; did you mean '{meant}'\? \(it takes k, scale, tau\)"
    with pytest.raises(TypeError, match=expected):
        registry.create("acme", **{option: 3.0})


def test_an_option_it_needs_is_named(registry):
    registry.register("needy")(lambda class_counts, *, beta=0.9: None)
    with pytest.raises(TypeError, match=r"loss 'needy' needs class_counts \(it takes class_counts, beta\)"):
        registry.create("needy")


def test_an_unknown_name_lists_the_closest(acme, registry):
    closest = r"no loss is called 'amce'; the closest are acme.*`topk-registry losses`"
    with pytest.raises(UnknownPluginError, match=closest):
        registry.create("amce")
    absent = "no loss is called 'globex:acme'; no installed distribution 'globex' has a loss; the closest are acme"
    with pytest.raises(UnknownPluginError, match=absent):
        registry.create("globex:acme")
    with pytest.raises(LookupError, match=r"there are .*acme"):
        registry.create("xyzzy")
    with pytest.raises(TypeError, match="the name of a loss is a string, got 3"):
        registry.create(3)


@pytest.mark.parametrize(
    ("source", "value", "reason"),
    [
        ("import absent\ndef Mine(): ...", "broken_losses:Mine", "ModuleNotFoundError: No module named 'absent'"),
        ("raise RuntimeError('bad weather')\nMine = None", "broken_losses:Mine", "RuntimeError: bad weather"),
        ("raise SystemExit('gone')\nMine = None", "broken_losses:Mine", "SystemExit: gone"),
        ("def __getattr__(name): raise AttributeError(name)", "broken_losses:Mine", "AttributeError: Mine"),
        ("Mine = {}", "broken_losses:Mine", "TypeError: expected a class or a function, got an instance of dict"),
    ],
)
def test_a_plugin_that_fails_on_import_is_broken_once_asked_for(acme, registry, source, value, reason):
    broken(acme, source, value)
    assert registry.info("broken").status == "available"
    with pytest.raises(BrokenPluginError, match=f"'broken' of broken-losses 1.0 .* is broken: {reason}") as caught:
        registry.create("broken")
    assert caught.value.__cause__ is not None
    info = registry.info("broken")
    assert info.status == "broken"
    assert info.error
    assert "broken" in registry.names()
    assert registry.create("acme")(torch.ones(1, 2), None) == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere_losses:Mine", "package 'nowhere_losses' is not installed"),
        ("acme losses:Mine", "package 'acme losses' is not installed"),
    ],
)
def test_what_metadata_shows_to_be_broken_is_listed_so(acme, registry, value, reason):
    acme.distribution("broken-losses", {"broken": value})
    info = registry.info("broken")
    assert info.status == "broken"
    assert re.search(reason, info.error)
    with pytest.raises(BrokenPluginError):
        registry.builder("broken")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("acme_losses:Mien", "module 'acme_losses' has no attribute 'Mien'"),
        ("acme_losses.missing:Mine", "No module named 'acme_losses.missing'"),
        ("acme_losses", "expected a class or a function, got an instance of module"),
        ("wrong_losses:Mine", "SyntaxError"),
    ],
)
def test_what_only_an_import_shows_is_listed_after_it(acme, registry, value, reason):
    acme.distribution("broken-losses", {"broken": value})
    acme.module("wrong_losses", "import math\ndef Mine(: pass\n")
    with pytest.raises(BrokenPluginError, match=reason):
        registry.builder("broken")
    assert re.search(reason, registry.info("broken").error)


def test_a_repaired_plugin_loads(acme, registry):
    broken(acme, "raise RuntimeError('bad weather')")
    with pytest.raises(BrokenPluginError):
        registry.builder("broken")
    acme.module("broken_losses", GOOD + "# repaired, and longer\n")
    registry.refresh()
    assert callable(registry.builder("broken"))
    assert registry.info("broken").status == "available"


def test_an_interrupt_is_no_broken_plugin(acme, registry):
    broken(acme, "def Mine():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.create("broken")
    acme.module("interrupted_losses", "raise KeyboardInterrupt\nMine = None\n")
    acme.distribution("interrupted-losses", {"interrupted": "interrupted_losses:Mine"})
    registry.refresh()
    with pytest.raises(KeyboardInterrupt):
        registry.builder("interrupted")
    assert registry.info("interrupted").status == "available"


@pytest.mark.parametrize("error", [ValueError, TypeError, OSError])
def test_an_error_of_a_factory_passes_through(acme, registry, error):
    broken(acme, f"def Mine(*, k=5):\n    raise {error.__name__}('k must be odd')\n")
    with pytest.raises(error, match="k must be odd"):
        registry.create("broken", k=4)


def test_registering_here(registry):
    @registry.register("local")
    def local(*, scale=1.0):
        """Scaled.

        More.
        """
        return lambda logits, target: scale

    assert registry.create("local", scale=4.0)(None, None) == 4.0
    info = registry.info("local")
    assert (info.status, info.distribution, info.summary) == ("registered", "", "Scaled.")
    assert info.value.endswith("test_registering_here.<locals>.local")


def test_a_taken_name_needs_override(acme, registry):
    with pytest.raises(NameTakenError, match=r"loss 'acme' is taken by acme-losses 1\.0 .*; override=True"):
        registry.register("acme")(lambda: "mine")
    registry.register("acme", override=True)(lambda: "mine")
    assert registry.create("acme") == "mine"
    assert registry.info("acme").status == "registered"
    assert registry.builder("acme-losses:acme").__module__ == "acme_losses"
    with pytest.raises(ValueError, match="taken by this process"):
        registry.register("acme")(lambda: "another")


def test_timms_names_are_never_free(registry):
    for override in (False, True):
        with pytest.raises(NameTakenError, match=r"'ce' is taken by timm .*; choose another"):
            registry.register("ce", override=override)(lambda: None)


def test_a_plugin_cannot_take_timms_name(acme, registry):
    acme.distribution("greedy-losses", {"ce": "acme_losses:Mine"})
    assert registry.info("ce").distribution == "timm"
    assert registry.builder("greedy-losses:ce").__module__ == "acme_losses"


@pytest.mark.parametrize("name", ["", "a b", "acme:x", "x*", "x,y"])
def test_a_name_that_could_not_be_asked_for_is_refused(registry, name):
    with pytest.raises(ValueError, match="without spaces, colons, commas and wildcards"):
        registry.register(name)


def test_a_decorator_without_its_name_is_explained(registry):
    with pytest.raises(ValueError, match=r"@register_loss\('mine'\)"):
        registry.register(functools.partial)
    with pytest.raises(TypeError, match="expected a class or a function, got an instance of int"):
        registry.register("number")(3)


def test_filters_are_timms(registry):
    for name in ("topk_a", "topk_b", "other"):
        registry.register(name)(lambda: None)
    registry.refresh()
    mine = {"topk_a", "topk_b", "other", "ce", "bce"}
    assert mine <= set(registry.names())
    assert registry.names("other") == ["other"]
    assert registry.names("oth") == []
    assert registry.names(["topk_[ab]", "c?"]) == ["ce", "topk_a", "topk_b"]
    assert registry.names("topk_?", exclude="*_b") == ["topk_a"]
    assert registry.names("timm:*") == ["bce", "ce"]


def test_threads_see_one_discovery(acme, registry):
    seen, barrier = [], threading.Barrier(8)

    def look():
        barrier.wait()
        seen.append((registry.names(), registry.builder("acme")))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert all(one == seen[0] for one in seen)


def test_the_public_functions_are_these(acme):
    tr.refresh_plugins()
    assert "acme" in tr.list_losses("ac*")
    assert tr.is_loss("acme")
    assert not tr.is_loss("acme_2")
    assert tr.loss_info("acme").distribution == "acme-losses"
    assert tr.get_loss_builder("acme").__module__ == "acme_losses"
    with pytest.raises(NameTakenError, match="acme"):
        tr.register_loss("acme")(lambda: max)
    tr.register_loss("acme", override=True)(lambda: max)
    assert tr.create_loss("acme") is max
    for returned, text in ((3.0, "3.0"), (torch.nn.MSELoss, "<class .*MSELoss'>")):  # the class in place of a loss
        tr.register_loss("acme", override=True)(lambda returned=returned: returned)
        with pytest.raises(BrokenPluginError, match=f"loss 'acme' returned {text}, expected a callable"):
            tr.create_loss("acme")


def test_a_plugin_that_is_the_loss_itself_is_explained(acme):
    broken(acme, "def Mine(scores, labels):\n    return scores.sum()\n")
    tr.refresh_plugins()
    with pytest.raises(TypeError, match=r"needs scores, labels .*a factory takes options and returns the loss"):
        tr.create_loss("broken")


def test_an_unknown_name_in_a_misspelt_group_is_found(site, registry):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"}, group="topk_registry.loss")
    with pytest.raises(UnknownPluginError, match=r"\[topk_registry.loss\]; the groups are .*doctor"):
        registry.create("acme")
