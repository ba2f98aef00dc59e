"""Find plug-ins in the metadata of installed distributions, without importing them.

Two environment variables narrow what is found; each is a list of wildcards separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, only matching plug-ins are used, those of this project included
    TOPK_REGISTRY_DISABLE   matching plug-ins are never used; it wins over the first

A wildcard is compared with the plug-in's name and with its distribution; ``distribution:name`` compares both.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from topk_registry.registry import source

OURS = "topk-registry"  # no other distribution takes names of this one
GROUPS = tuple(f"topk_registry.{name}" for name in ("losses", "datasets", "commands", "model_files"))
ALLOW, DENY = "TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE"


@dataclass(frozen=True)
class Plugin:
    """One declaration of a name: the value of the entry point and the distribution that owns it.

    ``factory`` is set of a plug-in that this process registered, which has no distribution; ``about`` is a summary that
    the source of the factory does not have.
    """

    name: str
    value: str
    distribution: str
    version: str
    factory: Any = None
    about: str = ""

    @property
    def owner(self) -> str:
        return f"{f'{self.distribution} {self.version}'.strip() or 'this process'} ({self.value})"

    @property
    def qualified(self) -> str:
        return f"{self.distribution}:{self.name}"

    def load(self) -> Any:
        """Import the module, which runs its code, and return the attribute."""
        module, _, attribute = self.value.partition(":")
        return self.factory or attrgetter(attribute.strip())(import_module(module.strip()))

    def problem(self) -> str:
        """Return what is certainly wrong before the plug-in is imported, or nothing."""
        package = re.split("[.:]", self.value)[0].strip()
        with suppress(Exception):  # an unusual finder, or a name that is none; loading the plug-in shows the error
            if not self.factory and find_spec(package) is None:
                return f"package {package!r} is not installed"
        return ""

    def summary(self) -> str:
        if self.factory:
            return source.first_line(self.factory.__doc__)
        module, _, attribute = self.value.partition(":")
        return self.about or source.summary(module, attribute)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def normalise(name: str) -> str:
    """Return the canonical spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def matches(pattern: str, plugin: Plugin) -> bool:
    """Return whether a wildcard matches the name, or ``distribution:name`` with wildcards in either."""
    owner, _, name = pattern.rpartition(":")
    return fnmatchcase(plugin.name, name) and fnmatchcase(normalise(plugin.distribution), normalise(owner or "*"))


def denied(plugin: Plugin) -> str:
    """Return the environment variable that disables a plug-in, or nothing."""

    def listed(variable: str) -> bool:
        patterns = os.environ.get(variable, "").replace(",", " ").split()
        owner = normalise(plugin.distribution)
        return any(matches(pattern, plugin) or fnmatchcase(owner, normalise(pattern)) for pattern in patterns)

    if listed(DENY):
        return DENY
    return ALLOW if os.environ.get(ALLOW, "").strip() and not listed(ALLOW) else ""


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of a group, and a line for each distribution whose metadata cannot be read."""
    plugins: set[Plugin] = set()
    problems: list[str] = []
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                first = distribution(dist.metadata["Name"])  # of several copies, the one that imports get
                about = (first.metadata["Name"], first.version)
                plugins |= {Plugin(e.name, e.value, *about) for e in first.entry_points.select(group=group)}
        except Exception as error:
            problems.append(f"{getattr(dist, '_path', dist)}: unreadable metadata: {type(error).__name__}: {error}")
    return sorted(plugins, key=lambda plugin: (plugin.qualified, plugin.value)), problems


def misspelt_groups() -> Iterator[tuple[str, set[str]]]:
    """Yield (message, names of entry points) for each group that is none of ours, but begins as ours do."""
    for dist in distributions():
        with suppress(Exception):  # discover, which reads the same file, reports it
            for group in sorted(dist.entry_points.groups - set(GROUPS)):
                if normalise(group).startswith(OURS):
                    owner, known = f"{dist.metadata['Name']} {dist.version}", ", ".join(GROUPS)
                    message = f"{owner}: unknown entry-point group [{group}]; the groups are {known}"
                    yield message, dist.entry_points.select(group=group).names
