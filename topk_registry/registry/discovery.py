"""Functions that find plug-ins in the metadata of installed distributions, without importing the plug-ins.

Two environment variables disable plug-ins. Each variable is a list of patterns, separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, disables every plug-in that matches no pattern, even a plug-in of this project
    TOPK_REGISTRY_DISABLE   disables every plug-in that matches a pattern, whatever the other variable says

A pattern is a name with wildcards, such as ``topk_*``. A plug-in matches if its name or the name of its distribution
matches the pattern. If the pattern has the form ``distribution:name``, both names must match.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from typing import Any

from topk_registry.registry import source

OURS = "topk-registry"  # name of the distribution of this project
GROUPS = tuple(f"topk_registry.{name}" for name in ("losses", "datasets", "commands", "model_files"))
ALLOW, DENY = "TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE"


@dataclass(frozen=True)
class Plugin:
    """A plug-in: a name, and the class or function (the factory) that creates the object with this name."""

    name: str
    value: str  # "module:attribute" of the factory
    distribution: str  # distribution that declares the plug-in; empty if this process registered the plug-in
    version: str  # version of the distribution
    factory: Any = None  # the factory itself if this process registered the plug-in
    about: str = ""  # one-line summary; if empty, the summary is read from the source of the factory

    @property
    def owner(self) -> str:
        return f"{f'{self.distribution} {self.version}'.strip() or 'this process'} ({self.value})"

    @property
    def qualified(self) -> str:
        return f"{self.distribution}:{self.name}"

    def load(self) -> Any:
        """Return the class or function of the plug-in, and import its module if necessary."""
        return self.factory or EntryPoint(self.name, self.value, "").load()

    def problem(self) -> str:
        """Return a message if Python does not find the package that defines the plug-in, else "". Import nothing."""
        package = re.split("[.:]", self.value)[0].strip()
        with suppress(Exception):  # find_spec can fail in a custom import finder; then load() reports the error
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
    """Return the canonical spelling of a distribution's name, as PEP 503 defines it: ``My_Loss`` -> ``my-loss``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def matches(pattern: str, plugin: Plugin) -> bool:
    """Return whether a plug-in matches the pattern ``NAME`` or ``DISTRIBUTION:NAME``. Both parts can have wildcards."""
    owner, _, name = pattern.rpartition(":")
    return fnmatchcase(plugin.name, name) and fnmatchcase(normalize(plugin.distribution), normalize(owner or "*"))


def denied(plugin: Plugin) -> str:
    """Return the name of the environment variable that disables the plug-in, or "" if it is enabled."""

    def listed(variable: str) -> bool:
        patterns = os.environ.get(variable, "").replace(",", " ").split()
        owner = normalize(plugin.distribution)
        return any(matches(pattern, plugin) or fnmatchcase(owner, normalize(pattern)) for pattern in patterns)

    if listed(DENY):
        return DENY
    return ALLOW if os.environ.get(ALLOW, "").strip() and not listed(ALLOW) else ""


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of an entry-point group, and one message per distribution whose metadata cannot be read."""
    plugins: set[Plugin] = set()
    problems: list[str] = []
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                first = distribution(dist.metadata["Name"])  # of several installed copies, the copy that an import uses
                about = (first.metadata["Name"], first.version)
                plugins |= {Plugin(e.name, e.value, *about) for e in first.entry_points.select(group=group)}
        except Exception as error:
            problems.append(f"{getattr(dist, '_path', dist)}: unreadable metadata: {type(error).__name__}: {error}")
    return sorted(plugins, key=lambda plugin: (plugin.qualified, plugin.value)), problems


def misspelt_groups() -> Iterator[tuple[str, set[str]]]:
    """For each misspelt entry-point group (``topk_registry.loses``), yield a message and the names of its plug-ins."""
    for dist in distributions():
        with suppress(Exception):  # discover() reads the same file and reports the error
            for group in sorted(dist.entry_points.groups - set(GROUPS)):
                if normalize(group).startswith(OURS):
                    owner, known = f"{dist.metadata['Name']} {dist.version}", ", ".join(GROUPS)
                    message = f"{owner}: unknown entry-point group [{group}]; the groups are {known}"
                    yield message, dist.entry_points.select(group=group).names
