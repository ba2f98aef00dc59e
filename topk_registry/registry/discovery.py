"""Find plug-ins in the metadata of installed distributions, without an import.

A plug-in is an entry point ``name = "package.module:factory"`` of a group. Two environment variables narrow what is
found, each a list of wildcards separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, only plug-ins that match are used (an allow list; the project's own count too)
    TOPK_REGISTRY_DISABLE   plug-ins that match are never used (a deny list; it wins over the first)

A wildcard is compared with the plug-in's name and with its distribution; ``distribution:name`` compares both.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from importlib import import_module
from importlib.metadata import Distribution, distribution, distributions

from topk_registry.registry import source

OURS = "topk-registry"  # the distribution whose names no other takes
_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[.*\])?\s*")


@dataclass(frozen=True)
class Plugin:
    """One declaration of a name: the entry point's value and the distribution that owns it."""

    name: str
    value: str
    distribution: str
    version: str

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def qualified(self) -> str:
        return f"{self.distribution}:{self.name}"

    def parse(self) -> tuple[str, str]:
        """(module, dotted attribute) of the value; a ValueError where it has another form."""
        if match := _VALUE.fullmatch(self.value):
            return match["module"], match["attr"]
        raise ValueError(f"the entry point must read 'package.module:factory', got {self.value!r}")

    def load(self) -> object:
        """Import the module, which runs its code, and return what the value names."""
        module, attr = self.parse()
        try:
            imported = import_module(module)
        except ModuleNotFoundError as error:
            if hint := source.misspelt(module, missing=error.name):
                raise ModuleNotFoundError(f"{error}{hint}", name=error.name) from error
            raise
        try:
            return reduce(getattr, attr.split("."), imported)
        except AttributeError as error:
            close = source.closest(attr.rpartition(".")[2], dir(imported))
            raise AttributeError(f"{error}{close}") from error


def normalise(name: str) -> str:
    """Return the form in which all spellings of a distribution's name are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def matches(pattern: str, plugin: Plugin) -> bool:
    """Return whether a wildcard matches a plug-in's name, or ``distribution:name`` with wildcards in either."""
    owner, colon, name = pattern.rpartition(":")
    return fnmatchcase(plugin.name, name) and (
        not colon or fnmatchcase(normalise(plugin.distribution), normalise(owner))
    )


def denied(plugin: Plugin) -> str | None:
    """Return the environment variable that disables a plug-in, or None."""
    allow, deny = _patterns("TOPK_REGISTRY_PLUGINS"), _patterns("TOPK_REGISTRY_DISABLE")
    if _selected(plugin, deny):
        return "TOPK_REGISTRY_DISABLE"
    return "TOPK_REGISTRY_PLUGINS" if allow and not _selected(plugin, allow) else None


def idle_patterns(plugins: Sequence[Plugin]) -> list[str]:
    """Return a line for each wildcard of the two variables that matches no plug-in, such as a misspelt one."""
    return [
        f"{variable}: {pattern!r} matches no plug-in here"
        for variable in ("TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE")
        for pattern in _patterns(variable)
        if not any(_selected(plugin, [pattern]) for plugin in plugins)
    ]


def _patterns(variable: str) -> list[str]:
    return os.environ.get(variable, "").replace(",", " ").split()


def _selected(plugin: Plugin, patterns: Iterable[str]) -> bool:
    owner = normalise(plugin.distribution)
    return any(matches(pattern, plugin) or fnmatchcase(owner, normalise(pattern)) for pattern in patterns)


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of a group, and a line for each distribution whose metadata could not be read."""
    plugins: dict[Plugin, None] = {}
    problems = []
    for name in _declaring(group, problems):
        try:
            # the first on sys.path is the one that imports get; a second copy further down is shadowed
            owner = distribution(name)
            for entry in owner.entry_points.select(group=group):
                if ":" in entry.name:
                    problems.append(f"{name}: {entry.name!r} cannot be asked for, a colon ends a distribution's name")
                    continue
                plugins[Plugin(entry.name, entry.value, name, owner.version)] = None
        except Exception as error:
            problems.append(f"{name}: unreadable entry points: {type(error).__name__}: {error}")
    return list(plugins), problems


def misspelt_groups(known: Sequence[str]) -> list[str]:
    """Return a line for each entry-point group that is nearly one of these, or is called as ours are and is none."""
    lines = []
    for dist in distributions():
        try:
            text = dist.read_text("entry_points.txt") or ""
            groups = re.findall(r"^\[(.+)\]\s*$", text, re.MULTILINE)
        except Exception:  # the registry, which reads the same file, reports it
            continue
        for group in set(groups) - set(known):
            close = get_close_matches(group.lower().replace("-", "_"), known, n=1, cutoff=0.9)
            if close or group.startswith("topk_registry."):
                lines.append(
                    f"{dist.metadata['Name']} {dist.version}: nobody reads the entry points of [{group}]; "
                    + (f"did you mean [{close[0]}]?" if close else f"there are {', '.join(known)}")
                )
    return sorted(lines)


def _declaring(group: str, problems: list[str]) -> list[str]:
    names: dict[str, str] = {}
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                names.setdefault(normalise(dist.metadata["Name"]), dist.metadata["Name"])
        except Exception as error:
            problems.append(f"{_place(dist)}: unreadable metadata: {type(error).__name__}: {error}")
    return list(names.values())


def _place(dist: Distribution) -> str:
    return str(getattr(dist, "_path", dist))
