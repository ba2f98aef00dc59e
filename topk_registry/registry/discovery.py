"""Find plug-ins in the metadata of installed distributions, without importing them.

Two environment variables restrict the plug-ins. Each is a list of wildcards separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, only matching plug-ins are used, including plug-ins of this project
    TOPK_REGISTRY_DISABLE   matching plug-ins are never used, even if the first variable matches too

A wildcard matches a plug-in by its name or by its distribution. ``distribution:name`` must match both.
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

OURS = "topk-registry"  # names of this distribution have priority
GROUPS = tuple(f"topk_registry.{name}" for name in ("losses", "datasets", "commands", "model_files"))
ALLOW, DENY = "TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE"


@dataclass(frozen=True)
class Plugin:
    """One declaration of a name: the value of the entry point, and the distribution that declares the name.

    If this process registered the plug-in, ``factory`` is set and there is no distribution. ``about`` is a summary for
    a factory whose source has none.
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
        """Import the module, which runs the code of the module, and return the attribute."""
        module, _, attribute = self.value.partition(":")
        return self.factory or attrgetter(attribute.strip())(import_module(module.strip()))

    def problem(self) -> str:
        """Return a problem that can be found without importing the plug-in, or an empty string."""
        package = re.split("[.:]", self.value)[0].strip()
        with suppress(Exception):  # a custom finder failed; loading the plug-in shows the error
            if not self.factory and find_spec(package) is None:
                return f"package {package!r} is not installed"
        return ""

    def summary(self) -> str:
        if self.factory:
            return source.first_line(self.factory.__doc__)
        module, _, attribute = self.value.partition(":")
        return self.about or source.summary(module, attribute)


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def normalize(name: str) -> str:
    """Return the canonical spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def matches(pattern: str, plugin: Plugin) -> bool:
    """Return whether a pattern ``NAME`` or ``DISTRIBUTION:NAME``, with wildcards in both parts, matches a plug-in."""
    owner, _, name = pattern.rpartition(":")
    return fnmatchcase(plugin.name, name) and fnmatchcase(normalize(plugin.distribution), normalize(owner or "*"))


def denied(plugin: Plugin) -> str:
    """Return the name of the environment variable that disables a plug-in, or an empty string."""

    def listed(variable: str) -> bool:
        patterns = os.environ.get(variable, "").replace(",", " ").split()
        owner = normalize(plugin.distribution)
        return any(matches(pattern, plugin) or fnmatchcase(owner, normalize(pattern)) for pattern in patterns)

    if listed(DENY):
        return DENY
    return ALLOW if os.environ.get(ALLOW, "").strip() and not listed(ALLOW) else ""


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of a group, and one message per distribution with unreadable metadata."""
    plugins: set[Plugin] = set()
    problems: list[str] = []
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                first = distribution(dist.metadata["Name"])  # if there are several copies, the one that imports use
                about = (first.metadata["Name"], first.version)
                plugins |= {Plugin(e.name, e.value, *about) for e in first.entry_points.select(group=group)}
        except Exception as error:
            problems.append(f"{getattr(dist, '_path', dist)}: unreadable metadata: {type(error).__name__}: {error}")
    return sorted(plugins, key=lambda plugin: (plugin.qualified, plugin.value)), problems


def misspelt_groups() -> Iterator[tuple[str, set[str]]]:
    """Yield (message, names of entry points) for each unknown group that begins like the groups of this project."""
    for dist in distributions():
        with suppress(Exception):  # discover() reads the same file and reports the error
            for group in sorted(dist.entry_points.groups - set(GROUPS)):
                if normalize(group).startswith(OURS):
                    owner, known = f"{dist.metadata['Name']} {dist.version}", ", ".join(GROUPS)
                    message = f"{owner}: unknown entry-point group [{group}]; the groups are {known}"
                    yield message, dist.entry_points.select(group=group).names
