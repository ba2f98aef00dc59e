"""Rules 1, 2, 4, 5 and 8: what is found, whose it is, and what is kept out."""

import sys
from importlib.metadata import entry_points

import entrypoints
import pytest

from topk_registry.errors import AmbiguousPluginError, DisabledPluginError
from topk_registry.registry import Registry, losses
from topk_registry.registry.discovery import Plugin, discover, matches

GROUP = "topk_registry.losses"
FACTORY = "def Mine(*, scale=1.0):\n    return lambda logits, target: scale * logits.sum()\n"


def found(group=GROUP):
    return {(p.distribution, p.name, p.value) for p in discover(group)[0]}


def test_a_new_distribution_is_found_without_being_imported(site, registry):
    site.module("acme_losses", "raise RuntimeError('imported')\ndef Mine(): ...\n")
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"}, version="2.5")
    assert "acme" in registry
    assert "acme" in registry.names()
    assert "acme_losses" not in sys.modules
    info = registry.info("acme")
    assert (info.distribution, info.version, info.value) == ("acme-losses", "2.5", "acme_losses:Mine")
    assert info.status == "available"


def test_the_entrypoints_package_finds_the_same_plugins(site):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine", "other": "acme_losses.sub:Other"})
    independent = {
        (ep.distro.name.replace("_", "-"), ep.name, f"{ep.module_name}:{ep.object_name}")
        for ep in entrypoints.get_group_all(GROUP)
    }
    assert found() == independent
    assert ("acme-losses", "other", "acme_losses.sub:Other") in independent


def test_the_projects_own_losses_are_found_like_any_other():
    own = {ep.name for ep in entry_points(group=GROUP) if ep.dist is not None and ep.dist.name == "topk-registry"}
    assert own
    assert own <= set(losses.names())


def test_what_was_found_is_remembered_until_refreshed(site, registry):
    assert "late" not in registry
    site.distribution("late-losses", {"late": "late_losses:Mine"})
    assert "late" not in registry
    registry.refresh()
    assert "late" in registry


def test_a_second_copy_of_a_distribution_is_shadowed(site, registry, tmp_path, monkeypatch):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"}, version="2.0")
    second = type(site)(tmp_path / "second")
    second.distribution("Acme_Losses", {"acme": "elsewhere:Mine", "dropped": "elsewhere:Old"}, version="1.0")
    monkeypatch.syspath_prepend(second.root)
    monkeypatch.syspath_prepend(site.root)
    assert registry.info("acme").value == "acme_losses:Mine"
    assert "dropped" not in registry


def test_the_same_declaration_twice_is_one(site, registry):
    site.module("acme_losses", FACTORY)
    info = site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    text = (info / "entry_points.txt").read_text()
    (info / "entry_points.txt").write_text(text + "acme = acme_losses:Mine\n")
    assert registry.info("acme").status == "available"


def test_a_distribution_that_declares_a_name_twice_is_told_apart_by_nobody(site, registry):
    info = site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    with (info / "entry_points.txt").open("a") as file:
        file.write("acme = acme_losses:Other\n")
    for name in ("acme", "acme-losses:acme"):
        with pytest.raises(AmbiguousPluginError, match="acme_losses:Other"):
            registry.builder(name)


def test_two_owners_of_a_name_are_an_error_only_when_it_is_asked_for(site, registry):
    for name in ("acme", "globex"):
        site.module(f"{name}_losses", FACTORY.replace("1.0", "2.0" if name == "globex" else "1.0"))
        site.distribution(f"{name}-losses", {"shared": f"{name}_losses:Mine", f"{name}_only": f"{name}_losses:Mine"})
    assert {"shared", "acme_only", "globex_only"} <= set(registry.names())
    assert [info.name for info in registry.infos("shared")] == ["acme-losses:shared", "globex-losses:shared"]
    registry.create("acme_only")
    with pytest.raises(
        AmbiguousPluginError, match=r"acme-losses 1\.0 .* and globex-losses 1\.0 .*'acme-losses:shared'"
    ):
        registry.create("shared")
    assert registry.builder("globex-losses:shared").__module__ == "globex_losses"
    assert registry.builder("Acme_Losses:shared").__module__ == "acme_losses"


