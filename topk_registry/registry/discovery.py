"""Find plug-ins in the metadata of installed distributions, without importing them.

A plug-in is an entry point ``name = "package.module:factory"`` of a group. Two environment variables narrow what is
found; each is a list of wildcards separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, only matching plug-ins are used, those of this project included
    TOPK_REGISTRY_DISABLE   matching plug-ins are never used; it wins over the first

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
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, distributions, version

from topk_registry.registry import source

OURS = "topk-registry"  # no other distribution takes names of this one
GROUPS = tuple(f"topk_registry.{name}" for name in ("losses", "datasets", "commands", "model_files"))
VARIABLES = ("TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE")
_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[.*\])?\s*")


@dataclass(frozen=True)
class Plugin:
    """One declaration of a name: the value of the entry point, and the distribution that owns it."""

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
        """Return (module, dotted attribute); raise ValueError if the value has another form."""
        if match := _VALUE.fullmatch(self.value):
            return match["module"], match["attr"]
        raise ValueError(f"expected an entry point 'package.module:factory', got {self.value!r}")

    def load(self) -> object:
        """Import the module, which runs its code, and return the attribute."""
        module, attr = self.parse()
        imported = import_module(module)
        try:
            return reduce(getattr, attr.split("."), imported)
        except AttributeError as error:
            close = source.closest(attr.rpartition(".")[2], dir(imported))
            raise AttributeError(f"{error}{close}") from error


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
    owner, colon, name = pattern.rpartition(":")
    same_owner = not colon or fnmatchcase(normalise(plugin.distribution), normalise(owner))
    return same_owner and fnmatchcase(plugin.name, name)


def denied(plugin: Plugin) -> str | None:
    """Return the environment variable that disables a plug-in, or None."""
    allow, deny = map(_patterns, VARIABLES)
    if _selected(plugin, deny):
        return VARIABLES[1]
    return VARIABLES[0] if allow and not _selected(plugin, allow) else None


def idle_patterns(plugins: Sequence[Plugin]) -> list[str]:
    """Return a line for each wildcard of the two variables that matches no plug-in."""
    return [
        f"{variable}: {pattern!r} matches no installed plug-in"
        for variable in VARIABLES
        for pattern in _patterns(variable)
        if not any(_selected(plugin, [pattern]) for plugin in plugins)
    ]


def _patterns(variable: str) -> list[str]:
    return os.environ.get(variable, "").replace(",", " ").split()


def _selected(plugin: Plugin, patterns: Iterable[str]) -> bool:
    owner = normalise(plugin.distribution)
    return any(matches(pattern, plugin) or fnmatchcase(owner, normalise(pattern)) for pattern in patterns)


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of a group, and a line for each distribution whose metadata cannot be read."""
    plugins: dict[Plugin, None] = {}
    problems: list[str] = []
    names: dict[str, str] = {}
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                names.setdefault(normalise(dist.metadata["Name"]), dist.metadata["Name"])
        except Exception as error:
            place = getattr(dist, "_path", dist)
            problems.append(f"{place}: unreadable metadata: {type(error).__name__}: {error}")
    for name in names.values():
        try:
            owner = distribution(name)  # the first on sys.path, which imports get
            for entry in owner.entry_points.select(group=group):
                if ":" in entry.name:
                    problems.append(f"{name}: the name {entry.name!r} must not contain a colon")
                else:
                    plugins[Plugin(entry.name, entry.value, name, owner.version)] = None
        except Exception as error:
            problems.append(f"{name}: unreadable entry points: {type(error).__name__}: {error}")
    return list(plugins), problems


def misspelt_groups() -> list[tuple[str, list[EntryPoint]]]:
    """Return (message, entry points) for each group whose name is nearly one of ours, or starts as ours do."""
    found = []
    for dist in distributions():
        for group in sorted({entry.group for entry in _entries(dist)} - set(GROUPS)):
            close = get_close_matches(group.lower().replace("-", "_"), GROUPS, n=1, cutoff=0.9)
            if close or group.startswith("topk_registry."):
                hint = f"did you mean [{close[0]}]?" if close else f"the groups are {', '.join(GROUPS)}"
                message = f"{dist.metadata['Name']} {dist.version}: unknown entry-point group [{group}]; {hint}"
                found.append((message, [entry for entry in _entries(dist) if entry.group == group]))
    return found


def _entries(dist: Distribution) -> Sequence[EntryPoint]:
    try:
        return list(dist.entry_points)
    except Exception:  # the registry, which reads the same file, reports it
        return ()
