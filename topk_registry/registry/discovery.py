"""Find plug-ins in the metadata of installed distributions, without importing them.

A plug-in is an entry point ``name = "package.module:factory"`` of a group. Two environment variables restrict the
plug-ins. Each is a list of wildcards separated by commas or spaces:

    TOPK_REGISTRY_PLUGINS   if set, only matching plug-ins are used, including plug-ins of this project
    TOPK_REGISTRY_DISABLE   matching plug-ins are never used, even if the first variable matches too

A wildcard matches a plug-in by its name or by its distribution. ``distribution:name`` must match both.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from typing import Any

from topk_registry.registry import source

OURS = "topk-registry"  # names of this distribution have priority
GROUPS = tuple(f"topk_registry.{name}" for name in ("losses", "datasets", "commands", "model_files"))
VARIABLES = ("TOPK_REGISTRY_PLUGINS", "TOPK_REGISTRY_DISABLE")
_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[.*\])?\s*")


@dataclass(frozen=True)
class Plugin:
    """One declaration of a name: the value of the entry point, and the distribution that declares it.

    ``factory`` is set if this process registered the plug-in. Such a plug-in has no distribution.
    """

    name: str
    value: str
    distribution: str
    version: str
    factory: Any = None

    @property
    def status(self) -> str:
        """Status of the plug-in while it is not loaded."""
        return "registered" if self.factory is not None else "available"

    @property
    def owner(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "this process"

    @property
    def qualified(self) -> str:
        return f"{self.distribution}:{self.name}"

    def parse(self) -> tuple[str, str]:
        """Return (module, dotted attribute), or raise ValueError if the value has another form."""
        if match := _VALUE.fullmatch(self.value):
            return match["module"], match["attr"]
        raise ValueError(f"expected an entry point 'package.module:factory', got {self.value!r}")

    def load(self) -> Any:
        """Import the module, which runs its code, and return the attribute."""
        if self.factory is not None:
            return self.factory
        module, attr = self.parse()
        imported = import_module(module)
        try:
            return reduce(getattr, attr.split("."), imported)
        except AttributeError as error:
            raise AttributeError(f"{error}{source.closest(attr.rpartition('.')[2], dir(imported))}") from error

    def problem(self) -> str:
        """Return a problem that can be detected without importing the plug-in, or an empty string."""
        try:
            module = "" if self.factory is not None else self.parse()[0]
            return f"module {module!r} is not installed" if module and source.file_of(module) is None else ""
        except ValueError as error:
            return str(error)
        except Exception:  # a custom finder failed; loading the plug-in shows the error
            return ""

    def summary(self) -> str:
        return source.first_line(self.factory.__doc__) if self.factory else source.summary(*self.parse())


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def normalize(name: str) -> str:
    """Return the canonical spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def matches(pattern: str, plugin: Plugin) -> bool:
    """Return whether a wildcard matches a plug-in by name or by ``distribution:name``, with wildcards in both."""
    owner, colon, name = pattern.rpartition(":")
    same_owner = not colon or fnmatchcase(normalize(plugin.distribution), normalize(owner))
    return same_owner and fnmatchcase(plugin.name, name)


def denied(plugin: Plugin) -> str | None:
    """Return the environment variable that disables a plug-in, or None."""
    allow, deny = (os.environ.get(variable, "").replace(",", " ").split() for variable in VARIABLES)
    if _selected(plugin, deny):
        return VARIABLES[1]
    return VARIABLES[0] if allow and not _selected(plugin, allow) else None


def _selected(plugin: Plugin, patterns: Sequence[str]) -> bool:
    owner = normalize(plugin.distribution)
    return any(matches(pattern, plugin) or fnmatchcase(owner, normalize(pattern)) for pattern in patterns)


def discover(group: str) -> tuple[list[Plugin], list[str]]:
    """Return the plug-ins of a group, and one message per distribution with unreadable metadata."""
    plugins: dict[Plugin, None] = {}
    problems: list[str] = []
    for dist in distributions():
        try:
            if group in (dist.read_text("entry_points.txt") or ""):
                first = distribution(dist.metadata["Name"])  # if there are several copies, the one that imports use
                about = (first.metadata["Name"], first.version)
                plugins |= {Plugin(e.name, e.value, *about): None for e in first.entry_points.select(group=group)}
        except Exception as error:
            place = getattr(dist, "_path", dist)
            problems.append(f"{place}: unreadable metadata: {type(error).__name__}: {error}")
    problems += [f"{plugin.qualified}: the name must not contain a colon" for plugin in plugins if ":" in plugin.name]
    return [plugin for plugin in plugins if ":" not in plugin.name], problems


def misspelt_groups() -> list[tuple[str, list[str]]]:
    """Return (message, names of entry points) for each group whose name is close to a group of this project."""
    found = []
    for dist in distributions():
        try:
            entries = list(dist.entry_points)
        except Exception:  # discover() reads the same file and reports the error
            continue
        for group in sorted({entry.group for entry in entries} - set(GROUPS)):
            close = get_close_matches(group.lower().replace("-", "_"), GROUPS, n=1, cutoff=0.9)
            if close or group.startswith("topk_registry."):
                hint = f"did you mean [{close[0]}]?" if close else f"the groups are {', '.join(GROUPS)}"
                message = f"{dist.metadata['Name']} {dist.version}: unknown entry-point group [{group}]; {hint}"
                found.append((message, [entry.name for entry in entries if entry.group == group]))
    return found