@pytest.mark.parametrize("pattern", ["acme", "ac*", "acme-losses", "Acme_Losses", "acme-losses:acme", "acme-*:a*"])
def test_the_deny_list_takes_names_and_distributions(site, registry, monkeypatch, pattern):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    site.distribution("globex-losses", {"globex": "globex_losses:Mine"})
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", f"nothing, {pattern}")
    assert "acme" not in registry
    assert "acme" not in registry.names()
    assert [(info.name, info.status) for info in registry.infos("acme")] == [("acme", "disabled")]
    with pytest.raises(DisabledPluginError, match=r"'acme' of acme-losses 1.0 .* is disabled by TOPK_REGISTRY_DISABLE"):
        registry.create("acme")
    assert "globex" in registry
    assert "ce" in registry


def test_the_allow_list_keeps_out_what_it_does_not_name(site, registry, monkeypatch):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine", "acme_2": "acme_losses:Mine"})
    site.distribution("globex-losses", {"globex": "globex_losses:Mine"})
    registry.register("local")(lambda: None)
    monkeypatch.setenv("TOPK_REGISTRY_PLUGINS", "acme-losses")
    assert registry.names() == ["acme", "acme_2", "bce", "ce", "local"]
    with pytest.raises(DisabledPluginError, match="TOPK_REGISTRY_PLUGINS"):
        registry.builder("globex")
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme_2")
    assert registry.names() == ["acme", "bce", "ce", "local"]


def test_an_empty_allow_list_is_none(site, registry, monkeypatch):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    monkeypatch.setenv("TOPK_REGISTRY_PLUGINS", " ")
    assert "acme" in registry


def test_denying_one_owner_settles_a_clash(site, registry, monkeypatch):
    for name in ("acme", "globex", "initech"):
        site.distribution(f"{name}-losses", {"shared": f"{name}_losses:Mine"})
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme-losses")
    with pytest.raises(AmbiguousPluginError, match="'globex-losses:shared' or 'initech-losses:shared'"):
        registry.info("shared")
    monkeypatch.setenv("TOPK_REGISTRY_DISABLE", "acme-losses initech-losses")
    assert registry.info("shared").distribution == "globex-losses"
    with pytest.raises(DisabledPluginError, match="of acme-losses"):
        registry.builder("acme-losses:shared")


def test_unreadable_metadata_hides_nothing_else(site, registry):
    site.distribution("acme-losses", {"acme": "acme_losses:Mine"})
    site.distribution("nameless", {"nameless": "nameless:Mine"}).joinpath("METADATA").write_text("\n")
    site.distribution("garbled", {}).joinpath("entry_points.txt").write_bytes(b"[topk_registry.losses]\n\xff\xfe = a:b")
    assert "acme" in registry
    assert "nameless" not in registry
    assert any("nameless-1.0.dist-info: unreadable metadata" in line for line in registry.problems())
    assert any("garbled" in line for line in registry.problems())


def test_data_sets_use_the_same_mechanism(site):
    site.module("acme_data", "def fields(root, *, size=32):\n    'Random fields.'\n    return [root, size]\n")
    site.distribution("acme-data", {"fields": "acme_data:fields"}, group="topk_registry.datasets")
    datasets = Registry("topk_registry.datasets", "dataset")
    assert datasets.create("fields", root="here", size=8) == ["here", 8]
    assert datasets.info("fields").summary == "Random fields."
    with pytest.raises(LookupError, match="no dataset is called 'feilds'; the closest are fields"):
        datasets.create("feilds")


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [("a*", True), ("A_loss", False), ("acme:a_loss", True), ("ACME.x:*", False), ("b*", False), ("a_los", False)],
)
def test_wildcards_match_whole_names(pattern, hit):
    assert matches(pattern, Plugin("a_loss", "m:f", "acme", "1")) is hit
